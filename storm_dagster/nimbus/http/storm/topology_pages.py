"""Pages of one topology: its page, components, metrics, spout lag, workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.model.errors import KeyNotFound
from storm_dagster.model.records import TaskError
from storm_dagster.model.security import public_conf
from storm_dagster.nimbus.http.storm.cluster_pages import OWNER, worker_row
from storm_dagster.nimbus.http.storm.formats import (
    Links,
    encoded,
    fixed,
    pretty_secs,
    short_error,
    window_hint,
)
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.page_snapshot import ComponentSnapshot, ExecutorSnapshot, TopologySnapshot
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.window_stats import (
    WINDOWS,
    Totals,
    WindowStats,
    is_system_name,
    split_input,
)

__all__ = ["TopologyPages"]


class TopologyPages:
    """Every page takes a topology's id or name; :class:`NotAlive` when there is none."""

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader

    def _links(self) -> Links:
        return Links.of(self._reader.view())

    def page(self, name: str, window: str, sys: bool) -> dict[str, Any]:
        """``/topology/:id``."""
        facts = self._reader.facts(name)
        runnable = self._reader.runnable(facts.id)
        conf = public_conf(runnable.conf)
        links = self._links()
        memory = sum(worker.memory_mb for worker in facts.workers)
        cpu = sum(worker.cpu for worker in facts.workers)
        shown = {id: part for id, part in sorted(facts.components.items()) if sys or not part.is_system}
        return {
            "id": facts.id,
            "encodedId": encoded(facts.id),
            "name": facts.name,
            "owner": OWNER,
            "user": None,
            "status": facts.status,
            "uptime": pretty_secs(facts.uptime_secs),
            "uptimeSeconds": facts.uptime_secs,
            "tasksTotal": facts.tasks_total,
            "workersTotal": facts.workers_total,
            "executorsTotal": facts.executors_total,
            "schedulerInfo": None,
            "schedulerDisplayResource": bool(memory or cpu),
            "requestedMemOnHeap": memory,
            "requestedMemOffHeap": 0.0,
            "requestedTotalMem": memory,
            "requestedCpu": cpu,
            "assignedMemOnHeap": memory,
            "assignedMemOffHeap": 0.0,
            "assignedTotalMem": memory,
            "assignedCpu": cpu,
            "msgTimeout": int(runnable.conf.get("topology.message.timeout.secs") or 0),
            "window": window,
            "windowHint": window_hint(window),
            "topologyStats": [_topology_stats(facts, name, sys) for name in WINDOWS],
            "workers": [worker_row(worker, links) for worker in facts.workers],
            "spouts": [
                self._spout(part, window, sys, facts.id, links)
                for part in shown.values()
                if part.kind == "spout"
            ],
            "bolts": [
                self._bolt(part, window, sys, facts.id, links)
                for part in shown.values()
                if part.kind == "bolt"
            ],
            "configuration": conf,
            "debug": bool(runnable.conf.get("topology.debug")),
            "samplingPct": 100.0 if runnable.conf.get("topology.debug") else 10.0,
            "replicationCount": self._reader.replication([facts.id])[facts.id],
            "stormVersion": self._nimbus.identity.version,
            "visualizationTable": [],
        }

    def workers(self, name: str) -> dict[str, Any]:
        """``/topology-workers/:id``: each slot once."""
        facts = self._reader.facts(name)
        port, scheme = self._logviewer()
        pairs = sorted({(worker.host, worker.port) for worker in facts.workers})
        return {
            "hostPortList": [{"host": host, "port": number} for host, number in pairs],
            "logviewerPort": port,
            "logviewerScheme": scheme,
        }

    def _logviewer(self) -> tuple[int, str]:
        """Storm has one port for all hosts; here each supervisor names its own, this is the configured one."""
        return int(self._nimbus.conf["supervisor.http.port"]), self._nimbus.identity.http.partition(":")[0]

    def metrics(self, name: str, window: str, sys: bool) -> dict[str, Any]:
        """``/topology/:id/metrics``: figures of each component by stream."""
        facts = self._reader.facts(name)

        def described(part: ComponentSnapshot) -> dict[str, Any]:
            one = part.windows[window]
            row: dict[str, Any] = {
                "id": part.id,
                "emitted": _by_stream(one.emitted, sys),
                "transferred": _by_stream(one.transferred, sys),
            }
            if part.kind == "spout":
                row["acked"] = _by_stream(one.acked, sys)
                row["failed"] = _by_stream(one.failed, sys)
                row["complete_ms_avg"] = _by_stream(one.complete_ms, sys, fixed)
            else:
                row["acked"] = _by_input(one.acked, sys)
                row["failed"] = _by_input(one.failed, sys)
                row["executed"] = _by_input(one.executed, sys)
                row["executed_ms_avg"] = _by_input(one.execute_ms, sys, fixed)
                row["process_ms_avg"] = _by_input(one.process_ms, sys, fixed)
            return row

        shown = [part for _, part in sorted(facts.components.items()) if sys or not part.is_system]
        return {
            "window": window,
            "windowHint": window_hint(window),
            "spouts": [described(part) for part in shown if part.kind == "spout"],
            "bolts": [described(part) for part in shown if part.kind == "bolt"],
            "reported": [
                {"component_id": component, "task": task, "metrics": dict(figures)}
                for (component, task), figures in facts.metrics.items()
            ],
        }

    def lag(self, name: str) -> dict[str, Any]:
        """``/topology/:id/lag``: of the spouts whose tasks report a metric named ``lag``."""
        view_stats = self._reader.stats(name) or {}
        lags: dict[str, dict[str, Any]] = {}
        for task, told in (view_stats.get("tasks") or {}).items():
            value = (told.get("metrics") or {}).get("lag")
            if isinstance(value, int | float) and not isinstance(value, bool):
                lags.setdefault(told.get("component") or "?", {})[task] = value
        return {
            component: {
                "spoutId": component,
                "spoutType": "STORM_DAGSTER",
                "spoutLagResult": {"totalLag": sum(by_task.values()), "tasks": by_task},
            }
            for component, by_task in sorted(lags.items())
        }

    def errors(self, name: str) -> dict[str, Any]:
        """``/topology/:id/get-errors``: the newest errors of all components."""
        facts, links = self._reader.facts(name), self._links()
        return {
            "topologyErrors": [
                {"component": part.id, **_error_row(error, facts.id, links)}
                for part in facts.components.values()
                for error in part.errors
            ]
        }

    def component(self, name: str, component: str, window: str, sys: bool) -> dict[str, Any]:
        """``/topology/:id/component/:component``; :class:`KeyNotFound` when the topology has no such component."""
        facts, links = self._reader.facts(name), self._links()
        part = facts.components.get(component)
        if part is None:
            raise KeyNotFound(
                f"topology {facts.name!r} has no component {component!r:.80}: it has {', '.join(sorted(facts.components))}"
            )
        return {
            "id": part.id,
            "encodedId": encoded(part.id),
            "name": facts.name,
            "user": None,
            "topologyId": facts.id,
            "encodedTopologyId": encoded(facts.id),
            "topologyStatus": facts.status,
            "componentType": part.kind,
            "executors": len(part.executors),
            "tasks": len(part.tasks),
            "window": window,
            "windowHint": window_hint(window),
            "schedulerDisplayResource": False,
            "requestedMemOnHeap": 0.0,
            "requestedMemOffHeap": 0.0,
            "requestedCpu": 0.0,
            "debug": bool(self._reader.runnable(facts.id).conf.get("topology.debug")),
            "samplingPct": 10.0,
            "eventLogLink": "",
            "profilingAndDebuggingCapable": True,
            "profileActionEnabled": True,
            "profilerActive": [],
            "componentErrors": [_error_row(error, facts.id, links) for error in part.errors],
            **(_spout_page if part.kind == "spout" else _bolt_page)(part, facts.id, window, sys, links),
        }

    def _spout(
        self, part: ComponentSnapshot, window: str, sys: bool, topology_id: str, links: Links
    ) -> dict[str, Any]:
        totals = part.windows[window].totals(include_sys=sys)
        return {
            "spoutId": part.id,
            "encodedSpoutId": encoded(part.id),
            **_common(part, totals),
            "completeLatency": fixed(totals.complete_ms),
            **_last_error(part, topology_id, links),
        }

    def _bolt(
        self, part: ComponentSnapshot, window: str, sys: bool, topology_id: str, links: Links
    ) -> dict[str, Any]:
        totals = part.windows[window].totals(include_sys=sys)
        return {
            "boltId": part.id,
            "encodedBoltId": encoded(part.id),
            **_common(part, totals),
            "capacity": fixed(part.capacity),
            "executed": totals.executed,
            "executeLatency": fixed(totals.execute_ms),
            "processLatency": fixed(totals.process_ms),
            **_last_error(part, topology_id, links),
        }


