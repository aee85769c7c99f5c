"""Pages of a topology: page, components, metrics, lag, errors, graph."""

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar
from urllib.parse import quote_plus

from storm_dagster.core.snapshot.tasks import ExecutorSnapshot, partition_lags
from storm_dagster.core.snapshot.topology import ComponentSnapshot, TopologySnapshot
from storm_dagster.core.snapshot.windows import (
    WINDOWS,
    Totals,
    WindowStats,
    latency_document,
    split_input,
)
from storm_dagster.http.documents import READ_ERRORS
from storm_dagster.http.router import Parameter, Router
from storm_dagster.model.conf import Conf
from storm_dagster.model.conf_layers import LayerName, merge_conf
from storm_dagster.model.errors import KeyNotFound, NotAlive
from storm_dagster.model.records import TaskError
from storm_dagster.nimbus.http.storm.cluster_pages import topology_row, worker_row
from storm_dagster.nimbus.http.storm.formats import (
    Links,
    debug_fields,
    format_fixed,
    pretty_secs,
    short_error,
    window_hint,
)
from storm_dagster.nimbus.http.storm.parameters import (
    IncludeSystem,
    TopologyId,
    Window,
)
from storm_dagster.nimbus.http.storm.starting_pages import starting_page
from storm_dagster.nimbus.http.storm.topology_documents import (
    ComponentPage,
    SpoutLag,
    TopologyErrors,
    TopologyMetrics,
    TopologyPage,
    VisualNode,
    VisualTable,
)
from storm_dagster.nimbus.http.storm.visualization import visualization, visualization_table
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.operations.context import topology_by_name

_NO_REQUESTED_RESOURCES = {
    "requestedMemOnHeap": 0.0,
    "requestedMemOffHeap": 0.0,
    "requestedCpu": 0.0,
}
"""Fields of a component in Storm's REST: components request no resources here."""
_COUNTS = ("emitted", "transferred", "acked", "failed")
_METRICS = {
    "spout": (_COUNTS, {"complete_ms_avg": "complete_ms"}),
    "bolt": (
        (*_COUNTS, "executed"),
        {"executed_ms_avg": "execute_ms", "process_ms_avg": "execute_ms"},
    ),
}
"""Kind of component -> counts and latencies in ``/topology/:id/metrics``, by their keys."""


