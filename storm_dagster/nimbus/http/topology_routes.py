"""Submissions, runs, topologies, the cluster, health and metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from storm_dagster.http.description import HttpOperation, Media, Parameter, path_names
from storm_dagster.http.query import query_text
from storm_dagster.http.responses import Endpoint, get, post, run_read
from storm_dagster.http.schemas import choice
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.verbs import VERBS, BlacklistRequest, SubmitRequest, check_request
from storm_dagster.nimbus.http import schemas
from storm_dagster.nimbus.http.metrics import Metrics
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
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
        asked = check_request(BlacklistRequest, document, "a change of the blacklist")
        return {"hosts": list(change_blacklist(nimbus.operations(epoch), **asked.fields()))}

    def state(request: Request) -> dict[str, Any]:
        asked = {part: query_text(request, part) for part in ("key", "limit", "after")}
        return reader.state(path_name(request), request.path_params["component"], **asked)

    def letters(request: Request, replay: bool = False) -> dict[str, Any]:
        asked = {part: query_text(request, part) for part in ("component", "limit", "after")}
        return reader.dead_letters(path_name(request), replay, **asked)

    async def exposition(request: Request) -> Response:
        return Response(await run_read(metrics.exposition), media_type=metrics.media_type)

    def path_name(request: Request) -> str:
        return request.path_params["name"]

    letter_page = (
        Parameter("component", str, "Only those of this spout"),
        Parameter("limit", int, "Letters at most, 1 to 1000 (100)"),
        Parameter("after", str, "Where the page begins: `next` of the one before"),
    )
    in_path = {
        "name": Parameter("name", str, "Topology name, or id", where="path"),
        "run_id": Parameter("run_id", str, "Run id", where="path"),
        "component": Parameter("component", str, "Component", where="path"),
        "verb": Parameter("verb", choice(*VERBS), where="path"),
    }
    reading, changing = (404, 500, 503), (404, 409, 500, 503)

    def one(
        method: Literal["GET", "POST"],
        path: str,
        endpoint: Endpoint,
        summary: str,
        schema: Any,
        query: tuple[Parameter, ...] = (),
        status: int = 200,
        errors: tuple[int, ...] = reading,
        **more: Any,
    ) -> HttpOperation:
        parameters = (*(in_path[name] for name in path_names(path)), *query)
        answers = {status: schema}
        return HttpOperation(
            method, path, endpoint, summary, "topologies", parameters, answers=answers, errors=errors, **more
        )

    def read(
        path: str, answer: Callable[[Request], Any], summary: str, schema: Any, *query: Parameter, **more: Any
    ) -> HttpOperation:
        return one("GET", path, get(answer), summary, schema, query, **more)

    def change(
        path: str,
        act: Callable[[Request, dict[str, Any]], Any],
        summary: str,
        schema: Any,
        status: int = 200,
        body: Any = dict[str, Any],
        **more: Any,
    ) -> HttpOperation:
        body = ("application/json", body)
        return one("POST", path, post(act, status), summary, schema, status=status, body=body, errors=changing, **more)

    return [
        read("/healthz", lambda _: reader.health(), "How this nimbus is", schemas.HealthDocument, errors=()),
        one("GET", "/metrics", exposition, "Metrics for Prometheus", Media({"text/plain": str}), errors=()),
        change(
            "/v1/submit",
            lambda _, document: submissions.submit(document),
            "Launch the run of a submission",
            schemas.SubmittedDocument,
            202,
            SubmitRequest,
            body_required=True,
        ),
        read(
            "/v1/runs/{run_id}",
            lambda request: nimbus.dagster.run(request.path_params["run_id"]),
            "A run and its steps",
            schemas.RunDocument,
        ),
        read("/v1/topologies", lambda _: reader.list_topologies(), "Topologies", schemas.ListDocument),
        read(
            "/v1/topologies/{name}",
            lambda request: reader.show(path_name(request)),
            "A topology with its tasks, workers, statistics and errors",
            schemas.ShowDocument,
        ),
        read(
            "/v1/topologies/{name}/state/{component}",
            state,
            "A page of the keyed state of a stateful bolt, as its tasks have it now",
            schemas.StateDocument,
            Parameter("key", str, "Only this key: as text, or as JSON for numbers and lists"),
            Parameter("limit", int, "Entries at most, 1 to 1000 (100)"),
            Parameter("after", str, "Where the page begins: `next` of the one before"),
            errors=changing,
        ),
        read(
            "/v1/topologies/{name}/dead-letters",
            letters,
            "A page of the dead letters of a topology's spouts",
            schemas.DeadLettersDocument,
            *letter_page,
            errors=changing,
        ),
        change(
            "/v1/topologies/{name}/dead-letters/replay",
            lambda request, _: letters(request, replay=True),
            "Emit a page of dead letters again",
            schemas.DeadLettersDocument,
            query=letter_page,
        ),
        read(
            "/v1/topologies/{name}/placement",
            lambda request: reader.placement(path_name(request), _task_of(request)),
            "Why each task is where it is",
            dict[str, Any],
        ),
        change(
            "/v1/topologies/{name}/{verb}",
            act,
            "Change a topology",
            schemas.ChangedDocument,
            202,
            reduce(or_, dict.fromkeys(row.request for row in VERBS.values())),
        ),
        read(
            "/v1/blacklist",
            lambda _: {"hosts": sorted(nimbus.cluster.blacklist())},
            "Hosts that get no new work",
            schemas.BlacklistDocument,
        ),
        change(
            "/v1/blacklist",
            lambda _, document: blacklist(document),
            "Change the blacklist",
            schemas.BlacklistDocument,
            body=BlacklistRequest,
        ),
        read("/v1/cluster", lambda _: reader.cluster(), "Nimbuses and supervisors", schemas.ClusterDocument),
    ]


def _task_of(request: Request) -> int | None:
    """The query parameter ``task``."""
    text = request.query_params.get("task")
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 10:
        raise InvalidRequest(f"task {text!r:.40} is not a task id: give a number")
    return int(text)
