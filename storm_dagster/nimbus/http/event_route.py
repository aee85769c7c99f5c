"""The route by which workers hand the events of their components to Dagster."""

from __future__ import annotations

import hmac
import threading
import time
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from storm_dagster.http.responses import Endpoint, bounded_json
from storm_dagster.model.dagster_events import decode_event
from storm_dagster.model.errors import InvalidRequest, NotAuthenticated, Unavailable
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.context import topology_by_name

_MOST_AT_ONCE = 4
"""Batches in progress; with a slow Dagster they must not take all threads of the service."""
_MOST_EVENTS = 100
_BATCH_SECS = 10.0
"""After which the rest of a batch is left for the next; a worker waits longer than that and one slow event."""


def event_endpoint(nimbus: Nimbus) -> Endpoint:
    """The endpoint."""
    turns = threading.BoundedSemaphore(_MOST_AT_ONCE)

    def known(request: Request) -> str:
        """The id of the topology that has a live worker with the request's token."""
        nimbus.status.require()
        topology = topology_by_name(nimbus.shown_view(), request.path_params["name"])
        shown = request.headers.get("authorization", "").removeprefix("Bearer ").encode("utf-8", "replace")
        tokens = [worker.token.encode() for worker in nimbus.cluster.live_workers(topology.id).values()]
        if not any(hmac.compare_digest(shown, token) for token in tokens):
            raise NotAuthenticated(
                f"events of topology {topology.id} come from its live workers only, which send their start token "
                "(Authorization: Bearer)"
            )
        return topology.id

    def report(topology_id: str, document: dict[str, Any]) -> dict[str, Any]:
        given = document.get("events")
        if not isinstance(given, list) or len(given) > _MOST_EVENTS or set(document) != {"events"}:
            raise InvalidRequest(f'a batch is {{"events": [event]}}, with {_MOST_EVENTS} events at most')
        if not turns.acquire(blocking=False):
            raise Unavailable("other batches of events are being stored: send it again")
        try:
            return _store(nimbus, topology_id, given)
        finally:
            turns.release()

    async def endpoint(request: Request) -> Response:
        # Nothing of an unauthorized body is read.
        topology_id = await run_in_threadpool(known, request)
        document = await bounded_json(request)
        return JSONResponse(await run_in_threadpool(report, topology_id, document))

    return endpoint


def _store(nimbus: Nimbus, topology_id: str, given: list[Any]) -> dict[str, Any]:
    stored: list[str] = []
    refused: dict[str, str] = {}
    trouble: str | None = None
    until = time.monotonic() + _BATCH_SECS
    for document in given:
        number = document.get("id") if isinstance(document, dict) else None
        if time.monotonic() > until:
            trouble = "Dagster is slow: the rest of the batch is left for the next one"
            break
        try:
            event = decode_event(document)
            nimbus.dagster.report_event(event, {"storm/topology": topology_id, "storm/event": event.id})
            stored.append(event.id)
        except InvalidRequest as error:
            if not isinstance(number, str):
                raise
            refused[number] = error.message
        except Unavailable as error:
            trouble = error.message
            break
    return {"stored": stored, "refused": refused, "trouble": trouble}
