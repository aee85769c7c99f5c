"""Explanation of one task's worker: the choice made again, with the workers that it was made against.

A placement keeps only which selector decided. Everything else follows from it: the order of workers among
equals, what stayed or was requested, and the order in which executors are placed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from storm_dagster.core.scheduling.selectors import CHAIN, Bin, Key, Selector, fair_share
from storm_dagster.core.scheduling.units import Unit, exchanges, units_of
from storm_dagster.model.placement import TopologyPlacement, TopologyToPlace
from storm_dagster.model.placement_reasons import Reason, reason_of

_COMPARED = (
    "tasks of its component in the worker",
    "tasks of its component on the supervisor",
    "tasks in the worker",
    "tasks on the supervisor",
    "tasks in the worker that it exchanges tuples with",
    "tasks on the supervisor that it exchanges tuples with",
    "place among equals",
)
_CHOSEN_BY_CHAIN = frozenset({Reason.ONLY, *CHAIN, Reason.FIRST})


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


def choice_of(topology: TopologyToPlace, placement: TopologyPlacement, task: int, most: int = 10) -> Choice | None:
    """The choice that put ``task`` where it is, with at most ``most`` alternatives.

    ``None`` where nothing was chosen by comparing workers (it stayed, its worker was requested, the
    strategy assigns round robin), and for a placement that was not made from this very topology. Never raises for an old
    placement.
    """
    if reason_of(placement.reasons.get(task, "")) not in _CHOSEN_BY_CHAIN:
        return None
    units = units_of(topology)
    asked = next((unit for unit in units if task in unit.tasks), None)
    if asked is None or placement.reasons.keys() != topology.tasks.keys():
        return None
    bins, unassigned = _start(placement, units)
    index_of = {unit.first: index for index, (_, chosen) in enumerate(bins) for unit in chosen}
    staying = [
        (worker.node, topology.tasks[other])
        for worker in placement.workers
        for other in worker.tasks
        if reason_of(placement.reasons[other]) in (Reason.KEPT, Reason.UNSTOPPED)
    ]
    selector, order, apart = _before(topology, [bin for bin, _ in bins], unassigned, staying)
    for unit in order[: order.index(asked)]:
        if unit.component in apart:
            selector.place_apart(unit, apart[unit.component])
    keys = _candidates(selector, order, asked, apart)
    if not keys or keys[0][-1] != index_of.get(asked.first):
        return None
    slots = ["{}:{}".format(*bin.slot) for bin, _ in bins]
    return Choice(slots[keys[0][-1]], len(keys), tuple(_lost(slots, keys[0], key) for key in keys[1 : most + 1]))


def _start(placement: TopologyPlacement, units: Iterable[Unit]) -> tuple[list[tuple[Bin, list[Unit]]], list[Unit]]:
    """Workers as they were before the first choice, each with the executors that were chosen for it; and all
    executors that no requested worker holds."""
    unit_of = {task: unit for unit in units for task in unit.tasks}
    by_slot = {f"{worker.node}:{worker.port}": worker for worker in placement.workers}
    bins: list[tuple[Bin, list[Unit]]] = []
    unassigned: list[Unit] = []
    for slot in placement.worker_reasons:
        worker = by_slot[slot]
        mine = sorted({unit_of[task] for task in worker.tasks}, key=lambda unit: unit.first)
        why = {unit: reason_of(placement.reasons[unit.first]) for unit in mine}
        if any(reason in (Reason.KEPT, Reason.UNSTOPPED, Reason.MASTER) for reason in why.values()):
            continue
        bin = Bin((worker.node, worker.port), worker.host, Reason.SLOT_ONLY, 0, 0)
        for unit in mine:
            if why[unit] in (Reason.USER, Reason.OLD, Reason.STAYS):
                bin.put(unit, why[unit] or Reason.ONLY)
        bins.append((bin, [unit for unit in mine if why[unit] in _CHOSEN_BY_CHAIN]))
        unassigned.extend(unit for unit in mine if why[unit] not in (Reason.USER, Reason.OLD))
    return bins, unassigned


def _before(
    topology: TopologyToPlace, bins: list[Bin], unassigned: list[Unit], staying: list[tuple[str, str]]
) -> tuple[Selector, list[Unit], dict[str, frozenset[str]]]:
    """The selector before its first choice, executors in the order in which they are chosen for, and
    supervisors that are closed to components which must be apart."""
    fixed = [sum(reason is not Reason.STAYS for reason in bin.reasons.values()) for bin in bins]
    average, remainder = fair_share(fixed, len(unassigned))
    for bin in bins:
        stayed = sum(reason is Reason.STAYS for reason in bin.reasons.values())
        remainder -= stayed > 0 and bin.size > average
    placed = {unit.first for bin in bins for unit in bin.units}
    waiting = [unit for unit in unassigned if unit.first not in placed]
    held = [*staying, *((bin.slot[0], unit.component) for bin in bins for unit in bin.units)]
    apart = {
        component: frozenset(node for node, holder in held if holder == component) for component in topology.differ_node
    }
    order = sorted(
        waiting,
        key=lambda unit: (
            unit.component not in apart,
            unit.component not in apart and unit.is_system,
            unit.first,
        ),
    )
    return Selector(bins, average, remainder, exchanges(topology)), order, apart


def _candidates(selector: Selector, order: list[Unit], asked: Unit, apart: dict[str, frozenset[str]]) -> list[Key]:
    """Keys of the workers that could take the executor, best first, once all before it are placed."""
    if asked.component in apart:
        return selector.apart_candidates(asked, apart[asked.component])
    rest = [unit for unit in order if unit.component not in apart]
    selector.place_all(rest[: rest.index(asked)])
    return selector.candidates(asked)


def _lost(slots: list[str], best: Key, key: Key) -> Alternative:
    step = next(index for index, (mine, other) in enumerate(zip(best, key, strict=True)) if mine != other)
    step_name = _COMPARED[step] if step < len(best) - 1 else _COMPARED[-1]
    # The numbers of tasks that it trades with are negative in a key: more is better.
    return Alternative(slots[key[-1]], step_name, abs(key[step]), abs(best[step]))
