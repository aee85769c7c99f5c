"""Slot allocation for the topologies of a cluster, in their order: one Arrow group in Spark for each cluster.

The only stage that is not parallel, because every topology narrows the choice of the next. It sees
supervisors, slots and workers, never tasks.
"""

from __future__ import annotations

import json

import pyarrow as pa

from storm_dagster.model.placement_reasons import no_supervisor_refusal
from storm_dagster.spark.assignment.balanced import allocate_balanced
from storm_dagster.spark.assignment.even import allocate_even, allocate_local
from storm_dagster.spark.assignment.free_ports import FreePorts
from storm_dagster.spark.assignment.schema import ALLOCATED, Row
from storm_dagster.spark.assignment.slot_allocation import PlacementRefused, SlotAllocation


def allocate_slots(key: tuple[pa.Scalar, ...], slots: pa.Table, requests: pa.Table) -> pa.Table:
    """Allocated slots of each topology of one cluster, or the reason why it gets none."""
    ports = FreePorts(slots)
    rows = [
        {**row, "cluster": request["cluster"], "topology": request["topology"]}
        for request in sorted(requests.to_pylist(), key=lambda row: row["topology"])
        for row in _allocate(json.loads(request["text"]), request["request"], ports)
    ]
    return pa.Table.from_pylist(rows, schema=ALLOCATED)


def _allocate(about: Row, request: Row, ports: FreePorts) -> list[Row]:
    if request["unchanged"]:
        return []
    allocation = SlotAllocation(about, request, ports)
    try:
        if about["strategy"] == "even":
            allocate_even(allocation)
        elif not ports.host:
            raise PlacementRefused(no_supervisor_refusal(about["name"]))
        elif about["strategy"] == "local":
            allocate_local(allocation)
        else:
            allocate_balanced(allocation)
    except PlacementRefused as refused:
        allocation.close(refused=True)
        return [{"kind": "failed", "text": json.dumps(refused.refusal._asdict())}]
    allocation.close(refused=False)
    freed = [{"kind": "freed", "ref": worker} for worker in allocation.freed]
    return [
        *freed,
        *({"kind": "slot", "number": number, **row} for number, row in enumerate(allocation.slots)),
    ]