class TopologyPages:
    """Routes of pages of a topology, which is named by its id or name.

    :class:`NotAlive` when no such topology runs.
    """

    router: ClassVar = Router("storm", storm_errors=True)

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader

    @router.route(
        "GET",
        "/api/v1/topology/{id}/metrics",
        summary="Statistics of components by stream",
        responses={200: TopologyMetrics},
        errors=READ_ERRORS,
    )
    def metrics(self, name: TopologyId, window: Window, sys: IncludeSystem) -> dict[str, Any]:
        """Statistics of each component by stream."""
        snapshot = self._reader.snapshot(name)
        spouts = snapshot.components_of("spout", sys)
        bolts = snapshot.components_of("bolt", sys)
        return {
            "window": window,
            "windowHint": window_hint(window),
            "spouts": [_stream_statistics(part, window, sys) for part in spouts],
            "bolts": [_stream_statistics(part, window, sys) for part in bolts],
            "reported": [
                {"component_id": component, "task": task, "metrics": dict(by_key)}
                for (component, task), by_key in snapshot.metrics.items()
            ],
        }

    @router.route(
        "GET",
        "/api/v1/topology/{id}/lag",
        summary="Lag of spouts that report one",
        responses={200: dict[str, SpoutLag]},
        errors=READ_ERRORS,
    )
    def lag(self, name: TopologyId) -> dict[str, Any]:
        """Lag of the spouts whose tasks report a metric named ``lag``."""
        parts = sorted(self._reader.snapshot(name).components.items())
        return {component: _lag_row(part) for component, part in parts if part.lag is not None}

    @router.route(
        "GET",
        "/api/v1/topology/{id}/get-errors",
        summary="Newest errors",
        responses={200: TopologyErrors},
        errors=READ_ERRORS,
    )
    def errors(self, name: TopologyId) -> dict[str, Any]:
        """The newest errors of all components."""
        snapshot = self._reader.snapshot(name)
        links = Links(self._reader.view())
        rows: list[dict[str, Any]] = []
        for part in snapshot.components.values():
            rows.extend(
                {"component": part.id, **_error_row(error, snapshot.id, links)}
                for error in part.errors
            )
        return {"topologyErrors": rows}

    @router.route(
        "GET",
        "/api/v1/topology/{id}/visualization-init",
        summary="Streams of a topology",
        responses={200: VisualTable},
        errors=READ_ERRORS,
    )
    def visualization_init(
        self, name: TopologyId, window: Window, sys: IncludeSystem
    ) -> dict[str, Any]:
        """Streams that a page can switch on and off."""
        return visualization_table(self._reader, name, window, sys)

    @router.route(
        "GET",
        "/api/v1/topology/{id}/visualization",
        summary="Graph of a topology",
        responses={200: dict[str, VisualNode]},
        errors=READ_ERRORS,
    )
    def visualization(self, name: TopologyId, window: Window, sys: IncludeSystem) -> dict[str, Any]:
        """Components with their numbers and inputs."""
        return visualization(self._reader, name, window, sys)

    @router.route(
        "GET",
        "/api/v1/topology/{id}/component/{component:path}",
        summary="A component",
        responses={200: ComponentPage},
        errors=READ_ERRORS,
    )
    def component(
        self,
        name: TopologyId,
        component: Annotated[str, Parameter("path", "component", "Component id")],
        window: Window,
        sys: IncludeSystem,
    ) -> dict[str, Any]:
        """One component; :class:`KeyNotFound` for an unknown one."""
        snapshot = self._reader.snapshot(name)
        links = Links(self._reader.view())
        part = snapshot.components.get(component)
        if part is None:
            raise KeyNotFound(
                f"topology {snapshot.name!r} has no component {component!r:.80}: it has "
                f"{', '.join(sorted(snapshot.components))}"
            )
        runnable = self._reader.runnable(snapshot.id)
        spec = runnable.spec.component(part.id)
        layers: dict[LayerName, Conf] = {"total": runnable.conf}
        if spec is not None:
            layers["component"] = spec.conf
        return {
            "id": part.id,
            "encodedId": quote_plus(part.id),
            "name": snapshot.name,
            "user": None,
            "topologyId": snapshot.id,
            "encodedTopologyId": quote_plus(snapshot.id),
            "topologyStatus": snapshot.status,
            "componentType": part.kind,
            "executors": len(part.executors),
            "tasks": len(part.tasks),
            "window": window,
            "windowHint": window_hint(window),
            "schedulerDisplayResource": False,
            **_NO_REQUESTED_RESOURCES,
            **debug_fields(merge_conf(layers)),
            "eventLogLink": "",
            "profilingAndDebuggingCapable": True,
            "profileActionEnabled": True,
            "profilerActive": [],
            "componentErrors": [_error_row(error, snapshot.id, links) for error in part.errors],
            **_statistics(part, snapshot.id, window, sys, links),
        }

    @router.route(
        "GET",
        "/api/v1/topology/{id}",
        summary="A topology",
        responses={200: TopologyPage},
        errors=READ_ERRORS,
    )
    def page(self, name: TopologyId, window: Window, sys: IncludeSystem) -> dict[str, Any]:
        """The topology with its components and workers.

        One that is being submitted has neither.
        """
        try:
            snapshot = self._reader.snapshot(name)
        except NotAlive:
            starting = self._reader.starting(name)
            if starting:
                return starting_page(starting[0], window, self._nimbus.identity.version)
            # It may have been published between the two reads.
            snapshot = self._reader.snapshot(name)
        runnable = self._reader.runnable(snapshot.id)
        conf = self._reader.shown_conf(snapshot.id)
        view = self._reader.view()
        links = Links(view)
        copies = self._reader.replication([snapshot.id]).get(snapshot.id, 0)
        head = topology_row(
            topology_by_name(view, snapshot.id), copies, self._nimbus.identity.version
        )

        return {
            **head,
            "user": None,
            "schedulerDisplayResource": bool(head["assignedMemOnHeap"] or head["assignedCpu"]),
            "msgTimeout": int(runnable.conf.get("topology.message.timeout.secs") or 0),
            "window": window,
            "windowHint": window_hint(window),
            "topologyStats": [_topology_stats(snapshot, row_window, sys) for row_window in WINDOWS],
            "workers": [worker_row(worker, links) for worker in snapshot.workers],
            "spouts": [
                _component_row(part, window, sys, snapshot.id, links)
                for part in snapshot.components_of("spout", sys)
            ],
            "bolts": [
                _component_row(part, window, sys, snapshot.id, links)
                for part in snapshot.components_of("bolt", sys)
            ],
            "configuration": conf,
            **debug_fields(runnable.conf),
            "visualizationTable": [],
        }


