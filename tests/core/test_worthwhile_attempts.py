"""Runs of healing while hosts come and go: a topology gets few runs that change nothing, and each
one that can be placed is placed soon.

A sensor, whose attempts are runs that start late, and the leader behind it heal a cluster of
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.liveness.detection import observe
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.liveness.retries import DAY_SECS, TopologyAttempts, permit_attempt
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
    HEALING,
    Assignment,
    AssignmentChange,
    ComponentTasks,
    StormBase,
    SupervisorInfo,
    TaskTable,
    WorkerNode,
)
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import ClusterView, TopologyView, Versioned
from storm_dagster.operations.live.outlook import ReassignmentOutlook, is_changed_by_plan

PATIENCE_SECS = 20.0
PLACED_WITHIN_SECS = 30.0
"""Longest time from the last change, which is the end of a session, to the placement."""
MASS_LOSS = 101.0
"""No share of lost workers freezes healing."""
LIMITS = LivenessLimits(window_secs=8, mass_loss_percent=MASS_LOSS)
SENSOR = HealingSettings(LIMITS, "b", are_runs=True)
LEADER = HealingSettings(LIMITS, "b", patience_secs=PATIENCE_SECS)
TASKS = 4
TABLE = TaskTable(components={"b": ComponentTasks(type="bolt", tasks=f"1-{TASKS}")})


@dataclass(frozen=True)
class Kind:
    """A topology of the program."""

    strategy: str = "balanced"
    workers: int = 2
    isolation: tuple[str, ...] = ()
    reserve: int = 0

    def runnable(self, name: str) -> Runnable:
        conf = {
            "topology.scheduler.strategy": self.strategy,
            "isolation.scheduler.machines": list(self.isolation),
            "jstorm.reserve.workers": self.reserve,
        }
        return Runnable(TopologySpec(name=name), conf)


@dataclass
class Run:
    """A run that the sensor has requested."""

    starts_at: float
    requested_at: float
    causes: list[Cause]


@dataclass
class Program:
    """Hosts, topologies, and what healers do."""

    kinds: dict[str, Kind]
    ports: dict[str, int]
    """Host -> its number of slots."""
    run_secs: float = 2.0
    run_fails: bool = False
    """True if each run ends with an error."""
    up: set[str] = field(default_factory=set)
    now: float = 1000.0
    sensor: HealingState = field(default_factory=HealingState)
    leader: HealingState | None = field(default_factory=HealingState)
    runs: list[Run] = field(default_factory=list)
    topologies: dict[str, TopologyView] = field(default_factory=dict)
    fruitless: dict[str, list[float]] = field(default_factory=dict)
    """Name -> times of the requests of its runs that changed nothing."""
    late: dict[str, int] = field(default_factory=dict)
    """Name -> number of these that found the leader's placement."""
    moved: dict[str, int] = field(default_factory=dict)
    """Name -> number of its placements after the first one."""
    changes: int = 0
    boots: int = 0
    beats: int = 0

    def __post_init__(self) -> None:
        self.up = set(self.ports)
        self.sensor_outlook = ReassignmentOutlook(max_planning_secs=float("inf"))
        self.leader_outlook = ReassignmentOutlook(max_planning_secs=float("inf"))
        self.boot_of = dict.fromkeys(self.ports, 0)
        for name, kind in self.kinds.items():
            self.topologies[name] = self.placed_first(name, kind)

    def placed_first(self, name: str, kind: Kind) -> TopologyView:
        """The topology as its submission placed it: on any hosts that it may use."""
        topology_id = f"{name}-1-1"
        empty = Assignment(
            topology_id=topology_id,
            code_dir=topology_id,
            node_host={},
            workers=(),
            task_start_secs={},
            timestamp_ms=0,
        )
        topology = TopologyView(
            id=topology_id,
            base=StormBase(
                name=name,
                launch_time_secs=0,
                status="ACTIVE",
                workers=kind.workers,
                executors={"b": TASKS},
                token="k",
                isolation=kind.isolation,
            ),
            base_at=Versioned(1, 1),
            tasks=TABLE,
            assignment=empty,
            assignment_at=Versioned(0, 1),
        )
        self.topologies[name] = topology
        batch = monitor_batch(
            self.view(), topology, kind.runnable(name), TABLE, [_nothing(topology)]
        )
        placement = plan_placement(batch).placement(name)
        if placement.status != "assigned":
            # It waits for slots from the beginning.
            return topology
        assignment = assignment_of(placement, topology_id=topology_id, previous=empty, now_secs=0)
        return replace(topology, assignment=assignment)

    def view(self) -> ClusterView:
        self.beats += 1
        supervisors = {
            host: SupervisorInfo(
                host=host,
                ports=tuple(range(1, self.ports[host] + 1)),
                started=self.boot_of[host],
                count=self.beats,
                version="t",
            )
            for host in sorted(self.up)
        }
        topologies: dict[str, TopologyView] = {}
        for topology in self.topologies.values():
            live = {
                worker.slot: WorkerNode(
                    pid=1, token="x", version=0, tasks=worker.tasks, started_ms=0, status="running"
                )
                for worker in topology.workers
                if worker.node in self.up
            }
            topologies[topology.id] = replace(topology, live_workers=live)
        return ClusterView("c", 1, 1, supervisors, topologies)

    def load(self, topology: TopologyView) -> Runnable:
        return self.kinds[topology.base.name].runnable(topology.base.name)

    def reassign(self, causes: Sequence[Cause], run: str = "") -> dict[str, str]:
        """What a reassignment by that run, or by the leader, does; name -> its outcome."""
        outcomes: dict[str, str] = {}
        for topology_id in sorted({cause.topology_id for cause in causes}):
            view = self.view()
            topology = view.topologies[topology_id]
            name = topology.base.name
            own_causes = [cause for cause in causes if cause.topology_id == topology_id]
            current = causes_still_true(view, topology, own_causes)
            if not current:
                assert topology.assignment_at is not None
                is_late = own_causes[0].generation < topology.assignment_at.version
                outcomes[name] = "late" if is_late else "void"
                continue
            batch = monitor_batch(view, topology, self.load(topology), TABLE, current)
            placement = plan_placement(batch).placement(name)
            is_same = same_workers(topology.assignment, placement)
            if placement.status != "assigned" or is_same:
                outcomes[name] = placement.status
                continue
            assert topology.assignment is not None and topology.assignment_at is not None
            assignment = assignment_of(
                placement, topology_id=topology_id, previous=topology.assignment, now_secs=0
            )
            change = AssignmentChange(at_secs=0, action=HEALING, run=run)
            history = (change, *assignment.history)[:20]
            assignment = assignment.model_copy(update={"history": history})
            version = topology.assignment_at.version + 1
            self.topologies[name] = replace(
                topology, assignment=assignment, assignment_at=Versioned(version, version + 1)
            )
            self.moved[name] = self.moved.get(name, 0) + 1
            outcomes[name] = "assigned"
        return outcomes

    def toggle(self, host: str) -> None:
        """The host's sessions end, or it comes back with another boot."""
        self.changes += 1
        self.boots += 1
        self.up ^= {host}
        self.boot_of[host] = self.boots

    def start_runs(self) -> None:
        due = [run for run in self.runs if run.starts_at <= self.now]
        self.runs = [run for run in self.runs if run.starts_at > self.now]
        for run in due:
            outcomes = {} if self.run_fails else self.reassign(run.causes, run="run")
            for name in {cause.name for cause in run.causes}:
                outcome = outcomes.get(name, "failed")
                if outcome == "late":
                    self.late[name] = self.late.get(name, 0) + 1
                if outcome != "assigned":
                    self.fruitless.setdefault(name, []).append(run.requested_at)

    def step(self) -> float:
        """One poll of both healers; the time of the next one."""
        self.start_runs()
        view = self.view()
        busy = {cause.topology_id for run in self.runs for cause in run.causes}
        step = healing_step(
            view,
            self.sensor,
            self.now,
            SENSOR,
            busy=lambda _: busy,
            outlook=self.sensor_outlook.poll(view, self.load),
        )
        self.sensor = step.memory
        if step.attempts:
            causes = [attempt.cause for attempt in step.attempts]
            self.runs.append(Run(self.now + self.run_secs, self.now, causes))
        if self.leader is not None:
            view = self.view()
            outlook = self.leader_outlook.poll(view, self.load)
            step = healing_step(view, self.leader, self.now, LEADER, outlook=outlook)
            self.leader = step.memory
            self.reassign([attempt.cause for attempt in step.attempts])
        next_run = min((run.starts_at for run in self.runs), default=self.now + 5)
        return min(self.now + 5, max(self.now + 0.5, next_run))

    def run(self, secs: float) -> None:
        end = self.now + secs
        while self.now < end:
            self.now = min(end, self.step())

    def placeable(self) -> list[str]:
        """Names of topologies with dead tasks that a plan would place now."""
        view = self.view()
        seen = observe(view, self.sensor.liveness, LIMITS, boot_id="b", boot_now=self.now)
        names: list[str] = []
        for topology in view.topologies.values():
            causes = [
                cause
                for cause in seen.causes
                if cause.topology_id == topology.id and cause.kind != "too_few_workers"
            ]
            if causes and is_changed_by_plan(view, topology, self.load(topology), causes):
                names.append(topology.base.name)
        return names

    def check(self) -> None:
        """The bounds of runs that change nothing, and of those that move tasks."""
        for times in self.fruitless.values():
            assert all(later - at >= 60 for at, later in pairwise(times)), times
            for begin in times:
                assert sum(begin <= at < begin + DAY_SECS for at in times) <= 10
        assert all(count <= self.moved[name] for name, count in self.late.items())
        # Each change may move tasks twice: from a lost host, and once to spread them.
        assert all(count <= 2 * self.changes for count in self.moved.values())


