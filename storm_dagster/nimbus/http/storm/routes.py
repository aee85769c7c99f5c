"""The routes of Storm's REST. More specific paths come first: a component's id may hold slashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from storm_dagster.http.description import HttpOperation, Parameter
from storm_dagster.http.query import query_text
from storm_dagster.http.responses import Endpoint, bounded_json
from storm_dagster.model.errors import InvalidRequest, StormDagsterError
from storm_dagster.nimbus.http.storm import schemas
from storm_dagster.nimbus.http.storm.actions import TopologyActions
from storm_dagster.nimbus.http.storm.cluster_pages import ClusterPages
from storm_dagster.nimbus.http.storm.topology_pages import TopologyPages
from storm_dagster.nimbus.http.storm.visualization import visualization, visualization_table
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.window_stats import check_window
from storm_dagster.nimbus.requests.worker_levels import WorkerLevels

_Seconds = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
_ID = Parameter("id", str, "Topology id, or name", where="path")
_WINDOW = Parameter("window", str, "600, 10800, 86400 or :all-time (default, also for any other)")
_SYS = Parameter("sys", str, "1 or true: with the system's components and streams")
_WAIT = Parameter("wait", _Seconds, "Seconds", where="path")
_SLOT = Parameter("slot", str, "HOST:PORT of a worker", where="path")
_COMPONENT = Parameter("component", str, "Component id", where="path")
_READING = (404, 500, 503)
_CHANGING = (404, 409, 500, 503)


def _storm_endpoint(answer: Callable[[Request], Any]) -> Endpoint:
    """An endpoint whose errors have Storm's form: ``{"error": kind, "errorMessage": text}``."""

    async def endpoint(request: Request) -> Response:
        try:
            return JSONResponse(await run_in_threadpool(answer, request))
        except StormDagsterError as error:
            return _refuse(error)

    return endpoint