def _stream_statistics(part: ComponentSnapshot, window: str, sys: bool) -> dict[str, Any]:
    """Counts and latencies of a component by its output and input streams."""
    window_stats = part.windows[window].filter_system(sys)
    counts, latencies = _METRICS[part.kind]
    statistics: dict[str, Any] = {"id": part.id}
    for name in counts:
        is_of_inputs = part.kind == "bolt" and name not in ("emitted", "transferred")
        statistics[name] = _by_stream(getattr(window_stats, name), is_of_inputs)
    for key, name in latencies.items():
        means = {stream: format_fixed(mean) for stream, mean in getattr(window_stats, name).items()}
        statistics[key] = _by_stream(means, part.kind == "bolt")
    return statistics


def _lag_row(part: ComponentSnapshot) -> dict[str, Any]:
    tasks = [task for task in part.tasks if task.lag is not None]
    return {
        "spoutId": part.id,
        "spoutType": "STORM_DAGSTER",
        "spoutLagResult": {
            "totalLag": part.lag,
            "tasks": {str(task.id): task.lag for task in tasks},
            "partitions": partition_lags(tasks),
        },
    }


def _topology_stats(snapshot: TopologySnapshot, window: str, sys: bool) -> dict[str, Any]:
    totals = snapshot.totals(window, include_sys=sys)
    return {
        "windowPretty": window_hint(window),
        "window": window,
        "completeLatency": format_fixed(totals.complete_ms),
        **_counts(totals),
    }


def _counts(totals: Totals) -> dict[str, Any]:
    return {name: getattr(totals, name) for name in _COUNTS}


def _numbers(
    snapshot: ComponentSnapshot | ExecutorSnapshot, window: str, sys: bool
) -> dict[str, Any]:
    """Counts, and the numbers that only spouts or only bolts have.

    Those of the system's streams are included with ``sys``.
    """
    totals = snapshot.windows[window].totals(include_sys=sys)
    if snapshot.kind == "spout":
        return {**_counts(totals), "completeLatency": format_fixed(totals.complete_ms)}
    return {**_counts(totals), "capacity": format_fixed(snapshot.capacity), **_executed(totals)}


def _executed(totals: Totals) -> dict[str, Any]:
    return {
        "executed": totals.executed,
        "executeLatency": format_fixed(totals.execute_ms),
        # A tuple is processed when its call returns.
        "processLatency": format_fixed(totals.execute_ms),
    }


def _component_row(
    part: ComponentSnapshot, window: str, sys: bool, topology_id: str, links: Links
) -> dict[str, Any]:
    return {
        f"{part.kind}Id": part.id,
        f"encoded{part.kind.capitalize()}Id": quote_plus(part.id),
        "executors": len(part.executors),
        "tasks": len(part.tasks),
        **_NO_REQUESTED_RESOURCES,
        **_numbers(part, window, sys),
        "latencyPercentiles": latency_document(part.windows[window].percentiles()),
        **_last_error(part, topology_id, links),
    }


