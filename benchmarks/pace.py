"""Base of the benchmarks' spouts: their pace, and the metrics that they report of it.

Each spout task reports ``emitted`` with the time ``at`` of the report (seconds of the machine's
clock, one for all processes), so that a rate is exact however late it is read; and the quantiles
``p50_ms`` and ``p99_ms`` of the complete latency of its newest tuples. ``bench.rate`` (tuples a
second of each task, 0: as fast as it goes) and ``bench.acked`` are conf keys.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from storm_dagster.api import Spout

_TELL_SECS = 1.0
_CLOCK_EVERY = 64
"""Calls between two reads of the clock of a spout that goes as fast as it can."""
_TIMED = 16
"""Every so-many-th tuple of a fast spout is measured for its latency."""
_KEPT = 5_000


class PacedSpout(Spout):
    """Emits :meth:`values` at its pace."""

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        self._rate = float(conf.get("bench.rate", 0))
        self._acked = bool(conf.get("bench.acked", True))
        self._count = 0
        self._began = self._told = time.monotonic()
        self._took: list[float] = []
        self._shown: list[float] = []

    def values(self, number: int) -> list[Any]:
        """The tuple of that number."""
        raise TypeError(f"{type(self).__name__} does not define values(self, number)")

    def next_tuple(self) -> None:
        number = self._count
        if self._rate:
            now = time.monotonic()
            if now - self._told >= _TELL_SECS:
                self._tell(now)
            if number >= (now - self._began) * self._rate:
                return
        elif number % _CLOCK_EVERY == 0:
            now = time.monotonic()
            if now - self._told >= _TELL_SECS:
                self._tell(now)
        self._count = number + 1
        if self._acked:
            timed = self._rate or number % _TIMED == 0
            self.emit(self.values(number), tup_id=time.monotonic() if timed else 0.0)
        else:
            self.emit(self.values(number))

    def ack(self, tup_id: float) -> None:
        """``tup_id`` is the time of emission, or 0."""
        if tup_id:
            self._took.append(time.monotonic() - tup_id)

    def _tell(self, now: float) -> None:
        self._told = now
        self.report_metric("emitted", self._count)
        self.report_metric("at", now)
        took, self._took = self._took, []
        self._shown = (self._shown + took)[-_KEPT:]
        if self._shown:
            ordered = sorted(self._shown)
            self.report_metric("p50_ms", round(ordered[len(ordered) // 2] * 1000, 2))
            self.report_metric("p99_ms", round(ordered[len(ordered) * 99 // 100] * 1000, 2))
