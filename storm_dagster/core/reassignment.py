"""Reassignment: input and result of the planner for a view of the cluster.

Three events: ``new`` (a submission), ``monitor`` (tasks judged dead) and ``rebalance``. The planner
sees only supervisors that may get work; tasks on other supervisors stay there (``unstopped``).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.scheduling.build import topology_to_place
from storm_dagster.core.scheduling.plan import event_of
from storm_dagster.core.scheduling.units import worker_count
from storm_dagster.core.submission.tasks import executors_of
from storm_dagster.core.transitions import STEADY
from storm_dagster.core.usable_slots import UserBounds, draining_slots, usable_slots
from storm_dagster.model.placement import (
    PlacementBatch,
    SupervisorSlots,
    TopologyPlacement,
    TopologyToPlace,
)
from storm_dagster.model.records import Assignment, AssignmentType, TaskTable
from storm_dagster.model.slot import Slot
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import ClusterView, TopologyView


@dataclass(frozen=True)
class Runnable:
    """Stored code of a topology."""

    spec: TopologySpec
    """Its normalized form, without system components."""
    conf: Mapping[str, Any]
    """Its total conf."""
    submitted_keys: frozenset[str] = frozenset()
    """Keys of the conf that came with the submission, not from the topology's code."""


def offered_supervisors(
    view: ClusterView,
    *,
    placing: Collection[str],
    avoid: Collection[str] = (),
    withheld: Collection[Slot] = (),
    isolation: Collection[str] = (),
) -> tuple[SupervisorSlots, ...]:
    """List the supervisors that may get work.

    They are those of :func:`~storm_dagster.core.usable_slots.usable_slots`, whose arguments these
    are.
    """
    usable = usable_slots(
        view, placing=placing, avoid=avoid, withheld=withheld, isolation=isolation
    )
    return usable.supervisors


def _to_place(
    name: str,
    topology_id: str,
    runnable: Runnable,
    table: TaskTable,
    executors: Mapping[str, int],
    **changes: Any,
) -> TopologyToPlace:
    """The planner's input; ``executors`` are numbers by component, ``changes`` fields to set."""
    to_place = topology_to_place(
        name=name,
        topology_id=topology_id,
        spec=runnable.spec,
        conf=runnable.conf,
        tasks=table,
        executors=executors_of(table, executors),
    )
    return to_place.model_copy(update=changes)


def _running_to_place(
    topology: TopologyView,
    runnable: Runnable,
    table: TaskTable,
    executors: Mapping[str, int],
    **changes: Any,
) -> TopologyToPlace:
    """As :func:`_to_place`, for a topology with its current assignment."""
    return _to_place(
        topology.base.name,
        topology.id,
        runnable,
        table,
        executors,
        old=topology.workers,
        **changes,
    )


def new_batch(
    view: ClusterView,
    *,
    name: str,
    topology_id: str,
    runnable: Runnable,
    table: TaskTable,
    executors: Mapping[str, int],
    workers: int,
    backup: Assignment | None,
    replaces: str | None = None,
) -> PlacementBatch:
    """Build the batch of a submission.

    ``backup`` is the newest assignment of the name, for ``use.old.assignment``. Slots of the
    topology that it ``replaces`` count as free: that topology ends in the same transaction.
    """
    old = backup.workers if backup is not None else ()
    to_place = _to_place(
        name, topology_id, runnable, table, executors, workers=workers, event="new", old=old
    )
    placing = [topology_id] if replaces is None else [topology_id, replaces]
    supervisors = offered_supervisors(view, placing=placing, isolation=to_place.isolation)
    return PlacementBatch(supervisors=supervisors, topologies=(to_place,))


def causes_still_true(
    view: ClusterView, topology: TopologyView, causes: Iterable[Cause]
) -> list[Cause]:
    """List the causes that still hold when their run starts.

    They concern the current assignment, and the workers have not recovered since. Empty if the
    topology has no assignment.
    """
    if topology.assignment_at is None:
        return []
    version = topology.assignment_at.version
    current: list[Cause] = []
    for cause in causes:
        is_current = cause.topology_id == topology.id and cause.generation == version
        if is_current and _still_true(view, topology, cause):
            current.append(cause)
    return current


