"""Plug-in of pytest that records the batches that tests place, so that Spark can place them too.

``-p storm_rigs.placement.batch_recorder``, with the file in ``STORM_RECORDED_BATCHES``; a line of
JSON for each batch.
"""

from __future__ import annotations

import os

from storm_dagster.core.scheduling import plan
from storm_dagster.model.placement import PlacementBatch, PlacementResult

RECORDED_BATCHES = "STORM_RECORDED_BATCHES"


def pytest_configure() -> None:
    """Record every batch of the local planner; tests import it by name afterwards."""
    path = os.environ[RECORDED_BATCHES]
    place = plan.plan_placement

    def record(batch: PlacementBatch) -> PlacementResult:
        with open(path, "a", encoding="utf-8") as lines:
            lines.write(batch.model_dump_json() + "\n")
        return place(batch)

    plan.plan_placement = record