def _nothing(topology: TopologyView) -> Cause:
    """The cause of a topology whose tasks have no slot."""
    return Cause(topology.id, topology.base.name, 0, "unassigned", "", "", 0, tuple(range(1, 5)))


HOSTS = ("a", "b", "c", "d")
KINDS = st.builds(
    Kind,
    strategy=st.sampled_from(["balanced", "even"]),
    workers=st.integers(1, 4),
    isolation=st.sampled_from([(), (), (), ("a",), ("a", "b"), ("d",), ("z",)]),
    reserve=st.sampled_from([0, 0, 1, 2, 9]),
)


@given(
    kinds=st.lists(KINDS, min_size=1, max_size=3),
    ports=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    toggles=st.lists(
        st.tuples(st.sampled_from(HOSTS), st.sampled_from([0.5, 1, 2, 4, 7, 15, 40, 130])),
        min_size=1,
        max_size=12,
    ),
    run_secs=st.sampled_from([0.5, 2.0, 6.0, 25.0, 45.0]),
)
def test_hosts_that_come_and_go_cause_few_runs_and_every_placement(
    kinds: list[Kind], ports: list[int], toggles: list[tuple[str, float]], run_secs: float
) -> None:
    named = {f"t{number}": kind for number, kind in enumerate(kinds)}
    # The last host stays: after a loss of all of them each gets a launch window.
    program = Program(named, {**dict(zip(HOSTS, ports, strict=True)), "stays": 0}, run_secs)
    program.run(10)
    for host, secs in toggles:
        program.toggle(host)
        program.run(secs)
    program.run(PLACED_WITHIN_SECS)
    assert program.placeable() == []
    program.run(100)
    program.check()


