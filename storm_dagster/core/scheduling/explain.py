"""Explanation of one task's worker: the choice, repeated, with its alternatives.

A placement keeps only the selector that decided. The rest follows from it: the order of workers
among equals, the executors that stayed or were requested, and the order in which executors are
placed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from storm_dagster.core.scheduling.plan import event_of
from storm_dagster.core.scheduling.selectors import FilledWorker, Key, WorkerSelector, fair_share
from storm_dagster.core.scheduling.strategy import TopologyEvent, strategy_of
from storm_dagster.core.scheduling.units import TopologySummary
from storm_dagster.model.placement import TopologyPlacement, TopologyToPlace
from storm_dagster.model.placement_reasons import REASONS, Reason

_MAX_ALTERNATIVES = 10
"""Number of alternatives that are shown."""
_COMPARED = (
    "tasks of its component in the worker",
    "tasks of its component on the supervisor",
    "tasks in the worker",
    "tasks on the supervisor",
    "tasks in the worker that it exchanges tuples with",
    "tasks on the supervisor that it exchanges tuples with",
    "place among equals",
)
"""Numbers in a :data:`Key`, in its order."""


@dataclass(frozen=True)
class Alternative:
    """A worker that could have taken the task, too."""

    worker: str
    """``node:port``."""
    selector: str
    """Selector that decided against it."""
    had: int
    """The number that the selector compares, for this worker."""
    chosen_had: int
    """The same number for the chosen worker."""


@dataclass(frozen=True)
class Choice:
    """Choice of the worker of a task."""

    worker: str
    """``node:port`` of the chosen worker."""
    candidates: int
    """Workers that could take it, the chosen one among them."""
    alternatives: tuple[Alternative, ...]
    """The closest first."""


def _selector(
    about: TopologySummary, workers: Sequence[FilledWorker], unassigned: int
) -> WorkerSelector:
    """The selector of the placement, before it placed the first executor.

    ``workers`` have the executors that were requested or stay; ``unassigned`` counts those that
    stay, too, as the placement does when it computes the share.
    """
    requested_sizes = [
        len(worker.reasons) - worker.reasons.count(Reason.STAYS) for worker in workers
    ]
    share, remainder = fair_share(requested_sizes, unassigned)
    for worker in workers:
        # A worker that executors which stay fill above the share uses up one of the remainder.
        if Reason.STAYS in worker.reasons and len(worker.positions) > share:
            remainder -= 1
    return WorkerSelector(workers, share, remainder, about.related, about.system)


def choice_of(topology: TopologyToPlace, placement: TopologyPlacement, task: int) -> Choice | None:
    """The choice that put ``task`` into its worker, with its closest alternatives.

    ``None`` if the worker was not chosen by a comparison: the task stayed, its worker was
    requested, or the strategy assigns round robin. ``None`` also for a placement of another state
    of the topology. Never raises for an old placement.
    """
    by_chain = frozenset({Reason.ONLY, *strategy_of(topology.strategy).chain})
    reasons = placement.reasons
    if REASONS.get(reasons.get(task, "")) not in by_chain:
        return None
    if reasons.keys() != topology.tasks.keys():
        return None
    event = event_of(topology)
    about = event.about
    component_at = event.executors.component
    position_of: dict[int, int] = {}
    for position, tasks in enumerate(event.executors.tasks()):
        position_of.update(dict.fromkeys(tasks, position))
    task_position = position_of.get(task)
    if task_position is None:
        return None
    slots, workers, unassigned, chosen = _start(event, placement, position_of, by_chain)
    apart = _apart(event, placement, position_of, workers)

    def rank(position: int) -> tuple[bool, bool, int]:
        """Order in which :meth:`WorkerSelector.place` places executors."""
        component = component_at[position]
        return (
            component not in apart,
            component not in apart and component in about.system,
            position,
        )

    selector = _selector(about, workers, unassigned)
    earlier = [position for position in chosen if rank(position) < rank(task_position)]
    selector.place(sorted(earlier), component_at, apart)
    component = component_at[task_position]
    if component in apart:
        keys = sorted(selector.apart_keys(component, apart[component]))
    else:
        keys = sorted(selector.open_keys(component))
    if not keys or keys[0][-1] != chosen.get(task_position):
        # The repetition chooses another worker: the placement is of another state.
        return None
    best = keys[0]
    alternatives = [_alternative(slots, best, key) for key in keys[1 : _MAX_ALTERNATIVES + 1]]
    return Choice(slots[best[-1]], len(keys), tuple(alternatives))


def _apart(
    event: TopologyEvent,
    placement: TopologyPlacement,
    position_of: Mapping[int, int],
    workers: list[FilledWorker],
) -> dict[int, set[str]]:
    """Component with ``task.on.differ.node`` -> its supervisors before the first choice.

    ``workers`` (:func:`_start`) have what was put into them before. Of the other workers of
    ``placement``, the finished result, only tasks that the event left alone were there before.
    """
    component_at = event.executors.component
    apart: dict[int, set[str]] = {component: set() for component in event.about.differ}
    for worker in placement.workers:
        for task in worker.ids:
            component = component_at[position_of[task]]
            reason = REASONS.get(placement.reasons[task])
            if component in apart and reason in (Reason.KEPT, Reason.UNSTOPPED):
                apart[component].add(worker.node)
    for filled in workers:
        for component in apart.keys() & filled.counts.keys():
            apart[component].add(filled.node)
    return apart


def _start(
    event: TopologyEvent,
    placement: TopologyPlacement,
    position_of: Mapping[int, int],
    by_chain: Collection[Reason],
) -> tuple[list[str], list[FilledWorker], int, dict[int, int]]:
    """Return (slots, workers, unassigned executors, chosen workers).

    ``slots`` (``node:port``) and ``workers`` are those before the first choice, in the order among
    equals; workers that the event did not touch, and that of a master alone, are left out.
    Executors that no requested worker holds are unassigned. The last value maps an executor to the
    index of the worker that was chosen for it.
    """
    by_slot = {worker.slot.key: worker for worker in placement.workers}
    component_at = event.executors.component
    slots: list[str] = []
    workers: list[FilledWorker] = []
    unassigned = 0
    chosen: dict[int, int] = {}
    unchanged = {Reason.KEPT, Reason.UNSTOPPED, Reason.MASTER}
    for slot in placement.worker_reasons:
        reason_of: dict[int, Reason | None] = {}
        for position in sorted({position_of[task] for task in by_slot[slot].ids}):
            first_task = event.executors.unit[position]
            reason_of[position] = REASONS.get(placement.reasons[first_task])
        if not unchanged.isdisjoint(reason_of.values()):
            continue
        worker = FilledWorker(by_slot[slot].node)
        for position, reason in reason_of.items():
            if reason is not None and reason in (Reason.USER, Reason.OLD, Reason.STAYS):
                worker.put(position, component_at[position], reason)
            elif reason in by_chain:
                chosen[position] = len(workers)
            if reason not in (Reason.USER, Reason.OLD):
                unassigned += 1
        slots.append(slot)
        workers.append(worker)
    return slots, workers, unassigned, chosen


def _alternative(slots: list[str], best: Key, key: Key) -> Alternative:
    """The worker of ``key``, with the first selector by which ``best`` is better."""
    # Keys end with the worker's number: two of them always differ.
    step = 0
    while best[step] == key[step]:
        step += 1
    step_name = _COMPARED[step]
    # The numbers of tasks that it trades with are negative in a key: more is better.
    return Alternative(slots[key[-1]], step_name, abs(key[step]), abs(best[step]))
