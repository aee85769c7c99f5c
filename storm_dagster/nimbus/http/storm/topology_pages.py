"""Pages of one topology: its page, components, metrics, spout lag, workers, and its graph
(``/visualization``).
"""

import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar
from urllib.parse import quote, quote_plus

from storm_dagster.core.snapshot.tasks import ExecutorSnapshot, partition_lags
from storm_dagster.core.snapshot.topology import ComponentSnapshot, TopologySnapshot
from storm_dagster.core.snapshot.windows import (
    WINDOWS,
    Totals,
    WindowStats,
    is_system_name,
    latency_document,
    split_input,
)
from storm_dagster.core.submission.tasks import with_system_components
from storm_dagster.http.router import Parameter, Router
from storm_dagster.model.errors import KeyNotFound
from storm_dagster.model.records import TaskError
from storm_dagster.nimbus.http.storm.cluster_pages import topology_row, worker_row
from storm_dagster.nimbus.http.storm.formats import (
    Links,
    format_fixed,
    pretty_secs,
    short_error,
    window_hint,
)
from storm_dagster.nimbus.http.storm.parameters import (
    READ_ERRORS,
    IncludeSystem,
    TopologyId,
    Window,
)
from storm_dagster.nimbus.http.storm.topology_documents import (
    ComponentPage,
    SpoutLag,
    TopologyErrors,
    TopologyMetrics,
    TopologyPage,
    VisualNode,
    VisualTable,
)
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.document_rows import fields_of
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.operations.context import topology_by_name

_NOTHING_ASKED = {"requestedMemOnHeap": 0.0, "requestedMemOffHeap": 0.0, "requestedCpu": 0.0}
_COUNTS = ("emitted", "transferred", "acked", "failed")
_METRICS = {
    "spout": (_COUNTS, {"complete_ms_avg": "complete_ms"}),
    "bolt": (
        (*_COUNTS, "executed"),
        {"executed_ms_avg": "execute_ms", "process_ms_avg": "execute_ms"},
    ),
}
"""What ``/topology/:id/metrics`` has of a component: counts, and latencies by their keys."""


class TopologyPages:
    """Every page takes a topology's id or name; :class:`NotAlive` when there is none."""

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
        """``/topology/:id/metrics``: statistics of each component by stream."""
        snapshot = self._reader.snapshot(name)

        def described(part: ComponentSnapshot) -> dict[str, Any]:
            sums = part.windows[window].filter_system(sys)
            counts, latencies = _METRICS[part.kind]
            fixed = {
                key: {each: format_fixed(mean) for each, mean in getattr(sums, name).items()}
                for key, name in latencies.items()
            }
            rows = {**{name: getattr(sums, name) for name in counts}, **fixed}
            by_input = rows.keys() - {"emitted", "transferred"} if part.kind == "bolt" else ()
            return {
                "id": part.id,
                **{name: _by_stream(by_key, name in by_input) for name, by_key in rows.items()},
            }

        return {
            "window": window,
            "windowHint": window_hint(window),
            "spouts": [described(part) for part in snapshot.components_of("spout", sys)],
            "bolts": [described(part) for part in snapshot.components_of("bolt", sys)],
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
        """``/topology/:id/lag``: of the spouts whose tasks report a metric named ``lag``."""
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
        """``/topology/:id/get-errors``: the newest errors of all components."""
        snapshot, links = self._reader.snapshot(name), Links(self._reader.view())
        return {
            "topologyErrors": [
                {"component": part.id, **_error_row(error, snapshot.id, links)}
                for part in snapshot.components.values()
                for error in part.errors
            ]
        }

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
        """``/topology/:id/visualization-init``."""
        return visualization_table(self._reader, name, window, sys)

    @router.route(
        "GET",
        "/api/v1/topology/{id}/visualization",
        summary="Graph of a topology",
        responses={200: dict[str, VisualNode]},
        errors=READ_ERRORS,
    )
    def visualization(self, name: TopologyId, window: Window, sys: IncludeSystem) -> dict[str, Any]:
        """``/topology/:id/visualization``."""
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
        """``/topology/:id/component/:component``; :class:`KeyNotFound` when the topology has no
        such component.
        """
        snapshot, links = self._reader.snapshot(name), Links(self._reader.view())
        part = snapshot.components.get(component)
        if part is None:
            raise KeyNotFound(
                f"topology {snapshot.name!r} has no component {component!r:.80}: it has {', '.join(sorted(snapshot.components))}"
            )
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
            **_NOTHING_ASKED,
            "debug": bool(self._reader.runnable(snapshot.id).conf.get("topology.debug")),
            "samplingPct": 10.0,
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
        """``/topology/:id``."""
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
            "topologyStats": [_topology_stats(snapshot, name, sys) for name in WINDOWS],
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
            "debug": bool(runnable.conf.get("topology.debug")),
            "samplingPct": 100.0 if runnable.conf.get("topology.debug") else 10.0,
            "visualizationTable": [],
        }


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


def _numbers(one: ComponentSnapshot | ExecutorSnapshot, window: str, sys: bool) -> dict[str, Any]:
    """Counts, and the numbers of a spout or a bolt that the other kind does not have."""
    totals = one.windows[window].totals(include_sys=sys)
    if one.kind == "spout":
        return {**_counts(totals), "completeLatency": format_fixed(totals.complete_ms)}
    return {**_counts(totals), "capacity": format_fixed(one.capacity), **_executed(totals)}


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
        **_NOTHING_ASKED,
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
    if part.errors:
        newest = part.errors[0]
        text, place = short_error(newest.error), _error_place(newest, topology_id, links)
        return {"lastError": text, "errorTime": newest.time, **place}
    texts = dict.fromkeys(("lastError", "errorHost", "errorWorkerLogLink"), "")
    return {**texts, **dict.fromkeys(("errorPort", "errorTime", "errorLapsedSecs"))}


