"""Tasks of a worker whose node went with its session: it opens them again only when nobody else has
them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.model import paths
from storm_dagster.model.records import WorkerNode, WorkerSlot
from storm_dagster.worker.dataplane.routes import Placement
from storm_dagster.worker.runtime.cluster_sync import ClusterSync
from storm_dagster.worker.runtime.lease import WorkerLease
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


class Tasks:
    """A loop that does at once what it is asked for, and notes which tasks are open."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(state_dir=None)
        self.open: frozenset[int] = frozenset()
        self.closed: list[frozenset[int]] = []

    def post(self, action: Callable[[], Any]) -> None:
        action()

    def call(self, action: Callable[[], Any], timeout: float) -> Any:
        return action()

    def statuses(self) -> dict[int, str]:
        return dict.fromkeys(self.open, "running")

    def close_tasks(self, tasks: frozenset[int]) -> None:
        self.open -= tasks
        self.closed.append(tasks)

    def place(self, placement: Placement, active: bool) -> None:
        self.open = placement.open

    def restore_levels(self, kept: object) -> None:
        pass


def spec_of(topology_id: str, slot: WorkerSlot) -> WorkerSpec:
    return WorkerSpec(
        worker_id="w1", token="mine", topology_id=topology_id, node=slot.node, host=slot.host, port=slot.port,
        home="/", code_dir="/", heartbeat_path="/", log_path="/",
    )  # fmt: skip


@pytest.mark.parametrize("moved", [False, True])
def test_tasks_that_another_may_have_had_meanwhile_are_opened_anew(
    world: World, moved: bool
) -> None:
    """Its session ended. Only a later placement can have given its tasks away, and back."""
    topology_id = world.submit("wc", conf={"topology.workers": 2})
    first, _ = world.assignment().workers
    tasks = Tasks()
    with StormClusterState.open(world.conf) as cluster:
        lease = WorkerLease(cluster.session.lease_end)
        sync = ClusterSync(spec_of(topology_id, first), world.conf, cluster, lease, tasks)  # type: ignore[arg-type]
        assert not sync._refresh() and tasks.open == set(first.ids) and tasks.closed == []
        world.cluster.state.delete_node(paths.worker(topology_id, first.node, first.port))
        if moved:
            at = paths.assignment(topology_id)
            for _ in range(2):
                world.cluster.state.set_data(at, world.cluster.state.get_data(at) or b"")
        assert not sync._refresh() and tasks.open == set(first.ids)
        assert tasks.closed == ([frozenset(first.ids)] if moved else [])


def test_tasks_that_another_took_meanwhile_stay_closed(world: World) -> None:
    topology_id = world.submit("wc", conf={"topology.workers": 2})
    first, second = world.assignment().workers
    spec = spec_of(topology_id, first)
    tasks = Tasks()
    with StormClusterState.open(world.conf) as cluster:
        sync = ClusterSync(spec, world.conf, cluster, WorkerLease(cluster.session.lease_end), tasks)  # type: ignore[arg-type]
        assert not sync._refresh() and tasks.open == set(first.ids)
        # Cut off: its session ends, another placement gives its tasks to the other worker, and one
        # more takes them back.
        world.cluster.state.delete_node(paths.worker(topology_id, first.node, first.port))
        at = world.cluster.read_assignment(topology_id)
        assert at is not None
        theirs = WorkerNode(
            pid=1,
            token="theirs",
            version=at[1].version,
            tasks=first.tasks,
            started_ms=0,
            status="running",
        )
        world.cluster.write_worker_node(
            topology_id, second.node, second.port, theirs, assignment_version=at[1].version
        )
        assert sync._refresh(), "its tasks wait for the other worker"
        assert not tasks.open
        world.stop_worker(topology_id, second.node, second.port)
        assert not sync._refresh() and tasks.open == set(first.ids)
