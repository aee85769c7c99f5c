"""The routes of Storm's REST. More specific paths come first: a component's id may hold slashes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from storm_dagster.http.description import HttpOperation, Parameter, path_names
from storm_dagster.http.query import query_text
from storm_dagster.http.responses import Endpoint, bounded_json, run_read
from storm_dagster.model.errors import StormDagsterError
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
_IN_PATH = {
    one.name: one
    for one in (
        Parameter("id", str, "Topology id, or name", where="path"),
        Parameter("wait", _Seconds, "Seconds", where="path"),
        Parameter("slot", str, "HOST:PORT of a worker", where="path"),
        Parameter("component", str, "Component id", where="path"),
        Parameter("owner", str, "Owner", where="path"),
        Parameter("action", str, "enable or disable", where="path"),
        Parameter("percent", str, "Share of tuples", where="path"),
        Parameter("minutes", str, where="path"),
    )
}
_QUERY: dict[str, tuple[Parameter, Callable[[str | None], Any]]] = {
    "supervisor_id": (Parameter("id", str, "Supervisor id"), lambda text: text),
    "host": (Parameter("host", str, "Host; ignored with an id"), lambda text: text),
    "window": (Parameter("window", str, "600, 10800, 86400 or :all-time (default, also for any other)"), check_window),
    "sys": (
        Parameter("sys", str, "1 or true: with the system's components and streams"),
        lambda text: text in ("1", "true"),
    ),
}
"""Name of a page's argument -> parameter of the query, and what makes the argument of its text."""
_READING = (404, 500, 503)
_CHANGING = (404, 409, 500, 503)


def _storm_endpoint(work: Callable[[Request], Awaitable[Any]]) -> Endpoint:
    """An endpoint whose errors have Storm's form: ``{"error": kind, "errorMessage": text}``."""

    async def endpoint(request: Request) -> Response:
        try:
            return JSONResponse(await work(request))
        except StormDagsterError as error:
            document = {"error": type(error).__name__, "errorMessage": error.message}
            return JSONResponse(document, status_code=error.http_status)

    return endpoint


def _operation(
    method: Literal["GET", "POST"],
    path: str,
    endpoint: Endpoint,
    summary: str,
    query: tuple[Parameter, ...] = (),
    **more: Any,
) -> HttpOperation:
    """An operation whose parameters in the path are known by their names; ``query`` are the others."""
    parameters = (*(_IN_PATH[name] for name in path_names(path)), *query)
    return HttpOperation(
        method, f"/api/v1{path}", endpoint, summary, "storm", parameters=parameters, storm=True, **more
    )


def _read(path: str, answer: Callable[..., Any], summary: str, kind: Any) -> HttpOperation:
    """A page: ``answer`` takes what stands in the path, in its order, and parameters of the query by its own names."""
    asked = {name: _QUERY[name] for name in inspect.signature(answer).parameters if name in _QUERY}

    async def work(request: Request) -> Any:
        def read() -> Any:
            query = {name: value(query_text(request, one.name)) for name, (one, value) in asked.items()}
            return answer(*request.path_params.values(), **query)

        return await run_read(read)

    query = tuple(one for one, _ in asked.values())
    return _operation("GET", path, _storm_endpoint(work), summary, query, answers={200: kind}, errors=_READING)


def _change(path: str, act: Callable[..., Any], summary: str, body: Any = None) -> HttpOperation:
    """An action: ``act`` takes what stands in the path and, where there is a ``body``, its document."""

    async def work(request: Request) -> Any:
        document = await bounded_json(request)
        return await run_in_threadpool(act, *request.path_params.values(), *((document,) if body is not None else ()))

    return _operation(
        "POST",
        path,
        _storm_endpoint(work),
        summary,
        body=("application/json", body) if body is not None else None,
        answers={200: schemas.TopologyOperation},
        errors=_CHANGING,
    )


