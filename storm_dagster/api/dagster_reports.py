"""Reports of bolts to Dagster: materializations, observations and checks of assets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from typing_extensions import Unpack

from storm_dagster.model.dagster_events import DagsterEvent


class AssetEvent(TypedDict, total=False):
    """Fields of a materialization or observation."""

    partition: str | None
    metadata: Mapping[str, Any] | None
    description: str | None
    data_version: str | None
    anchors: Sequence[Any] | None


class DagsterReports:
    """``self.dagster`` of a bolt. Each call checks its values, and returns at once.

    The event is delivered at least once, through nimbus: the tuple in process is acked only when Dagster has stored
    the event, and a replayed tuple reports it again. Without a tuple (ticks, ``initialize``, untracked tuples, bolts
    without ``auto_anchor``) the worker keeps the event until then, and reports an error if it must drop it. As with
    ``emit``, ``anchors`` sets other tuples. Equal pending events are sent once.

    ``key`` is ``"lake/clicks"`` or a list of its parts. ``metadata`` are JSON values, 16 KiB at most.
    """

    def __init__(self, bolt: Any) -> None:
        self._bolt = bolt

    def materialize(self, key: str | Sequence[str], **event: Unpack[AssetEvent]) -> None:
        """Report that the asset, or a partition of it, was materialized: what depends on it may start."""
        self._report("materialization", key, **event)

    def observe(self, key: str | Sequence[str], **event: Unpack[AssetEvent]) -> None:
        """Report an observation of the asset; nothing starts, unless its data version has changed."""
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
        """Report the result of the asset check ``name``."""
        given = {"partition": partition, "metadata": metadata, "severity": severity, "anchors": anchors}
        self._report("check", key, check=name, passed=passed, **given)

    def _report(self, kind: str, key: Any, anchors: Any = None, **given: Any) -> None:
        bolt = self._bolt
        event = DagsterEvent.make(f"{bolt.topology_name}/{bolt.component_name}", kind, key, **given)
        bolt._bound().event(event, bolt._anchors(anchors))
