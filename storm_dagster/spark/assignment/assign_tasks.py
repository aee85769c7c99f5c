"""Assignment of executors to the slots of their topology. Runs in Spark, for all topologies in parallel."""

from __future__ import annotations

import json

import pyarrow as pa

from storm_dagster.core.scheduling.slot_allocation import AllocatedSlot
from storm_dagster.core.scheduling.steps import TopologyEvent
from storm_dagster.core.scheduling.task_assignment import Allocated
from storm_dagster.core.scheduling.units import Row, TopologySummary
from storm_dagster.model.placement_reasons import Refusal
from storm_dagster.spark.assignment.schema import PLACED, read_executors

_SLOT = ("node", "host", "port", "why", "role", "ref", "text")


def assign_tasks(key: tuple[pa.Scalar, ...], units: pa.Table, rows: pa.Table) -> pa.Table:
    """Rows of all workers of one topology, those that stay as they are included."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows.to_pylist():
        by_kind.setdefault(row["kind"], []).append(row)
    (about,) = (TopologySummary(**json.loads(row["text"])) for row in by_kind.pop("about"))
    slots = sorted(by_kind.pop("slot", ()), key=lambda row: row["number"])
    allocated = Allocated(
        [AllocatedSlot(**{name: row[name] for name in _SLOT}) for row in slots],
        [row["ref"] for row in by_kind.pop("freed", ())],
        next((Refusal(**json.loads(row["text"])) for row in by_kind.pop("failed", ())), None),
    )
    event = TopologyEvent(about, read_executors(units), (row for part in by_kind.values() for row in part))
    placed = event.assign(allocated)
    for row in placed:
        row.update(cluster=key[0].as_py(), topology=key[1].as_py())
    return pa.Table.from_pylist(placed, schema=PLACED)