def _topology_stats(facts: TopologySnapshot, window: str, sys: bool) -> dict[str, Any]:
    totals = facts.totals(window, include_sys=sys)
    return {
        "windowPretty": window_hint(window),
        "window": window,
        "emitted": totals["emitted"],
        "transferred": totals["transferred"],
        "completeLatency": fixed(totals["complete_ms"]),
        "acked": totals["acked"],
        "failed": totals["failed"],
    }


def _common(part: ComponentSnapshot, totals: Totals) -> dict[str, Any]:
    return {
        "executors": len(part.executors),
        "tasks": len(part.tasks),
        "emitted": totals.emitted,
        "transferred": totals.transferred,
        "acked": totals.acked,
        "failed": totals.failed,
        "requestedMemOnHeap": 0.0,
        "requestedMemOffHeap": 0.0,
        "requestedCpu": 0.0,
    }


def _last_error(part: ComponentSnapshot, topology_id: str, links: Links) -> dict[str, Any]:
    if not part.errors:
        return {
            "lastError": "",
            "errorHost": "",
            "errorPort": None,
            "errorTime": None,
            "errorLapsedSecs": None,
            "errorWorkerLogLink": "",
        }
    newest = part.errors[0]
    return {
        "lastError": short_error(newest.error),
        "errorHost": newest.host,
        "errorPort": newest.port,
        "errorTime": newest.time,
        "errorLapsedSecs": max(0, int(time.time()) - newest.time),
        "errorWorkerLogLink": links.worker(topology_id, None, newest.host, newest.port),
    }


