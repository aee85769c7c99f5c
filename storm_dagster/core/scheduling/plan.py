"""Local planner: the steps of a placement in process, one topology after the other.

It serves reassignment, the leader's own healing and scheduled dry runs; submissions and rebalances
are placed by the PySpark assignment, with the same steps
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


def plan_placement(batch: PlacementBatch) -> PlacementResult:
    """Place every topology of the batch, in order of priority (lower first), then name.

    No slot is given to two topologies; slots that any topology's ``old`` names are given to no
    other one. A topology that does not fit fails alone, with the reason, and takes no slot. The
    same batch always gives the same result, in whatever order supervisors, topologies, ports and
    tasks are listed.
    """
    ports = _free_ports(batch.supervisors, batch.topologies)
    placements = tuple(_place(topology, ports) for topology in service_order(batch.topologies))
    return PlacementResult(placements=placements, planner="python")


def _free_ports(
    supervisors: Sequence[SupervisorSlots], topologies: Sequence[TopologyToPlace]
) -> FreePorts:
    holders = Counter[Slot]()
    for topology in topologies:
        holders.update({worker.slot for worker in topology.old})
    ordered = sorted(supervisors, key=lambda supervisor: supervisor.id)
    slots: list[Slot] = []
    for supervisor in ordered:
        slots += [Slot(supervisor.id, port) for port in sorted(supervisor.unused)]
    return FreePorts(
        ((supervisor.id, supervisor.info) for supervisor in ordered),
        ((slot, holders[slot]) for slot in slots),
        {host for topology in topologies for host in topology.isolation},
    )


def event_of(topology: TopologyToPlace) -> TopologyEvent:
    """The event of a topology as the rules read it."""
    codes: Codes = {}
    executors = executors_of(topology, codes)
    rows = list(history_rows(topology, codes))
    counts = Counter(executors.component)
    about = summary_of(topology, codes, [counts[component] for component in codes.values()])
    return TopologyEvent(about, executors, rows)


def _place(topology: TopologyToPlace, ports: FreePorts) -> TopologyPlacement:
    event = event_of(topology)
    return placement_of(topology, event.assign(allocate(event.about, event.request(), ports)))


_TEXTS = {int(reason): reason.text for reason in Reason}


def placement_of(topology: TopologyToPlace, rows: list[Row]) -> TopologyPlacement:
    """The placement from the rows of its workers: ``assigned``, or ``unchanged`` when a live
    assignment looks so.

    A ``failed`` one lists no worker, a current assignment stays as it is; ``unassigned`` names the
    tasks that have no worker now.
    """
    several = several_tasks(topology)
    if len(rows) == 1 and rows[0]["node"] is None:
        refusal = Refusal(**json.loads(rows[0]["text"]))
        without = [task for unit in rows[0]["units"] for task in several.get(unit, (unit,))]
        return TopologyPlacement(
            name=topology.name,
            status="failed",
            error_type=refusal.error_type,
            error=refusal.message,
            unassigned=dict.fromkeys(without, refusal.brief),
        )
    warnings = next((json.loads(row["text"]) for row in rows if row["text"]), ())
    before = {worker.slot: worker for worker in topology.old}
    rows.sort(key=lambda row: (row["node"], row["port"]))
    workers: list[WorkerSlot] = []
    slots: dict[int, Slot] = {}
    reasons: dict[int, str] = {}
    for row in rows:
        tasks = [
            (unit, _TEXTS[reason])
            for unit, reason in zip(row["units"], row["reasons"], strict=True)
        ]
        if several:
            tasks = [(task, text) for unit, text in tasks for task in several.get(unit, (unit,))]
        reasons.update(tasks)
        ids = [task for task, _ in tasks]
        slot = Slot(row["node"], row["port"])
        workers.append(
            WorkerSlot.of_tasks(slot, row["host"], ids, memory_bytes=row["memory"], cpu=row["cpu"])
        )
        slots.update(dict.fromkeys(ids, slot))
    unchanged = topology.event != "new" and _as_before(before, workers)
    return TopologyPlacement(
        name=topology.name,
        status="unchanged" if unchanged else "assigned",
        workers=tuple(workers),
        kept=tuple(worker.slot.key for worker in workers if worker.slot in before),
        moved=_moved(topology, slots),
        reasons=dict(sorted(reasons.items())),
        worker_reasons={
            Slot(row["node"], row["port"]).key: slot_reason_text(row["why"], row["against"])
            for row in sorted(rows, key=lambda row: row["number"])
        },
        warnings=tuple(warnings),
    )


def _as_before(before: Mapping[Slot, WorkerSlot], workers: Sequence[WorkerSlot]) -> bool:
    """Whether the live assignment has the same workers; unknown resources (0) count as equal."""
    pairs = [(before.get(worker.slot), worker) for worker in workers]
    return len(before) == len(workers) and all(
        old is not None
        and old.tasks == new.tasks
        and old.memory_bytes in (0, new.memory_bytes)
        and old.cpu in (0, new.cpu)
        for old, new in pairs
    )


def _moved(topology: TopologyToPlace, slots: Mapping[int, Slot]) -> int:
    """Number of tasks of the old workers whose slot, by ``slots``, is another one."""
    moved = 0
    for worker in topology.old:
        before = worker.slot
        moved += sum(slots.get(task, before) != before for task in worker.ids)
    return moved
