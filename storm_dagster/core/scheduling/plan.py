"""Local planner: the steps of a placement in process, topology by topology.

It serves reassignment, the leader's own healing and scheduled dry runs. The PySpark assignment
places submissions and rebalances, with the same steps
(``docs/decisions.md#placement-on-spark``).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from storm_dagster.core.scheduling.history import history_rows
from storm_dagster.core.scheduling.slot_allocation import FreePorts
from storm_dagster.core.scheduling.strategy import TopologyEvent, allocate
from storm_dagster.core.scheduling.units import (
    Codes,
    Row,
    executors_of,
    service_order,
    several_tasks,
    summary_of,
)
from storm_dagster.model.placement import (
    PlacementBatch,
    PlacementResult,
    SupervisorSlots,
    TopologyPlacement,
    TopologyToPlace,
)
from storm_dagster.model.placement_reasons import Reason, Refusal, slot_reason_text
from storm_dagster.model.records import WorkerSlot
from storm_dagster.model.slot import Slot

_TEXTS = {int(reason): reason.text for reason in Reason}
"""Number of a reason -> its sentence."""


def plan_placement(batch: PlacementBatch) -> PlacementResult:
    """Place every topology of the batch, by priority (lower first), then by name.

    Two topologies never get the same slot. A slot that a topology's ``old`` names is not given to
    another topology. A topology that does not fit fails alone, with the reason, and takes no slot.
    The same batch always gives the same result; the order in which supervisors, topologies, ports
    and tasks are listed does not matter.
    """
    ports = _free_ports(batch.supervisors, batch.topologies)
    placements = tuple(_place(topology, ports) for topology in service_order(batch.topologies))
    return PlacementResult(placements=placements, planner="python")


def _free_ports(
    supervisors: Sequence[SupervisorSlots], topologies: Sequence[TopologyToPlace]
) -> FreePorts:
    """The unused ports of the supervisors, with the topologies of the batch that hold them."""
    holders = Counter[Slot]()
    for topology in topologies:
        holders.update({worker.slot for worker in topology.old})
    ordered = sorted(supervisors, key=lambda supervisor: supervisor.id)
    slots: list[Slot] = []
    for supervisor in ordered:
        slots += [Slot(supervisor.id, port) for port in sorted(supervisor.unused)]
    isolated: set[str] = set()
    for topology in topologies:
        isolated.update(topology.isolation)
    return FreePorts(
        ((supervisor.id, supervisor.info) for supervisor in ordered),
        ((slot, holders[slot]) for slot in slots),
        isolated,
    )


def event_of(topology: TopologyToPlace) -> TopologyEvent:
    """Return the event of a topology as the rules read it."""
    codes: Codes = {}
    executors = executors_of(topology, codes)
    rows = list(history_rows(topology, codes))
    counts = Counter(executors.component)
    about = summary_of(topology, codes, [counts[component] for component in codes.values()])
    return TopologyEvent(about, executors, rows)


def _place(topology: TopologyToPlace, ports: FreePorts) -> TopologyPlacement:
    event = event_of(topology)
    allocated = allocate(event.about, event.request(), ports)
    return placement_of(topology, event.assign(allocated))


def _warnings_of(rows: Sequence[Row]) -> list[str]:
    """Warnings of a placement; the first row of the topology's workers that has a text has all."""
    for row in rows:
        if row["text"]:
            return json.loads(row["text"])
    return []


def placement_of(topology: TopologyToPlace, rows: list[Row]) -> TopologyPlacement:
    """Build the placement from the rows of its workers (:class:`TaskAssignment`).

    ``rows`` are sorted in place. Its status is ``assigned``, or ``unchanged`` if it equals the live
    assignment. A ``failed`` placement lists no worker and leaves the current assignment unchanged;
    ``unassigned`` names the tasks that have no worker now.
    """
    several = several_tasks(topology)
    # The single row of a refused topology names no slot.
    if len(rows) == 1 and rows[0]["node"] is None:
        return _failed_placement(topology, rows[0], several)
    warnings = _warnings_of(rows)
    before = {worker.slot: worker for worker in topology.old}
    rows.sort(key=lambda row: (row["node"], row["port"]))
    workers: list[WorkerSlot] = []
    # By task.
    slots: dict[int, Slot] = {}
    reasons: dict[int, str] = {}
    for row in rows:
        ids: list[int] = []
        for unit, reason in zip(row["units"], row["reasons"], strict=True):
            for task in several.get(unit, (unit,)):
                ids.append(task)
                reasons[task] = _TEXTS[reason]
        slot = Slot(row["node"], row["port"])
        workers.append(
            WorkerSlot.of_tasks(slot, row["host"], ids, memory_bytes=row["memory"], cpu=row["cpu"])
        )
        slots.update(dict.fromkeys(ids, slot))
    unchanged = topology.event != "new" and _is_unchanged(before, workers)
    return TopologyPlacement(
        name=topology.name,
        status="unchanged" if unchanged else "assigned",
        workers=tuple(workers),
        kept=tuple(worker.slot.key for worker in workers if worker.slot in before),
        moved=_moved(topology, slots),
        reasons=dict(sorted(reasons.items())),
        # In the order among equals, with which ``explain`` repeats the choice.
        worker_reasons={
            Slot(row["node"], row["port"]).key: slot_reason_text(row["why"], row["against"])
            for row in sorted(rows, key=lambda row: row["number"])
        },
        warnings=tuple(warnings),
    )


def _failed_placement(
    topology: TopologyToPlace, row: Row, several: Mapping[int, tuple[int, ...]]
) -> TopologyPlacement:
    """The placement from the single row of a refused topology."""
    refusal = Refusal(**json.loads(row["text"]))
    without: list[int] = []
    for unit in row["units"]:
        without += several.get(unit, (unit,))
    return TopologyPlacement(
        name=topology.name,
        status="failed",
        error_type=refusal.error_type,
        error=refusal.message,
        unassigned=dict.fromkeys(without, refusal.brief),
    )


def _is_unchanged(before: Mapping[Slot, WorkerSlot], workers: Sequence[WorkerSlot]) -> bool:
    """True if the live assignment has the same workers.

    Unknown resources (0) count as equal.
    """
    if len(before) != len(workers):
        return False
    for worker in workers:
        old = before.get(worker.slot)
        if old is None or old.tasks != worker.tasks:
            return False
        if old.memory_bytes not in (0, worker.memory_bytes) or old.cpu not in (0, worker.cpu):
            return False
    return True


def _moved(topology: TopologyToPlace, slots: Mapping[int, Slot]) -> int:
    """Number of tasks of the old workers whose slot, by ``slots``, is another one."""
    moved = 0
    for worker in topology.old:
        before = worker.slot
        moved += sum(slots.get(task, before) != before for task in worker.ids)
    return moved