def _still_true(view: ClusterView, topology: TopologyView, cause: Cause) -> bool:
    """True if the view shows the same problem, for a cause of the current assignment.

    A process or record that is not the one that was judged (``Cause.seen``) is not the problem.
    """
    worker = topology.live_workers.get(cause.slot)
    if cause.kind == "unassigned":
        return True
    if cause.kind == "too_few_workers":
        return topology.base.status in STEADY and not topology.missing_workers
    if cause.kind == "silent_master":
        return topology.beats_at is None or cause.seen in ("", str(topology.beats_at.mzxid))
    if worker is None:
        # The causes of a worker that is gone hold. But a lost host whose supervisor is back starts
        # its workers itself, so wait for them.
        return cause.kind != "lost_host" or cause.node not in view.supervisors
    if cause.kind == "dead_task":
        return not topology.dead_tasks.isdisjoint(cause.tasks)
    return (
        cause.kind == "never_ran"
        and worker.status == "starting"
        and cause.seen in ("", worker.token[:8])
    )


def monitor_batch(
    view: ClusterView,
    topology: TopologyView,
    runnable: Runnable,
    table: TaskTable,
    causes: Collection[Cause],
) -> PlacementBatch:
    """Build the batch that reassigns the tasks of ``causes`` and no others.

    If the only cause is too few workers, it is the batch of a rebalance, which moves the fewest
    tasks. The topology gets no worker beyond the bounds of its user.
    """
    avoid: set[str] = set()
    for cause in causes:
        avoid.update(cause.avoid)
    if {cause.kind for cause in causes} == {"too_few_workers"}:
        workers = _bounded_workers(view, topology, runnable)
        # The leader moves the workers on hosts that drain, while the spouts pause.
        staying = draining_slots(view, topology)
        return rebalance_batch(
            view, topology, runnable, table, workers=workers, avoid=avoid, staying=staying
        )
    # A cause without a worker names no slot.
    withheld = {cause.slot for cause in causes if cause.node}
    supervisors = offered_supervisors(view, placing=[topology.id], avoid=avoid, withheld=withheld)
    dead: set[int] = set()
    for cause in causes:
        dead.update(cause.tasks)
    dead &= table.component_of().keys()
    # Tasks on supervisors that are not offered, and that are not judged dead, stay in this round.
    # Besides tasks that run, these are tasks of workers whose limit has not passed: only the
    # observer judges silence, never the planner.
    elsewhere: set[int] = set()
    offered = {supervisor.id for supervisor in supervisors}
    for worker in topology.workers:
        # A cause names whole workers, but the assignment decides on their tasks.
        if worker.slot in withheld:
            dead.update(worker.ids)
        if worker.node not in offered:
            elsewhere.update(worker.ids)
    base = topology.base
    to_place = _running_to_place(
        topology,
        runnable,
        table,
        base.executors,
        workers=_bounded_workers(view, topology, runnable),
        event="monitor",
        dead=tuple(sorted(dead)),
        unstopped=tuple(sorted(elsewhere - dead)),
    )
    return PlacementBatch(supervisors=supervisors, topologies=(to_place,))


def _bounded_workers(view: ClusterView, topology: TopologyView, runnable: Runnable) -> int:
    """The requested workers, as far as the bounds of the topology's user allow them.

    The workers that it has count in any case: healing takes none away.
    """
    more_workers = UserBounds.from_conf(runnable.conf).more_workers(view, topology)
    if more_workers is None:
        return topology.base.workers
    return min(topology.base.workers, max(1, len(topology.workers) + more_workers))