def _error_row(error: TaskError, topology_id: str, links: Links) -> dict[str, Any]:
    return {
        "time": error.time * 1000,
        "errorHost": error.host,
        "errorPort": error.port,
        "errorWorkerLogLink": links.worker(topology_id, None, error.host, error.port),
        "errorLapsedSecs": max(0, int(time.time()) - error.time),
        "error": error.error,
    }


def _executor_row(one: ExecutorSnapshot, totals: Totals, topology_id: str, links: Links) -> dict[str, Any]:
    return {
        "id": one.id,
        "encodedId": encoded(one.id),
        "uptime": pretty_secs(one.uptime_secs),
        "uptimeSeconds": one.uptime_secs,
        "host": one.host,
        "port": one.port,
        "emitted": totals.emitted,
        "transferred": totals.transferred,
        "acked": totals.acked,
        "failed": totals.failed,
        "workerLogLink": links.worker(topology_id, one.node, one.host, one.port),
    }


def _window_rows(part: ComponentSnapshot, sys: bool) -> list[tuple[dict[str, Any], Totals]]:
    rows: list[tuple[dict[str, Any], Totals]] = []
    for window in WINDOWS:
        totals = part.windows[window].totals(include_sys=sys)
        row = {
            "window": window,
            "windowPretty": window_hint(window),
            "emitted": totals.emitted,
            "transferred": totals.transferred,
            "acked": totals.acked,
            "failed": totals.failed,
        }
        rows.append((row, totals))
    return rows


