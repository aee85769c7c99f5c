"""Every rule of I1 to I8: silent for a sound cluster, one sentence for what breaks it, counted when
it stays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from storm_dagster.core.invariants.rules import RULES, violations
from storm_dagster.core.invariants.snapshot import (
    ClusterSnapshot,
    GrayNodes,
    PendingViolations,
    Violation,
    WorkerPid,
    confirm_violations,
)
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    SupervisorInfo,
    TaskTable,
    WorkerNode,
    WorkerSlot,
)
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView, Versioned

ID = "wc-1-1700000000"
KEYS = [f"{ID}-{suffix}" for suffix in ("stormjar.jar", "stormconf.ser", "stormcode.ser")]


def slot(port: int, tasks: str) -> WorkerSlot:
    return WorkerSlot(node="s1", host="h1", port=port, tasks=tasks)


def node(port: int, tasks: str, **more: Any) -> WorkerNode:
    given: dict[str, Any] = {"status": "running", "version": 3, "code": "aa", **more}
    return WorkerNode(pid=1000 + port, token="t", tasks=tasks, started_ms=0, **given)


def topology(**changes: Any) -> TopologyView:
    base = StormBase(
        name="wc",
        launch_time_secs=0,
        status="ACTIVE",
        workers=2,
        executors={"a": 2, "b": 2},
        token="tok",
    )
    made = TopologyView(
        id=ID,
        base=base,
        base_at=Versioned(1, 10),
        tasks=TaskTable(
            components={
                "a": ComponentTasks(type="bolt", tasks="1-2"),
                "b": ComponentTasks(type="spout", tasks="3-4"),
            }
        ),
        assignment=Assignment(
            topology_id=ID,
            code_dir=ID,
            node_host={"s1": "h1"},
            workers=(slot(6900, "1-2"), slot(6901, "3-4")),
            task_start_secs={"1-4": 1},
            timestamp_ms=1000,
        ),
        assignment_at=Versioned(3, 11),
        live_workers={Slot("s1", 6900): node(6900, "1-2"), Slot("s1", 6901): node(6901, "3-4")},
    )
    return replace(made, **changes)


def view(*topologies: TopologyView, **changes: Any) -> ClusterView:
    supervisor = SupervisorInfo(
        host="h1", ports=(6900, 6901, 6902), started=0, count=1, version="t"
    )
    return replace(
        ClusterView("c", 5, 7, {"s1": supervisor}, {each.id: each for each in topologies}),
        **changes,
    )


def facts(
    *topologies: TopologyView, seen: ClusterView | None = None, **changes: Any
) -> ClusterSnapshot:
    """A sound look, everything looked at, changed by what is given."""
    made = ClusterSnapshot(
        view=seen or view(*(topologies or (topology(),))),
        tokens={"tok": TokenRecord(topology_id=ID, name="wc", epoch=4, published=True)},
        blobs=dict.fromkeys(KEYS, "ff"),
        copies=dict.fromkeys(KEYS, 2),
        wanted_copies={ID: 2},
        gray={ID: GrayNodes(False)},
    )
    return replace(made, **changes)


def broken(found: ClusterSnapshot) -> set[str]:
    return {violation.rule for violation in violations(found)}


def assigned(*workers: WorkerSlot, **changes: Any) -> TopologyView:
    return topology(
        assignment=topology().assignment.model_copy(update={"workers": workers}), **changes
    )  # type: ignore[union-attr]


def with_base(**changes: Any) -> TopologyView:
    return topology(base=topology().base.model_copy(update=changes))


def test_a_sound_cluster_passes_and_missing_parts_are_not_judged() -> None:
    sound = facts(processes=(WorkerPid(ID, "s1", 6900, 7900), WorkerPid(ID, "s1", 6901, 7901)))
    assert violations(sound) == []
    assert violations(ClusterSnapshot(view=view(topology()))) == []
    assert violations(replace(sound, former=sound)) == []


OTHER = "other-2-1700000000"
TWIN = replace(
    topology(), id=OTHER, base=topology().base.model_copy(update={"name": "other", "token": "o"})
)

CASES: dict[str, tuple[str, ClusterSnapshot]] = {
    "a task in two slots": (
        "one_slot_per_task",
        facts(assigned(slot(6900, "1-3"), slot(6901, "3-4"))),
    ),
    "a task without slot and reason": (
        "one_slot_per_task",
        facts(assigned(slot(6900, "1-2"), slot(6901, "3"))),
    ),
    "a task of no component": (
        "one_slot_per_task",
        facts(assigned(slot(6900, "1-2"), slot(6901, "3-5"))),
    ),
    "a slot of two topologies": ("slots_not_shared", facts(seen=view(topology(), TWIN))),
    "a slot twice": ("slots_not_shared", facts(assigned(slot(6900, "1-2"), slot(6900, "3-4")))),
    "a lost supervisor": ("assigned_to_live_slots", facts(seen=view(topology(), supervisors={}))),
    "a port not offered": (
        "assigned_to_live_slots",
        facts(assigned(slot(6900, "1-2"), slot(7999, "3-4"))),
    ),
    "two owners": (
        "one_live_owner",
        facts(
            topology(
                live_workers={
                    Slot("s1", 6900): node(6900, "1-2"),
                    Slot("s1", 6901): node(6901, "2-4"),
                }
            )
        ),
    ),
    "two processes in a slot": (
        "one_process_per_slot",
        facts(processes=(WorkerPid(ID, "s1", 6900, 7900), WorkerPid(ID, "s1", 6900, 9))),
    ),
    "a process beside the node's": (
        "one_process_per_slot",
        facts(processes=(WorkerPid(ID, "s1", 6900, 12345),)),
    ),
    "visible without assignment": (
        "base_implies_published",
        facts(topology(assignment=None, assignment_at=None)),
    ),
    "a damaged record": (
        "records_intact",
        facts(seen=view(topology(), corrupt={"/tasks/x": "no JSON"})),
    ),
    "a process of a gone topology": (
        "no_stray_processes",
        facts(processes=(WorkerPid("gone-1-1700000000", "s1", 6902, 5),)),
    ),
    "a process in a slot given up": (
        "no_stray_processes",
        facts(processes=(WorkerPid(ID, "s1", 6902, 5),)),
    ),
    "a missing blob": ("blobs_present", facts(blobs=dict.fromkeys(KEYS[1:], "ff"))),
    "too few copies": ("blobs_replicated", facts(copies=dict.fromkeys(KEYS, 1))),
    "a token of the future": (
        "epoch_rises",
        facts(tokens={"tok": TokenRecord(topology_id=ID, name="wc", epoch=6, published=True)}),
    ),
    "an epoch that went back": ("epoch_rises", facts(former=facts(seen=view(topology(), epoch=6)))),
    "another cluster": ("epoch_rises", facts(former=facts(seen=view(topology(), cluster_id="d")))),
    "two of a name": (
        "one_topology_per_token",
        facts(
            seen=view(topology(), replace(assigned(slot(6902, "1-4")), id=OTHER, live_workers={}))
        ),
    ),
    "a token of another": (
        "one_topology_per_token",
        facts(tokens={"tok": TokenRecord(topology_id=OTHER, name="wc", epoch=1, published=True)}),
    ),
    "no token": ("one_topology_per_token", facts(tokens={})),
    "an upgraded worker on the former code": (
        "one_version_per_worker",
        facts(
            with_base(status="UPGRADING"),
            gray={ID: GrayNodes(True, upgraded=frozenset({"h1:6900"}), code="bb")},
        ),
    ),
    "an upgrade without status": ("one_version_per_worker", facts(gray={ID: GrayNodes(True)})),
    "a status without upgrade": ("one_version_per_worker", facts(with_base(status="UPGRADING"))),
    "a worker in both sets": (
        "one_version_per_worker",
        facts(
            with_base(status="UPGRADING"),
            gray={ID: GrayNodes(True, frozenset({"h1:6900"}), frozenset({"h1:6900"}))},
        ),
    ),
    "an assignment written for nothing": (
        "no_idle_writes",
        facts(former=facts(topology(assignment_at=Versioned(2, 9)))),
    ),
    "a base written for nothing": (
        "no_idle_writes",
        facts(former=facts(topology(base_at=Versioned(0, 9)))),
    ),
    "a rebalance for ever": ("wishes_end", facts(rebalance_requests=frozenset({ID}))),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_what_breaks_a_rule_is_found(case: str) -> None:
    rule, found = CASES[case]
    mine = [violation for violation in violations(found) if violation.rule == rule]
    assert mine, f"{case}: {violations(found)}"
    for violation in mine:
        assert violation.thing and violation.reason and violation.remedy
        assert violation.to_document()["invariant"] in violation.invariant
    assert broken(found) <= {rule, *ALSO.get(case, ())}, "nothing else is blamed"


ALSO = {
    "two processes in a slot": {"no_stray_processes"},
    "a slot of two topologies": {"one_topology_per_token"},
}
"""What the same damage breaks besides."""


def test_every_rule_and_every_invariant_has_a_case() -> None:
    assert {rule for rule, _ in CASES.values()} == {rule.name for rule in RULES}
    assert {rule.invariant for rule in RULES} == {f"I{number}" for number in range(1, 9)}


def test_legal_states_break_nothing() -> None:
    # Without a slot, with a reason; a handover between two versions; a lost supervisor's worker
    # that lives.
    assert (
        broken(
            facts(assigned(slot(6900, "1-2"), slot(6901, "3")), unschedulable={ID: frozenset({4})})
        )
        == set()
    )
    handover = {Slot("s1", 6900): node(6900, "1-2"), Slot("s1", 6901): node(6901, "2-4", version=4)}
    assert broken(facts(topology(live_workers=handover))) == set()
    paused = {
        Slot("s1", 6900): node(6900, "1-2", status="paused"),
        Slot("s1", 6901): node(6901, "2-4"),
    }
    assert broken(facts(topology(live_workers=paused))) == set()
    killed = with_base(status="KILLED")
    assert broken(facts(replace(killed, assignment=None, tasks=None), blobs={}, gray={})) == set()
    upgrading = facts(
        replace(
            with_base(status="UPGRADING"),
            live_workers={
                Slot("s1", 6900): node(6900, "1-2", code="bb"),
                Slot("s1", 6901): node(6901, "3-4"),
            },
        ),
        gray={ID: GrayNodes(True, frozenset({"h1:6901"}), frozenset({"h1:6900"}), "bb")},
    )
    assert broken(upgrading) == set()
    # Written, and something changed.
    moved = facts(
        former=facts(assigned(slot(6900, "1-2"), slot(6902, "3-4"), assignment_at=Versioned(2, 9)))
    )
    assert broken(moved) == set()


def test_what_lasts_counts_and_what_passes_does_not() -> None:
    lasting = Violation("I1", "one_slot_per_task", "t", "r", "m")
    passing = Violation("I3", "no_orphans", "t", "r", "m")
    event = Violation("I8", "no_idle_writes", "t", "r", "m")
    counted, pending = confirm_violations(
        PendingViolations(), [lasting, passing], boot_now=0, stable_secs=5
    )
    assert counted == []
    counted, pending = confirm_violations(pending, [lasting], boot_now=4, stable_secs=5)
    assert counted == []
    counted, pending = confirm_violations(pending, [lasting, passing], boot_now=5, stable_secs=5)
    assert counted == [lasting], "the other was fixed in between and began again"
    assert confirm_violations(PendingViolations(), [event], boot_now=0, stable_secs=5)[0] == [event]
    assert confirm_violations(PendingViolations(), [lasting], boot_now=0, stable_secs=0)[0] == [], (
        "one look is not enough"
    )