def rebalance_batch(
    view: ClusterView,
    topology: TopologyView,
    runnable: Runnable,
    table: TaskTable,
    *,
    executors: Mapping[str, int] | None = None,
    workers: int | None = None,
    reassign: bool = False,
    avoid: Collection[str] = (),
    staying: Collection[Slot] = (),
) -> PlacementBatch:
    """Build the batch of a rebalance.

    It places all tasks of ``table``, except those that run where no supervisor can stop them.
    Without ``executors`` or ``workers`` these numbers do not change. With ``reassign`` no task has
    to stay where it is. Supervisors in ``avoid`` get no work, and their workers count as those that
    no supervisor can stop, as do the workers in the slots ``staying``.
    """
    supervisors = offered_supervisors(view, placing=[topology.id], avoid=avoid)
    usable = view.supervisors.keys() - {*avoid}
    unstopped: set[int] = set()
    for worker in topology.workers:
        is_unstopped = worker.node not in usable and worker.slot in topology.live_workers
        if is_unstopped or worker.slot in staying:
            unstopped.update(worker.ids)
    unstopped &= table.component_of().keys()
    to_place = _running_to_place(
        topology,
        runnable,
        table,
        topology.base.executors if executors is None else executors,
        workers=topology.base.workers if workers is None else workers,
        event="rebalance",
        reassign=reassign,
        unstopped=tuple(sorted(unstopped)),
    )
    return PlacementBatch(supervisors=supervisors, topologies=(to_place,))


def present_workers(
    view: ClusterView, topology: TopologyView, runnable: Runnable, table: TaskTable
) -> int:
    """The ``topology.workers`` for which the topology needs no more slots than it has.

    It is at most the requested number, and at least 1.
    """
    about = event_of(current_topology(view, topology, runnable, table)).about
    needed, _ = worker_count(about.workers, about.executors, about.single_master)
    missing = max(0, needed - len(topology.workers))
    return max(1, about.workers - missing)


def current_topology(
    view: ClusterView, topology: TopologyView, runnable: Runnable, table: TaskTable
) -> TopologyToPlace:
    """The planner's input for a rebalance that changes no numbers, with the current assignment."""
    return rebalance_batch(view, topology, runnable, table).topologies[0]


def same_workers(assignment: Assignment | None, placement: TopologyPlacement) -> bool:
    """True if the placement equals the current one, so that it need not be written.

    ``False`` without an assignment.
    """
    if assignment is None:
        return False
    # The host counts: a host that was renamed can be reached only by its new name.
    old = {worker.slot: (worker.host, worker.tasks) for worker in assignment.workers}
    new = {worker.slot: (worker.host, worker.tasks) for worker in placement.workers}
    return old == new


def same_resources(assignment: Assignment | None, placement: TopologyPlacement) -> bool:
    """True if no worker that keeps its slot gets other memory or CPU by the placement.

    A record of an older release does not name them (0).
    """
    if assignment is None:
        return True
    old = {worker.slot: worker for worker in assignment.workers}
    for worker in placement.workers:
        former = old.get(worker.slot)
        if former is None:
            continue
        has_memory = former.memory_bytes in (0, worker.memory_bytes)
        has_cpu = former.cpu in (0, worker.cpu)
        if not (has_memory and has_cpu):
            return False
    return True


def assignment_of(
    placement: TopologyPlacement,
    *,
    topology_id: str,
    previous: Assignment | None,
    now_secs: int,
    kind: AssignmentType = "Assign",
    restarted: Collection[int] = (),
) -> Assignment:
    """Build the record of a placement.

    A task keeps its start if it stays on its node and port, else it starts now; tasks in
    ``restarted`` (judged dead) start now in any case. ``node_host`` names only supervisors in use.
    Code, restarts and history are those of ``previous``, the current assignment. Fields of a newer
    release stay in the record, and in each slot that is still used.
    """
    old_slots = previous.task_slots() if previous else {}
    old_starts = previous.start_secs() if previous else {}
    starts: dict[int, int] = {}
    for worker in placement.workers:
        slot = worker.slot
        for task in worker.ids:
            stays = old_slots.get(task) == slot and task not in restarted
            starts[task] = old_starts.get(task, now_secs) if stays else now_secs
    assignment = Assignment(
        topology_id=topology_id,
        code_dir=previous.code_dir if previous else topology_id,
        node_host={worker.node: worker.host for worker in placement.workers},
        workers=placement.workers,
        task_start_secs=Assignment.pack_start_secs(starts),
        timestamp_ms=now_secs * 1000,
        type=kind,
        code=previous.code if previous else {},
        restarts=previous.restarts if previous else 0,
        history=previous.history if previous else (),
    )
    if previous is None:
        return assignment
    before = {worker.slot: worker for worker in previous.workers}
    workers = tuple(worker.keep_unknown(before.get(worker.slot)) for worker in assignment.workers)
    return assignment.model_copy(update={"workers": workers}).keep_unknown(previous)
