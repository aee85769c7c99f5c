"""The HTTP application of one nimbus: handlers of its own routes, of Storm's, of logs and pages;
events of workers.
"""

import hmac
import threading
from collections.abc import Mapping
from functools import partial, reduce
from operator import or_
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from storm_dagster.core.diagnosis import FindingKind
from storm_dagster.core.snapshot.windows import check_window
from storm_dagster.http.authentication import Authentication
from storm_dagster.http.description import HttpApi
from storm_dagster.http.guard import Guard, allowed_hosts, host_of
from storm_dagster.http.logs.routes import LogRoutes
from storm_dagster.http.responses import EXCEPTION_HANDLERS, Endpoint, bounded_json
from storm_dagster.model.dagster_names import DECLARED_VERSION_KEY
from storm_dagster.model.errors import InvalidRequest, NotAuthenticated, Unavailable
from storm_dagster.model.requests import BlacklistRequest, SubmitRequest, check_request
from storm_dagster.model.verbs import VERBS
from storm_dagster.nimbus.dagster.event_store import EventStore
from storm_dagster.nimbus.http.blob_routes import BlobEndpoints
from storm_dagster.nimbus.http.metrics import Metrics
from storm_dagster.nimbus.http.pages.routes import page_routes
from storm_dagster.nimbus.http.storm.actions import (
    LogLevelsRequest,
    StormRebalance,
    TopologyActions,
)
from storm_dagster.nimbus.http.storm.cluster_pages import ClusterPages
from storm_dagster.nimbus.http.storm.topology_pages import (
    TopologyPages,
    visualization,
    visualization_table,
)
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.running_workers import WorkerLevels, stacks_at
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.operations.context import topology_by_name
from storm_dagster.operations.live.blacklist import change_blacklist
from storm_dagster.security.settings import Security

_MOST_AT_ONCE = 4
"""Batches in progress; with a slow Dagster they must not take all threads of the service."""
_MOST_EVENTS = 100


def build_app(
    nimbus: Nimbus, reader: ClusterReader, submissions: Submissions, lifecycle: LifecycleRequests
) -> ASGIApp:
    """The ASGI application of a nimbus."""
    metrics = Metrics(nimbus, reader)
    conf = nimbus.conf
    logs = LogRoutes(
        nimbus.logs, lambda port: stacks_at(reader.view(), port, Security.of(conf)), conf.values
    )
    api = HttpApi("storm_dagster nimbus", nimbus.identity.version)
    logs.add_to(api)
    add_routes(api, nimbus, reader, submissions, lifecycle, metrics)
    routes = [*api.routes(), *page_routes(nimbus, reader)]
    app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    app.router.redirect_slashes = False
    guarded = Authentication(app, Security.of(nimbus.conf), nimbus.conf.values, reader.conf)
    seeds = [host_of(seed.partition("://")[2] or seed) for seed in nimbus.conf["nimbus.seeds"]]
    hosts = allowed_hosts([nimbus.identity.host, *seeds])
    return Guard(guarded, hosts=hosts, observe=metrics.observe, routes=routes)


def add_routes(
    api: HttpApi,
    nimbus: Nimbus,
    reader: ClusterReader,
    submissions: Submissions,
    lifecycle: LifecycleRequests,
    metrics: Metrics,
) -> None:
    """Add our own routes, and everything under ``/api/v1`` that is not about logs."""

    def act(name: str, verb: str, document: Mapping[str, Any]) -> dict[str, Any]:
        answer = lifecycle.act(name, verb, document)
        reader.forget()
        return answer

    def blacklist(document: Mapping[str, Any]) -> dict[str, Any]:
        epoch = nimbus.status.require()
        asked = check_request(BlacklistRequest, document, "a change of the blacklist")
        return {"hosts": list(change_blacklist(nimbus.operations(epoch), **asked.fields()))}

    handlers = {
        "blobs": BlobEndpoints(nimbus),
        "events": event_endpoint(nimbus, reader),
        "reader": reader,
        "dagster": nimbus.dagster,
        "submissions": submissions,
        "metrics": metrics,
        "act": act,
        "replay": lambda name, _, **asked: reader.dead_letters(name, replay=True, **asked),
        "read_blacklist": lambda: {"hosts": sorted(nimbus.cluster.blacklist())},
        "blacklist": blacklist,
    }
    types = {
        "finding": FindingKind,
        "verb": Literal[tuple(VERBS)],
        "verb request": reduce(or_, dict.fromkeys(row.request for row in VERBS.values())),
        "SubmitRequest": SubmitRequest,
        "BlacklistRequest": BlacklistRequest,
    }
    api.add("storm_dagster.nimbus.http", handlers, types, {"task": _task_of})
    handlers = {
        "cluster": ClusterPages(nimbus, reader),
        "topology": TopologyPages(nimbus, reader),
        "actions": TopologyActions(lifecycle, reader, WorkerLevels(nimbus)),
        "graph": partial(visualization, reader),
        "streams": partial(visualization_table, reader),
    }
    types = {"StormRebalance": StormRebalance, "LogLevelsRequest": LogLevelsRequest}
    readers = {"window": check_window, "sys": lambda text: text in ("1", "true")}
    api.add("storm_dagster.nimbus.http.storm", handlers, types, readers)


def _task_of(text: str | None) -> int | None:
    """The query parameter ``task``."""
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 10:
        raise InvalidRequest(f"task {text!r:.40} is not a task id: give a number")
    return int(text)


def event_endpoint(nimbus: Nimbus, reader: ClusterReader) -> Endpoint:
    """The endpoint by which workers hand the events of their components to Dagster."""
    turns = threading.BoundedSemaphore(_MOST_AT_ONCE)
    store = EventStore(nimbus)

    def sending_topology(request: Request) -> str:
        """Id of the topology that has a live worker with the request's token."""
        nimbus.status.require()
        topology = topology_by_name(nimbus.shown_view(), request.path_params["name"])
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        shown = token.encode("utf-8", "replace")
        workers = nimbus.cluster.live_workers(topology.id).values()
        if not any(hmac.compare_digest(shown, worker.token.encode()) for worker in workers):
            raise NotAuthenticated(
                f"events of topology {topology.id} come from its live workers only, which send their start token "
                "(Authorization: Bearer)"
            )
        return topology.id

    def report(topology_id: str, document: dict[str, Any]) -> dict[str, Any]:
        events = document.get("events")
        if (
            not isinstance(events, list)
            or len(events) > _MOST_EVENTS
            or set(document) != {"events"}
        ):
            raise InvalidRequest(
                f'a batch is {{"events": [event]}}, with {_MOST_EVENTS} events at most'
            )
        if not turns.acquire(blocking=False):
            raise Unavailable("other batches of events are being stored: send it again")
        try:
            conf = reader.conf(topology_id) or {}
            return store.store(topology_id, events, declared=DECLARED_VERSION_KEY in conf)
        finally:
            turns.release()

    async def endpoint(request: Request) -> Response:
        # The body of an unauthorized request is not read.
        topology_id = await run_in_threadpool(sending_topology, request)
        return JSONResponse(
            await run_in_threadpool(report, topology_id, await bounded_json(request))
        )

    return endpoint