def waiting_program(**options: object) -> Program:
    """A topology whose tasks of a lost host find no slot; a host without free slots is there."""
    program = Program(
        {"t": Kind(workers=2), "full": Kind(workers=1, isolation=("c",))},
        {"a": 1, "b": 1, "c": 1},
        **options,  # type: ignore[arg-type]
    )
    program.run(10)
    program.toggle("b")
    program.run(70)
    return program


def flap(program: Program, secs: float, every: float = 20.0) -> None:
    """The host without free slots for the topology comes and goes."""
    for _ in range(int(secs / every)):
        program.toggle("c")
        program.run(every)


def test_a_host_without_free_slots_that_flaps_causes_no_run() -> None:
    program = waiting_program()
    before = len(program.fruitless["t"])
    assert before == 1
    flap(program, 900)
    assert len(program.fruitless["t"]) == before
    program.check()


@pytest.mark.long
def test_a_day_of_flapping_causes_at_most_ten_runs() -> None:
    program = waiting_program()
    flap(program, DAY_SECS, every=30.0)
    assert 1 <= len(program.fruitless["t"]) <= 10
    program.check()


def test_a_host_with_workers_that_flaps_causes_one_run_without_effect() -> None:
    """Its workers have no other place, and come back with it."""
    program = Program({"t": Kind(workers=2)}, {"a": 1, "b": 1})
    program.run(10)
    for _ in range(40):
        program.toggle("b")
        program.run(20)
    assert len(program.fruitless["t"]) == 1
    program.check()


