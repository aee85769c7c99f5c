"""Submissions, runs, topologies, the cluster, health and metrics."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from storm_dagster.http.answers import Endpoint, get, post
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.nimbus.http.metrics import Metrics
from storm_dagster.nimbus.lifecycle_requests import LifecycleRequests
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.reading import ClusterReader
from storm_dagster.nimbus.submitting import Submissions
from storm_dagster.operations.blacklist import change_blacklist

__all__ = ["topology_routes"]


def topology_routes(
    nimbus: Nimbus, reader: ClusterReader, submissions: Submissions, metrics: Metrics
) -> list[Route]:
    """The routes of this module."""
    lifecycle = LifecycleRequests(nimbus)

    def act(request: Request, document: dict[str, Any]) -> dict[str, Any]:
        return lifecycle.act(request.path_params["name"], request.path_params["verb"], document)

    def blacklist(document: dict[str, Any]) -> dict[str, Any]:
        epoch = nimbus.status.require()
        unknown = sorted(set(document) - {"add", "remove"})
        hosts = {key: document.get(key) or [] for key in ("add", "remove")}
        if unknown or not all(isinstance(value, list) for value in hosts.values()):
            raise InvalidRequest('a change of the blacklist is {"add": [host], "remove": [host]}')
        listed = change_blacklist(nimbus.operations(epoch), add=hosts["add"], remove=hosts["remove"])
        return {"hosts": list(listed)}

    async def exposition(request: Request) -> Response:
        return Response(await run_in_threadpool(metrics.exposition), media_type=metrics.media_type)

    routes: list[tuple[str, Endpoint, str]] = [
        ("/healthz", get(lambda _: reader.health()), "GET"),
        ("/metrics", exposition, "GET"),
        ("/v1/submit", post(lambda _, document: submissions.submit(document), 202), "POST"),
        ("/v1/runs/{run_id}", get(lambda request: nimbus.dagster.run(request.path_params["run_id"])), "GET"),
        ("/v1/topologies", get(lambda _: reader.list_topologies()), "GET"),
        ("/v1/topologies/{name}", get(lambda request: reader.show(request.path_params["name"])), "GET"),
        (
            "/v1/topologies/{name}/placement",
            get(lambda request: reader.placement(request.path_params["name"])),
            "GET",
        ),
        ("/v1/topologies/{name}/{verb}", post(act, 202), "POST"),
        ("/v1/blacklist", get(lambda _: {"hosts": sorted(nimbus.cluster.blacklist())}), "GET"),
        ("/v1/blacklist", post(lambda _, document: blacklist(document)), "POST"),
        ("/v1/cluster", get(lambda _: reader.cluster()), "GET"),
    ]
    return [Route(path, endpoint, methods=[method]) for path, endpoint, method in routes]
