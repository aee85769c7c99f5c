"""Runs in Spark, in one Arrow group for each cluster: slots for topologies, in their order.

The only stage that is not parallel, because every topology narrows the choice of the next. It sees
supervisors, slots and workers, never tasks.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from storm_dagster.model.placement_reasons import no_supervisor_refusal
from storm_dagster.spark.assignment.balanced import seat_balanced
from storm_dagster.spark.assignment.even import seat_even, seat_local
from storm_dagster.spark.assignment.ports import Ports
from storm_dagster.spark.assignment.schema import SEATS
from storm_dagster.spark.assignment.seating import Refused, Seating

__all__ = ["allot_slots"]

Row = dict[str, Any]


def allot_slots(key: tuple[pa.Scalar, ...], slots: pa.Table, demands: pa.Table) -> pa.Table:
    """Rows of seats for each topology of one cluster, or a row that says why it gets none."""
    ports = Ports(slots)
    columns: dict[str, list[Any]] = {name: [] for name in SEATS.names}
    for demand in sorted(demands.to_pylist(), key=lambda row: row["topology"]):
        for seat in _serve(json.loads(demand["text"]), demand["demand"], ports):
            seat.update(cluster=demand["cluster"], topology=demand["topology"])
            for name, values in columns.items():
                values.append(seat.get(name))
    return pa.table(columns, schema=SEATS)


def _serve(about: Row, demand: Row, ports: Ports) -> list[Row]:
    if demand["settled"]:
        return []
    seating = Seating(about, demand, ports)
    try:
        if about["strategy"] == "even":
            seat_even(seating)
        elif not ports.host:
            raise Refused(no_supervisor_refusal(about["name"]))
        elif about["strategy"] == "local":
            seat_local(seating)
        else:
            seat_balanced(seating)
    except Refused as refused:
        seating.close(refused=True)
        return [{"kind": "failed", "text": json.dumps(refused.refusal._asdict())}]
    seating.close(refused=False)
    freed = [{"kind": "freed", "ref": worker} for worker in seating.freed]
    return [*freed, *({"kind": "seat", "seat": number, **seat} for number, seat in enumerate(seating.seats))]
