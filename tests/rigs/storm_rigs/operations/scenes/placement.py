"""Scenes of topologies that change their places, or fall silent before they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.model import paths
from storm_dagster.model.operation_record import OperationRecord
from storm_dagster.model.records import encode_record
from storm_dagster.operations.live import healing
from storm_dagster.operations.live.deploy import drain, undo_drain
from storm_dagster.operations.live.rebalance import rebalance
from storm_rigs.operations.acting import finish_due
from storm_rigs.operations.scenes.scene import Scene, due, is_active
from storm_rigs.stage.records import World


def rebalancing(world: World) -> Scene:
    """A rebalance without delay."""
    topology_id = world.submit("wc", "t", conf={"topology.workers": 2})
    pending = {"workers": 4, "executors": {"split": 3}, "wait_secs": 0}

    def completed() -> None:
        is_active(world, topology_id, 4)
        assert world.named().base.executors["split"] == 3

    return Scene(
        world,
        "storm_dagster.operations.live.rebalance:rebalance",
        {"name": "wc", **pending},
        again=lambda ctx: rebalance(ctx, "wc", **pending),
        begun=lambda: (world.named().base.status, world.named().base.workers) != ("ACTIVE", 2),
        completed=completed,
        undone=lambda: is_active(world, topology_id),
    )


def continuing(world: World) -> Scene:
    """An accepted rebalance, planned under a leader that another one has followed."""
    scene = rebalancing(world)
    topology_id = world.named().id
    record = OperationRecord(
        topology_id=topology_id, name="wc", verb="rebalance", epoch=0, started_secs=1
    )
    world.cluster.state.mkdirs(paths.OPERATIONS)
    world.cluster.state.create_node(paths.operation("r"), encode_record(record))
    world.lead()
    scene.target = "storm_rigs.operations.acting:continue_change"
    scene.arguments = {"request": "r", "topology_id": topology_id}
    return scene


def due_rebalance(world: World) -> Scene:
    """A rebalance whose delay passes."""
    scene = rebalancing(world)
    rebalance(
        world.context(), "wc", workers=4, executors={"split": 3}, wait_secs=5, waits_for_delay=False
    )
    return due(scene)


def due_rebalance_that_fits_no_more(world: World) -> Scene:
    """A rebalance during whose delay a host was lost."""
    topology_id = world.submit("wc", "t", conf={"topology.workers": 2})
    rebalance(world.context(), "wc", workers=7, wait_secs=5, waits_for_delay=False)
    world.cluster.state.delete_node(paths.supervisor("s2"))
    return due(
        Scene(
            world,
            "",
            {},
            again=finish_due,
            begun=lambda: True,
            completed=lambda: is_active(world, topology_id),
            undone=lambda: None,
        )
    )


def reassigning(world: World) -> Scene:
    """A worker whose host was lost, and a host that could take it."""
    topology_id = world.submit("wc", "t", conf={"topology.workers": 2})
    lost = world.assignment().workers[0]
    world.cluster.state.delete_node(paths.supervisor(lost.node))
    world.supervisor("s3")

    def causes() -> list[Cause]:
        topology = world.named()
        assert topology.assignment is not None and topology.assignment_at is not None
        return [
            Cause(
                topology.id,
                "wc",
                topology.assignment_at.version,
                "lost_host",
                worker.node,
                worker.host,
                worker.port,
                worker.ids,
            )
            for worker in topology.assignment.workers
            if worker.node == lost.node
        ]

    def completed() -> None:
        is_active(world, topology_id)
        assert causes() == []

    return Scene(
        world,
        "storm_rigs.operations.acting:reassign",
        {"causes": [cause.to_json() for cause in causes()]},
        again=lambda ctx: healing.reassign(ctx, causes()),
        # The cause is seen again for as long as it is there: nobody needs to remember it.
        begun=lambda: causes() == [],
        completed=completed,
        undone=lambda: is_active(world, topology_id),
    )


def draining(undo: bool) -> Callable[[World], Scene]:
    """Makes the scene of a drain, or of its end."""

    def scene(world: World) -> Scene:
        topology_id = world.submit("wc", "t", conf={"topology.workers": 2})
        arguments: dict[str, Any] = {"topology_id": topology_id}
        if undo:
            drain(world.context(), topology_id, 0)
        else:
            arguments["max_secs"] = 0
        operate = undo_drain if undo else drain

        def silent(wanted: bool) -> None:
            base = world.named().base
            assert (base.status, base.wanted_status) == (
                "INACTIVE" if wanted else "ACTIVE",
                "ACTIVE",
            )
            assert (base.delay_secs is not None) == wanted

        # The leader lets it go on in any case, once its time has passed.
        return Scene(
            world,
            f"storm_dagster.operations.live.deploy:{operate.__name__}",
            arguments,
            again=lambda ctx: operate(ctx, **arguments),
            begun=lambda: True,
            completed=lambda: silent(False),
            undone=lambda: None,
        )

    return scene
