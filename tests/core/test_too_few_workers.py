"""A topology with too few workers spreads when slots join and stay; hosts that come and go move
nothing twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.liveness.causes import SPREAD_PAUSE_SECS, Cause
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.liveness.step import HealingSettings, HealingState, healing_step
from storm_dagster.core.reassignment import (
    Runnable,
    assignment_of,
    causes_still_true,
    monitor_batch,
    same_workers,
)
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    SupervisorInfo,
    TaskTable,
    WorkerNode,
    WorkerSlot,
)
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import ClusterView, TopologyView, Versioned

WINDOW = 8.0
SETTINGS = HealingSettings(LivenessLimits(window_secs=WINDOW), "b")
TASKS = 8
RUNNABLE = Runnable(TopologySpec(name="t"), {"topology.scheduler.strategy": "even"})
TABLE = TaskTable(components={"b": ComponentTasks(type="bolt", tasks=f"1-{TASKS}")})


@dataclass
class Cluster:
    """A topology of eight tasks that asked for ``workers``, on hosts that come and go; what a
    healer does is done.
    """

    workers: int = 4
    ports: int = 2
    hosts: set[str] = field(default_factory=lambda: {"s1"})
    now: float = 1000.0
    version: int = 0
    slots: dict[tuple[str, int], tuple[int, ...]] = field(
        default_factory=lambda: {("s1", 1): (1, 3, 5, 7), ("s1", 2): (2, 4, 6, 8)}
    )
    state: HealingState = field(default_factory=HealingState)
    beats: int = 0
    spreads: list[tuple[float, frozenset[int]]] = field(default_factory=list)
    """Time and tasks of each spread."""
    placed_at: float | None = None

    def view(self) -> ClusterView:
        self.beats += 1
        slots = [
            WorkerSlot(node=node, host=node, port=port, tasks=",".join(map(str, tasks)))
            for (node, port), tasks in self.slots.items()
        ]
        topology = TopologyView(
            id="t-1-1",
            base=StormBase(
                name="t",
                launch_time_secs=0,
                status="ACTIVE",
                workers=self.workers,
                executors={"b": TASKS},
                token="k",
            ),
            base_at=Versioned(1, 1),
            tasks=TABLE,
            assignment=Assignment(
                topology_id="t-1-1",
                code_dir="t-1-1",
                node_host={slot.node: slot.host for slot in slots},
                workers=tuple(slots),
                task_start_secs=Assignment.pack_start_secs(
                    dict.fromkeys(range(1, TASKS + 1), self.version)
                ),
                timestamp_ms=0,
            ),
            assignment_at=Versioned(self.version, self.version + 1),
            live_workers={
                slot.slot: WorkerNode(
                    pid=1,
                    token="x",
                    version=self.version,
                    tasks=slot.tasks,
                    started_ms=0,
                    status="running",
                )
                for slot in slots
                if slot.node in self.hosts
            },
        )
        supervisors = {
            host: SupervisorInfo(
                host=host,
                ports=tuple(range(1, self.ports + 1)),
                started=0,
                count=self.beats,
                version="t",
            )
            for host in sorted(self.hosts)
        }
        return ClusterView("c", 1, 1, supervisors, {"t-1-1": topology})

    def step(self) -> float:
        """One step of a healer, and its reassignment; when the next one is due."""
        view = self.view()
        result = healing_step(view, self.state, self.now, SETTINGS)
        self.state = result.memory
        causes = [attempt.cause for attempt in result.attempts]
        topology = view.topologies["t-1-1"]
        true = causes_still_true(view, topology, causes)
        assert true == causes
        if true:
            placement = plan_placement(
                monitor_batch(view, topology, RUNNABLE, TABLE, true)
            ).placement("t")
            if placement.status == "assigned" and not same_workers(topology.assignment, placement):
                self.place(
                    assignment_of(placement, topology_id="t-1-1", previous=None, now_secs=0), true
                )
            return self.now + 1
        return result.next_check or float("inf")

    def place(self, assignment: Assignment, causes: list[Cause]) -> None:
        now = {worker.slot: worker.ids for worker in assignment.workers}
        before = {task: slot for slot, tasks in self.slots.items() for task in tasks}
        moved = frozenset(
            task for slot, tasks in now.items() for task in tasks if before[task] != slot
        )
        if causes[0].kind == "too_few_workers":
            self.spreads.append((self.now, moved))
            if self.placed_at is not None:
                assert self.now - self.placed_at >= SPREAD_PAUSE_SECS, (
                    "a placement, and a spread soon after it"
                )
        self.slots, self.version, self.placed_at = now, self.version + 1, self.now

    def run(self, secs: float) -> None:
        """Let time pass."""
        end = self.now + secs
        while self.now < end:
            self.now = min(end, max(self.now + 0.5, self.step()))


def test_it_spreads_once_slots_have_stayed_for_two_session_timeouts() -> None:
    cluster = Cluster()
    cluster.run(60)
    cluster.hosts.add("s2")
    joined = cluster.now
    cluster.run(WINDOW - 0.1)
    assert not cluster.spreads
    cluster.run(10)
    ((at, moved),) = cluster.spreads
    assert joined + WINDOW <= at <= joined + WINDOW + 1
    # Two workers of two tasks are new: no other task moves.
    assert len(moved) == 4 and sorted(map(len, cluster.slots.values())) == [2, 2, 2, 2]
    cluster.run(2 * SPREAD_PAUSE_SECS)
    assert len(cluster.spreads) == 1, "it has all workers: nothing more to do"


def test_slots_that_do_not_stay_move_nothing() -> None:
    cluster = Cluster()
    for _ in range(20):
        cluster.hosts.add("s2")
        cluster.run(WINDOW - 1)
        cluster.hosts.discard("s2")
        cluster.run(20)
    assert not cluster.spreads and cluster.version == 0


@pytest.mark.parametrize(
    "change",
    [
        {"status": "REBALANCING"},
        {"status": "UPGRADING"},
        {"status": "KILLED"},
        {"workers": 2},
        {"executors": {"b": 2, "__topology_master": 1}},
    ],
)
def test_who_lacks_no_worker_or_is_being_changed_is_left_alone(change: dict[str, object]) -> None:
    cluster = Cluster(hosts={"s1", "s2"})
    state, now = HealingState(), 1000.0
    for _ in range(20):
        view = cluster.view()
        topology = view.topologies["t-1-1"]
        view = replace(
            view,
            topologies={
                "t-1-1": replace(topology, base=topology.base.model_copy(update=dict(change)))
            },
        )
        result = healing_step(view, state, now, SETTINGS)
        assert not result.attempts
        state, now = result.memory, now + 2


def test_slots_that_it_may_not_use_are_tried_every_ten_minutes() -> None:
    """The healer sees no conf: a plan that changes nothing is made again, but rarely."""
    cluster = Cluster(hosts={"s1", "s2"})
    tries = 0
    state, now = HealingState(), 1000.0
    while now < 1000.0 + 3 * SPREAD_PAUSE_SECS:
        result = healing_step(cluster.view(), state, now, SETTINGS)
        tries += len(result.attempts)
        state, now = result.memory, now + 10
    assert tries == 3


@given(
    st.lists(
        st.tuples(st.sampled_from(["s2", "s3"]), st.integers(1, 900)), min_size=1, max_size=10
    ),
    st.integers(2, 10),
    st.integers(2, 4),
)
def test_hosts_that_come_and_go_move_a_task_once_in_ten_minutes(
    toggles: list[tuple[str, int]], workers: int, ports: int
) -> None:
    cluster = Cluster(workers=workers, ports=ports)
    cluster.run(10)
    for host, secs in toggles:
        cluster.hosts ^= {host}
        cluster.run(secs)
    for task in range(1, TASKS + 1):
        times = [at for at, moved in cluster.spreads if task in moved]
        assert all(later - at >= SPREAD_PAUSE_SECS for at, later in pairwise(times))
    # Once all stays as it is, it has as many workers as it asked for, or as there are slots and
    # executors.
    cluster.run(2 * SPREAD_PAUSE_SECS + 120)
    assert len(cluster.slots) == min(workers, TASKS, ports * len(cluster.hosts))
    sizes = sorted(map(len, cluster.slots.values()))
    assert sizes[-1] - sizes[0] <= 1