def _error_row(error: TaskError, topology_id: str, links: Links) -> dict[str, Any]:
    return {
        "time": error.time * 1000,
        "error": error.error,
        "errorCount": error.count,
        **_error_place(error, topology_id, links),
    }


def _executor_row(
    one: ExecutorSnapshot, window: str, sys: bool, topology_id: str, links: Links
) -> dict[str, Any]:
    return {
        **fields_of("executor", one),
        "encodedId": quote_plus(one.id),
        "uptime": pretty_secs(one.uptime_secs),
        "workerLogLink": links.worker(topology_id, one.node, one.host, one.port),
        **_numbers(one, window, sys),
    }


def _window_row(part: ComponentSnapshot, window: str, sys: bool) -> dict[str, Any]:
    return {
        "window": window,
        "windowPretty": window_hint(window),
        **_numbers(part, window, sys),
        "latencyPercentiles": latency_document(part.windows[window].percentiles()),
    }


def _output_row(part: ComponentSnapshot, sums: WindowStats, stream: str) -> dict[str, Any]:
    one = sums.of(stream)
    if part.kind == "bolt":
        return {"stream": stream, "emitted": one.emitted, "transferred": one.transferred}
    return {
        "stream": stream,
        **_counts(one),
        "completeLatency": format_fixed(one.complete_ms),
        "latencyPercentiles": latency_document(sums.stream_percentiles(stream)),
    }


def _input_row(sums: WindowStats, key: str) -> dict[str, Any]:
    component, stream = split_input(key)
    one = sums.of(key)
    return {
        "component": component,
        "encodedComponentId": quote_plus(component),
        "stream": stream,
        **_executed(one),
        "acked": one.acked,
        "failed": one.failed,
        "latencyPercentiles": latency_document(sums.stream_percentiles(key)),
    }


def _statistics(
    part: ComponentSnapshot, topology_id: str, window: str, sys: bool, links: Links
) -> dict[str, Any]:
    """The tables of a component's page: windows, streams, executors."""
    sums = part.windows[window].filter_system(sys)
    tables: dict[str, Any] = {
        "spoutSummary" if part.kind == "spout" else "boltStats": [
            _window_row(part, each, sys) for each in WINDOWS
        ],
        "outputStats": [_output_row(part, sums, stream) for stream in sums.outputs],
        "executorStats": [
            _executor_row(each, window, sys, topology_id, links) for each in part.executors
        ],
    }
    if part.kind == "bolt":
        tables["inputStats"] = [_input_row(sums, key) for key in sums.inputs]
    return tables


def _by_stream(by_key: Mapping[str, Any], of_inputs: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for key, value in sorted(by_key.items()):
        component, stream = split_input(key)
        source = (
            {"component_id": component, "stream_id": stream} if of_inputs else {"stream_id": key}
        )
        rows.append({**source, "value": value})
    return rows


_UNSAFE = re.compile(r"[^A-Za-z_\-:.]")
_COLUMNS = 4


def _sane(stream: str) -> str:
    """A stream's name as Storm's page uses it in identifiers."""
    name = stream if re.match(r"[A-Za-z]", stream) else f"s{stream}"
    return _UNSAFE.sub("_", name)


def visualization(reader: ClusterReader, name: str, window: str, sys: bool) -> dict[str, Any]:
    """Component -> its type, load, latency, what it sent by stream, executors and inputs; keys as
    in Storm.
    """
    snapshot = reader.snapshot(name)
    runnable = reader.runnable(snapshot.id)
    spec = with_system_components(runnable.spec, runnable.conf) if sys else runnable.spec
    graph: dict[str, Any] = {}
    for component_id, kind, declared in spec.components():
        part = snapshot.components.get(component_id)
        if part is None:
            continue
        totals = part.windows[window].totals(include_sys=sys)
        sent = part.windows[window].transferred
        graph[component_id] = {
            ":type": kind,
            ":capacity": part.capacity,
            ":latency": totals.complete_ms if kind == "spout" else totals.execute_ms,
            ":transferred": {
                stream: count for stream, count in sent.items() if sys or not is_system_name(stream)
            },
            ":stats": [
                {
                    ":host": one.host,
                    ":port": one.port,
                    ":uptime_secs": one.uptime_secs,
                    ":transferred": {
                        window: dict(one.windows[window].transferred) for window in WINDOWS
                    },
                }
                for one in part.executors
            ],
            ":link": f"/api/v1/topology/{quote(snapshot.id, safe='')}/component/{quote(component_id, safe='')}",
            ":inputs": [
                {
                    ":component": one.component,
                    ":stream": one.stream,
                    ":sani-stream": _sane(one.stream),
                    ":grouping": one.grouping.type,
                }
                for one in declared.inputs
                if sys or not is_system_name(one.stream)
            ],
        }
    return graph


def visualization_table(reader: ClusterReader, name: str, window: str, sys: bool) -> dict[str, Any]:
    """Every stream once, in rows of four: what a page offers to switch on and off."""
    graph = visualization(reader, name, window, sys)
    streams = sorted({one[":stream"] for part in graph.values() for one in part[":inputs"]})
    boxes = [
        {":stream": one, ":sani-stream": _sane(one), ":checked": not is_system_name(one)}
        for one in streams
    ]
    rows = [boxes[start : start + _COLUMNS] for start in range(0, len(boxes), _COLUMNS)]
    return {"visualizationTable": rows}
