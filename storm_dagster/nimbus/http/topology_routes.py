"""Submissions, runs, topologies, the cluster, health and metrics."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from storm_dagster.http.description import HttpOperation, Media, Parameter
from storm_dagster.http.query import query_text
from storm_dagster.http.responses import Endpoint, get, post
from storm_dagster.http.schemas import choice
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.nimbus.http import schemas
from storm_dagster.nimbus.http.metrics import Metrics
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.lifecycle import VERBS, LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.operations.live.blacklist import change_blacklist


def topology_operations(
    nimbus: Nimbus, reader: ClusterReader, submissions: Submissions, metrics: Metrics
) -> list[HttpOperation]:
    """The routes of this module."""
    lifecycle = LifecycleRequests(nimbus)

    def act(request: Request, document: dict[str, Any]) -> dict[str, Any]:
        answer = lifecycle.act(request.path_params["name"], request.path_params["verb"], document)
        reader.forget()
        return answer

    def blacklist(document: dict[str, Any]) -> dict[str, Any]:
        epoch = nimbus.status.require()
        unknown = sorted(set(document) - {"add", "remove"})
        hosts = {key: document.get(key) or [] for key in ("add", "remove")}
        if unknown or not all(isinstance(value, list) for value in hosts.values()):
            raise InvalidRequest('a change of the blacklist is {"add": [host], "remove": [host]}')
        listed = change_blacklist(nimbus.operations(epoch), add=hosts["add"], remove=hosts["remove"])
        return {"hosts": list(listed)}

    def state(request: Request) -> dict[str, Any]:
        asked = {part: query_text(request, part) for part in ("key", "limit", "after")}
        return reader.state(path_name(request), request.path_params["component"], **asked)

    async def exposition(request: Request) -> Response:
        return Response(await run_in_threadpool(metrics.exposition), media_type=metrics.media_type)

    def path_name(request: Request) -> str:
        return request.path_params["name"]

    name = Parameter("name", str, "Topology name, or id", where="path")
    reading, changing = (404, 500, 503), (404, 409, 500, 503)

    def one(method: Any, path: str, endpoint: Endpoint, summary: str, schema: Any, **more: Any) -> HttpOperation:
        status = more.pop("status", 200)
        more.setdefault("errors", reading)
        return HttpOperation(method, path, endpoint, summary, "topologies", answers={status: schema}, **more)

    return [
        one(
            "GET",
            "/healthz",
            get(lambda _: reader.health()),
            "How this nimbus is",
            schemas.HealthDocument,
            errors=(),
        ),
        one("GET", "/metrics", exposition, "Metrics for Prometheus", Media({"text/plain": str}), errors=()),
        one(
            "POST",
            "/v1/submit",
            post(lambda _, document: submissions.submit(document), 202),
            "Launch the run of a submission",
            schemas.SubmittedDocument,
            status=202,
            body=("application/json", schemas.SubmissionDocument),
            body_required=True,
            errors=changing,
        ),
        one(
            "GET",
            "/v1/runs/{run_id}",
            get(lambda request: nimbus.dagster.run(request.path_params["run_id"])),
            "A run and its steps",
            schemas.RunDocument,
            parameters=(Parameter("run_id", str, "Run id", where="path"),),
        ),
        one(
            "GET",
            "/v1/topologies",
            get(lambda _: reader.list_topologies()),
            "Topologies",
            schemas.ListDocument,
        ),
        one(
            "GET",
            "/v1/topologies/{name}",
            get(lambda request: reader.show(path_name(request))),
            "A topology with its tasks, workers, statistics and errors",
            schemas.ShowDocument,
            parameters=(name,),
        ),
        one(
            "GET",
            "/v1/topologies/{name}/state/{component}",
            get(state),
            "A page of the keyed state of a stateful bolt, as its tasks have it now",
            schemas.StateDocument,
            parameters=(
                name,
                Parameter("component", str, "Component", where="path"),
                Parameter("key", str, "Only this key: as text, or as JSON for numbers and lists"),
                Parameter("limit", int, "Entries at most, 1 to 1000 (100)"),
                Parameter("after", str, "Where the page begins: `next` of the one before"),
            ),
            errors=changing,
        ),
        one(
            "GET",
            "/v1/topologies/{name}/placement",
            get(lambda request: reader.placement(path_name(request), _task_of(request))),
            "Why each task is where it is",
            dict[str, Any],
            parameters=(name,),
        ),
        one(
            "POST",
            "/v1/topologies/{name}/{verb}",
            post(act, 202),
            "Change a topology",
            schemas.ChangedDocument,
            status=202,
            parameters=(name, Parameter("verb", choice(*VERBS), where="path")),
            body=("application/json", dict[str, Any]),
            errors=changing,
        ),
        one(
            "GET",
            "/v1/blacklist",
            get(lambda _: {"hosts": sorted(nimbus.cluster.blacklist())}),
            "Hosts that get no new work",
            schemas.BlacklistDocument,
        ),
        one(
            "POST",
            "/v1/blacklist",
            post(lambda _, document: blacklist(document)),
            "Change the blacklist",
            schemas.BlacklistDocument,
            body=("application/json", dict[str, Any]),
            errors=changing,
        ),
        one(
            "GET",
            "/v1/cluster",
            get(lambda _: reader.cluster()),
            "Nimbuses and supervisors",
            schemas.ClusterDocument,
        ),
    ]


def _task_of(request: Request) -> int | None:
    """The query parameter ``task``."""
    text = request.query_params.get("task")
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 10:
        raise InvalidRequest(f"task {text!r:.40} is not a task id: give a number")
    return int(text)
