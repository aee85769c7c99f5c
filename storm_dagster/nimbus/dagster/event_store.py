"""Storing of a worker's events in the Dagster of the cluster."""

import logging
import time
from typing import Any

from storm_dagster.model.dagster_events import DagsterEvent, decode_event
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.time_cache_map import TimeCacheMap

_log = logging.getLogger(__name__)
_BATCH_SECS = 10.0
"""Time after which the rest of a batch is left for the next one; a worker waits longer."""
_DEFINED_SECS = 60.0
"""Time for which an asset that is defined is not looked up."""
_MAX_DEFINED = 10_000
"""Limit of the assets that are remembered as defined; others are looked up each time."""


class EventStore:
    """Stores batches of events in Dagster; safe to share between threads."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._defined: TimeCacheMap[str, bool] = TimeCacheMap(
            _DEFINED_SECS, now=time.monotonic(), limit=_MAX_DEFINED
        )
        """Assets that this Dagster was seen to define."""
        nimbus.expiring.append(self._defined)

    def store(self, topology_id: str, documents: list[Any], *, declared: bool) -> dict[str, Any]:
        """Store the events; the response of ``POST /v1/topologies/{name}/events``.

        ``stored`` has the ids of the stored events, ``refused`` and ``undefined`` have a text by
        id. If Dagster does not respond or is slow, the rest is not stored, and ``trouble`` is the
        reason. :class:`InvalidRequest` for an invalid event without an id.

        Events of a topology that is ``declared`` in another Dagster are stored here, too. If this
        Dagster does not define their asset, ``undefined`` says so, because no automation condition
        sees the event then.
        """
        stored: list[str] = []
        refused: dict[str, str] = {}
        undefined: dict[str, str] = {}
        trouble: str | None = None
        deadline = time.monotonic() + _BATCH_SECS
        for document in documents:
            if time.monotonic() > deadline:
                trouble = "Dagster is slow: the rest of the batch is left for the next one"
                break
            event_id = document.get("id") if isinstance(document, dict) else None
            try:
                event = decode_event(document)
                origin = {"storm/topology": topology_id, "storm/event": event.id}
                self._nimbus.dagster.report_event(event, origin)
            except InvalidRequest as error:
                if not isinstance(event_id, str):
                    raise
                refused[event_id] = error.message
                continue
            except Unavailable as error:
                trouble = error.message
                break
            stored.append(event.id)
            if declared and not self._is_defined(event):
                undefined[event.id] = self._undefined_text()
        return {"stored": stored, "refused": refused, "undefined": undefined, "trouble": trouble}

    def _is_defined(self, event: DagsterEvent) -> bool:
        """True if the asset is defined here, or if Dagster does not respond."""
        if self._defined.get(event.asset):
            return True
        try:
            defined = self._nimbus.dagster.defines_asset(event.key)
        except (InvalidRequest, Unavailable) as error:
            _log.warning(
                "asset %s counts as defined, because Dagster did not respond: %s",
                event.asset,
                error,
            )
            return True
        if defined:
            self._defined.put(event.asset, True)
        return defined

    def _undefined_text(self) -> str:
        """Remedy for an event whose asset this Dagster does not define."""
        site = self._nimbus.dagster.site
        return (
            f"is stored in the cluster's Dagster at {site}, where events of a declared topology "
            "go. That Dagster does not define the asset, so no batch asset starts: add "
            "build_storm_defs to the code location that defines it, and set dagster.graphql.url "
            "and dagster.location to that Dagster"
        )
