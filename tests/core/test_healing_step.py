"""One step of healing, as the sensor and the leader take it: attempts, back-off, gaps, and the
mass-loss guard.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.liveness.causes import (
    FirstSeen,
    LivenessMemory,
    MissingSlot,
    StartingWorker,
    TopologyMemory,
)
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.liveness.step import (
    HealingSettings,
    HealingState,
    HealingStepResult,
    healing_step,
)
from storm_dagster.core.transitions import DueMemory
from storm_dagster.defs.healing.memory import HealingMemory
from storm_dagster.model.healing_pause import HealingPause
from storm_dagster.model.records import (
    Assignment,
    StormBase,
    SupervisorInfo,
    WorkerNode,
    WorkerSlot,
)
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView, Versioned
from storm_dagster.zk.sensor_memory import decode_memory, encode_memory

SETTINGS = HealingSettings(LivenessLimits(), "b", longest_gap_secs=20)
UNHURRIED = replace(SETTINGS, limits=LivenessLimits(window_secs=8), longest_gap_secs=float("inf"))
NODES = ("s1", "s2", "s3", "s4")


def cluster(*lost: str, gone: tuple[str, ...] = ()) -> ClusterView:
    """A topology with one worker on each of four supervisors; of ``gone`` the worker, of ``lost``
    both are absent.
    """
    slots = tuple(
        WorkerSlot(node=node, host=f"h{node}", port=1, tasks=str(task))
        for task, node in enumerate(NODES, start=1)
    )
    topology = TopologyView(
        id="t-1-1",
        base=StormBase(
            name="t", launch_time_secs=0, status="ACTIVE", workers=4, executors={}, token="k"
        ),
        base_at=Versioned(1, 1),
        tasks=None,
        assignment=Assignment(
            topology_id="t-1-1",
            code_dir="t-1-1",
            node_host={slot.node: slot.host for slot in slots},
            workers=slots,
            task_start_secs=Assignment.pack_start_secs(dict.fromkeys(range(1, 5), 0)),
            timestamp_ms=0,
        ),
        assignment_at=Versioned(3, 10),
        beats=None,
        beats_at=None,
        live_workers={
            Slot(slot.node, 1): WorkerNode(
                pid=1, token="x", version=3, tasks=slot.tasks, started_ms=0, status="running"
            )
            for slot in slots
            if slot.node not in (*lost, *gone)
        },
    )
    supervisors = {
        node: SupervisorInfo(host=f"h{node}", ports=(1,), started=0, count=1, version="t")
        for node in NODES
        if node not in lost
    }
    return ClusterView(
        cluster_id="c",
        epoch=1,
        assignments_version=1,
        supervisors=supervisors,
        topologies={"t-1-1": topology},
    )


@dataclass
class Healer:
    """A healer that steps at given boot clocks; its supervisors beat at each step."""

    state: HealingState = field(default_factory=HealingState)
    settings: HealingSettings = SETTINGS
    beats: int = 0
    busy: tuple[str, ...] = ()
    promise: bool | None = None
    """Result of each plan."""

    def at(self, now: float, view: ClusterView) -> HealingStepResult[HealingState]:
        self.beats += 1
        supervisors = {
            node: info.model_copy(update={"count": self.beats})
            for node, info in view.supervisors.items()
        }
        view = replace(view, supervisors=supervisors)

        def decide() -> HealingStepResult[HealingState]:
            return healing_step(
                view,
                self.state,
                now,
                self.settings,
                busy=lambda _: self.busy,
                outlook=lambda _: self.promise,
            )

        step = decide()
        assert decide() == step
        self.state = step.memory
        return step

    def keys(self, now: float, view: ClusterView) -> list[str]:
        return [attempt.run_key for attempt in self.at(now, view).attempts]


def test_a_lost_host_is_attempted_at_once_and_again_with_back_off() -> None:
    healer = Healer()
    assert healer.keys(0, cluster()) == []
    first = healer.at(1, cluster("s2"))
    assert [attempt.run_key for attempt in first.attempts] == ["t-1-1:3:lost_host@s2-1:1"]
    assert first.next_check == 2
    assert healer.keys(1.5, cluster("s2")) == []
    assert healer.keys(2, cluster("s2")) == ["t-1-1:3:lost_host@s2-1:2"]
    assert healer.keys(3, cluster()) == [] and healer.state.attempts == {}


def paused(view: ClusterView, until_ms: int = 100_000) -> ClusterView:
    return replace(view, healing_pause=HealingPause(since_ms=0, until_ms=until_ms, user="ann"))


def test_in_a_pause_causes_wait_and_are_due_at_its_end() -> None:
    healer = Healer()
    healer.at(0, cluster())
    step = healer.at(1, paused(cluster("s2")))
    assert not step.attempts
    assert [cause.kind for cause in step.observation.causes] == ["lost_host"]
    assert step.paused is not None and step.paused.startswith("healing is paused by ann until ")
    record = decode_memory(HealingState, encode_memory(healer.state))
    assert record == healer.state, "another process goes on with it"
    after = healer.at(9, cluster("s2"))
    assert [attempt.run_key for attempt in after.attempts] == ["t-1-1:3:lost_host@s2-1:1"]
    assert after.paused is None


def test_a_pause_that_no_leader_ends_is_over_a_minute_late() -> None:
    healer = Healer(settings=UNHURRIED)
    healer.at(0, cluster())
    lost = paused(cluster("s2"))
    assert healer.keys(10, lost) == []
    assert healer.keys(10 + 160, lost) == [], "a leader has a minute to end it"
    assert healer.keys(10 + 161, lost) == ["t-1-1:3:lost_host@s2-1:1"]
    assert healer.keys(300, paused(cluster("s2"), until_ms=900_000)) == [], "another pause"


def test_a_topology_whose_reassignment_is_under_way_gets_no_new_attempt() -> None:
    healer = Healer()
    healer.at(0, cluster())
    assert len(healer.keys(1, cluster("s2"))) == 1
    healer.busy = ("t-1-1",)
    assert healer.keys(9, cluster("s2")) == []
    healer.busy = ("other-1-1",)
    assert healer.keys(10, cluster("s2")) == ["t-1-1:3:lost_host@s2-1:2"]


def test_who_is_busy_is_asked_only_when_there_are_causes() -> None:
    asked: list[int] = []

    def busy(causes: object) -> tuple[str, ...]:
        asked.append(1)
        return ()

    before = healing_step(cluster(), HealingState(), 0, SETTINGS, busy=busy).memory
    assert asked == []
    healing_step(cluster("s2"), before, 1, SETTINGS, busy=busy)
    assert asked == [1]


@pytest.mark.parametrize(("gap", "attempts"), [(20, 1), (21, 0), (-1, 0)])
def test_a_gap_in_which_nobody_watched_grants_new_time(gap: float, attempts: int) -> None:
    healer = Healer()
    healer.at(100, cluster())
    assert len(healer.keys(100 + gap, cluster("s2"))) == attempts


def test_a_healer_without_a_longest_gap_judges_after_any_pause() -> None:
    healer = Healer(settings=replace(SETTINGS, longest_gap_secs=float("inf")))
    healer.at(100, cluster())
    assert len(healer.keys(900, cluster("s2"))) == 1


def test_an_unset_last_step_grants_new_time() -> None:
    healer = Healer()
    healer.at(0, cluster())
    healer.state = msgspec.structs.replace(healer.state, polled_at=HealingState().polled_at)
    assert healer.keys(1, cluster("s2")) == []


def test_the_guard_alarms_stops_attempts_and_ends_with_the_launch_window() -> None:
    healer = Healer()
    healer.at(0, cluster())
    step = healer.at(1, cluster("s1", "s2", "s3"))
    assert step.attempts == [] and step.memory.alarm and "3 of 4 workers" in step.memory.alarm
    assert step.next_check == 121
    for now in range(20, 122, 20):
        assert healer.at(now, cluster("s1", "s2", "s3")).memory.alarm
    late = healer.at(122, cluster("s1", "s2", "s3"))
    assert len(late.attempts) == 3 and late.memory.alarm is None


def test_a_step_keeps_what_its_caller_remembers_besides() -> None:
    class More(HealingState, frozen=True):
        mark: str = ""

    assert healing_step(cluster(), More(mark="kept"), 0, SETTINGS).memory.mark == "kept"


STORED = (
    '{"boot_id": "b", "since": 90.5, "topologies": {"wc-1-1": {"assignment": [3, 91.0], "beats": [20, 99.5], '
    '"missing": {"s1:6700": [95.25, true, 1700000000]}, "starting": {"s2:6700": [96.0, "0123abcd"]}}}, '
    '"supervisors": {"s1": [7, 99.0]}, "frozen_since": 97.0, "cold": true}'
)
MEMORY = LivenessMemory(
    boot_id="b",
    since=90.5,
    topologies={
        "wc-1-1": TopologyMemory(
            assignment=FirstSeen(3, 91.0),
            beats=FirstSeen(20, 99.5),
            missing={"s1:6700": MissingSlot(95.25, True, 1700000000)},
            starting={"s2:6700": StartingWorker(96.0, "0123abcd")},
        )
    },
    supervisors={"s1": FirstSeen(7, 99.0)},
    frozen_since=97.0,
    cold=True,
)


def test_the_stored_form_of_a_memory_stays() -> None:
    assert decode_memory(LivenessMemory, STORED) == MEMORY
    assert json.loads(encode_memory(MEMORY)) == json.loads(STORED)
    due = DueMemory("b", {"wc-1-1": (12, 34.5)})
    assert decode_memory(DueMemory, '{"boot_id": "b", "seen": {"wc-1-1": [12, 34.5]}}') == due


@pytest.mark.parametrize("part", ["since", "supervisors", "cold"])
def test_a_memory_that_lacks_a_part_is_empty(part: str) -> None:
    document = {key: value for key, value in json.loads(STORED).items() if key != part}
    assert decode_memory(LivenessMemory, json.dumps(document)) == LivenessMemory()
    assert decode_memory(LivenessMemory, json.dumps({**document, part: "?"})) == LivenessMemory()


TEN = tuple(f"s{number}" for number in range(10))


def wide(placed: dict[int, str], up: Collection[str], version: int) -> ClusterView:
    """Ten supervisors with four workers each; ``placed``: task -> supervisor, each task a worker of
    its own.
    """
    slots = tuple(
        WorkerSlot(node=node, host=f"h{node}", port=task, tasks=str(task))
        for task, node in sorted(placed.items())
    )
    view = cluster()
    topology = view.topologies["t-1-1"]
    assert topology.assignment is not None
    live = {
        slot.slot: WorkerNode(
            pid=1, token="x", version=version, tasks=slot.tasks, started_ms=0, status="running"
        )
        for slot in slots
        if slot.node in up
    }
    changed = replace(
        topology,
        assignment=topology.assignment.model_copy(update={"workers": slots}),
        assignment_at=Versioned(version, 10 + version),
        live_workers=live,
    )
    supervisors = {
        node: SupervisorInfo(host=node, ports=(1,), started=0, count=1, version="t") for node in up
    }
    return replace(view, topologies={"t-1-1": changed}, supervisors=supervisors)


@given(st.lists(st.floats(0, 7.9), min_size=4, max_size=9), st.booleans())
def test_a_fault_in_parts_moves_at_most_what_the_guard_allows(
    times: list[float], heals: bool
) -> None:
    healer = Healer(settings=UNHURRIED)
    placed = {task: TEN[task % 10] for task in range(1, 41)}
    healer.at(0, wide(placed, TEN, 0))
    up, moved, version = list(TEN), set[int](), 0
    for at, node in sorted(zip(times, TEN, strict=False)):
        up.remove(node)
        tasks = {
            task
            for attempt in healer.at(100 + at, wide(placed, up, version)).attempts
            for task in attempt.cause.tasks
        }
        moved |= tasks
        if heals and tasks:
            version += 1
            placed |= dict.fromkeys(tasks, "s9")
    assert len(moved) <= 12, "three hosts are 30 percent, the fourth is one too many"
    assert healer.state.alarm
    # Nobody heals while the pause lasts, and all of it is healed when it ends.
    assert healer.at(150, wide(placed, up, version)).attempts == []
    late = healer.at(300, wide(placed, up, version)).attempts
    assert {task for attempt in late for task in attempt.cause.tasks} == {
        t for t in placed if placed[t] not in up
    }


@pytest.mark.parametrize(("late", "healed_after"), [(0, 30.1), (1, 30.1), (8, 30.1), (8.1, 0)])
def test_after_an_outage_a_host_that_reconnects_late_gets_its_time(
    late: float, healed_after: float
) -> None:
    healer = Healer(settings=UNHURRIED)
    healer.at(100, cluster())
    healer.state = msgspec.structs.replace(healer.state, polled_at=HealingState().polled_at)
    healer.at(110, cluster(*(["s2"] if late == 0 else [])))
    if healed_after:
        assert healer.keys(110 + late, cluster("s2")) == []
        assert healer.keys(110 + late + 29.9, cluster("s2")) == []
    assert len(healer.keys(110 + late + healed_after, cluster("s2"))) == 1
    assert healer.keys(150, cluster()) == []
    assert len(healer.keys(151, cluster("s2"))) == 1, "later losses are healed at once"


def test_an_arriving_supervisor_alone_ends_no_back_off() -> None:
    healer = Healer()
    healer.at(0, cluster())
    for now in (1, 2, 4, 8, 16):
        assert len(healer.keys(now, cluster("s2", "s3"))) == 2
    # s3 is back, its worker is not yet: whether s2's tasks fit there, only a plan says.
    assert healer.keys(18, cluster("s2", gone=("s3",))) == []
    healer.promise = False
    for now in (34, 48, 60):
        assert healer.keys(now, cluster("s2", gone=("s3",))) == []
    healer.promise = True
    assert "t-1-1:3:lost_host@s2-1:6" in healer.keys(61, cluster("s2", gone=("s3",)))


def test_a_record_of_the_sensor_keeps_its_attempts_and_no_counters() -> None:
    healer = Healer(state=HealingMemory())
    healer.at(0, cluster())
    for now in (1, 2, 4, 8, 16):
        healer.at(now, cluster("s2", "s3"))
    assert b'"supervisors":{}' in healer.state.to_record()  # type: ignore[attr-defined]
    stored = decode_memory(HealingMemory, healer.state.to_record())  # type: ignore[attr-defined]
    assert (stored.attempts, stored.topology_attempts) == (
        healer.state.attempts,
        healer.state.topology_attempts,
    )
    healer.state = msgspec.structs.replace(stored, polled_at=16.0)
    assert healer.keys(17, cluster("s2", "s3")) == []


def test_a_cause_is_left_to_another_healer_for_a_while() -> None:
    patient = replace(SETTINGS, patience_secs=60, longest_gap_secs=float("inf"))
    healer = Healer(settings=patient)
    healer.at(0, cluster())
    assert healer.keys(10, cluster("s2")) == []
    assert healer.at(11, cluster("s2")).next_check == 70
    assert healer.keys(69, cluster("s2", "s3", gone=())) == []
    assert healer.keys(70, cluster("s2")) == ["t-1-1:3:lost_host@s2-1:1"]
    # The other one is gone: nothing is left to it.
    healer.at(80, cluster("s2", "s4"))
    healer.settings = SETTINGS
    assert "t-1-1:3:lost_host@s4-1:1" in healer.keys(81, cluster("s2", "s4"))
