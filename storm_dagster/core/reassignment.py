"""Reassignment: the planner's input from a view of the cluster, and the assignment from the
planner's result.

Three events: ``new`` (a submission), ``monitor`` (tasks judged dead) and ``rebalance``. The planner
sees only supervisors that may get work; what runs on any other stays where it is (``unstopped``).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.scheduling.build import topology_to_place
from storm_dagster.core.submission.tasks import executors_of
from storm_dagster.core.transitions import STEADY
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
    """Stored code of a topology: its normalized form without system components, and its total
    conf.
    """

    spec: TopologySpec
    conf: Mapping[str, Any]
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
    """Supervisors that may get work: registered, not blacklisted by host, not in ``avoid``.

    Ports of topologies outside ``placing`` (topology ids) are taken, and so are ``withheld`` slots:
    those of workers that are dead in this round. Hosts that others are isolated on are left out,
    but for those of ``isolation``, and for those that a topology of ``placing`` is isolated on.
    """
    used = view.used_ports(without=frozenset(placing))
    for node, port in withheld:
        used.setdefault(node, set()).add(port)
    return tuple(
        SupervisorSlots(
            id=supervisor_id,
            info=info,
            used=tuple(sorted(used.get(supervisor_id, ()))),
        )
        for supervisor_id, info in sorted(view.open_supervisors(placing, isolation).items())
        if supervisor_id not in avoid
    )


def _to_place(
    name: str,
    topology_id: str,
    runnable: Runnable,
    table: TaskTable,
    executors: Mapping[str, int],
    **changes: Any,
) -> TopologyToPlace:
    built = topology_to_place(
        name=name,
        topology_id=topology_id,
        spec=runnable.spec,
        conf=runnable.conf,
        tasks=table,
        executors=executors_of(table, executors),
    )
    return built.model_copy(update=changes)


def _to_place_again(
    topology: TopologyView,
    runnable: Runnable,
    table: TaskTable,
    executors: Mapping[str, int],
    **changes: Any,
) -> TopologyToPlace:
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
    """The batch of a submission. ``backup`` is the newest assignment of the name, for
    ``use.old.assignment``.

    Slots of the topology that it ``replaces`` count as free: that one ends in the same transaction.
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
    """Causes that still hold: of the current assignment, and of what did not recover while they
    waited for a run.
    """
    if topology.assignment_at is None:
        return []
    version = topology.assignment_at.version
    mine = [
        cause
        for cause in causes
        if cause.topology_id == topology.id and cause.generation == version
    ]
    return [cause for cause in mine if _still_true(view, topology, cause)]


def _still_true(view: ClusterView, topology: TopologyView, cause: Cause) -> bool:
    live = topology.live_workers.get(cause.slot)
    if cause.kind == "unassigned":
        return True
    if cause.kind == "too_few_workers":
        return topology.base.status in STEADY and not topology.missing_workers
    if cause.kind == "silent_master":
        return topology.beats_at is None or cause.seen in ("", str(topology.beats_at.mzxid))
    if live is None:
        # A supervisor that is back starts its workers itself: they get their time.
        return cause.kind != "lost_host" or cause.node not in view.supervisors
    if cause.kind == "dead_task":
        return not topology.dead_tasks.isdisjoint(cause.tasks)
    return (
        cause.kind == "never_ran"
        and live.status == "starting"
        and cause.seen in ("", live.token[:8])
    )