def _action_endpoint(act: Callable[[Request, dict[str, Any]], Any]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            document = await bounded_json(request)
            return JSONResponse(await run_in_threadpool(act, request, document))
        except StormDagsterError as error:
            return _refuse(error)

    return endpoint


def _refuse(error: StormDagsterError) -> Response:
    document = {"error": type(error).__name__, "errorMessage": error.message}
    return JSONResponse(document, status_code=error.http_status)


def _sys(request: Request) -> bool:
    return (query_text(request, "sys") or "") in ("1", "true")


def _query(request: Request) -> tuple[str, str, bool]:
    return request.path_params["id"], check_window(query_text(request, "window")), _sys(request)


def _supervisor(pages: ClusterPages, request: Request) -> dict[str, Any]:
    supervisor_id, host = query_text(request, "id"), query_text(request, "host")
    if supervisor_id is None and host is None:
        raise InvalidRequest("a supervisor is asked for by ?id= or ?host=")
    return pages.supervisor(supervisor_id, host)


def storm_operations(nimbus: Nimbus, reader: ClusterReader) -> list[HttpOperation]:
    """Everything under ``/api/v1`` that is not about logs."""
    cluster, topology = ClusterPages(nimbus, reader), TopologyPages(nimbus, reader)
    actions = TopologyActions(LifecycleRequests(nimbus), reader, WorkerLevels(nimbus))

    def read(
        path: str,
        answer: Callable[[Request], Any],
        summary: str,
        kind: Any,
        *parameters: Parameter,
        errors: tuple[int, ...] = _READING,
    ) -> HttpOperation:
        return HttpOperation(
            "GET",
            f"/api/v1{path}",
            _storm_endpoint(answer),
            summary,
            "storm",
            parameters=parameters,
            answers={200: kind},
            errors=errors,
            storm=True,
        )

    def change(
        path: str,
        act: Callable[[Request, dict[str, Any]], Any],
        summary: str,
        *parameters: Parameter,
        body: Any = None,
    ) -> HttpOperation:
        return HttpOperation(
            "POST",
            f"/api/v1{path}",
            _action_endpoint(act),
            summary,
            "storm",
            parameters=parameters,
            body=("application/json", body) if body is not None else None,
            answers={200: schemas.TopologyOperation},
            errors=_CHANGING,
            storm=True,
        )

    def name(request: Request) -> str:
        return request.path_params["id"]

    def wait(request: Request) -> str:
        return request.path_params["wait"]

    def disabled(path: str, summary: str, *parameters: Parameter) -> HttpOperation:
        return read(
            f"/topology/{{id}}/profiling/{path}",
            lambda request: actions.profiling(name(request)),
            f"{summary}: answered with status 'disabled', workers are no JVMs",
            schemas.DisabledAction,
            _ID,
            *parameters,
        )

    return [
        read("/cluster/configuration", lambda _: cluster.configuration(), "The cluster's conf", dict[str, Any]),
        read("/cluster/summary", lambda _: cluster.summary(), "Metrics of the cluster", schemas.ClusterSummary),
        read("/supervisor/summary", lambda _: cluster.supervisors(), "Supervisors", schemas.SupervisorSummary),
        read(
            "/supervisor",
            lambda request: _supervisor(cluster, request),
            "A supervisor by id, or those of a host, and their workers",
            schemas.SupervisorPage,
            Parameter("id", str, "Supervisor id"),
            Parameter("host", str, "Host; ignored with an id"),
            _SYS,
        ),
        read("/nimbus/summary", lambda _: cluster.nimbuses(), "Nimbuses", schemas.NimbusSummary),
        read(
            "/history/summary",
            lambda _: cluster.history(),
            "Ids of running topologies",
            schemas.HistorySummary,
        ),
        read("/owner-resources", lambda _: cluster.owners(), "Resources by owner", schemas.OwnerSummary),
        read(
            "/owner-resources/{owner}",
            lambda request: cluster.owners(request.path_params["owner"]),
            "Resources of one owner: topologies have no owners here",
            schemas.OwnerSummary,
            Parameter("owner", str, "Owner", where="path"),
        ),
        read("/topology/summary", lambda _: cluster.topologies(), "Topologies", schemas.TopologySummary),
        read(
            "/topology-workers/{id}",
            lambda request: topology.workers(name(request)),
            "Hosts and ports of a topology's workers",
            schemas.TopologyWorkers,
            _ID,
        ),
        change(
            "/topology/{id}/activate",
            lambda request, _: actions.activate(name(request)),
            "Activate a topology",
            _ID,
        ),
        change(
            "/topology/{id}/deactivate",
            lambda request, _: actions.deactivate(name(request)),
            "Deactivate a topology",
            _ID,
        ),
        change(
            "/topology/{id}/rebalance/{wait}",
            lambda request, document: actions.rebalance(name(request), wait(request), document),
            "Rebalance a topology",
            _ID,
            _WAIT,
            body=schemas.RebalanceRequest,
        ),
        change(
            "/topology/{id}/kill/{wait}",
            lambda request, _: actions.kill(name(request), wait(request)),
            "Kill a topology",
            _ID,
            _WAIT,
        ),
        *(
            change(
                f"/topology/{{id}}{part}/debug/{{action}}/{{percent}}",
                lambda request, _: actions.debug(name(request)),
                "Refused: tuples are not sampled here; the response names the alternative",
                _ID,
                *((_COMPONENT,) if part else ()),
                Parameter("action", str, "enable or disable", where="path"),
                Parameter("percent", str, "Share of tuples", where="path"),
            )
            for part in ("/component/{component:path}", "")
        ),
        read(
            "/topology/{id}/logconfig",
            lambda request: actions.log_levels(name(request)),
            "Levels of loggers",
            schemas.LogLevelsPage,
            _ID,
        ),
        change(
            "/topology/{id}/logconfig",
            lambda request, document: actions.set_log_levels(name(request), document),
            "Change levels of loggers in the workers, for a time or until taken back",
            _ID,
            body=dict[str, Any],
        ),
        read(
            "/topology/{id}/profiling/dumpjstack/{slot}",
            lambda request: actions.stacks(name(request), request.path_params["slot"]),
            "Stacks of a worker's threads",
            schemas.StacksPage,
            _ID,
            _SLOT,
        ),
        disabled("start/{slot}/{minutes}", "Profile a worker", _SLOT, Parameter("minutes", str, where="path")),
        *(
            disabled(f"{verb}/{{slot}}", summary, _SLOT)
            for verb, summary in (
                ("stop", "End profiling"),
                ("dumpprofile", "Store a profile"),
                ("dumpheap", "Dump the heap"),
            )
        ),
        read(
            "/topology/{id}/metrics",
            lambda request: topology.metrics(*_query(request)),
            "Statistics of components by stream",
            schemas.TopologyMetrics,
            _ID,
            _WINDOW,
            _SYS,
        ),
        read(
            "/topology/{id}/lag",
            lambda request: topology.lag(name(request)),
            "Lag of spouts that report one",
            dict[str, schemas.SpoutLag],
            _ID,
        ),
        read(
            "/topology/{id}/get-errors",
            lambda request: topology.errors(name(request)),
            "Newest errors",
            schemas.TopologyErrors,
            _ID,
        ),
        read(
            "/topology/{id}/visualization-init",
            lambda request: visualization_table(visualization(reader, *_query(request))),
            "Streams of a topology",
            schemas.VisualTable,
            _ID,
            _WINDOW,
            _SYS,
        ),
        read(
            "/topology/{id}/visualization",
            lambda request: visualization(reader, *_query(request)),
            "Graph of a topology",
            dict[str, schemas.VisualNode],
            _ID,
            _WINDOW,
            _SYS,
        ),
        read(
            "/topology/{id}/component/{component:path}",
            lambda request: topology.component(
                request.path_params["id"], request.path_params["component"], *_query(request)[1:]
            ),
            "A component",
            schemas.ComponentPage,
            _ID,
            _COMPONENT,
            _WINDOW,
            _SYS,
        ),
        read(
            "/topology/{id}",
            lambda request: topology.page(*_query(request)),
            "A topology",
            schemas.TopologyPage,
            _ID,
            _WINDOW,
            _SYS,
        ),
    ]
