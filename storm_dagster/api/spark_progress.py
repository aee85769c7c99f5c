"""Progress of a streaming query as numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

__all__ = ["QueryProgress", "metrics_of"]


class QueryProgress:
    """The batches of the runs of one query, each counted once."""

    def __init__(self) -> None:
        self._newest: tuple[str, int] = ("", -1)
        self.batches: int = 0

    def skip(self, query: Any) -> None:
        """Count no batch that ended before; those of a query that another task started are in its statistics."""
        before = self.batches
        for _ in self.batches_since(query):
            self.batches = before

    def batches_since(self, query: Any) -> Iterator[dict[str, Any]]:
        """Spark's reports of the batches that have ended since the last call, oldest first; of an idle query the last."""
        reports = [json.loads(each.json) for each in query.recentProgress]
        for report in reports:
            at = (report["runId"], report["batchId"])
            # An idle query reports the batch that it waits for.
            ended = "addBatch" in report["durationMs"]
            if ended and (at[0] != self._newest[0] or at[1] > self._newest[1]):
                self._newest = at
                self.batches += 1
                yield report
        if reports and "addBatch" not in reports[-1]["durationMs"]:
            yield reports[-1]


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
    return sum(value for part in parts if isinstance(value := part.get(name), int | float))


def _lag(source: Mapping[str, Any]) -> float | None:
    behind = (source.get("metrics") or {}).get("maxOffsetsBehindLatest")
    try:
        return float(behind) if behind is not None else float(source["latestOffset"]) - float(source["endOffset"])
    except (KeyError, TypeError, ValueError):
        return None
