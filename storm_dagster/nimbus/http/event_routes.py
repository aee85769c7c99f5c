"""The route by which workers report events of components to Dagster."""

import hmac
import threading
from typing import Any, ClassVar

from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from storm_dagster.http.responses import bounded_json
from storm_dagster.http.router import Router
from storm_dagster.model.dagster_names import DECLARED_VERSION_KEY
from storm_dagster.model.errors import InvalidRequest, NotAuthenticated, Unavailable
from storm_dagster.nimbus.dagster.event_store import EventStore
from storm_dagster.nimbus.http.parameters import TOPOLOGY_NAME
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.operations.context import topology_by_name

_MAX_BATCHES = 4
"""Batches in progress; with a slow Dagster they must not take all threads of the service."""
_MAX_EVENTS = 100
"""Events in a batch."""


class EventBatch(BaseModel, extra="forbid"):
    """Events of one worker.

    :mod:`storm_dagster.model.dagster_events` encodes them.
    """

    events: list[dict[str, Any]]


class EventResult(BaseModel, extra="forbid"):
    """Ids of the events that were stored, refused, or have an undefined asset.

    ``trouble`` is the reason why later events were not stored.
    """

    stored: list[str]
    refused: dict[str, str]
    undefined: dict[str, str]
    trouble: str | None


class EventRoutes:
    """The route of events, which only live workers may use."""

    router: ClassVar = Router("topologies")

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader
        self._store = EventStore(nimbus)
        self._batches = threading.BoundedSemaphore(_MAX_BATCHES)
        """Held while a batch is stored."""

    @router.route(
        "POST",
        "/v1/topologies/{name}/events",
        summary="Report events of assets to Dagster (for workers)",
        parameters=(TOPOLOGY_NAME,),
        body=EventBatch,
        body_required=True,
        responses={200: EventResult},
        errors=(401, 404, 500, 503),
    )
    async def report(self, request: Request) -> Response:
        """Store a batch of events.

        The body of an unauthorized request is not read.
        """
        topology_id = await run_in_threadpool(self._sending_topology, request)
        document = await bounded_json(request)
        return JSONResponse(await run_in_threadpool(self._store_batch, topology_id, document))

    def _sending_topology(self, request: Request) -> str:
        """Id of the topology with a live worker that has the request's token.

        :class:`NotAuthenticated` without such a worker, :class:`NotLeading` at a follower.
        """
        nimbus = self._nimbus
        nimbus.status.require()
        topology = topology_by_name(nimbus.shown_view(), request.path_params["name"])
        authorization = request.headers.get("authorization", "")
        token = authorization.removeprefix("Bearer ").encode("utf-8", "replace")
        workers = nimbus.cluster.live_workers(topology.id).values()
        if not any(hmac.compare_digest(token, worker.token.encode()) for worker in workers):
            raise NotAuthenticated(
                f"events of topology {topology.id} come from its live workers only, which send "
                "their start token "
                "(Authorization: Bearer)"
            )
        return topology.id

    def _store_batch(self, topology_id: str, document: dict[str, Any]) -> dict[str, Any]:
        """Store the events of a request's body, and return its response.

        :class:`InvalidRequest` for another body, :class:`Unavailable` if too many batches are in
        progress.
        """
        events = document.get("events")
        if not isinstance(events, list) or len(events) > _MAX_EVENTS or set(document) != {"events"}:
            raise InvalidRequest(
                f'a batch is {{"events": [event]}}, with {_MAX_EVENTS} events at most'
            )
        if not self._batches.acquire(blocking=False):
            raise Unavailable("other batches of events are being stored: send it again")
        try:
            conf = self._reader.conf(topology_id) or {}
            is_declared = DECLARED_VERSION_KEY in conf
            return self._store.store(topology_id, events, declared=is_declared)
        finally:
            self._batches.release()