def _spout_page(
    part: ComponentSnapshot, topology_id: str, window: str, sys: bool, links: Links
) -> dict[str, Any]:
    one = part.windows[window]
    executors: list[dict[str, Any]] = []
    for executor in part.executors:
        totals = executor.windows[window].totals(include_sys=sys)
        row = _executor_row(executor, totals, topology_id, links)
        executors.append({**row, "completeLatency": fixed(totals.complete_ms)})
    return {
        "spoutSummary": [
            {**row, "completeLatency": fixed(totals.complete_ms)} for row, totals in _window_rows(part, sys)
        ],
        "outputStats": [
            {
                "stream": stream,
                "emitted": one.emitted.get(stream, 0),
                "transferred": one.transferred.get(stream, 0),
                "completeLatency": fixed(one.complete_ms.get(stream, 0.0)),
                "acked": one.acked.get(stream, 0),
                "failed": one.failed.get(stream, 0),
            }
            for stream in _streams(one, sys)
        ],
        "executorStats": executors,
    }


def _bolt_page(
    part: ComponentSnapshot, topology_id: str, window: str, sys: bool, links: Links
) -> dict[str, Any]:
    one = part.windows[window]
    executors: list[dict[str, Any]] = []
    for executor in part.executors:
        totals = executor.windows[window].totals(include_sys=sys)
        executors.append(
            {
                **_executor_row(executor, totals, topology_id, links),
                "capacity": fixed(executor.capacity),
                "executed": totals.executed,
                "executeLatency": fixed(totals.execute_ms),
                "processLatency": fixed(totals.process_ms),
            }
        )
    return {
        "boltStats": [
            {
                **row,
                "executed": totals.executed,
                "executeLatency": fixed(totals.execute_ms),
                "processLatency": fixed(totals.process_ms),
                "capacity": fixed(part.capacity),
            }
            for row, totals in _window_rows(part, sys)
        ],
        "inputStats": [
            {
                "component": split_input(key)[0],
                "encodedComponentId": encoded(split_input(key)[0]),
                "stream": split_input(key)[1],
                "executed": one.executed.get(key, 0),
                "executeLatency": fixed(one.execute_ms.get(key, 0.0)),
                "processLatency": fixed(one.process_ms.get(key, 0.0)),
                "acked": one.acked.get(key, 0),
                "failed": one.failed.get(key, 0),
            }
            for key in sorted(one.executed)
            if sys or not is_system_name(split_input(key)[1])
        ],
        "outputStats": [
            {
                "stream": stream,
                "emitted": one.emitted.get(stream, 0),
                "transferred": one.transferred.get(stream, 0),
            }
            for stream in _streams(one, sys)
        ],
        "executorStats": executors,
    }


def _streams(one: WindowStats, sys: bool) -> list[str]:
    return sorted(stream for stream in {*one.emitted, *one.transferred} if sys or not is_system_name(stream))


def _by_stream(
    figures: Mapping[str, Any], sys: bool, shown: Callable[[Any], Any] = lambda value: value
) -> list[dict[str, Any]]:
    return [
        {"stream_id": stream, "value": shown(value)}
        for stream, value in sorted(figures.items())
        if sys or not is_system_name(stream)
    ]


def _by_input(
    figures: Mapping[str, Any], sys: bool, shown: Callable[[Any], Any] = lambda value: value
) -> list[dict[str, Any]]:
    return [
        {"component_id": split_input(key)[0], "stream_id": split_input(key)[1], "value": shown(value)}
        for key, value in sorted(figures.items())
        if sys or not is_system_name(split_input(key)[1])
    ]
