"""Bolts: what is done with tuples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from storm_dagster.api.component import Component
from storm_dagster.api.dagster_reports import DagsterReports
from storm_dagster.api.tuples import Tuple

__all__ = ["AUTO", "Bolt"]

AUTO: Any = None
"""``anchors`` of an emit that leaves the choice to ``auto_anchor``; pass ``[]`` for an unanchored tuple."""


class Bolt(Component):
    """Processes the tuples of its inputs, one at a time in each task.

    ``process`` may be ``async``: then up to ``async_window`` tuples of a task are in flight at once, on an
    event loop of the task's own thread.
    """

    auto_ack: ClassVar[bool] = True
    """Ack each tuple when ``process`` has returned."""
    auto_anchor: ClassVar[bool] = True
    """Anchor what ``process`` emits to the tuple that it was given."""
    auto_fail: ClassVar[bool] = True
    """Fail the tuple when ``process`` raises; else it is neither acked nor failed and times out."""
    async_window: ClassVar[int] = 64

    @classmethod
    def _kind(cls) -> str:
        return "bolt"

    def _begin(self) -> None:
        """What follows belongs together (of bolts with state)."""

    def _undo(self) -> None:
        """Take back what was done to the state since then."""

    def process(self, tup: Tuple) -> Any:
        """Handle one tuple."""
        raise TypeError(f"{type(self).__name__} does not define process(self, tup)")

    def named(self, tup: Tuple) -> dict[str, Any]:
        """The values of a received tuple by field."""
        return dict(zip(self.context.source_fields(tup.component, tup.stream), tup.values, strict=False))

    def process_tick(self, tup: Tuple) -> Any:
        """Called every ``topology.tick.tuple.freq.secs`` seconds when that is set."""

    def emit(
        self,
        tup: Sequence[Any],
        stream: str | None = None,
        anchors: Sequence[Tuple] | None = AUTO,
        direct_task: int | None = None,
        need_task_ids: bool = False,
    ) -> list[int] | None:
        """Emit values; returns the receiving task ids when ``need_task_ids``.

        The tuple fails or times out together with its ``anchors``; by default these are the tuple in
        process, with ``[]`` it is not tracked.
        """
        return self._bound().emit(tup, stream, anchors, direct_task, need_task_ids, None)

    @property
    def dagster(self) -> DagsterReports:
        """What the bolt tells Dagster: ``self.dagster.materialize("lake/clicks", partition="2026-11-21-10:00")``."""
        return DagsterReports(self)

    def _anchors(self, anchors: Any) -> Any:
        """What an emit or event with these anchors hangs on."""
        return anchors

    def ack(self, tup: Tuple) -> None:
        """The tuple is done. Only the first ``ack`` or ``fail`` of a tuple counts."""
        self._bound().ack(tup)

    def fail(self, tup: Tuple) -> None:
        """The tuple failed: its spout hears it now, not at the timeout."""
        self._bound().fail(tup)