def _error_place(error: TaskError, topology_id: str, links: Links) -> dict[str, Any]:
    return {
        "errorHost": error.host,
        "errorPort": error.port,
        "errorLapsedSecs": max(0, int(time.time()) - error.time),
        "errorWorkerLogLink": links.worker(topology_id, None, error.host, error.port),
    }


def _last_error(part: ComponentSnapshot, topology_id: str, links: Links) -> dict[str, Any]:
    """Fields of a component's newest error; without an error they are empty or null."""
    if part.errors:
        newest = part.errors[0]
        return {
            "lastError": short_error(newest.error),
            "errorTime": newest.time,
            **_error_place(newest, topology_id, links),
        }
    return {
        "lastError": "",
        "errorHost": "",
        "errorWorkerLogLink": "",
        "errorPort": None,
        "errorTime": None,
        "errorLapsedSecs": None,
    }


def _error_row(error: TaskError, topology_id: str, links: Links) -> dict[str, Any]:
    return {
        "time": error.time * 1000,
        "error": error.error,
        "errorCount": error.count,
        **_error_place(error, topology_id, links),
    }


def _executor_row(
    executor: ExecutorSnapshot, window: str, sys: bool, topology_id: str, links: Links
) -> dict[str, Any]:
    log_link = links.worker(topology_id, executor.node, executor.host, executor.port)
    return {
        "id": executor.id,
        "uptimeSeconds": executor.uptime_secs,
        "host": executor.host,
        "port": executor.port,
        "encodedId": quote_plus(executor.id),
        "uptime": pretty_secs(executor.uptime_secs),
        "workerLogLink": log_link,
        **_numbers(executor, window, sys),
    }


def _window_row(part: ComponentSnapshot, window: str, sys: bool) -> dict[str, Any]:
    return {
        "window": window,
        "windowPretty": window_hint(window),
        **_numbers(part, window, sys),
        "latencyPercentiles": latency_document(part.windows[window].percentiles()),
    }


def _output_row(part: ComponentSnapshot, window_stats: WindowStats, stream: str) -> dict[str, Any]:
    totals = window_stats.of(stream)
    if part.kind == "bolt":
        return {"stream": stream, "emitted": totals.emitted, "transferred": totals.transferred}
    return {
        "stream": stream,
        **_counts(totals),
        "completeLatency": format_fixed(totals.complete_ms),
        "latencyPercentiles": latency_document(window_stats.stream_percentiles(stream)),
    }


def _input_row(window_stats: WindowStats, key: str) -> dict[str, Any]:
    component, stream = split_input(key)
    totals = window_stats.of(key)
    return {
        "component": component,
        "encodedComponentId": quote_plus(component),
        "stream": stream,
        **_executed(totals),
        "acked": totals.acked,
        "failed": totals.failed,
        "latencyPercentiles": latency_document(window_stats.stream_percentiles(key)),
    }


def _statistics(
    part: ComponentSnapshot, topology_id: str, window: str, sys: bool, links: Links
) -> dict[str, Any]:
    """The tables of a component's page: windows, streams, executors."""
    window_stats = part.windows[window].filter_system(sys)
    windows_key = "spoutSummary" if part.kind == "spout" else "boltStats"
    tables: dict[str, Any] = {
        windows_key: [_window_row(part, row_window, sys) for row_window in WINDOWS],
        "outputStats": [_output_row(part, window_stats, stream) for stream in window_stats.outputs],
        "executorStats": [
            _executor_row(executor, window, sys, topology_id, links) for executor in part.executors
        ],
    }
    if part.kind == "bolt":
        tables["inputStats"] = [_input_row(window_stats, key) for key in window_stats.inputs]
    return tables


def _by_stream(by_key: Mapping[str, Any], of_inputs: bool) -> list[dict[str, Any]]:
    """Rows of values by stream; the key of an input names its component as well."""
    rows: list[dict[str, Any]] = []
    for key, value in sorted(by_key.items()):
        if of_inputs:
            component, stream = split_input(key)
            rows.append({"component_id": component, "stream_id": stream, "value": value})
        else:
            rows.append({"stream_id": key, "value": value})
    return rows
