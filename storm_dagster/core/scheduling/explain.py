"""Explanation of one task's worker: the choice made again, with the workers that it was made
against.

A placement keeps only which selector decided. Everything else follows from it: the order of workers
among equals, what stayed or was requested, and the order in which executors are placed.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from storm_dagster.core.scheduling.plan import event_of
from storm_dagster.core.scheduling.selectors import FilledWorker, Key, WorkerSelector, fair_share
from storm_dagster.core.scheduling.strategy import TopologyEvent, strategy_of
from storm_dagster.model.placement import TopologyPlacement, TopologyToPlace
from storm_dagster.model.placement_reasons import REASONS, Reason

_MOST_ALTERNATIVES = 10
_COMPARED = (
    "tasks of its component in the worker",
    "tasks of its component on the supervisor",
    "tasks in the worker",
    "tasks on the supervisor",
    "tasks in the worker that it exchanges tuples with",
    "tasks on the supervisor that it exchanges tuples with",
    "place among equals",
)


@dataclass(frozen=True)
class Alternative:
    """A worker that could have taken the task too."""

    worker: str
    """``node:port``."""
    selector: str
    """Selector that decided against it."""
    had: int
    """That number for this worker."""
    chosen_had: int
    """The same number for the worker that was chosen."""


@dataclass(frozen=True)
class Choice:
    """Choice of the worker of a task."""

    worker: str
    candidates: int
    """Workers that could take it, the chosen one among them."""
    alternatives: tuple[Alternative, ...]
    """The closest first."""


def choice_of(topology: TopologyToPlace, placement: TopologyPlacement, task: int) -> Choice | None:
    """The choice that put ``task`` where it is, with its closest alternatives.

    ``None`` where nothing was chosen by comparing workers (it stayed, its worker was requested, the
    strategy assigns round robin), and for a placement that was not made from this very topology.
    Never raises for an old placement.
    """
    by_chain = frozenset({Reason.ONLY, *strategy_of(topology.strategy).chain})
    why = placement.reasons
    if REASONS.get(why.get(task, "")) not in by_chain or why.keys() != topology.tasks.keys():
        return None
    event = event_of(topology)
    about, component = event.about, event.executors.component
    position_of = {
        member: position
        for position, group in enumerate(event.executors.tasks())
        for member in group
    }
    asked = position_of.get(task)
    if asked is None:
        return None
    slots, workers, unassigned, chosen = _start(event, placement, position_of, by_chain)
    held = [
        (worker.node, component[position_of[member]])
        for worker in placement.workers
        for member in worker.ids
        if REASONS.get(placement.reasons[member]) in (Reason.KEPT, Reason.UNSTOPPED)
    ]
    held.extend((worker.node, kind) for worker in workers for kind in worker.counts)
    apart = {kind: {node for node, holder in held if holder == kind} for kind in about.differ}

    def rank(position: int) -> tuple[bool, bool, int]:
        kind = component[position]
        return (kind not in apart, kind not in apart and kind in about.system, position)

    share, remainder = fair_share(
        (sum(why is not Reason.STAYS for why in w.reasons) for w in workers), unassigned
    )
    remainder -= sum(
        Reason.STAYS in worker.reasons and len(worker.positions) > share for worker in workers
    )
    selector = WorkerSelector(workers, share, remainder, about.related, about.system)
    selector.place(
        sorted(position for position in chosen if rank(position) < rank(asked)), component, apart
    )
    kind = component[asked]
    keys = sorted(
        selector.apart_keys(kind, apart[kind]) if kind in apart else selector.open_keys(kind)
    )
    if not keys or keys[0][-1] != chosen.get(asked):
        return None
    best, *others = keys[: _MOST_ALTERNATIVES + 1]
    return Choice(slots[best[-1]], len(keys), tuple(_lost(slots, best, other) for other in others))


def _start(
    event: TopologyEvent,
    placement: TopologyPlacement,
    position_of: Mapping[int, int],
    by_chain: Collection[Reason],
) -> tuple[list[str], list[FilledWorker], int, dict[int, int]]:
    """Slots and workers as they were before the first choice, the number of executors that no
    requested worker holds, and the worker that was chosen for each.
    """
    by_slot = {worker.slot.key: worker for worker in placement.workers}
    component = event.executors.component
    slots: list[str] = []
    workers: list[FilledWorker] = []
    unassigned = 0
    chosen: dict[int, int] = {}
    for slot in placement.worker_reasons:
        mine = sorted({position_of[task] for task in by_slot[slot].ids})
        why = {
            position: REASONS.get(placement.reasons[event.executors.unit[position]])
            for position in mine
        }
        if any(reason in (Reason.KEPT, Reason.UNSTOPPED, Reason.MASTER) for reason in why.values()):
            continue
        worker = FilledWorker(by_slot[slot].node)
        for position, reason in why.items():
            if reason is not None and reason in (Reason.USER, Reason.OLD, Reason.STAYS):
                worker.put(position, component[position], reason)
            elif reason in by_chain:
                chosen[position] = len(workers)
        unassigned += sum(reason not in (Reason.USER, Reason.OLD) for reason in why.values())
        slots.append(slot)
        workers.append(worker)
    return slots, workers, unassigned, chosen


def _lost(slots: list[str], best: Key, key: Key) -> Alternative:
    step = next(
        index for index, (mine, other) in enumerate(zip(best, key, strict=True)) if mine != other
    )
    step_name = _COMPARED[step] if step < len(best) - 1 else _COMPARED[-1]
    # The numbers of tasks that it trades with are negative in a key: more is better.
    return Alternative(slots[key[-1]], step_name, abs(key[step]), abs(best[step]))
