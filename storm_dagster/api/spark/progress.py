"""A streaming query from outside: the owner of its checkpoint, and its progress as numbers.

The owner is a record in the checkpoint's folder ``owner``, which Spark writes and reads: the
checkpoint is where the Spark server can write, which a worker may not reach.
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
    """This task's claim. Of the tasks of a component the one of the newest assignment owns it, of
    equal ones the last.
    """

    def __init__(self, checkpoint: str, context: Any) -> None:
        launched = str(context.topology_id).rpartition("-")[2]
        self._checkpoint = checkpoint
        self._place = f"{checkpoint.rstrip('/')}/owner"
        self._mine: dict[str, Any] = {
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
        mine, found = self._mine, self._read(session)
        if found["name"] != mine["name"]:
            raise InvalidTopology(
                f"checkpoint {self._checkpoint} belongs to {found['name']} ({found['worker']}), not to {mine['name']}: "
                f"name another checkpoint; if that one is gone for good, remove {self._place}"
            )
        if found["epoch"] > mine["epoch"]:
            raise self._lost_to(found)
        frame = session.createDataFrame([(json.dumps(mine),)], "value string")
        frame.coalesce(1).write.mode("overwrite").text(self._place)

    def check(self, session: Any) -> None:
        """Return if this task is the owner; :class:`Conflict` names the other one."""
        found = self._read(session)
        if found["token"] != self._mine["token"]:
            raise self._lost_to(found)

    def _lost_to(self, found: dict[str, Any]) -> Conflict:
        return Conflict(
            f"the query of {self._mine['name']} with checkpoint {self._checkpoint} now belongs to {found['worker']}, so "
            f"{self._mine['worker']} leaves it: one task at a time owns a query; nothing is to be done if the task moved"
        )

    def _read(self, session: Any) -> dict[str, Any]:
        """The record; this task's own if there is none, or a damaged one."""
        try:
            (row,) = session.read.text(self._place).collect()
            return {key: json.loads(row[0])[key] for key in self._mine}
        except (ValueError, KeyError, TypeError):
            return self._mine
        except Exception as error:
            if "PATH_NOT_FOUND" in str(error):
                return self._mine
            raise


def new_reports(query: Any, newest: dict[str, int]) -> list[tuple[dict[str, Any], bool]]:
    """(Spark's report, whether it is of a batch that has ended) after the ``newest`` batch of the
    run, oldest first.

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

    ``lag`` is what the sources have and the query has not read: the distance of numeric offsets,
    over all partitions. ``watermark_secs`` is in seconds since 1970; a metric that the query or its
    source does not have is left out.
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
            found["watermark_lag_secs"] = round(
                (time.time() if now_secs is None else now_secs) - secs, 3
            )
    return found


def _sum(parts: list[Mapping[str, Any]], name: str) -> float:
    # A batch that took no time has an infinite rate.
    return sum(
        value
        for part in parts
        if isinstance(value := part.get(name), int | float) and isfinite(value)
    )


def _lag(source: Mapping[str, Any]) -> float | None:
    try:
        return _total(source["latestOffset"]) - _total(source["endOffset"])
    except (KeyError, TypeError, ValueError):
        return None


def _total(offset: Any) -> float:
    # Of Kafka: topic -> partition -> offset.
    return sum(map(_total, offset.values())) if isinstance(offset, Mapping) else float(offset)
