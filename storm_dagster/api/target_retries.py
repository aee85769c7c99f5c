"""Retries of a bolt that waits for an external system: a sink's target, or Spark."""

from typing import TYPE_CHECKING

from storm_dagster.api.outages import MAX_PAUSE_MS, MIN_PAUSE_MS, OutageReports
from storm_dagster.host.waiting import Backoff

if TYPE_CHECKING:
    from storm_dagster.api.bolts import Bolt


class TargetRetries:
    """Pauses between the retries of one bolt, and its reports.

    While the bolt waits, the worker passes it no tuples, holds the spouts back, and lets no message
    timeout run: see ``Bolt._is_full`` and ``Bolt._room_at``, which this sets. Used by the thread
    that runs the bolt.
    """

    def __init__(self, bolt: "Bolt") -> None:
        self._bolt = bolt
        self._pauses_ms = Backoff(MIN_PAUSE_MS, MAX_PAUSE_MS)
        self.reports: OutageReports = OutageReports(bolt, lambda: bolt.context.now_ms())

    def is_due(self) -> bool:
        """True if the pause is over, and the task still belongs to this process.

        Without a pause it is always over.
        """
        context = self._bolt.context
        # The new owner of a task that moved retries.
        return context.now_ms() >= self._bolt._room_at and context.may_write()

    def wait(self, pause_ms: int | None = None) -> None:
        """Make the bolt full, and the retry due after ``pause_ms``.

        By default the pause doubles from 0.5 s to 10 s.
        """
        bolt = self._bolt
        now = bolt.context.now_ms()
        self.reports.begin()
        if pause_ms is None:
            pause_ms = round(self._pauses_ms.next_pause())
        bolt._room_at = now + pause_ms
        bolt._is_full = True

    def end(self) -> None:
        """Note that the target answers: the next wait begins with a short pause."""
        self._pauses_ms.reset()
        self._bolt._room_at = 0
        self.reports.end()