def storm_operations(nimbus: Nimbus, reader: ClusterReader) -> list[HttpOperation]:
    """Everything under ``/api/v1`` that is not about logs."""
    cluster, topology = ClusterPages(nimbus, reader), TopologyPages(nimbus, reader)
    actions = TopologyActions(LifecycleRequests(nimbus), reader, WorkerLevels(nimbus))
    graph = functools.partial(visualization, reader)

    def disabled(path: str, summary: str) -> HttpOperation:
        return _read(
            f"/topology/{{id}}/profiling/{path}",
            actions.profiling,
            f"{summary}: answered with status 'disabled', workers are no JVMs",
            schemas.DisabledAction,
        )

    return [
        _read("/cluster/configuration", cluster.configuration, "The cluster's conf", dict[str, Any]),
        _read("/cluster/summary", cluster.summary, "Metrics of the cluster", schemas.ClusterSummary),
        _read("/supervisor/summary", cluster.supervisors, "Supervisors", schemas.SupervisorSummary),
        _read(
            "/supervisor",
            cluster.supervisor,
            "A supervisor by id, or those of a host, and their workers",
            schemas.SupervisorPage,
        ),
        _read("/nimbus/summary", cluster.nimbuses, "Nimbuses", schemas.NimbusSummary),
        _read("/history/summary", cluster.history, "Ids of running topologies", schemas.HistorySummary),
        _read("/owner-resources", cluster.owners, "Resources by owner", schemas.OwnerSummary),
        _read("/owner-resources/{owner}", cluster.owners, "Resources of one owner", schemas.OwnerSummary),
        _read("/topology/summary", cluster.topologies, "Topologies", schemas.TopologySummary),
        _read(
            "/topology-workers/{id}",
            topology.workers,
            "Hosts and ports of a topology's workers",
            schemas.TopologyWorkers,
        ),
        *(
            _change(f"/topology/{{id}}/{verb}", functools.partial(actions.act, verb=verb), f"{verb.title()} a topology")
            for verb in ("activate", "deactivate")
        ),
        _change("/topology/{id}/rebalance/{wait}", actions.rebalance, "Rebalance a topology", schemas.StormRebalance),
        _change("/topology/{id}/kill/{wait}", actions.kill, "Kill a topology"),
        *(
            _change(
                f"/topology/{{id}}{part}/debug/{{action}}/{{percent}}",
                actions.debug,
                "Refused: tuples are not sampled here; the response names the alternative",
            )
            for part in ("/component/{component:path}", "")
        ),
        _read("/topology/{id}/logconfig", actions.log_levels, "Levels of loggers", schemas.LogLevelsPage),
        _change(
            "/topology/{id}/logconfig",
            actions.set_log_levels,
            "Change levels of loggers in the workers, for a time or until taken back",
            schemas.LogLevelsRequest,
        ),
        _read(
            "/topology/{id}/profiling/dumpjstack/{slot}",
            actions.stacks,
            "Stacks of a worker's threads",
            schemas.StacksPage,
        ),
        disabled("start/{slot}/{minutes}", "Profile a worker"),
        disabled("stop/{slot}", "End profiling"),
        disabled("dumpprofile/{slot}", "Store a profile"),
        disabled("dumpheap/{slot}", "Dump the heap"),
        _read(
            "/topology/{id}/metrics", topology.metrics, "Statistics of components by stream", schemas.TopologyMetrics
        ),
        _read("/topology/{id}/lag", topology.lag, "Lag of spouts that report one", dict[str, schemas.SpoutLag]),
        _read("/topology/{id}/get-errors", topology.errors, "Newest errors", schemas.TopologyErrors),
        _read(
            "/topology/{id}/visualization-init",
            lambda name, window, sys: visualization_table(graph(name, window, sys)),
            "Streams of a topology",
            schemas.VisualTable,
        ),
        _read("/topology/{id}/visualization", graph, "Graph of a topology", dict[str, schemas.VisualNode]),
        _read("/topology/{id}/component/{component:path}", topology.component, "A component", schemas.ComponentPage),
        _read("/topology/{id}", topology.page, "A topology", schemas.TopologyPage),
    ]
