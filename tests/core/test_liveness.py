"""Who is dead, without any wall clock."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace as replaced

from storm_dagster.core.liveness.causes import Cause, LivenessMemory, due_attempts
from storm_dagster.core.liveness.detection import observe
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.reassignment import (
    Runnable,
    assignment_of,
    monitor_batch,
    offered_supervisors,
)
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.placement import TopologyPlacement
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    SupervisorInfo,
    TaskBeats,
    TaskTable,
    WorkerNode,
    WorkerSlot,
)
from storm_dagster.model.slot import Slot
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import ClusterView, TopologyView, Versioned
from storm_dagster.zk.sensor_memory import decode_memory, encode_memory

LIMITS = LivenessLimits()
TABLE = TaskTable(
    components={
        "b": ComponentTasks(type="bolt", tasks="1-4,6"),
        "__topology_master": ComponentTasks(type="bolt", tasks="5"),
    }
)


def cluster(
    slots: dict[tuple[str, int], str],
    *,
    gone: set[tuple[str, int]] = frozenset(),  # type: ignore[assignment]
    lost: set[str] = frozenset(),  # type: ignore[assignment]
    restarting: dict[str, tuple[int, ...]] | None = None,
    dead: str = "",
    beats: int = 20,
    generation: int = 3,
    mzxid: int = 10,
    count: int = 1,
    status: Any = "ACTIVE",
    start: int = 0,
    ports: tuple[int, ...] = (1, 2, 3, 4),
) -> ClusterView:
    """One topology on ``slots``; workers in ``gone`` have no node, supervisors in ``lost``
    neither.
    """
    nodes = sorted({node for node, _ in slots})
    tasks = [
        task
        for ranges in slots.values()
        for task in WorkerSlot(node="", host="", port=1, tasks=ranges).ids
    ]
    assignment = Assignment(
        topology_id="t-1-1",
        code_dir="t-1-1",
        node_host={node: f"h{node}" for node in nodes},
        workers=tuple(
            WorkerSlot(node=node, host=f"h{node}", port=port, tasks=ranges)
            for (node, port), ranges in slots.items()
        ),
        task_start_secs=Assignment.pack_start_secs(dict.fromkeys(tasks, start)),
        timestamp_ms=0,
    )
    live = {
        Slot(node, port): WorkerNode(
            pid=1, token="x", version=generation, tasks=ranges, started_ms=0, status="running"
        )
        for (node, port), ranges in slots.items()
        if (node, port) not in gone
    }
    base = StormBase(
        name="t", launch_time_secs=0, status=status, workers=2, executors={"b": 5}, token="k"
    )
    topology = TopologyView(
        id="t-1-1",
        base=base,
        base_at=Versioned(1, 1),
        tasks=TABLE,
        assignment=assignment,
        assignment_at=Versioned(generation, mzxid),
        beats=TaskBeats(topology_id="t-1-1", topology_master=5, dead=dead),
        beats_at=Versioned(1, beats),
        live_workers=live,
    )
    return ClusterView(
        cluster_id="c",
        epoch=1,
        assignments_version=1,
        supervisors={
            node: SupervisorInfo(
                host=f"h{node}",
                ports=ports,
                started=0,
                count=count,
                version="t",
                restarting=(restarting or {}).get(node, ()),
            )
            for node in nodes
            if node not in lost
        },
        topologies={"t-1-1": topology},
    )


TWO = {("s1", 1): "1,3,5", ("s2", 1): "2,4,6"}


class Clock:
    """An observer that looks at views at given boot clocks."""

    def __init__(self) -> None:
        self.memory = LivenessMemory()

    def at(self, now: float, view: ClusterView, **options: Any) -> Any:
        options = {"boot_id": "b", **options}
        seen = observe(view, self.memory, LIMITS, boot_now=now, **options)
        self.memory = decode_memory(LivenessMemory, encode_memory(seen.memory))
        assert self.memory == seen.memory
        return seen

    def kinds(self, now: float, view: ClusterView, **options: Any) -> list[tuple[str, str]]:
        return [(cause.kind, cause.node) for cause in self.at(now, view, **options).causes]


def test_workers_that_beat_are_not_dead() -> None:
    clock = Clock()
    assert clock.kinds(0, cluster(TWO)) == []
    assert clock.kinds(20, cluster(TWO, beats=21, count=2)) == []


@pytest.mark.parametrize(("silence", "dead"), [(30, False), (30.1, True)])
def test_the_limit_is_exceeded_not_reached(silence: float, dead: bool) -> None:
    clock = Clock()
    clock.at(0, cluster(TWO))
    clock.at(1, cluster(TWO, gone={("s2", 1)}))
    assert bool(clock.kinds(1 + silence, cluster(TWO, gone={("s2", 1)}, beats=21))) == dead


def test_whole_workers_die() -> None:
    clock = Clock()
    clock.at(0, cluster(TWO))
    (cause,) = clock.at(1, cluster(TWO, dead="4")).causes
    assert cause.tasks == (2, 4, 6)


def test_a_silent_master_takes_only_its_worker() -> None:
    clock = Clock()
    clock.at(0, cluster(TWO))
    seen = clock.at(31, cluster(TWO, dead="4", count=2))
    assert [(cause.kind, cause.tasks) for cause in seen.causes] == [("silent_master", (1, 3, 5))]


def test_a_lost_supervisor_alone_moves_nothing() -> None:
    clock = Clock()
    clock.at(0, cluster(TWO))
    assert clock.kinds(100, cluster(TWO, lost={"s2"}, beats=21, count=2)) == []


def test_a_lost_host_moves_at_once() -> None:
    clock = Clock()
    clock.at(0, cluster(TWO))
    assert clock.kinds(1, cluster(TWO, lost={"s2"}, gone={("s2", 1)})) == [("lost_host", "s2")]


def test_a_host_that_drains_has_no_dead_worker_until_it_is_gone() -> None:
    def draining(count: int, beats: int) -> ClusterView:
        view = cluster(TWO, gone={("s2", 1)}, beats=beats, count=count)
        info = view.supervisors["s2"].model_copy(update={"draining": True})
        return replace(view, supervisors={**view.supervisors, "s2": info})

    clock = Clock()
    clock.at(0, cluster(TWO))
    for now in range(1, 200, 20):
        assert clock.kinds(now, draining(now, 20 + now)) == []
    # It hangs: its counter no longer rises.
    assert clock.kinds(250, draining(181, 300)) == [("dead_worker", "s2")]
    ended = cluster(TWO, lost={"s2"}, gone={("s2", 1)}, beats=500, count=500)
    assert clock.kinds(251, ended) == [("lost_host", "s2")]


def test_a_lost_host_was_silent_since_its_counter_last_rose() -> None:
    clock = Clock()
    clock.at(0, cluster(TWO, count=1))
    clock.at(3, cluster(TWO, count=2))
    clock.at(6, cluster(TWO, count=2))
    # Its supervisor's session ends first, its worker's a little later.
    clock.at(8, cluster(TWO, count=2, lost={"s1"}))
    seen = clock.at(9, cluster(TWO, count=3, gone={("s1", 1)}, lost={"s1"}))
    assert [(cause.kind, cause.silent_secs) for cause in seen.causes] == [("lost_host", 6.0)]
    # Nobody knows for how long it was silent that saw it only once.
    other = Clock()
    other.memory = replaced(clock.memory, since=9.0)
    seen = other.at(9, cluster(TWO, count=3, gone={("s1", 1)}, lost={"s1"}))
    assert seen.memory.last_signs is UNSET
    clock.at(12, cluster(TWO, count=4))
    assert clock.memory.last_signs is UNSET, "it is back"


def test_a_new_boot_grants_a_full_timeout() -> None:
    clock = Clock()
    clock.at(0, cluster(TWO))
    lost = cluster(TWO, lost={"s2"}, gone={("s2", 1)})
    assert clock.kinds(5000, lost, boot_id="other") == []
    assert clock.kinds(5030, lost, boot_id="other") == []
    assert ("lost_host", "s2") in clock.kinds(5032, lost, boot_id="other")


def test_a_boot_clock_that_went_back_is_another_boot() -> None:
    clock = Clock()
    clock.at(1000, cluster(TWO))
    assert clock.kinds(1, cluster(TWO, lost={"s2"}, gone={("s2", 1)})) == []


def test_restarting_in_place_has_the_launch_limit() -> None:
    clock = Clock()
    clock.at(0, cluster(TWO))
    view = cluster(TWO, gone={("s2", 1)}, restarting={"s2": (1,)})
    assert clock.at(1, view).restarting == (("t-1-1", "s2", 1),)
    assert clock.kinds(121, cluster(TWO, gone={("s2", 1)}, restarting={"s2": (1,)}, beats=21)) == []
    assert clock.kinds(122, cluster(TWO, gone={("s2", 1)}, restarting={"s2": (1,)}, beats=22)) == [
        ("dead_worker", "s2")
    ]


def test_a_launch_has_its_limit_and_a_new_placement_a_new_one() -> None:
    clock = Clock()
    clock.at(0, cluster(TWO, gone={("s2", 1)}))
    assert clock.kinds(120, cluster(TWO, gone={("s2", 1)}, beats=21)) == []
    assert clock.kinds(121, cluster(TWO, gone={("s2", 1)}, beats=22)) == [("dead_worker", "s2")]
    again = cluster(TWO, gone={("s2", 1)}, generation=4, mzxid=30, beats=40, start=7)
    assert clock.kinds(122, again) == []


def starting(view: ClusterView, *nodes: str, token: str = "x") -> ClusterView:
    """``view`` with the workers on ``nodes`` not running all their tasks yet."""
    topology = view.topologies["t-1-1"]
    live = {
        slot: worker.model_copy(update={"status": "starting", "token": token})
        if slot[0] in nodes
        else worker
        for slot, worker in topology.live_workers.items()
    }
    return replace(view, topologies={"t-1-1": replace(topology, live_workers=live)})


def test_a_worker_without_reports_is_dead_after_the_launch_window() -> None:
    """It is there and beats, but a task of it never came up."""
    clock = Clock()
    clock.at(0, starting(cluster(TWO), "s2"))
    seen = clock.at(120, starting(cluster(TWO, beats=21), "s2"))
    assert not seen.causes and "has not reported its tasks for 120 s" in seen.waiting[0]
    assert clock.kinds(121, starting(cluster(TWO, beats=22), "s2")) == [("never_ran", "s2")]
    # Another process has its own time.
    assert clock.kinds(122, starting(cluster(TWO, beats=23), "s2", token="y")) == []
    # One that ran, and starts another task later, as well.
    assert clock.kinds(130, cluster(TWO, beats=24)) == []
    assert clock.kinds(250, starting(cluster(TWO, beats=25), "s2")) == []


def test_a_cluster_that_was_started_as_a_whole_gets_a_launch_window() -> None:
    """Nothing of before is there when its daemons and workers come up again, one after the
    other.
    """
    clock = Clock()
    clock.at(0, cluster(TWO, count=50))
    nothing = cluster(TWO, gone={("s1", 1), ("s2", 1)}, lost={"s1", "s2"})
    assert clock.kinds(5, nothing) == []
    half = cluster(TWO, gone={("s1", 1), ("s2", 1)}, lost={"s2"}, count=1)
    assert clock.kinds(8, half) == []
    assert clock.kinds(100, cluster(TWO, lost={"s2"}, gone={("s2", 1)}, beats=21, count=9)) == []
    # A host that does not come back within the window is lost.
    late = cluster(TWO, lost={"s2"}, gone={("s2", 1)}, beats=22, count=10)
    assert ("lost_host", "s2") in clock.kinds(126, late)


def test_a_cluster_started_between_two_polls_gets_a_launch_window() -> None:
    clock = Clock()
    clock.at(0, cluster(TWO, count=50))
    half = cluster(TWO, gone={("s1", 1), ("s2", 1)}, lost={"s2"}, count=1)
    assert clock.kinds(15, half) == []
    # Without a restart the same sight is a lost host.
    other = Clock()
    other.at(0, cluster(TWO, count=50))
    assert ("lost_host", "s2") in other.kinds(
        15, cluster(TWO, gone={("s2", 1)}, lost={"s2"}, count=51)
    )


def test_a_host_lost_after_its_return_has_no_launch_window() -> None:
    """The observer was cut off while every supervisor restarted."""
    limits = replace(LIMITS, window_secs=8)
    clock = Clock()
    clock.at(0, cluster(TWO, count=50))
    memory = observe(
        cluster(TWO, count=1), clock.memory, limits, boot_id="b", boot_now=15, restart_limits=True
    ).memory
    lost = cluster(TWO, lost={"s2"}, gone={("s2", 1)}, count=2)
    memory = observe(lost, memory, limits, boot_id="b", boot_now=18).memory
    late = cluster(TWO, lost={"s2"}, gone={("s2", 1)}, beats=21, count=3)
    causes = observe(late, memory, limits, boot_id="b", boot_now=18.1 + limits.task_secs).causes
    assert [(cause.kind, cause.node) for cause in causes] == [("lost_host", "s2")]
    # One that never came back has the launch window.
    memory = observe(
        lost, clock.memory, limits, boot_id="b", boot_now=15, restart_limits=True
    ).memory
    assert observe(late, memory, limits, boot_id="b", boot_now=18.1 + limits.task_secs).causes == ()


@pytest.mark.parametrize("status", ["KILLED"])
def test_statuses_that_are_not_healed(status: str) -> None:
    clock = Clock()
    clock.at(0, cluster(TWO, status=status))
    assert clock.kinds(1, cluster(TWO, status=status, lost={"s2"}, gone={("s2", 1)})) == []


def test_tasks_without_a_slot_are_named_once_there_is_one() -> None:
    slots = {("s1", 1): "1,3,5"}
    assert Clock().kinds(0, cluster(slots, ports=(1,))) == []
    (cause,) = Clock().at(0, cluster(slots, ports=(1, 2))).causes
    assert (cause.kind, cause.tasks) == ("unassigned", (2, 4, 6))


MANY = {
    ("s1", 1): "1",
    ("s2", 1): "2",
    ("s3", 1): "3",
    ("s4", 1): "4",
    ("s5", 1): "5",
    ("s6", 1): "6",
}


def mass(*lost: str, **more: Any) -> ClusterView:
    return cluster(MANY, lost=set(lost), gone={(node, 1) for node in lost}, **more)


def test_mass_loss_freezes_for_a_launch_window() -> None:
    clock = Clock()
    clock.at(0, mass())
    seen = clock.at(1, mass("s1", "s2", "s3"))
    assert seen.causes == () and seen.frozen and "3 of 6 workers" in seen.frozen
    assert seen.next_check is not None
    assert clock.at(121, mass("s1", "s2", "s3", beats=21)).causes == ()
    # Bounded: what is gone for so long is gone.
    assert len(clock.at(122, mass("s1", "s2", "s3", beats=21)).causes) >= 3


def test_mass_loss_ends_when_they_come_back() -> None:
    clock = Clock()
    clock.at(0, mass())
    clock.at(1, mass("s1", "s2", "s3"))
    assert clock.at(10, mass()).frozen is None
    assert clock.kinds(11, mass("s1")) == [("lost_host", "s1")]


def test_two_supervisors_are_no_mass() -> None:
    clock = Clock()
    clock.at(0, mass())
    seen = clock.at(1, mass("s1", "s2"))
    assert seen.frozen is None and len(seen.causes) == 2


def test_a_silent_supervisor_gets_no_new_work() -> None:
    clock = Clock()
    clock.at(0, cluster(TWO))
    seen = clock.at(31, cluster(TWO, beats=21, dead="4"))
    assert seen.silent_supervisors == ("s1", "s2")
    assert seen.causes[0].avoid == ("s1", "s2")


@given(
    st.lists(
        st.tuples(st.floats(0.1, 50), st.booleans(), st.booleans(), st.booleans()), max_size=15
    )
)
def test_causes_are_stable_and_the_living_are_never_judged(
    steps: list[tuple[float, bool, bool, bool]],
) -> None:
    clock = Clock()
    now, beats = 0.0, 20
    for pause, worker_gone, supervisor_lost, beating in steps:
        now += pause
        beats += beating
        view = cluster(
            TWO,
            gone={("s2", 1)} if worker_gone else set(),
            lost={"s2"} if supervisor_lost else set(),
            beats=beats,
        )
        before = clock.memory
        seen = clock.at(now, view)
        same = observe(view, before, LIMITS, boot_id="b", boot_now=now)
        assert [cause.key for cause in same.causes] == [cause.key for cause in seen.causes]
        if not worker_gone:
            assert all(cause.node != "s2" for cause in seen.causes)


def test_causes_travel_as_json() -> None:
    clock = Clock()
    clock.at(0, cluster(TWO))
    (cause,) = clock.at(1, cluster(TWO, dead="4")).causes
    assert Cause.from_json(json.loads(json.dumps(cause.to_json()))) == cause
    assert cause.key == "t-1-1:3:dead_task@s2-1"
    for bad in (None, {}, {**cause.to_json(), "kind": "whim"}, {**cause.to_json(), "tasks": [1]}):
        with pytest.raises(InvalidRequest):
            Cause.from_json(bad)


def test_attempts_rise_with_a_pause_that_grows() -> None:
    clock = Clock()
    clock.at(0, cluster(TWO))
    (cause,) = clock.at(1, cluster(TWO, dead="4")).causes
    due, memory = due_attempts([cause], {}, boot_now=0)
    assert [part.run_key for part in due] == ["t-1-1:3:dead_task@s2-1:1"]
    assert due_attempts([cause], memory, boot_now=0.5)[0] == []
    assert due_attempts([cause], memory, boot_now=5, running=[due[0].run_key])[0] == []
    pauses, now = [], 0.0
    for _ in range(9):
        before = memory[cause.key][1]
        pauses.append(before - now)
        now = before
        due, memory = due_attempts([cause], memory, boot_now=now)
        assert len(due) == 1
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert due_attempts([], memory, boot_now=now)[1] == {}


def test_bad_cursors_are_empty_memories() -> None:
    for bad in (None, 3, {}, {"boot_id": "b"}, {"boot_id": 1, "since": "x", "topologies": {}}):
        assert decode_memory(LivenessMemory, json.dumps(bad)) == LivenessMemory()


class TestReassignment:
    def view(self) -> ClusterView:
        return cluster(TWO, lost={"s2"}, gone={("s2", 1)})

    def cause(self) -> Cause:
        return Cause("t-1-1", "t", 3, "lost_host", "s2", "hs2", 1, (2, 4, 6))

    def test_own_slots_are_free_others_are_not(self) -> None:
        (offered,) = offered_supervisors(self.view(), placing=["t-1-1"])
        assert offered.used == ()
        (offered,) = offered_supervisors(self.view(), placing=["x"], withheld=[Slot("s1", 3)])
        assert offered.used == (1, 3)
        assert (
            offered_supervisors(replace(self.view(), blacklist=frozenset({"hs1"})), placing=[])
            == ()
        )
        assert offered_supervisors(self.view(), placing=[], avoid=["s1"]) == ()

    def test_a_monitor_batch_names_the_dead_tasks_and_where_they_may_go(self) -> None:
        view = self.view()
        runnable = Runnable(TopologySpec(name="t"), {})
        batch = monitor_batch(view, view.topologies["t-1-1"], runnable, TABLE, [self.cause()])
        (topology,) = batch.topologies
        assert (topology.event, topology.dead, topology.unstopped) == ("monitor", (2, 4, 6), ())
        assert [part.id for part in batch.supervisors] == ["s1"]
        assert topology.parallelism == {"b": 5}

    def test_what_was_not_judged_stays(self) -> None:
        view = cluster({**TWO, ("s2", 2): "1"} | {("s1", 1): "3,5"}, lost={"s2"}, gone={("s2", 1)})
        runnable = Runnable(TopologySpec(name="t"), {})
        batch = monitor_batch(view, view.topologies["t-1-1"], runnable, TABLE, [self.cause()])
        assert batch.topologies[0].unstopped == (1,)

    def test_only_what_moves_or_was_dead_starts_now(self) -> None:
        old = self.view().topologies["t-1-1"].assignment
        placement = TopologyPlacement(
            name="t",
            status="assigned",
            workers=(
                WorkerSlot(node="s1", host="hs1", port=1, tasks="1,3,5,7"),
                WorkerSlot(node="s1", host="hs1", port=2, tasks="2,4,6"),
            ),
        )
        new = assignment_of(placement, topology_id="t-1-1", previous=old, now_secs=9, restarted=[3])
        assert new.start_secs() == {1: 0, 3: 9, 5: 0, 7: 9, 2: 9, 4: 9, 6: 9}
        assert new.node_host == {"s1": "hs1"}
