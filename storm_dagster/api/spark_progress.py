"""Progress of a streaming query as numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from math import isfinite
from typing import Any


def new_reports(query: Any, newest: dict[str, int]) -> list[tuple[dict[str, Any], bool]]:
    """(Spark's report, whether it is of a batch that has ended) after the ``newest`` batch of the run, oldest first.

    ``newest`` is brought up to date, so that each batch is reported once.
    """
    found: list[tuple[dict[str, Any], bool]] = []
    for report in [json.loads(each.json) for each in query.recentProgress]:
        run, batch = report["runId"], report["batchId"]
        # An idle query reports the batch that it waits for.
        ended = "addBatch" in report["durationMs"]
        if batch > newest.get(run, -1):
            found.append((report, ended))
            newest[run] = batch if ended else batch - 1
    return found


def metrics_of(report: Mapping[str, Any], now_secs: float | None = None) -> dict[str, float]:
    """The metrics of a component, of Spark's report of a batch.

    ``lag`` counts what the sources have and the query has not read: records of Kafka, else units of numeric offsets.
    ``watermark_secs`` is in seconds since 1970; a metric that the query or its source does not have is left out.
    """
    sources, state = report.get("sources") or [], report.get("stateOperators") or []
    found: dict[str, float] = {
        "batch_id": report["batchId"],
        "batch_rows": _sum(sources, "numInputRows"),
        "batch_ms": report["durationMs"].get("triggerExecution", 0),
        "input_rows_per_sec": round(_sum(sources, "inputRowsPerSecond"), 3),
        "processed_rows_per_sec": round(_sum(sources, "processedRowsPerSecond"), 3),
    }
    lags = [lag for lag in map(_lag, sources) if lag is not None]
    if lags:
        found["lag"] = sum(lags)
    if state:
        found["state_rows"] = _sum(state, "numRowsTotal")
        found["state_bytes"] = _sum(state, "memoryUsedBytes")
    watermark = (report.get("eventTime") or {}).get("watermark")
    if watermark:
        secs = datetime.fromisoformat(watermark.replace("Z", "+00:00")).timestamp()
        # Before its first row Spark's watermark is 1970.
        if secs > 0:
            found["watermark_secs"] = secs
            found["watermark_lag_secs"] = round((time.time() if now_secs is None else now_secs) - secs, 3)
    return found


def _sum(parts: list[Mapping[str, Any]], name: str) -> float:
    # A batch that took no time has an infinite rate.
    return sum(value for part in parts if isinstance(value := part.get(name), int | float) and isfinite(value))


def _lag(source: Mapping[str, Any]) -> float | None:
    behind = (source.get("metrics") or {}).get("maxOffsetsBehindLatest")
    try:
        return float(behind) if behind is not None else float(source["latestOffset"]) - float(source["endOffset"])
    except (KeyError, TypeError, ValueError):
        return None
