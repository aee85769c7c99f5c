"""What a scene is, and what several scenes assert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from storm_dagster.model import paths
from storm_dagster.operations.context import OperationsContext
from storm_rigs.operations.acting import Actor, finish_due
from storm_rigs.stage.records import World


@dataclass
class Scene:
    """An operation that is about to begin in a world."""

    world: World
    target: str
    arguments: dict[str, Any]
    again: Callable[[OperationsContext], object]
    """The same operation, repeated by somebody else on their context."""
    begun: Callable[[], bool]
    """Whether the operation has done anything that counts, so that the leader alone must complete
    it.
    """
    completed: Callable[[], object]
    """Asserts that it is done."""
    undone: Callable[[], object]
    """Asserts that nothing of it remains."""

    def act(self, **conf: Any) -> Actor:
        """A process of its own that runs the operation, with more ``conf``."""
        return Actor(
            {**self.world.conf, **conf}, self.world.blobs.directory, self.target, self.arguments
        )


def due(scene: Scene) -> Scene:
    """The scene in which the leader, or the sensor, finishes what another process began."""
    scene.target, scene.arguments = "storm_rigs.operations.acting:finish_due", {}
    scene.again = finish_due
    return scene


def gone(world: World, topology_id: str) -> None:
    """Assert that no node and no blob names the topology, besides its token."""
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
    assert [*nodes, *(key for key in world.blobs.keys("") if topology_id in key)] == []


def is_active(world: World, topology_id: str, workers: int = 2) -> None:
    """Assert that the topology is the one that runs, on that many workers, and that no rebalance is
    left.
    """
    topology = world.named()
    assert (topology.id, topology.base.status, topology.base.workers) == (
        topology_id,
        "ACTIVE",
        workers,
    )
    assert len(world.assignment().workers) == workers
    assert "rebalance" not in (world.cluster.state.find_children(paths.topology(topology_id)) or ())