def test_what_waited_is_placed_as_soon_as_a_slot_is_there() -> None:
    program = waiting_program()
    flap(program, 320)
    program.ports["d"] = 1
    program.boot_of["d"] = 0
    program.toggle("d")
    program.run(10)
    assert program.placeable() == []
    assert "d" in {worker.node for worker in program.topologies["t"].workers}
    assert program.moved["t"] == 1


def test_the_leader_leaves_a_new_slot_to_the_sensor_and_then_takes_it() -> None:
    program = waiting_program(run_fails=True)
    program.ports["d"] = 1
    program.boot_of["d"] = 0
    program.toggle("d")
    program.run(PATIENCE_SECS - 6)
    assert "t" not in program.moved
    program.run(PLACED_WITHIN_SECS - PATIENCE_SECS + 6)
    assert program.moved["t"] == 1


def test_runs_that_fail_although_a_plan_places_are_limited() -> None:
    program = Program({"t": Kind(workers=2)}, {"a": 2, "b": 1, "c": 3}, run_fails=True)
    program.leader = None
    program.run(10)
    program.toggle("c" if "c" in {w.node for w in program.topologies["t"].workers} else "b")
    program.run(3600)
    times = program.fruitless["t"]
    assert len(times) == 10
    program.check()


def test_in_the_minute_after_a_fruitless_run_the_leader_heals() -> None:
    program = Program({"t": Kind(workers=2)}, {"a": 1, "b": 1})
    program.run(10)
    program.toggle("b")
    program.run(15)
    assert len(program.fruitless["t"]) == 1
    program.ports["d"] = 1
    program.boot_of["d"] = 0
    program.toggle("d")
    program.run(PLACED_WITHIN_SECS)
    assert program.moved["t"] == 1
    assert program.placeable() == []
    assert len(program.fruitless["t"]) == 1


def test_a_host_that_is_lost_beside_another_one_is_healed_in_its_own_time() -> None:
    """The placement for the first host does not begin the leader's patience for the second."""
    kinds = {"t0": Kind(workers=1), "t1": Kind(workers=2)}
    program = Program(kinds, {"a": 0, "b": 2, "c": 3, "d": 2}, run_fails=True)
    program.run(10)
    for host, secs in (("b", 0.5), ("d", 0.5), ("b", 4.0), ("b", PLACED_WITHIN_SECS)):
        program.toggle(host)
        program.run(secs)
    assert program.placeable() == []


def test_runs_that_start_after_the_leader_has_healed_are_limited() -> None:
    """Each run waits in a queue for longer than the leader waits for it."""
    program = Program({"t": Kind("even", workers=2)}, {"a": 2, "b": 2, "c": 2}, run_secs=25.0)
    program.run(10)
    for number in range(60):
        used = {worker.node for worker in program.topologies["t"].workers}
        host = sorted(used)[number % len(used)]
        program.toggle(host)
        program.run(PLACED_WITHIN_SECS)
        assert program.placeable() == []
        program.toggle(host)
        program.run(2)
    assert program.moved["t"] == 60
    assert program.late["t"] == len(program.fruitless["t"]) == 10
    program.check()


