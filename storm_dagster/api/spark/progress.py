"""Owner and progress of a streaming query.

The owner of a checkpoint is a record in its folder ``owner``. Spark writes and reads it: the
checkpoint is in a place that the Spark server can write, but a worker perhaps cannot reach.
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
    """Ownership record of this task for a checkpoint.

    Of the tasks of a component the one of the newest assignment owns the checkpoint, of equal ones
    the last.
    """

    def __init__(self, checkpoint: str, context: Any) -> None:
        launched = str(context.topology_id).rpartition("-")[2]
        self._checkpoint = checkpoint
        self._place = f"{checkpoint.rstrip('/')}/owner"
        self._record: dict[str, Any] = {
            "name": f"component {context.component!r} of topology {context.topology_name!r}",
            "epoch": [int(launched) if launched.isdigit() else 0, context.assignment_version],
            "token": uuid.uuid4().hex,
            "worker": f"task {context.task_id} at {context.host}:{context.port}",
        }

    def take(self, session: Any) -> None:
        """Become the owner, before the query starts.

        :class:`InvalidTopology` if it belongs to another component or topology, :class:`Conflict`
        if it belongs to a task of a newer assignment.
        """
        owner = self._read(session)
        if owner["name"] != self._record["name"]:
            raise InvalidTopology(
                f"checkpoint {self._checkpoint} belongs to {owner['name']} ({owner['worker']}), "
                f"not to {self._record['name']}: "
                f"name another checkpoint; if that one is gone for good, remove {self._place}"
            )
        if owner["epoch"] > self._record["epoch"]:
            raise self._lost_to(owner)
        frame = session.createDataFrame([(json.dumps(self._record),)], "value string")
        frame.coalesce(1).write.mode("overwrite").text(self._place)

    def check(self, session: Any) -> None:
        """Return if this task is the owner; :class:`Conflict` names the other one."""
        owner = self._read(session)
        if owner["token"] != self._record["token"]:
            raise self._lost_to(owner)

    def _lost_to(self, owner: dict[str, Any]) -> Conflict:
        return Conflict(
            f"the query of {self._record['name']} with checkpoint {self._checkpoint} now belongs "
            f"to {owner['worker']}, so {self._record['worker']} leaves it: one task at a time owns "
            "a query; nothing is to be done if the task moved"
        )

    def _read(self, session: Any) -> dict[str, Any]:
        """The record in the checkpoint; this task's own if it is missing or damaged."""
        try:
            (row,) = session.read.text(self._place).collect()
            stored = json.loads(row[0])
            return {key: stored[key] for key in self._record}
        except (ValueError, KeyError, TypeError):
            return self._record
        except Exception as error:
            if "PATH_NOT_FOUND" in str(error):
                return self._record
            raise


def new_reports(query: Any, newest: dict[str, int]) -> list[tuple[dict[str, Any], bool]]:
    """Return Spark's reports after the ``newest`` batch of the run, oldest first.

    Each comes with True if its batch has ended. ``newest`` is updated, so that each batch is
    reported once.
    """
    reports: list[tuple[dict[str, Any], bool]] = []
    for progress in query.recentProgress:
        report = json.loads(progress.json)
        run = report["runId"]
        batch = report["batchId"]
        # An idle query reports the batch that it waits for.
        ended = "addBatch" in report["durationMs"]
        if batch > newest.get(run, -1):
            reports.append((report, ended))
            newest[run] = batch if ended else batch - 1
    return reports


def metrics_of(report: Mapping[str, Any], now_secs: float | None = None) -> dict[str, float]:
    """The metrics of a component, from Spark's report of a batch.

    ``lag`` is the number of records of the sources that the query has not read: the distance of
    numeric offsets, over all partitions. ``watermark_secs`` is in seconds since 1970. A metric that
    the query or its source does not have is omitted.
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
    watermark = (report.get("eventTime") or {}).get("watermark")
    if watermark:
        secs = datetime.fromisoformat(watermark.replace("Z", "+00:00")).timestamp()
        # Before its first row Spark's watermark is 1970.
        if secs > 0:
            if now_secs is None:
                now_secs = time.time()
            metrics["watermark_secs"] = secs
            metrics["watermark_lag_secs"] = round(now_secs - secs, 3)
    return metrics


def _sum(parts: list[Mapping[str, Any]], name: str) -> float:
    total = 0
    for part in parts:
        value = part.get(name)
        # A batch that took no time has an infinite rate.
        if isinstance(value, int | float) and isfinite(value):
            total += value
    return total


def _lag(source: Mapping[str, Any]) -> float | None:
    try:
        return _total(source["latestOffset"]) - _total(source["endOffset"])
    except (KeyError, TypeError, ValueError):
        return None


def _total(offset: Any) -> float:
    # Of Kafka: topic -> partition -> offset.
    if isinstance(offset, Mapping):
        return sum(map(_total, offset.values()))
    return float(offset)
