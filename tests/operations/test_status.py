"""Problems of tasks that do not run, read from a cluster in ZooKeeper.

Statuses are proven in ``tests/core/test_snapshot.py``, the documents of ``list`` and ``show`` in
``tests/nimbus/test_golden_documents.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import NotAlive
from storm_dagster.operations.context import load_runnable
from storm_dagster.operations.read.explaining import problems
from storm_dagster.operations.read.status import list_document
from storm_rigs.operations.snapshots import show
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


def shown(world: World, **options: Any) -> dict[str, Any]:
    return show(world.cluster.load_view(), "wc", now_secs=world.time + 60, **options)


def problems_now(world: World) -> list[str]:
    view, topology = world.cluster.load_view(), world.named()
    down = [
        task["id"] for task in shown(world)["tasks"] if task["status"] in ("dead", "unassigned")
    ]
    return problems(view, topology, load_runnable(world.context(), topology), down)


def not_running(world: World) -> int:
    (row,) = list_document(world.cluster.load_view(), now_secs=world.time + 60)["topologies"]
    return row["not_running"]


def test_tasks_that_wait_for_slots_are_seen_with_what_to_do(world: World) -> None:
    topology_id = world.submit("wc", conf={"topology.workers": 6})
    world.run_workers(topology_id)
    assert (problems_now(world), not_running(world)) == ([], 0)
    lost = [w for w in world.assignment().workers if w.node == "s1"]
    world.cluster.state.delete_node(paths.supervisor("s1"))
    for worker in lost:
        world.stop_worker(topology_id, *worker.slot)
    tasks = sum(len(worker.ids) for worker in lost)
    # One slot of s2 is free, three are needed: the balanced strategy places nothing, and this says
    # why.
    (problem,) = problems_now(world)
    assert problem.startswith(f"{tasks} tasks (") and "wait for a slot" in problem
    assert "1 is free" in problem and "add a supervisor" in problem
    assert "`storm-dagster rebalance wc -n WORKERS`" in problem
    assert not_running(world) == tasks
    world.supervisor("s3")
    (problem,) = problems_now(world)
    assert (
        problem.startswith(f"{tasks} tasks (")
        and "about to be moved to" in problem
        and "s3:" in problem
    )


def test_show_of_an_unknown_name(world: World) -> None:
    with pytest.raises(NotAlive, match="none"):
        shown(world)