def test_a_run_that_moves_tasks_is_not_fruitless() -> None:
    program = Program({"t": Kind("even", workers=2)}, {"a": 2, "b": 2, "c": 2})
    program.leader = None
    program.run(10)
    for number in range(20):
        used = {worker.node for worker in program.topologies["t"].workers}
        host = sorted(used)[number % len(used)]
        program.toggle(host)
        program.run(10)
        assert program.placeable() == []
        program.toggle(host)
        program.run(2)
    assert program.moved["t"] == 20
    assert "t" not in program.fruitless


CAUSE = Cause("t-1-1", "t", 3, "lost_host", "s2", "h2", 1, (1,))


def test_an_assignment_gets_one_attempt_without_a_plan() -> None:
    asked: list[Sequence[Cause]] = []

    def never(causes: Sequence[Cause]) -> bool:
        asked.append(causes)
        return False

    assert permit_attempt([CAUSE], None, now=10, outlook=never, are_runs=True).is_granted
    assert asked == []
    former = TopologyAttempts(3, 10.0)
    assert not permit_attempt([CAUSE], former, now=500, outlook=never, are_runs=True).is_granted
    newer = replace(CAUSE, generation=4)
    assert permit_attempt([newer], former, now=500, outlook=never, are_runs=True).is_granted
    # Free slots alone are no reason: the view does not know the reserve.
    spread = replace(newer, kind="too_few_workers", node="", port=0)
    assert not permit_attempt([spread], None, now=500, outlook=never, are_runs=True).is_granted


def test_a_topology_that_cannot_be_planned_is_tried_within_the_bounds() -> None:
    def unknown(causes: Sequence[Cause]) -> None:
        return None

    former = TopologyAttempts(3, 10.0)
    assert not permit_attempt([CAUSE], former, now=50, outlook=unknown, are_runs=True).is_granted
    assert permit_attempt([CAUSE], former, now=71, outlook=unknown, are_runs=True).is_granted
    many = tuple(float(at) for at in range(9))
    exhausted = TopologyAttempts(3, 10.0, fruitless=many)
    assert not permit_attempt(
        [CAUSE], exhausted, now=999, outlook=unknown, are_runs=True
    ).is_granted
    assert permit_attempt(
        [CAUSE], exhausted, now=DAY_SECS + 5, outlook=unknown, are_runs=True
    ).is_granted
    assert permit_attempt([CAUSE], exhausted, now=999, outlook=unknown, are_runs=False).is_granted


def test_plans_of_a_poll_are_bounded_and_all_get_their_turn() -> None:
    kinds = {f"t{number}": Kind(workers=1) for number in range(5)}
    program = Program(kinds, {"a": 5})
    program.toggle("a")
    outlook = ReassignmentOutlook(max_planning_secs=0)
    view = program.view()
    loads: list[str] = []

    def load(topology: TopologyView) -> Runnable:
        loads.append(topology.id)
        return program.load(topology)

    causes = {
        topology.id: [replace(_nothing(topology), kind="lost_host", node="a", port=worker.port)]
        for topology in view.topologies.values()
        for worker in topology.workers
    }
    assert len(causes) == 5
    for _ in range(5):
        ask = outlook.poll(view, load)
        assert [ask(own_causes) for own_causes in causes.values()] == [False] * 5
    # Each was read once, planned once, and is known from then on.
    assert sorted(loads) == sorted(causes)
    assert len(outlook._results) == 5


def test_an_attempt_is_counted_by_its_topology_not_by_its_cause() -> None:
    """Two hosts that flap in turn are two causes, and one topology."""
    program = Program({"t": Kind(workers=2)}, {"a": 1, "b": 1})
    program.run(10)
    for number in range(20):
        host = "ab"[number % 2]
        program.toggle(host)
        program.run(10)
        program.toggle(host)
        program.run(5)
    assert len(program.fruitless["t"]) == 1
