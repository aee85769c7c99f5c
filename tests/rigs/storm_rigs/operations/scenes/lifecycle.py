"""Scenes of topologies that come, change and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storm_dagster.model.errors import NotAlive
from storm_dagster.model.names import jar_key
from storm_dagster.model.verbs import Verb
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.submit import submission as stages
from storm_dagster.operations.submit.staging import read_client_token
from storm_rigs.operations.acting import finish_submission, submit
from storm_rigs.operations.archives import pack_archive
from storm_rigs.operations.scenes.scene import Scene, due, gone, is_active
from storm_rigs.stage.records import World

_LIFECYCLE = lifecycle.__name__


def submission(world: World) -> Scene:
    """A submission whose parts are uploaded."""
    arguments = {
        "name": "wc",
        "token": "t",
        "handle": world.upload("h", conf={"topology.workers": 2}),
    }

    def completed() -> None:
        topology = world.named()
        assert (topology.base.status, topology.base.token) == ("ACTIVE", "t")
        assert len(world.assignment().workers) == 2

    return Scene(
        world,
        "storm_rigs.operations.acting:submit",
        arguments,
        again=lambda ctx: submit(ctx, **arguments),
        begun=lambda: world.find() is not None,
        completed=completed,
        undone=lambda: _nothing(world),
    )


def continuing(world: World) -> Scene:
    """A submission that was staged under a leader that another one has followed."""
    scene = submission(world)
    with scene.act() as actor:
        assert actor.run_to("before.publish")
        actor.kill()
    world.lead()
    scene.target = "storm_rigs.operations.acting:continue_submission"
    scene.arguments = {"token": "t"}
    scene.again = lambda ctx: finish_submission(ctx, token="t")
    return scene


def _nothing(world: World) -> None:
    """Assert that there is no topology, and no blob besides uploads."""
    assert not world.cluster.load_view().topologies
    assert [key for key in world.blobs.keys("") if not key.startswith("upload.")] == []


def due_activation(world: World) -> Scene:
    """A published topology that nobody activated."""
    scene = submission(world)
    with scene.act() as actor:
        assert actor.run_to("after.publish")
        actor.kill()
    return due(scene)


def killing(world: World) -> Scene:
    """A kill without delay."""
    topology_id = world.submit("wc", "t", conf={"topology.workers": 2})
    world.cluster.report_error(topology_id, 1, "boom", time=1)

    def begun() -> bool:
        topology = world.find()
        return topology is None or topology.base.status == "KILLED"

    return Scene(
        world,
        f"{_LIFECYCLE}:kill",
        {"name": "wc", "wait_secs": 0},
        again=lambda ctx: lifecycle.kill(ctx, "wc", 0),
        begun=begun,
        completed=lambda: gone(world, topology_id),
        undone=lambda: is_active(world, topology_id),
    )


def cancelling(world: World) -> Scene:
    """A kill of a topology that is being submitted, right before its publication."""
    ctx = world.context()
    handle = world.upload("h")
    stages.stage_conf(ctx, name="wc", token="t", handle=handle)
    stages.stage_code(ctx, token="t")
    stages.stage_tasks(ctx, token="t")
    stages.stage_assignment(ctx, token="t")

    def begun() -> bool:
        stored = read_client_token(world.context(), "t")
        return stored is None or stored[0].cancelled_by == "kill"

    def completed() -> None:
        assert begun()
        with pytest.raises(NotAlive):
            stages.publish_assignment(world.context(), token="t")
        assert not world.cluster.load_view().topologies

    return Scene(
        world,
        f"{_LIFECYCLE}:kill",
        {"name": "wc"},
        again=lambda ctx: lifecycle.kill(ctx, "wc"),
        begun=begun,
        completed=completed,
        undone=lambda: _nothing(world),
    )


def due_removal(world: World) -> Scene:
    """A killed topology whose delay passes."""
    scene = killing(world)
    lifecycle.kill(world.context(), "wc", 5)
    return due(scene)


def status_change(verb: Verb) -> Callable[[World], Scene]:
    """Make the scene of a verb that only changes the status, such as ``activate``."""
    operation = lifecycle.OPERATIONS[verb.name]
    after = verb.until[0]
    before = "INACTIVE" if after == "ACTIVE" else "ACTIVE"

    def scene(world: World) -> Scene:
        world.submit("wc", "t", inactive=before == "INACTIVE")

        def status(expected: str | None) -> None:
            base = world.named().base
            assert base.status == expected
            if expected in ("ACTIVE", "INACTIVE"):
                assert base.wanted_status == expected

        return Scene(
            world,
            f"{operation.__module__}:{operation.__name__}",
            {"name": "wc"},
            again=lambda ctx: operation(ctx, "wc"),
            begun=lambda: world.named().base.status == after,
            completed=lambda: status(after),
            undone=lambda: status(before),
        )

    return scene


def _code_hash(world: World, topology_id: str) -> str:
    return world.blobs.meta(jar_key(topology_id)).sha256


def restarting(world: World) -> Scene:
    """A restart of the workers."""
    topology_id = world.submit("wc", "t", conf={"topology.workers": 2})
    base, workers = world.named().base, world.assignment().workers

    def restarts() -> int:
        after = world.named()
        assert (after.id, after.base, world.assignment().workers) == (topology_id, base, workers)
        return world.assignment().restarts

    def completed() -> None:
        assert restarts() >= 1

    def undone() -> None:
        assert restarts() == 0

    return Scene(
        world,
        f"{_LIFECYCLE}:restart",
        {"name": "wc"},
        again=lambda ctx: lifecycle.restart(ctx, "wc"),
        begun=lambda: restarts() > 0,
        completed=completed,
        undone=undone,
    )


def updating(world: World) -> Scene:
    """A hot deploy."""
    old = world.submit("wc", "t", conf={"topology.workers": 2})
    old_code = _code_hash(world, old)
    handle = world.upload("h2", conf={"topology.workers": 2}, archive=pack_archive("newer archive"))
    options: dict[str, Any] = {"token": "next", "handle": handle}

    def completed() -> None:
        new = world.named()
        assert new.id != old
        is_active(world, new.id)
        assert _code_hash(world, new.id) != old_code
        gone(world, old)

    def undone() -> None:
        is_active(world, old)
        assert _code_hash(world, old) == old_code

    return Scene(
        world,
        f"{_LIFECYCLE}:update",
        {"name": "wc", **options},
        again=lambda ctx: lifecycle.update(ctx, "wc", **options),
        begun=lambda: world.named().id != old,
        completed=completed,
        undone=undone,
    )
