"""`list --json` and `show --json` have exactly the keys that scripts rely on."""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import NotAlive
from storm_dagster.operations.context import load_runnable
from storm_dagster.operations.read import status
from storm_dagster.operations.read.explaining import problems
from storm_rigs.operations.snapshots import show
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


def shown(world: World, **options: Any) -> dict[str, Any]:
    return show(world.cluster.load_view(), "wc", now_secs=world.time + 60, **options)


def test_a_list_has_the_figures_of_each_topology(world: World) -> None:
    assert status.list_document(world.cluster.load_view(), now_secs=0) == {"topologies": []}
    topology_id = world.submit("wc", conf={"topology.workers": 2})
    assert status.list_document(world.cluster.load_view(), now_secs=world.time + 60) == {
        "topologies": [
            {
                "id": topology_id,
                "name": "wc",
                "status": "ACTIVE",
                "uptime_secs": 60,
                "workers": 2,
                "executors": 7,
                "tasks": 7,
                "not_running": 0,
            }
        ]
    }


def test_show_has_the_agreed_keys(world: World) -> None:
    topology_id = world.submit("wc", conf={"topology.workers": 2})
    world.run_workers(topology_id)
    world.cluster.report_error(topology_id, 1, "boom", host="s1", port=6900, time=17)
    stats = {
        "tasks": {
            "1": {
                "status": "running",
                "uptime_secs": 9,
                "stats": {"executed": 4, "execute_ms": 0.5},
            }
        },
        "workers": {"s1:6900": {"pid": 7, "uptime_secs": 12}},
    }
    ctx = world.context()
    document = shown(world, report=stats, errors=status.errors_of(ctx, topology_id))
    assert list(document) == [
        "id",
        "name",
        "status",
        "uptime_secs",
        "workers",
        "tasks",
        "components",
        "errors",
        "back_pressure",
    ]
    worker = document["workers"][0]
    assert set(worker) == {"node", "host", "port", "pid", "tasks", "uptime_secs", "version"}
    assert (worker["pid"], worker["uptime_secs"], worker["version"]) == (
        7900,
        12,
        "0123456789abcdef",
    )
    task = document["tasks"][0]
    assert set(task) == {
        "id",
        "component",
        "node",
        "host",
        "port",
        "status",
        "uptime_secs",
        "stats",
    }
    assert list(task["stats"]) == list(status.STAT_NAMES)
    assert (task["status"], task["uptime_secs"], task["stats"]["executed"]) == ("running", 9, 4)
    assert document["errors"] == [
        {
            "component": "split",
            "task": 1,
            "host": "s1",
            "port": 6900,
            "time": 17,
            "error": "boom",
            "count": 1,
        }
    ]
    split = document["components"]["split"]
    assert split["tasks"] == [1, 2] and split["executors"] == 2
    assert split["stats"]["executed"] == 4 and split["stats"]["execute_ms"] == 0.5
    assert document["components"]["__acker"]["type"] == "bolt"


def statuses(document: dict[str, Any]) -> set[str]:
    return {task["status"] for task in document["tasks"]}


def test_a_task_is_starting_running_or_dead(world: World) -> None:
    topology_id = world.submit("wc")
    assert statuses(shown(world)) == {"starting"}
    assert statuses(show(world.cluster.load_view(), "wc", now_secs=world.time + 121)) == {"dead"}
    world.run_workers(topology_id, status="starting")
    assert statuses(shown(world)) == {"starting"}
    world.run_workers(topology_id)
    assert statuses(shown(world)) == {"running"}
    world.cluster.write_beats(
        topology_id, world.beats().model_copy(update={"dead": "3"}), assignment_version=0
    )
    assert [task["id"] for task in shown(world)["tasks"] if task["status"] == "dead"] == [3]
    worker = world.assignment().workers[0]
    world.stop_worker(topology_id, *worker.slot)
    world.supervisor(worker.node, restarting=(worker.port,))
    assert statuses(show(world.cluster.load_view(), "wc", now_secs=world.time + 500)) == {
        "starting"
    }
    world.cluster.state.delete_node(paths.supervisor(worker.node))
    assert statuses(shown(world)) == {"dead"}


def problems_now(world: World) -> list[str]:
    view, topology = world.cluster.load_view(), world.named()
    down = [
        task["id"] for task in shown(world)["tasks"] if task["status"] in ("dead", "unassigned")
    ]
    return problems(view, topology, load_runnable(world.context(), topology), down)


def not_running(world: World) -> int:
    (row,) = status.list_document(world.cluster.load_view(), now_secs=world.time + 60)["topologies"]
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
