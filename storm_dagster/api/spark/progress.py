"""Owner of a streaming query's checkpoint, and progress of a query as metrics.

The owner is a record in the checkpoint's folder ``owner``. Spark writes and reads it, because a
checkpoint may be at a place that only the Spark server can reach.
"""

import json
import time
import uuid
from collections.abc import Mapping
from datetime import datetime
from math import isfinite
from typing import Any

from storm_dagster.model.errors import Conflict, InvalidTopology


class CheckpointOwner:
    """Ownership of a checkpoint by this task.

    Of the tasks of a component that of the newest assignment is the owner; of several with the same
    assignment the last one that called :meth:`take`.
    """

    def __init__(self, checkpoint: str, context: Any) -> None:
        # The last part of a topology id is the time of its submission.
        launched = str(context.topology_id).rpartition("-")[2]
        self._checkpoint = checkpoint
        self._folder = f"{checkpoint.rstrip('/')}/owner"
        self._own_record: dict[str, Any] = {
            "name": f"component {context.component!r} of topology {context.topology_name!r}",
            # A larger one is that of a newer deployment or assignment.
            "epoch": [int(launched) if launched.isdigit() else 0, context.assignment_version],
            "token": uuid.uuid4().hex,
            "worker": f"task {context.task_id} at {context.host}:{context.port}",
        }

    def take(self, session: Any) -> None:
        """Become the owner, before the query starts.

        Raises :class:`InvalidTopology` if the checkpoint belongs to another component or topology,
        and :class:`Conflict` if it belongs to a task of a newer assignment.
        """
        own_record = self._own_record
        owner = self._read(session)
        if owner["name"] != own_record["name"]:
            raise InvalidTopology(
                f"checkpoint {self._checkpoint} belongs to {owner['name']} ({owner['worker']}), "
                f"not to {own_record['name']}: name another checkpoint; "
                f"if that one is gone for good, remove {self._folder}"
            )
        if owner["epoch"] > own_record["epoch"]:
            raise self._lost_to(owner)
        frame = session.createDataFrame([(json.dumps(own_record),)], "value string")
        frame.coalesce(1).write.mode("overwrite").text(self._folder)

    def check(self, session: Any) -> None:
        """Return if this task is the owner; :class:`Conflict` names another owner."""
        owner = self._read(session)
        if owner["token"] != self._own_record["token"]:
            raise self._lost_to(owner)

    def _lost_to(self, owner: dict[str, Any]) -> Conflict:
        return Conflict(
            f"the query of {self._own_record['name']} with checkpoint {self._checkpoint} "
            f"now belongs to {owner['worker']}, so {self._own_record['worker']} leaves it: "
            "one task at a time owns a query; ignore this if the task moved"
        )

    def _read(self, session: Any) -> dict[str, Any]:
        """The record of the owner; this task's record if it is missing or damaged."""
        try:
            (row,) = session.read.text(self._folder).collect()
            record = json.loads(row[0])
            return {key: record[key] for key in self._own_record}
        except (ValueError, KeyError, TypeError):
            return self._own_record
        except Exception as error:
            if "PATH_NOT_FOUND" in str(error):
                return self._own_record
            raise


def new_reports(query: Any, newest: dict[str, int]) -> list[tuple[dict[str, Any], bool]]:
    """Spark's reports after the ``newest`` batch of the run, oldest first.

    Each is a pair (report, True if its batch has ended). ``newest``, run -> batch, is updated, so
    that each batch that has ended is reported once.
    """
    reports: list[tuple[dict[str, Any], bool]] = []
    for progress in query.recentProgress:
        report = json.loads(progress.json)
        run = report["runId"]
        batch = report["batchId"]
        # An idle query reports the batch that it waits for.
        has_ended = "addBatch" in report["durationMs"]
        if batch > newest.get(run, -1):
            reports.append((report, has_ended))
            newest[run] = batch if has_ended else batch - 1
    return reports


def metrics_of(report: Mapping[str, Any], now_secs: float | None = None) -> dict[str, float]:
    """The metrics of a component, from Spark's report of a batch.

    ``lag`` is the number of records that the sources have and the query has not read: the distance
    of numeric offsets, over all partitions. ``watermark_secs`` is in seconds since 1970; a metric
    that the query or its source does not have is missing.
    """
    sources = report.get("sources") or []
    state = report.get("stateOperators") or []
    metrics: dict[str, float] = {
        "batch_id": report["batchId"],
        "batch_rows": _sum(sources, "numInputRows"),
        "batch_ms": report["durationMs"].get("triggerExecution", 0),
        "input_rows_per_sec": round(_sum(sources, "inputRowsPerSecond"), 3),
        "processed_rows_per_sec": round(_sum(sources, "processedRowsPerSecond"), 3),
    }
    lags = [lag for lag in map(_lag, sources) if lag is not None]
    if lags:
        metrics["lag"] = sum(lags)
    if state:
        metrics["state_rows"] = _sum(state, "numRowsTotal")
        metrics["state_bytes"] = _sum(state, "memoryUsedBytes")
    event_time = report.get("eventTime") or {}
    watermark = event_time.get("watermark")
    if watermark:
        if now_secs is None:
            now_secs = time.time()
        secs = datetime.fromisoformat(watermark.replace("Z", "+00:00")).timestamp()
        # Before its first row Spark's watermark is 1970.
        if secs > 0:
            metrics["watermark_secs"] = secs
            metrics["watermark_lag_secs"] = round(now_secs - secs, 3)
    return metrics


def _sum(parts: list[Mapping[str, Any]], name: str) -> float:
    """Sum of the finite numbers of that name.

    A batch that took no time has an infinite rate.
    """
    total: float = 0
    for part in parts:
        value = part.get(name)
        if isinstance(value, int | float) and isfinite(value):
            total += value
    return total


def _lag(source: Mapping[str, Any]) -> float | None:
    try:
        return _total(source["latestOffset"]) - _total(source["endOffset"])
    except (KeyError, TypeError, ValueError):
        return None


def _total(offset: Any) -> float:
    """Sum of the offsets of a source; Kafka has topic -> partition -> offset."""
    if isinstance(offset, Mapping):
        return sum(map(_total, offset.values()))
    return float(offset)
