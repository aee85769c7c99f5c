"""A submission that is interrupted after every single step converges to exactly one topology (J6, I6, I8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import Unavailable
from storm_dagster.operations import lifecycle
from storm_dagster.operations.cleaner import clean
from storm_dagster.zk.transaction import Transaction

pytestmark = pytest.mark.zookeeper


def check_one_or_nothing(world: Any) -> None:
    """Nothing half visible: a topology has all of its parts, or none."""
    view = world.cluster.load_view()
    assert not view.corrupt
    assert len(view.topologies) <= 1
    for topology in view.topologies.values():
        assert topology.tasks is not None and topology.assignment is not None and topology.beats is not None
        assert topology.tasks.component_of().keys() == topology.assignment.task_slots().keys()
        for suffix in ("stormjar.jar", "stormconf.ser", "stormcode.ser", "placement.json"):
            assert world.blobs.exists(f"{topology.id}-{suffix}"), suffix
    assert world.cluster.assignment_ids() == list(view.topologies)


class CrashAt:
    """Ends the process at the nth crash point."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self.left = number
        self.error = error
        self.passed: list[str] = []

    def __call__(self, name: str) -> None:
        self.passed.append(name)
        self.left -= 1
        if self.left == 0:
            raise self.error(name)


def test_interrupted_after_every_step(
    world: Any, stages: Callable[..., None], crash_class: type[BaseException]
) -> None:
    number = 0
    names: list[str] = []
    while True:
        number += 1
        name, token = f"wc{number}", f"t{number}"
        handle = world.upload(f"h{number}")
        crash = CrashAt(number, crash_class)
        options = {"name": name, "token": token, "handle": handle}
        try:
            stages(world.context(checkpoint=crash), **options)
            ended = True
        except crash_class:
            ended = False
        names = crash.passed
        check_one_or_nothing(world)
        claimed = world.cluster.state.get_data(paths.token(token))
        world.time += 1000
        stages(world.context(), **options)
        check_one_or_nothing(world)
        (topology,) = world.cluster.load_view().topologies.values()
        assert topology.base.status == "ACTIVE" and topology.base.token == token
        if claimed is not None:
            assert topology.id.encode() in claimed, "the id was fixed at the token's first use"
        lifecycle.kill(world.context(), name, 0)
        assert not world.cluster.load_view().topologies
        if ended:
            break
    assert {"after.token", "after.publish", "after.activate", "after.store.stormjar.jar"} <= set(names)
    assert number > 15


class LosingState:
    """Real ZooKeeper behind it; the nth commit loses its answer, before or after it lands."""

    def __init__(self, state: Any, number: int, landed: bool) -> None:
        self._state = state
        self.left = number
        self.landed = landed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def transaction(self) -> Any:
        transaction = self._state.transaction()
        commit = transaction.commit

        def losing() -> Any:
            self.left -= 1
            if self.left == 0:
                if self.landed:
                    commit()
                raise Unavailable("the connection was lost")
            return commit()

        transaction.commit = losing  # type: ignore[method-assign]
        return transaction


class LosingCluster:
    """The cluster state over a :class:`LosingState`."""

    def __init__(self, cluster: Any, number: int, landed: bool) -> None:
        self._cluster = cluster
        self.state = LosingState(cluster.state, number, landed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)


@pytest.mark.parametrize("landed", [True, False])
def test_a_lost_reply_is_read_again_and_never_doubles_anything(
    world: Any, stages: Callable[..., None], landed: bool
) -> None:
    assert isinstance(world.cluster.state.transaction(), Transaction)
    for number in (1, 2, 3):
        cluster = LosingCluster(world.cluster, number, landed)
        name = f"wc{number}"
        stages(
            world.context(cluster=cluster), name=name, token=f"t{number}", handle=world.upload(f"h{number}")
        )
        assert cluster.state.left <= 0
        (topology,) = world.cluster.load_view().topologies.values()
        assert topology.base.status == "ACTIVE"
        assert len(world.cluster.state.get_children(paths.TOKENS)) == number
        lifecycle.kill(world.context(), name, 0)


def test_a_kill_that_is_interrupted_after_every_step_is_finished(
    world: Any, crash_class: type[BaseException]
) -> None:
    number = 0
    while True:
        number += 1
        topology_id = world.submit("wc", f"t{number}")
        world.cluster.report_error(topology_id, 1, "boom", time=1)
        crash = CrashAt(number, crash_class)
        try:
            lifecycle.kill(world.context(checkpoint=crash), "wc", 0)
            ended = True
        except crash_class:
            ended = False
            if world.cluster.load_view().topologies:
                # Interrupted before it was marked: the caller repeats the kill; else the leader finishes it.
                if world.cluster.load_view().topologies[topology_id].base.status != "KILLED":
                    lifecycle.kill(world.context(), "wc", 0)
                else:
                    assert lifecycle.finish_due(world.context()).done == (f"remove {topology_id}",)
        assert nothing_left(world, topology_id) == []
        if ended:
            break
    assert number > 5


def nothing_left(world: Any, topology_id: str) -> list[str]:
    """Nodes and blobs that still name the topology, besides its token."""
    state = world.cluster.state
    nodes = [
        path
        for path in (
            paths.topology(topology_id),
            paths.assignment(topology_id),
            paths.tasks(topology_id),
            paths.taskbeats(topology_id),
            paths.task_errors(topology_id),
            paths.gray_upgrade(topology_id),
            paths.metrics(topology_id),
            paths.workers(topology_id),
        )
        if state.exists(path)
    ]
    return [*nodes, *(key for key in world.blobs.keys("") if topology_id in key)]


def test_what_a_crashed_submission_left_is_cleaned_once_its_token_has_expired(
    world: Any, stages: Callable[..., None], crash_class: type[BaseException]
) -> None:
    number = 0
    while True:
        number += 1
        crash = CrashAt(number, crash_class)
        try:
            stages(
                world.context(checkpoint=crash),
                name="wc",
                token=f"t{number}",
                handle=world.upload(f"h{number}"),
            )
        except crash_class:
            pass
        if world.cluster.load_view().topologies:
            break
        # While the token counts, nothing of it is touched (F10).
        ctx = world.context()
        before = world.blobs.keys()
        pinned, memory = clean(ctx, boot_now=0.0, grace_secs=0, upload_secs=3600)
        staged = [key for key in before if key.startswith((f"staging.t{number}", f"wc-{number}"))]
        if world.cluster.state.exists(paths.token(f"t{number}")):
            assert set(staged) <= set(world.blobs.keys())
            assert not pinned.tokens
        _, memory = clean(ctx, memory, boot_now=10_000.0, grace_secs=0)
        clean(ctx, memory, boot_now=20_000.0, grace_secs=0)
        assert world.blobs.keys() == []
        assert world.cluster.state.get_children(paths.TOKENS) == []
    assert number > 10
