"""Placements of one topology, from the workers that a strategy filled."""

from __future__ import annotations

from collections.abc import Iterable

from storm_dagster.core.scheduling.history import History, OldWorker, moved_tasks
from storm_dagster.core.scheduling.selectors import Bin
from storm_dagster.core.scheduling.units import Unit
from storm_dagster.model.placement import PlacedWorker, TopologyPlacement, TopologyToPlace
from storm_dagster.model.placement_reasons import Reason, Refusal, reason_text, slot_reason_text


class NoRoom(Exception):
    """The topology cannot be placed; the text says why and what to do. Never leaves the planner."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def _staying(topology: TopologyToPlace, worker: OldWorker, slot_why: Reason, task_why: Reason) -> Bin:
    bin = Bin(
        worker.slot,
        worker.host,
        slot_why,
        worker.memory_bytes or topology.memory_bytes,
        worker.cpu or topology.cpu,
    )
    for unit in worker.units:
        bin.put(unit, task_why)
    return bin


def staying_bins(topology: TopologyToPlace, history: History) -> list[Bin]:
    """The workers that the event does not touch."""
    kept = [_staying(topology, worker, Reason.SLOT_KEPT, Reason.KEPT) for worker in history.kept]
    unstopped = [_staying(topology, worker, Reason.SLOT_UNSTOPPED, Reason.UNSTOPPED) for worker in history.unstopped]
    return [*kept, *unstopped]


def succeeded(topology: TopologyToPlace, bins: Iterable[Bin], warnings: Iterable[str] = ()) -> TopologyPlacement:
    """The placement ``assigned``, or ``unchanged`` when a live assignment already looks so."""
    filled = [bin for bin in bins if bin.units]
    held = {(worker.node, worker.port) for worker in topology.old}
    workers = tuple(
        sorted(
            (
                PlacedWorker(
                    node=bin.slot[0],
                    host=bin.host,
                    port=bin.slot[1],
                    tasks=tuple(sorted(task for unit in bin.units for task in unit.tasks)),
                    memory_bytes=bin.memory_bytes,
                    cpu=bin.cpu,
                    kept=bin.slot in held,
                )
                for bin in filled
            ),
            key=lambda worker: (worker.node, worker.port),
        )
    )
    reasons = {
        task: reason_text(bin.reasons[unit.first]) for bin in filled for unit in bin.units for task in unit.tasks
    }
    same = topology.event != "new" and _same(topology.old, workers)
    return TopologyPlacement(
        name=topology.name,
        status="unchanged" if same else "assigned",
        workers=workers,
        moved=moved_tasks(topology.old, workers),
        reasons=dict(sorted(reasons.items())),
        worker_reasons={f"{bin.slot[0]}:{bin.slot[1]}": slot_reason_text(bin.why, bin.against) for bin in filled},
        warnings=tuple(warnings),
    )


def _same(old: Iterable[PlacedWorker], new: Iterable[PlacedWorker]) -> bool:
    """Whether nothing would change for anyone: the same tasks in the same slots with the same resources."""
    before = {(worker.node, worker.port): worker for worker in old}
    after = {(worker.node, worker.port): worker for worker in new}
    return before.keys() == after.keys() and all(
        set(before[slot].tasks) == set(worker.tasks)
        and before[slot].memory_bytes in (0, worker.memory_bytes)
        and before[slot].cpu in (0, worker.cpu)
        for slot, worker in after.items()
    )


def failed(topology: TopologyToPlace, units: Iterable[Unit], history: History, error: NoRoom) -> TopologyPlacement:
    """The placement ``failed``: no worker is listed, a current assignment stays as it is.

    ``unassigned`` names the tasks that have no worker now: those to place, except in a rebalance, where they
    stay where they are.
    """
    without = {unit.first for unit in history.needed}
    if topology.event == "rebalance":
        without -= {unit.first for worker in history.old for unit in worker.units}
    return TopologyPlacement(
        name=topology.name,
        status="failed",
        error_type=error.refusal.error_type,
        error=error.refusal.message,
        unassigned={task: error.refusal.brief for unit in units if unit.first in without for task in unit.tasks},
    )
