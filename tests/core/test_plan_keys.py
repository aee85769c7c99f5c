"""Keys of plans of a healer: a plan is made again only if its input has changed. And the attempts
that count as those that changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.liveness.retries import (
    DAY_SECS,
    MAX_FRUITLESS,
    TopologyAttempts,
    fruitless_attempts,
    needs_plan,
    plan_key,
)
from storm_dagster.core.reassignment import Runnable, monitor_batch
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.core.usable_slots import UserBounds
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

NODES = ("s1", "s2", "s3")
TASKS = range(1, 7)
TABLE = TaskTable(components={"b": ComponentTasks(type="bolt", tasks="1-6")})
OWN_SLOTS = (Slot("s1", 1), Slot("s2", 1), Slot("s3", 1))
GENERATION = 3


@dataclass(frozen=True)
class Scene:
    """A cluster with the topology ``t``, a worker of which is judged, and the topology ``other``.

    Each field is a value that healing may read.
    """

    lost: frozenset[str] = frozenset()
    """Supervisors that are not registered."""
    draining: frozenset[str] = frozenset()
    blacklist: frozenset[str] = frozenset()
    ports: tuple[int, ...] = (3, 3, 3)
    """Number of slots of each supervisor."""
    dead: frozenset[Slot] = frozenset({Slot("s2", 1)})
    """Own slots whose worker does not live."""
    judged: Slot = OWN_SLOTS[1]
    """Own slot of the cause."""
    is_spread: bool = False
    """True if the cause is that the topology has too few workers."""
    avoid: tuple[str, ...] = ()
    own_workers: int = 3
    other_slots: frozenset[Slot] = frozenset()
    other_isolation: tuple[str, ...] = ()
    other_tasks: int = 4
    code: str = "t-1-1"
    generation: int = GENERATION
    started: int = 0
    """Start and number of loops of each supervisor."""
    silent_secs: float = 0.0
    beats: bool = False

    def view(self) -> ClusterView:
        supervisors = {
            node: SupervisorInfo(
                host=f"h{node[1:]}",
                ports=tuple(range(1, ports + 1)),
                started=self.started,
                count=self.started,
                version="t",
                draining=node in self.draining,
            )
            for node, ports in zip(NODES, self.ports, strict=True)
            if node not in self.lost
        }
        own = self._own()
        other_slots = sorted(self.other_slots)
        other = _topology("other", other_slots, TASKS[: self.other_tasks], self.other_isolation)
        return ClusterView(
            "c", 1, 1, supervisors, {own.id: own, other.id: other}, blacklist=self.blacklist
        )

    def _own(self) -> TopologyView:
        own = _topology("t", OWN_SLOTS, TASKS, (), code=self.code, workers=self.own_workers)
        live = {slot: node for slot, node in own.live_workers.items() if slot not in self.dead}
        own = replace(own, live_workers=live, assignment_at=Versioned(self.generation, 1))
        if self.beats:
            beats = TaskBeats(topology_id=own.id, topology_master=1, summary={"rate": 7.0})
            own = replace(own, beats=beats, beats_at=Versioned(9, 9))
        return own

    def causes(self) -> list[Cause]:
        if self.is_spread:
            spread = Cause("t-1-1", "t", self.generation, "too_few_workers", "", "", 0, ())
            return [replace(spread, avoid=self.avoid)]
        tasks = tuple(list(TASKS)[OWN_SLOTS.index(self.judged) :: len(OWN_SLOTS)])
        host = f"h{self.judged.node[1:]}"
        cause = Cause(
            "t-1-1",
            "t",
            self.generation,
            "dead_worker",
            self.judged.node,
            host,
            self.judged.port,
            tasks,
            avoid=self.avoid,
            silent_secs=self.silent_secs,
        )
        return [cause]

    def key(self) -> tuple[Any, ...]:
        return plan_key(self.view(), self.causes(), UserBounds())

    def plan(self, strategy: str) -> object:
        """The placement that the local planner makes for the causes."""
        view = self.view()
        runnable = Runnable(TopologySpec(name="t"), {"topology.scheduler.strategy": strategy})
        batch = monitor_batch(view, view.topologies["t-1-1"], runnable, TABLE, self.causes())
        placement = plan_placement(batch).placement("t")
        return placement.status, placement.workers


def _topology(
    name: str,
    slots: Sequence[Slot],
    tasks: Sequence[int],
    isolation: tuple[str, ...],
    *,
    code: str = "",
    workers: int = 1,
) -> TopologyView:
    """A topology whose workers all live, each with a share of its tasks."""
    topology_id = f"{name}-1-1"
    assigned: list[WorkerSlot] = []
    for number, slot in enumerate(slots):
        share = list(tasks)[number :: len(slots)]
        host = f"h{slot.node[1:]}"
        assigned.append(WorkerSlot.of_tasks(slot, host, share, memory_bytes=1, cpu=1))
    live = {
        worker.slot: WorkerNode(
            pid=1, token="x", version=0, tasks=worker.tasks, started_ms=0, status="running"
        )
        for worker in assigned
    }
    base = StormBase(
        name=name,
        launch_time_secs=0,
        status="ACTIVE",
        workers=workers,
        executors={"b": len(tasks)},
        token="k",
        isolation=isolation,
    )
    assignment = Assignment(
        topology_id=topology_id,
        code_dir=code or topology_id,
        node_host={},
        workers=tuple(assigned),
        task_start_secs={},
        timestamp_ms=0,
    )
    return TopologyView(
        id=topology_id,
        base=base,
        base_at=Versioned(1, 1),
        tasks=TABLE,
        assignment=assignment,
        assignment_at=Versioned(0, 1),
        live_workers=live,
    )


_SOME_NODES = st.frozensets(st.sampled_from(NODES), max_size=2)
_SOME_HOSTS = st.frozensets(st.sampled_from(["h1", "h2", "h3", "h9"]), max_size=2)
_FREE_SLOTS = [Slot(node, port) for node in NODES for port in (2, 3, 4)]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "lost": _SOME_NODES,
    "draining": _SOME_NODES,
    "blacklist": _SOME_HOSTS,
    "ports": st.tuples(*[st.integers(1, 4)] * 3),
    "dead": st.frozensets(st.sampled_from(OWN_SLOTS), max_size=3),
    "judged": st.sampled_from(OWN_SLOTS),
    "is_spread": st.booleans(),
    "avoid": st.sampled_from([(), ("s1",), ("s3",)]),
    "own_workers": st.integers(1, 4),
    "other_slots": st.frozensets(st.sampled_from(_FREE_SLOTS), max_size=4),
    "other_isolation": st.sampled_from([(), ("h1",), ("h2", "h3"), ("h9",)]),
    "other_tasks": st.integers(1, 6),
    "started": st.integers(0, 2),
    "silent_secs": st.sampled_from([0.0, 9.0]),
    "beats": st.booleans(),
}
SCENES = st.builds(Scene, **VALUES)


@settings(max_examples=max(10, settings().max_examples // 2))
@given(
    scene=SCENES,
    changes=st.fixed_dictionaries({}, optional=VALUES),
    strategy=st.sampled_from(["balanced", "even"]),
)
def test_plans_of_equal_keys_are_equal(
    scene: Scene, changes: dict[str, Any], strategy: str
) -> None:
    """Otherwise a healer would use the result of a plan that no longer holds."""
    for field, value in changes.items():
        changed = replace(scene, **{field: value})
        if changed.key() == scene.key():
            assert changed.plan(strategy) == scene.plan(strategy), field


@pytest.mark.parametrize(
    "changes",
    [
        {"started": 9},
        {"beats": True},
        {"silent_secs": 60.0},
        {"other_tasks": 2},
        {"other_isolation": ("h9",)},
        {"blacklist": frozenset({"h9"})},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_values_without_effect_on_a_plan_are_not_part_of_its_key(changes: dict[str, Any]) -> None:
    """A host that comes and goes gives few different keys, and so few plans."""
    scene = Scene(other_slots=frozenset({Slot("s3", 2)}))
    assert replace(scene, **changes).key() == scene.key()


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": GENERATION + 1},
        {"code": "new"},
        {"own_workers": 4},
        {"lost": frozenset({"s3"})},
        {"draining": frozenset({"s3"})},
        {"blacklist": frozenset({"h3"})},
        {"ports": (3, 3, 2)},
        {"other_slots": frozenset({Slot("s3", 2)})},
        {"other_isolation": ("h3",)},
        {"judged": Slot("s1", 1)},
        {"avoid": ("s3",)},
        {"avoid": ("s3",), "dead": frozenset({Slot("s2", 1), Slot("s3", 1)})},
    ],
    ids=" and ".join,
)
def test_a_changed_input_of_a_plan_changes_its_key(changes: dict[str, Any]) -> None:
    assert replace(Scene(), **changes).key() != Scene().key()


def test_a_used_port_that_decides_between_supervisors_is_part_of_the_key() -> None:
    """Of two supervisors with as many free ports, the one with fewer used ports gets the tasks."""
    scene = Scene(lost=frozenset({"s2"}))
    busier = replace(scene, ports=(4, 3, 3), other_slots=frozenset({Slot("s1", 4)}))
    assert busier.plan("balanced") != scene.plan("balanced")
    assert busier.key() != scene.key()


def test_the_room_of_its_user_is_part_of_the_key_of_a_plan() -> None:
    scene = Scene()
    view = scene.view()
    own = view.topologies["t-1-1"]
    owned = replace(own, base=own.base.model_copy(update={"owner": "ann"}))
    view = replace(view, topologies={**view.topologies, own.id: owned})
    keys = {plan_key(view, scene.causes(), UserBounds(max_slots=slots)) for slots in (3, 4, 5)}
    assert len(keys) == 3


NOW = 2 * DAY_SECS


@pytest.mark.parametrize(
    ("former", "expected"),
    [
        (None, ()),
        # The assignment is still that of the attempt.
        (TopologyAttempts(GENERATION, NOW - 5), (NOW - 5,)),
        (TopologyAttempts(GENERATION - 1, NOW - 5), ()),
        (TopologyAttempts(GENERATION - 1, NOW - 5, (NOW - 70,)), (NOW - 70,)),
        (TopologyAttempts(GENERATION, NOW - 5, (NOW - 70,)), (NOW - 70, NOW - 5)),
        # The attempt is counted once.
        (TopologyAttempts(GENERATION, NOW - 5, (NOW - 70, NOW - 5)), (NOW - 70, NOW - 5)),
        # A day has passed since the first one.
        (TopologyAttempts(GENERATION, NOW, (NOW - DAY_SECS, NOW - 9)), (NOW - 9, NOW)),
        # The clock of another boot is ahead.
        (TopologyAttempts(GENERATION, NOW + 1, (NOW + 0.5, NOW - 9)), (NOW - 9,)),
    ],
)
def test_attempts_of_a_day_that_changed_nothing_are_counted_once(
    former: TopologyAttempts | None, expected: tuple[float, ...]
) -> None:
    assert fruitless_attempts(former, GENERATION, NOW) == expected


def test_the_newest_attempts_that_changed_nothing_are_kept() -> None:
    earlier = tuple(NOW - 100 + number for number in range(MAX_FRUITLESS))
    attempts = fruitless_attempts(TopologyAttempts(GENERATION, NOW, earlier), GENERATION, NOW)
    assert attempts == (*earlier[1:], NOW)


@pytest.mark.parametrize("kind", ["unassigned", "too_few_workers"])
def test_a_cause_that_free_slots_make_is_planned_before_the_first_attempt(kind: Any) -> None:
    """Alone, and beside another cause."""
    (lost,) = Scene().causes()
    free_slots = replace(lost, kind=kind, node="", host="", port=0)
    assert not needs_plan([lost], None)
    assert needs_plan([free_slots], None)
    assert needs_plan([lost, free_slots], None)