def monitor_batch(
    view: ClusterView,
    topology: TopologyView,
    runnable: Runnable,
    table: TaskTable,
    causes: Collection[Cause],
) -> PlacementBatch:
    """The batch that reassigns the tasks of ``causes`` and keeps all others where they are.

    When it only has too few workers, the batch of a rebalance: the fewest tasks move that spread
    it.
    """
    avoid = {node for cause in causes for node in cause.avoid}
    if {cause.kind for cause in causes} == {"too_few_workers"}:
        return rebalance_batch(view, topology, runnable, table, avoid=avoid)
    withheld = {cause.slot for cause in causes if cause.node}
    supervisors = offered_supervisors(view, placing=[topology.id], avoid=avoid, withheld=withheld)
    dead = {task for cause in causes for task in cause.tasks} & table.component_of().keys()
    # A cause names whole workers, but the assignment decides: a slot in it goes as a whole.
    dead.update(
        task for worker in topology.workers if worker.slot in withheld for task in worker.ids
    )
    # What is not offered and not judged dead yet stays in this round. Besides the tasks that run,
    # these are tasks of workers whose limit has not passed: silence is judged by the observer
    # alone, never by the planner.
    offered = {supervisor.id for supervisor in supervisors}
    elsewhere = {
        task for worker in topology.workers if worker.node not in offered for task in worker.ids
    }
    base = topology.base
    to_place = _to_place_again(
        topology,
        runnable,
        table,
        base.executors,
        workers=base.workers,
        event="monitor",
        dead=tuple(sorted(dead)),
        unstopped=tuple(sorted(elsewhere - dead)),
    )
    return PlacementBatch(supervisors=supervisors, topologies=(to_place,))


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
) -> PlacementBatch:
    """The batch of a rebalance: all tasks of ``table``, but those that run where no supervisor can
    stop them.

    ``executors`` and ``workers`` that are not given stay as they are.
    """
    supervisors = offered_supervisors(view, placing=[topology.id], avoid=avoid)
    present, able = table.component_of().keys(), view.supervisors.keys() - {*avoid}
    unstopped = {
        task
        for worker in topology.workers
        if worker.node not in able and worker.slot in topology.live_workers
        for task in worker.ids
    }
    to_place = _to_place_again(
        topology,
        runnable,
        table,
        topology.base.executors if executors is None else executors,
        workers=topology.base.workers if workers is None else workers,
        event="rebalance",
        reassign=reassign,
        unstopped=tuple(sorted(unstopped & present)),
    )
    return PlacementBatch(supervisors=supervisors, topologies=(to_place,))


def current_topology(
    view: ClusterView, topology: TopologyView, runnable: Runnable, table: TaskTable
) -> TopologyToPlace:
    """The topology with its current assignment, as a rebalance without changes takes it."""
    return rebalance_batch(view, topology, runnable, table).topologies[0]


def same_workers(assignment: Assignment | None, placement: TopologyPlacement) -> bool:
    """Whether the placement is the current one already; then nothing is written."""
    if assignment is None:
        return False
    # The host counts: one that was renamed is reached by its new name alone.
    old = {worker.slot: (worker.host, worker.tasks) for worker in assignment.workers}
    new = {worker.slot: (worker.host, worker.tasks) for worker in placement.workers}
    return old == new


def assignment_of(
    placement: TopologyPlacement,
    *,
    topology_id: str,
    previous: Assignment | None,
    now_secs: int,
    kind: AssignmentType = "Assign",
    restarted: Collection[int] = (),
) -> Assignment:
    """The record for a placement.

    A task keeps its start when it stays on its node and port, else it starts now; tasks in
    ``restarted`` (judged dead) start now wherever they are. ``node_host`` names only supervisors in
    use. Fields of a newer release stay in the record, and in each slot that is still used.
    """
    old_slots = previous.task_slots() if previous else {}
    old_starts = previous.start_secs() if previous else {}
    starts: dict[int, int] = {}
    for worker in placement.workers:
        slot = worker.slot
        for task in worker.ids:
            stays = old_slots.get(task) == slot and task not in restarted
            starts[task] = old_starts.get(task, now_secs) if stays else now_secs
    built = Assignment(
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
        return built
    before = {worker.slot: worker for worker in previous.workers}
    workers = tuple(worker.keep_unknown(before.get(worker.slot)) for worker in built.workers)
    return built.model_copy(update={"workers": workers}).keep_unknown(previous)


def imbalance(workers: Iterable[tuple[str, int]], *, wanted: int, supervisors: int) -> float:
    """Excess of the fullest worker or supervisor over its fair share: 0 is even, 1 is twice the
    share.

    ``workers``: (supervisor id, number of tasks) of each used slot. ``wanted``: workers that the
    tasks should be spread over. ``supervisors``: number of usable ones. The larger of two excesses:
    tasks on one worker, and workers on one supervisor.
    """
    used = [(node, tasks) for node, tasks in workers if tasks > 0]
    total = sum(tasks for _, tasks in used)
    if not total:
        return 0.0
    fair_tasks = -(-total // max(1, min(wanted, total)))
    fair_workers = -(-len(used) // max(1, min(supervisors, len(used))))
    fullest = max(tasks for _, tasks in used)
    crowded = max(Counter(node for node, _ in used).values())
    return max(fullest / fair_tasks, crowded / fair_workers) - 1.0
