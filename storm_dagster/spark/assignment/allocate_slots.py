"""Slot allocation for the topologies of a cluster, in their order: one Arrow group in Spark for each cluster.

The only stage that is not parallel, because every topology narrows the choice of the next. It sees
supervisors, slots and workers, never tasks.
"""

from __future__ import annotations

import json

import pyarrow as pa

from storm_dagster.core.scheduling.free_ports import FreePorts
from storm_dagster.core.scheduling.slot_requests import DifferNeed, RequestedSlot, ReusableSlot, SlotRequest
from storm_dagster.core.scheduling.steps import allocate
from storm_dagster.core.scheduling.units import Row, TopologySummary
from storm_dagster.spark.assignment.schema import ALLOCATED


def allocate_slots(key: tuple[pa.Scalar, ...], slots: pa.Table, requests: pa.Table) -> pa.Table:
    """Allocated slots of each topology of one cluster, or the reason why it gets none."""
    ports = _free_ports(slots)
    rows = [
        {**row, "cluster": request["cluster"], "topology": request["topology"]}
        for request in sorted(requests.to_pylist(), key=lambda row: row["topology"])
        for row in _allocate(request, ports)
    ]
    return pa.Table.from_pylist(rows, schema=ALLOCATED)


def _free_ports(slots: pa.Table) -> FreePorts:
    columns = [slots.column(name).to_pylist() for name in ("node", "rank", "host", "total", "port", "holders")]
    rows = sorted(zip(*columns, strict=True), key=lambda row: row[:2])
    return FreePorts(
        ((node, host, total) for node, rank, host, total, _, _ in rows if rank == 1),
        ((node, port, holders) for node, _, _, _, port, holders in rows if port is not None),
    )


def _allocate(row: Row, ports: FreePorts) -> list[Row]:
    allocated = allocate(TopologySummary(**json.loads(row["text"])), _request(row["request"]), ports)
    if allocated.refusal is not None:
        return [{"kind": "failed", "text": json.dumps(allocated.refusal._asdict())}]
    return [
        *({"kind": "freed", "ref": worker} for worker in allocated.freed),
        *({"kind": "slot", "number": number, **vars(slot)} for number, slot in enumerate(allocated.slots)),
    ]


def _request(row: Row) -> SlotRequest:
    nested = {
        "requested": [RequestedSlot(**{**wanted, "hint": _slot(wanted["hint"])}) for wanted in row["requested"]],
        "own": [_slot(own) for own in row["own"]],
        "reusable": [ReusableSlot(**worker) for worker in row["reusable"]],
        "needs": [DifferNeed(**need) for need in row["needs"]],
    }
    return SlotRequest(**{**row, **nested})


def _slot(row: Row | None) -> tuple[str, int] | None:
    return (row["node"], row["port"]) if row is not None else None
