"""The input and the output of ``storm-dagster plan``, over the local planner."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.operations.read.plan_file import Planner, parse_plans, result_document

WORD_COUNT: dict[str, Any] = {
    "name": "wc",
    "conf": {"topology.workers": 2},
    "spouts": {"lines": {"parallelism": 1}},
    "bolts": {
        "split": {"parallelism": 2, "inputs": ["lines"], "conf": {}},
        "count": {"parallelism": 2, "inputs": ["split"]},
    },
}
SUPERVISORS = [
    {
        "id": "s1",
        "host": "h1",
        "ports": [6900, 6901],
        "used": [6900],
        "rack": "r1",
        "cpu": 400,
        "memory_mb": 4096,
    },
    {"id": "s2", "host": "h2", "ports": [6900, 6901]},
]


def plan_documents(text: str, planner: Planner) -> list[dict[str, Any]]:
    return [result_document(plan, planner) for plan in parse_plans(text)]


def plan(topology: dict[str, Any] | None = None, **document: Any) -> dict[str, Any]:
    """The outcome document of one topology."""
    whole = {
        "supervisors": SUPERVISORS,
        "topologies": [{**WORD_COUNT, **(topology or {})}],
        **document,
    }
    (result,) = plan_documents(yaml.safe_dump(whole), plan_placement)
    return result["topologies"]["wc"]


def refused(topology: dict[str, Any] | None = None, **document: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        plan(topology, **document)
    return caught.value.message


def test_the_documents_of_the_design() -> None:
    text = json.dumps({"conf": {}, "supervisors": SUPERVISORS, "topologies": [WORD_COUNT]})
    assert plan_documents(text, plan_placement) == [
        {
            "topologies": {
                "wc": {
                    "status": "assigned",
                    "error": None,
                    "workers": [
                        {
                            "node": "s1", "host": "h1", "port": 6901, "tasks": [2, 4, 5],
                            "components": {"__acker": 1, "count": 1, "split": 1},
                            "memory_bytes": 2147483648, "cpu": 1, "kept": False,
                        },
                        {
                            "node": "s2", "host": "h2", "port": 6900, "tasks": [1, 3, 6, 7],
                            "components": {"__topology_master": 1, "count": 1, "lines": 1, "split": 1},
                            "memory_bytes": 2147483648, "cpu": 1, "kept": False,
                        },
                    ],
                    "tasks": {
                        "1": "split", "2": "split", "3": "count", "4": "count", "5": "__acker",
                        "6": "__topology_master", "7": "lines",
                    },
                    "unassigned": {},
                    "moved": 0,
                    "warnings": [],
                }
            },
            "seconds": {"session": 0.0, "assign": 0.0},
        }
    ]  # fmt: skip


def test_a_topology_that_does_not_fit_is_an_outcome_not_an_error() -> None:
    outcome = plan({"conf": {"topology.workers": 4}})
    assert outcome["status"] == "failed"
    assert outcome["error"] == {
        "type": "Unavailable",
        "message": "topology 'wc' needs 4 slots, 3 are free (s1: 1, s2: 2): add a supervisor or set topology.workers=3",
    }
    assert outcome["workers"] == []
    assert set(outcome["unassigned"]) == set("1234567")


def test_several_documents_in_their_order() -> None:
    one = {"supervisors": SUPERVISORS, "topologies": [WORD_COUNT]}
    two = {"supervisors": SUPERVISORS[:1], "topologies": [{**WORD_COUNT, "name": "other"}]}
    first, second = plan_documents(yaml.safe_dump_all([one, two]), plan_placement)
    assert list(first["topologies"]) == ["wc"]
    assert second["topologies"]["other"]["status"] == "failed"


def test_events_old_dead_and_kept() -> None:
    old = [
        {"node": "s1", "host": "h1", "port": 6901, "tasks": [1, 3, 6, 7]},
        {"node": "s2", "host": "h2", "port": 6900, "tasks": [2, 4, 5]},
    ]
    same = plan({"event": "monitor", "old": old})
    assert (same["status"], same["moved"]) == ("unchanged", 0)
    assert [worker["kept"] for worker in same["workers"]] == [True, True]
    healed = plan({"event": "monitor", "old": old, "dead": [4]})
    assert (healed["status"], healed["moved"]) == ("assigned", 3)
    assert healed["workers"][1]["port"] == 6901


def test_explicit_ids_and_the_numbering_around_them() -> None:
    outcome = plan(
        {
            "tasks": {"split": [1, 2, 8, 9]},
            "bolts": {"split": {"parallelism": 4, "inputs": ["lines"]}},
        }
    )
    assert outcome["tasks"] == {
        "1": "split", "2": "split", "3": "__acker", "4": "__topology_master", "5": "lines", "8": "split",
        "9": "split",
    }  # fmt: skip


def test_more_tasks_than_executors_stay_together() -> None:
    bolts = {"b": {"parallelism": 2, "inputs": ["lines"], "conf": {"topology.tasks": 5}}}
    outcome = plan({"bolts": bolts, "conf": {"topology.workers": 2, "topology.acker.executors": 0}})
    assert outcome["tasks"] == {
        **{str(task): "b" for task in range(1, 6)},
        "6": "__topology_master",
        "7": "lines",
    }
    held = [worker["tasks"] for worker in outcome["workers"]]
    assert sorted(sorted(set(tasks) & {1, 2, 3, 4, 5}) for tasks in held) == [[1, 2, 3], [4, 5]]


def test_conf_reaches_the_planner() -> None:
    conf = {
        "topology.workers": 1,
        "topology.priority": 3,
        "topology.scheduler.strategy": "even",
        "isolation.scheduler.machines": ["h1"],
        "jstorm.reserve.workers": 1,
        "use.old.assignment": True,
        "topology.master.single.worker": True,
        "topology.master.worker.memory.size": 7,
        "worker.memory.size": 8,
        "worker.cpu.slot.num": 2,
        "use.userdefine.assignment": [
            {"host": "h1", "port": 6901, "memory_bytes": 1, "cpu": 2, "components": {"split": 2}}
        ],
    }
    bolts = {"b": {"inputs": ["lines"], "conf": {"task.on.differ.node": True}}}
    text = yaml.safe_dump(
        {"supervisors": SUPERVISORS, "topologies": [{**WORD_COUNT, "conf": conf, "bolts": bolts}]}
    )
    (topology,) = parse_plans(text)[0].topologies
    assert (topology.workers, topology.priority, topology.strategy) == (1, 3, "even")
    assert (topology.isolation, topology.reserve, topology.use_old) == (("h1",), 1, True)
    assert (topology.single_master, topology.master_memory_bytes) == (True, 7)
    assert (topology.memory_bytes, topology.cpu) == (8, 2)
    assert topology.user_workers[0].components == {"split": 2}
    assert topology.differ_node == ("b",)
    assert topology.inputs == {"b": ("lines",)}
    assert topology.parallelism == {"b": 1, "__acker": 1, "lines": 1}


def test_local_mode_puts_every_task_into_one_worker() -> None:
    outcome = plan(
        conf={"storm.cluster.mode": "local"}, supervisors=[{"id": "s1", "ports": [6900, 6901]}]
    )
    assert [worker["tasks"] for worker in outcome["workers"]] == [[1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("topology", "document", "expected"),
    [
        ({"conf": {"topology.wrokers": 2}}, {}, "did you mean 'topology.workers'?"),
        ({"conf": {"topology.workers": 0}}, {}, "topology.workers must be at least 1"),
        ({"conf": {"topology.scheduler.strategy": "best"}}, {}, "must be one of balanced, even"),
        ({}, {"conf": {"nimbus.seed": []}}, "did you mean 'nimbus.seeds'?"),
        (
            {"evnt": "new"},
            {},
            "topologies[0].evnt: unknown key: use one of bolts, conf, dead, event",
        ),
        ({"event": "other"}, {}, "topologies[0].event: "),
        ({"name": "a b"}, {}, "may hold only letters"),
        (
            {"spouts": {}, "bolts": {"b": {"inputs": ["b"]}}},
            {},
            "topologies[0]: topology 'wc' has no spout",
        ),
        (
            {"bolts": {"b": {"inputs": ["lines", "lime"]}}},
            {},
            "topologies[0].bolts.b.inputs[1]: component 'lime' does not exist: did you mean 'lines'?",
        ),
        (
            {"spouts": {"lines": {"inputs": ["split"]}}},
            {},
            "topologies[0].spouts.lines.inputs: a spout has no",
        ),
        (
            {"bolts": {"lines": {"inputs": ["lines"]}}},
            {},
            "topologies[0].bolts.lines: a spout has the same id",
        ),
        (
            {"spouts": {"lines": {"parallelism": 0}}, "bolts": {}},
            {},
            "topologies[0].spouts: the topology has no task",
        ),
        (
            {"event": "monitor", "dead": [1, 99]},
            {},
            "topologies[0].dead[1]: task 99 does not exist",
        ),
        ({"event": "monitor", "unstopped": [0]}, {}, "topologies[0].unstopped[0]"),
        ({"bolts": {"__b": {"inputs": ["lines"]}}}, {}, "starts with '__'"),
        (
            {"tasks": {"nobody": [1]}},
            {},
            "topologies[0].tasks.nobody: component 'nobody' has no tasks",
        ),
        (
            {"tasks": {"split": [1], "count": [1]}},
            {},
            "topologies[0].tasks.split: id 1 is given twice",
        ),
        ({"tasks": {"split": [1]}}, {}, "parallelism 2 and 1 task ids"),
        (
            {"old": [{"node": "s1", "port": 1, "tasks": [1]}] * 2},
            {},
            "topologies[0].old[1]: slot 's1:1' is listed twice",
        ),
        (
            {
                "old": [
                    {"node": "s1", "port": 1, "tasks": [1]},
                    {"node": "s1", "port": 2, "tasks": [2, 1]},
                ]
            },
            {},
            "topologies[0].old[1].tasks: task 1 is listed twice",
        ),
        (
            {"conf": {"use.userdefine.assignment": [{"hots": "h1"}]}},
            {},
            "topologies[0]: use.userdefine.assignment, worker 1: hots",
        ),
        (
            {},
            {"supervisors": [{"id": "s1", "ports": [1]}] * 2},
            "supervisors[1].id: supervisor 's1' is listed twice",
        ),
        ({}, {"supervisors": [{"id": "s1", "ports": [70000]}]}, "supervisors[0].ports[0]: "),
        (
            {},
            {"supervisors": [*SUPERVISORS, {"id": "s3", "ports": [1, 1]}]},
            "supervisors[2].ports: port 1 is listed",
        ),
        (
            {},
            {"supervisors": [*SUPERVISORS, {"id": "s3", "host": "h2", "ports": [6901]}]},
            "supervisors[2].ports: port 6901 is a port of supervisor 's2' too",
        ),
        (
            {},
            {"supervisors": [{"id": "s1", "ports": [1], "used": [1, 2]}]},
            "supervisors[0].used: 2 ports are used, the supervisor has 1",
        ),
        (
            {},
            {"supervisors": [{"id": "s1", "ports": [1, 2], "used": [3]}]},
            "supervisors[0].used[0]: port 3 is none",
        ),
        (
            {},
            {"supervisors": [{"id": "s1", "ports": [1], "prots": []}]},
            "supervisors[0].prots: unknown key: use one of",
        ),
        ({}, {"supervisors": []}, "supervisors: there is none"),
        ({}, {"topologies": []}, "topologies: there is none"),
        (
            {},
            {"topologies": [WORD_COUNT, WORD_COUNT]},
            "topologies[1].name: topology 'wc' is listed twice",
        ),
    ],
)
def test_what_is_wrong_is_named(
    topology: dict[str, Any], document: dict[str, Any], expected: str
) -> None:
    assert expected in refused(topology, **document)


@pytest.mark.parametrize(
    "text", ["", "---\n", "[1, 2]", "just text", "{", "a: [", "topologies: !!python/object:x.y {}"]
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        plan_documents(text, plan_placement)


def test_a_wrong_document_is_found_before_any_is_planned() -> None:
    calls: list[object] = []
    text = yaml.safe_dump_all(
        [{"supervisors": SUPERVISORS, "topologies": [WORD_COUNT]}, {"topologies": [{}]}]
    )
    with pytest.raises(InvalidRequest, match="plan, document 2"):
        plan_documents(text, lambda batch: calls.append(batch) or plan_placement(batch))
    assert calls == []
