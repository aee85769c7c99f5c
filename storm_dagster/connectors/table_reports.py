"""Reports of a sink's task on its tables: materializations for Dagster."""

import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from storm_dagster.model.dagster_events import DagsterEvent, target_key, written_assets
from storm_dagster.model.dagster_names import DECLARED_VERSION_KEY

if TYPE_CHECKING:
    from storm_dagster.api.bolts import Bolt

REPORT_SECS_KEY = "topology.sink.report.secs"
"""Conf key: interval of the reports; 0 turns them off."""


@dataclass
class _Unreported:
    """Rows that are in no report of one asset."""

    since_ms: int
    """Time of the former report, or of the start of the task."""
    rows: int = 0
    newest_ms: int | None = None
    """Largest event time of these rows; ``None``: unknown."""

    def add(self, rows: int, newest_ms: int | None) -> None:
        """Count written rows."""
        self.rows += rows
        if newest_ms is not None:
            self.newest_ms = max(newest_ms, self.newest_ms or newest_ms)


@dataclass
class _Offer:
    """A report that was given to the worker, and the rows in it."""

    is_taken: "Future[bool]"
    unreported: _Unreported


class TableReports:
    """Reports of one task on the assets that its sink writes.

    There is one report for each interval in which rows were written, at most. All tasks of a
    topology report at the same time, so that its code location merges their reports. A report has
    no tuple, and holds none back. The worker drops it if it has no room; its rows are in the next
    one. Topologies that no code location declares make no report. Used by the thread of the task.
    """

    def __init__(self, bolt: "Bolt") -> None:
        self._bolt = bolt
        conf: Mapping[str, Any] = bolt.conf
        interval_ms = 0
        if DECLARED_VERSION_KEY in conf:
            interval_ms = 1000 * int(conf.get(REPORT_SECS_KEY, 0))
        self._interval_ms = interval_ms
        # The reports of several topologies are spread over the interval.
        name = str(bolt.topology_name)
        self._shift_ms = zlib.crc32(name.encode()) % interval_ms if interval_ms else 0
        now = bolt.context.now_ms()
        self._period = self._period_at(now)
        self._unreported: dict[str, _Unreported] = {}
        if interval_ms:
            self._unreported = {asset: _Unreported(now) for asset in written_assets(conf)}
        self._offers: dict[str, _Offer] = {}
        """Asset -> report whose outcome is not known yet."""
        self._dropped = 0
        """Number of reports for which the worker had no room."""

    def count(self, rows: int, event_times: Sequence[Any]) -> None:
        """Count the rows of a written batch.

        ``event_times`` are numbers of milliseconds since 1970, or times; other values count as
        unknown.
        """
        if not self._unreported:
            return
        times = [time for time in map(_milliseconds, event_times) if time is not None]
        newest_ms = max(times, default=None)
        for unreported in self._unreported.values():
            unreported.add(rows, newest_ms)

    def report_if_due(self) -> None:
        """Report the rows of the last interval, once it is over."""
        if not self._unreported:
            return
        now = self._bolt.context.now_ms()
        period = self._period_at(now)
        if period == self._period:
            return
        self._period = period
        for asset in list(self._unreported):
            self._take_back(asset)
            if self._unreported[asset].rows and asset not in self._offers:
                self._report(asset, now)
        if self._dropped:
            self._bolt.report_metric("table_reports_dropped", self._dropped)

    def _period_at(self, now: int) -> int:
        """Number of the interval that ``now`` is in; 0 without intervals."""
        if not self._interval_ms:
            return 0
        return (now + self._shift_ms) // self._interval_ms

    def _take_back(self, asset: str) -> None:
        """Take the rows of a report back that the worker has dropped."""
        offer = self._offers.get(asset)
        if offer is None or not offer.is_taken.done():
            return
        del self._offers[asset]
        is_dropped = offer.is_taken.exception() is not None or not offer.is_taken.result()
        if is_dropped:
            self._dropped += 1
            unreported = self._unreported[asset]
            unreported.add(offer.unreported.rows, offer.unreported.newest_ms)
            unreported.since_ms = offer.unreported.since_ms

    def _report(self, asset: str, now: int) -> None:
        """Give the worker the report on one asset."""
        bolt = self._bolt
        unreported = self._unreported[asset]
        # The task and the time distinguish the report from any other one.
        metadata: dict[str, Any] = {
            "rows": unreported.rows,
            "since": _text(unreported.since_ms),
            "tasks": 1,
            "task": bolt.context.task_id,
        }
        if unreported.newest_ms is not None:
            metadata["newest_event_time"] = _text(unreported.newest_ms)
        event = DagsterEvent.make(
            f"{bolt.topology_name}/{bolt.component_name}",
            "materialization",
            target_key(bolt.component_name, asset),
            metadata=metadata,
        )
        is_taken = bolt._bound().offer_event(event)
        self._offers[asset] = _Offer(is_taken, unreported)
        self._unreported[asset] = _Unreported(now)


def _milliseconds(time: Any) -> int | None:
    """An event time in milliseconds since 1970; ``None`` for a value that is not a time."""
    if isinstance(time, datetime):
        return round(time.timestamp() * 1000)
    if isinstance(time, int | float) and not isinstance(time, bool):
        return round(time)
    return None


def _text(time_ms: int) -> str:
    """A time as text. Later times have larger texts."""
    time = datetime.fromtimestamp(time_ms / 1000, timezone.utc)
    return time.isoformat(timespec="milliseconds")
