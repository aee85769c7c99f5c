"""What a bolt tells Dagster: materializations, observations and checks of assets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from typing_extensions import Unpack

from storm_dagster.model.dagster_events import DagsterEvent

__all__ = ["AssetEvent", "DagsterReports"]


class AssetEvent(TypedDict, total=False):
    """What can be said of a materialization or observation."""

    partition: str | None
    metadata: Mapping[str, Any] | None
    description: str | None
    data_version: str | None
    anchors: Sequence[Any] | None


class DagsterReports:
    """``self.dagster`` of a bolt. Each call checks its values, and returns at once.

    The event is delivered at least once, through nimbus: the tuple in process is acked only when Dagster has stored
    it, and a tuple that is replayed reports it again. Where there is no tuple (ticks, ``initialize``, untracked
    tuples, bolts without ``auto_anchor``) the worker keeps it until then, and reports an error when it must drop
    it. As with ``emit``, ``anchors`` names the tuples to hang it on instead. Equal events that wait are sent once.

    ``key`` is ``"lake/clicks"`` or a list of its parts. ``metadata`` are JSON values, 16 KiB at most.
    """

    def __init__(self, bolt: Any) -> None:
        self._bolt = bolt

    def materialize(self, key: str | Sequence[str], **event: Unpack[AssetEvent]) -> None:
        """The asset, or a partition of it, has been made: what depends on it may start."""
        self._report("materialization", key, **event)

    def observe(self, key: str | Sequence[str], **event: Unpack[AssetEvent]) -> None:
        """Something was seen of the asset; nothing starts, unless its data version is another one."""
        self._report("observation", key, **event)

    def check(
        self,
        key: str | Sequence[str],
        name: str,
        passed: bool,
        *,
        partition: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        severity: Literal["ERROR", "WARN"] = "ERROR",
        anchors: Sequence[Any] | None = None,
    ) -> None:
        """The check ``name`` of the asset passed, or did not."""
        given = {"partition": partition, "metadata": metadata, "severity": severity, "anchors": anchors}
        self._report("check", key, check=name, passed=passed, **given)

    def _report(self, kind: str, key: Any, anchors: Any = None, **given: Any) -> None:
        bolt = self._bolt
        event = DagsterEvent.make(f"{bolt.topology_name}/{bolt.component_name}", kind, key, **given)
        bolt._bound().event(event, bolt._anchors(anchors))
