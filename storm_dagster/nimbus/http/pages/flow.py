"""What flows in one topology, for its page: from the topology master's answer, or from nothing.
Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from storm_dagster.core.pictures.graph import DrawnComponent, DrawnEdge, State, graph_picture
from storm_dagster.core.pictures.layout import neighborhood
from storm_dagster.core.reassignment import Runnable
from storm_dagster.model.amounts import compact, latency, percent
from storm_dagster.model.fusion import fused_components
from storm_dagster.model.records import TaskError, TaskTable
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import TopologyView
from storm_dagster.nimbus.http.storm.formats import Links
from storm_dagster.nimbus.requests.page_snapshot import lag_by_partition
from storm_dagster.operations.read.explaining import findings_of

COLUMNS = {
    "name": "component",
    "rate": "tuples/s",
    "p50_ms": "p50 ms",
    "p95_ms": "p95 ms",
    "p99_ms": "p99 ms",
    "capacity": "capacity",
    "waiting": "queue",
    "held": "held back",
    "failed": "failed/s",
    "lag": "lag",
    "errors": "errors",
}
"""Sortable columns of the table of components, and their titles."""
_BUSY = 0.8
_MOST_DRAWN = 40
"""Components in one drawing; of a larger topology the page begins around the worst one."""


class TopologyFlow:
    """Components, edges, tasks and findings of one topology at one moment."""

    def __init__(
        self,
        topology: TopologyView,
        stats: Mapping[str, Any] | None,
        code: Runnable | None,
        errors: Sequence[tuple[str, TaskError]],
        now_secs: int,
    ) -> None:
        self._topology = topology
        self._stats: Mapping[str, Any] = stats or {}
        self.findings = findings_of(topology, stats, now_secs=now_secs, errors=errors)
        self._slow = {one.component for one in self.findings if one.kind in ("bottleneck", "skew")}
        table = topology.tasks or TaskTable(components={})
        names = [name for name in table.components if not name.startswith("__")]
        counts: dict[str, int] = {}
        for component, error in errors:
            counts[component] = counts.get(component, 0) + error.count
        flow: Mapping[str, Any] = self._stats.get("components", {})
        self._tasks = {task: name for name in names for task in table.components[name].ids}
        fused = fused_components(code.spec, code.conf) if code is not None else {}
        self.rows: dict[str, dict[str, Any]] = {
            name: {
                "name": name,
                "kind": table.components[name].type,
                "tasks": len(table.components[name].ids),
                "executors": topology.base.executors.get(name, len(table.components[name].ids)),
                **{
                    key: flow.get(name, {}).get(key)
                    for key in COLUMNS
                    if key not in ("name", "errors")
                },
                "errors": counts.get(name, 0),
                "slow": name in self._slow,
                "fused": fused.get(name, ""),
            }
            for name in names
        }
        self.edges = self._edges(code.spec if code is not None else None)

    def lags(self, focus: str) -> list[tuple[str, str, float | None, float | None]]:
        """(component, partition, records, seconds) of what sources are behind, the most first."""
        names = [focus] if focus else self.rows
        reported: Mapping[str, Any] = self._stats.get("tasks") or {}
        found = [
            (name, partition, *lag)
            for name in names
            for partition, lag in lag_by_partition(
                reported, [task for task, of in self._tasks.items() if of == name]
            ).items()
        ]
        return sorted(found, key=lambda row: -(row[2] or 0))

    def _edges(self, spec: TopologySpec | None) -> dict[tuple[str, str, str], float]:
        """(source, target, stream) -> tuples per second; without the submitted topology those on
        which something flows.
        """
        found: dict[tuple[str, str, str], float] = {}
        for name, _, part in spec.components() if spec is not None else ():
            found |= {(one.component, name, one.stream): 0.0 for one in part.inputs}
        for target, inputs in self._stats.get("edges", {}).items():
            for key, rate in inputs.items():
                source, _, stream = key.rpartition(":")
                found[source, target, stream] = rate
        return {
            key: rate for key, rate in found.items() if key[0] in self.rows and key[1] in self.rows
        }

    def narrowed(self, focus: str) -> str:
        """The component around which a large topology is drawn; empty if all of it is."""
        if len(self.rows) <= _MOST_DRAWN:
            return ""
        worst = max(
            self.rows.values(),
            key=lambda row: (row["slow"], row["waiting"] or 0, row["capacity"] or 0.0),
        )
        return focus or worst["name"]

    def picture(self, focus: str, link: Callable[[str], str] | None) -> str:
        """The graph as SVG; components are links to ``link(name)``."""
        center = self.narrowed(focus)
        near = neighborhood([key[:2] for key in self.edges], center) if center else self.rows.keys()
        rates: dict[tuple[str, str], float] = {}
        for (source, target, _), rate in self.edges.items():
            rates[source, target] = rates.get((source, target), 0.0) + rate
        return graph_picture(
            [
                DrawnComponent(
                    name,
                    self._state(row),
                    row["executors"],
                    _lines(row),
                    row["capacity"] if row["kind"] == "bolt" else None,
                    row["errors"],
                    link(name) if link else "",
                )
                for name, row in self.rows.items()
                if name in near
            ],
            [
                DrawnEdge(
                    *edge, rate, edge[1] in self._slow and bool(self.rows[edge[1]]["waiting"])
                )
                for edge, rate in rates.items()
            ],
            f"Components of {self._topology.base.name} and what flows between them",
        )

    def _state(self, row: Mapping[str, Any]) -> State:
        if row["slow"]:
            return "slow"
        return (
            "spout"
            if row["kind"] == "spout"
            else "busy"
            if (row["capacity"] or 0.0) >= _BUSY
            else "calm"
        )

    def sorted_rows(self, sort: str) -> list[dict[str, Any]]:
        """Components by name, or the largest first."""
        rows = sorted(self.rows.values(), key=lambda row: (row["kind"] != "spout", row["name"]))
        return (
            rows
            if sort == "name"
            else sorted(rows, key=lambda row: -(row[sort] if row[sort] is not None else -1.0))
        )

    def edge_rows(self) -> list[tuple[str, str, str, float]]:
        """(source, stream, target, tuples per second)."""
        return sorted(
            (source, stream, target, rate) for (source, target, stream), rate in self.edges.items()
        )

    def tasks(self, component: str) -> list[dict[str, Any]]:
        """Tasks of a component, or of all of them (empty), the busiest first."""
        assigned = self._topology.assignment
        slots = {
            task: worker for worker in (assigned.workers if assigned else ()) for task in worker.ids
        }
        known: Mapping[str, Any] = self._stats.get("tasks", {})
        rows = [
            {
                "task": task,
                "component": name,
                "slot": f"{slots[task].host}:{slots[task].port}" if task in slots else None,
                "status": known.get(str(task), {}).get("status")
                or ("unassigned" if task not in slots else "unknown"),
                **{
                    key: known.get(str(task), {}).get(key)
                    for key in ("uptime_secs", "rate", "busy", "waiting")
                },
            }
            for task, name in self._tasks.items()
            if component in ("", name)
        ]
        return sorted(
            rows, key=lambda row: (-(row["busy"] or 0.0), -(row["rate"] or 0.0), row["task"])
        )

    def metrics(self, component: str) -> list[tuple[str, str, str, Any]]:
        """(component, task, name, value) of what tasks report, of a component or of all of them
        (empty).
        """
        known: Mapping[str, Any] = self._stats.get("tasks", {})
        return [
            (name, str(task), metric, value)
            for task, name in sorted(self._tasks.items(), key=lambda item: (item[1], item[0]))
            if component in ("", name)
            for metric, value in sorted((known.get(str(task), {}).get("metrics") or {}).items())
            if metric != "lag_by_partition"
        ]

    def workers(self, links: Links) -> list[dict[str, Any]]:
        """Workers with their process, CPU, memory and log."""
        rows: list[dict[str, Any]] = []
        for worker in self._topology.assignment.workers if self._topology.assignment else ():
            live = self._topology.live_workers.get(worker.slot)
            report: Mapping[str, Any] = self._stats.get("workers", {}).get(
                f"{worker.node}:{worker.port}", {}
            )
            system: Mapping[str, Any] = report.get("system", {})
            base = links.base(worker.host)
            rows.append(
                {
                    "slot": f"{worker.host}:{worker.port}",
                    "pid": live.pid if live is not None else None,
                    "tasks": len(worker.ids),
                    "uptime_secs": report.get("uptime_secs"),
                    "cpu": report.get("cpu"),
                    "memory_mb": system["memory_bytes"] / 2**20
                    if system.get("memory_bytes")
                    else None,
                    "restarts": report.get("restarts"),
                    "silent_secs": report.get("silent_secs"),
                    "log": links.worker(self._topology.id, worker.node, worker.host, worker.port),
                    "stacks": f"{base}/logview?cmd=jstack&workerPort={worker.port}" if base else "",
                }
            )
        return sorted(rows, key=lambda row: row["slot"])


def _lines(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Two lines of a component in the graph."""
    first = (
        f"{compact(row['rate'])}/s \u00b7 p95 {latency(row['p95_ms'])}"
        if row["rate"] is not None
        else "no figures"
    )
    if row["fused"]:
        return first, f"in the query of {row['fused']}"
    if row["kind"] == "bolt":
        return first, f"{compact(row['waiting'])} wait" if row["waiting"] is not None else ""
    parts = [f"lag {compact(row['lag'])}"] if row["lag"] is not None else []
    if row["held"]:
        parts.append(f"held back {percent(row['held'])}")
    return first, " \u00b7 ".join(parts)
