"""The Arrow groups of the assignment: what runs in Spark's Python workers.

Requests and tasks are worked out per topology, in parallel, many small topologies in one group: a
group costs about as much as two hundred tasks. Only the allocation of slots is not parallel,
because every topology narrows the choice of the next: one group for each cluster, which sees
supervisors, slots and workers, never tasks.
"""

import json
from collections.abc import Collection

import pyarrow as pa

from storm_dagster.core.scheduling.requested_workers import (
    DifferNeed,
    RequestedSlot,
    ReusableSlot,
    SlotRequest,
)
from storm_dagster.core.scheduling.slot_allocation import AllocatedSlot, FreePorts
from storm_dagster.core.scheduling.strategy import TopologyEvent, allocate
from storm_dagster.core.scheduling.task_assignment import Allocated
from storm_dagster.core.scheduling.units import Executors, Row, TopologySummary
from storm_dagster.model.multimap import multimap
from storm_dagster.model.placement_reasons import Refusal
from storm_dagster.spark.assignment.schema import ALLOCATED, PLACED, SLOT_REQUESTS, read_executors

_NO_EXECUTORS = Executors([], [], None)
_SLOT = ("node", "host", "port", "why", "role", "ref", "text")


def request_slots(key: tuple[pa.Scalar, ...], runs: pa.Table, rows: pa.Table) -> pa.Table:
    """Slot requests of some topologies from the runs of their executors and the rows about them."""
    executors = read_executors(runs)
    requests: list[Row] = []
    for topology, facts in _by_topology(rows).items():
        text = next(row["text"] for row in facts if row["kind"] == "about")
        event = TopologyEvent(
            TopologySummary(**json.loads(text)), executors.get(topology, _NO_EXECUTORS), facts
        )
        request = event.request()._asdict()
        requests.append(
            {"cluster": key[0].as_py(), "topology": topology, "text": text, "request": request}
        )
    return pa.Table.from_pylist(requests, schema=SLOT_REQUESTS)


def _by_topology(rows: pa.Table) -> dict[int, list[Row]]:
    return multimap((row["topology"], row) for row in rows.to_pylist())


def allocate_slots(key: tuple[pa.Scalar, ...], slots: pa.Table, requests: pa.Table) -> pa.Table:
    """Allocated slots of each topology of one cluster, or the reason why it gets none."""
    served = sorted(requests.to_pylist(), key=lambda row: row["topology"])
    abouts = [TopologySummary(**json.loads(request["text"])) for request in served]
    ports = _free_ports(slots, {host for about in abouts for host in about.isolation})
    rows = [
        {**row, "cluster": request["cluster"], "topology": request["topology"]}
        for request, about in zip(served, abouts, strict=True)
        for row in _allocate(about, request, ports)
    ]
    return pa.Table.from_pylist(rows, schema=ALLOCATED)


def _free_ports(slots: pa.Table, isolated: Collection[str]) -> FreePorts:
    columns = [
        slots.column(name).to_pylist()
        for name in ("node", "rank", "host", "total", "port", "holders")
    ]
    rows = sorted(zip(*columns, strict=True), key=lambda row: row[:2])
    return FreePorts(
        ((node, host, total) for node, rank, host, total, _, _ in rows if rank == 1),
        ((node, port, holders) for node, _, _, _, port, holders in rows if port is not None),
        isolated,
    )


def _allocate(about: TopologySummary, row: Row, ports: FreePorts) -> list[Row]:
    allocated = allocate(about, _request(row["request"]), ports)
    if allocated.refusal is not None:
        return [{"kind": "failed", "text": json.dumps(allocated.refusal._asdict())}]
    return [
        *({"kind": "freed", "ref": worker} for worker in allocated.freed),
        *(
            {"kind": "slot", "number": number, **vars(slot)}
            for number, slot in enumerate(allocated.slots)
        ),
    ]


def _request(row: Row) -> SlotRequest:
    nested = {
        "requested": [
            RequestedSlot(**{**wanted, "hint": _slot(wanted["hint"])})
            for wanted in row["requested"]
        ],
        "own": [_slot(own) for own in row["own"]],
        "reusable": [ReusableSlot(**worker) for worker in row["reusable"]],
        "needs": [DifferNeed(**need) for need in row["needs"]],
    }
    return SlotRequest(**{**row, **nested})


def _slot(row: Row | None) -> tuple[str, int] | None:
    return (row["node"], row["port"]) if row is not None else None


def assign_tasks(key: tuple[pa.Scalar, ...], runs: pa.Table, rows: pa.Table) -> pa.Table:
    """Rows of all workers of some topologies, those that stay as they are included."""
    executors, placed = read_executors(runs), list[Row]()
    for topology, facts in _by_topology(rows).items():
        for row in _assigned(executors.get(topology, _NO_EXECUTORS), facts):
            row.update(cluster=key[0].as_py(), topology=topology)
            placed.append(row)
    return pa.Table.from_pylist(placed, schema=PLACED)


def _assigned(executors: Executors, facts: list[Row]) -> list[Row]:
    by_kind = multimap((row["kind"], row) for row in facts)
    (about,) = (TopologySummary(**json.loads(row["text"])) for row in by_kind.pop("about"))
    slots = sorted(by_kind.pop("slot", ()), key=lambda row: row["number"])
    allocated = Allocated(
        [AllocatedSlot(**{name: row[name] for name in _SLOT}) for row in slots],
        [row["ref"] for row in by_kind.pop("freed", ())],
        next((Refusal(**json.loads(row["text"])) for row in by_kind.pop("failed", ())), None),
    )
    return TopologyEvent(
        about, executors, (row for part in by_kind.values() for row in part)
    ).assign(allocated)
