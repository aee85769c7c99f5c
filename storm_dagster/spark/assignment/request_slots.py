"""Slot requests of topologies with a history, one row for each topology. Runs in Spark."""

from __future__ import annotations

import json

import pyarrow as pa

from storm_dagster.core.scheduling.steps import TopologyEvent
from storm_dagster.core.scheduling.units import TopologySummary
from storm_dagster.spark.assignment.schema import SLOT_REQUESTS, read_executors


def request_slots(key: tuple[pa.Scalar, ...], units: pa.Table, rows: pa.Table) -> pa.Table:
    """Slot request of one topology from its executors and the rows about it."""
    facts = rows.to_pylist()
    text = next(row["text"] for row in facts if row["kind"] == "about")
    event = TopologyEvent(TopologySummary(**json.loads(text)), read_executors(units), facts)
    row = {"cluster": key[0].as_py(), "topology": key[1].as_py(), "text": text, "request": event.request()._asdict()}
    return pa.Table.from_pylist([row], schema=SLOT_REQUESTS)
