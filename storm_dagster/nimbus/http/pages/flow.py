"""Rows and a picture of the flow in a topology, from its snapshot. Pure."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from storm_dagster.core.diagnosis import diagnose
from storm_dagster.core.pictures.graph import DrawnComponent, DrawnEdge, State, graph_picture
from storm_dagster.core.pictures.layout import neighborhood
from storm_dagster.core.snapshot.stream_metrics import STREAM_METRICS, stream_metrics
from storm_dagster.core.snapshot.tasks import TaskSnapshot
from storm_dagster.core.snapshot.topology import ComponentSnapshot, TopologySnapshot
from storm_dagster.model.amounts import compact, latency, percent
from storm_dagster.nimbus.http.storm.formats import Links

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
_FLOW_COLUMNS = tuple(key for key in COLUMNS if key not in ("name", "errors"))
"""Columns whose numbers are attributes of a component's ``flow``."""
_BUSY = 0.8
"""Capacity from which a bolt is drawn as busy."""
_MAX_DRAWN = 40
"""Components in one drawing; of a larger topology the surroundings of one are drawn."""


class TopologyFlow:
    """Components, edges, tasks and findings of a topology, as rows."""

    def __init__(self, topology: TopologySnapshot) -> None:
        self._topology = topology
        self.findings = diagnose(topology)
        self._slow = {
            finding.component for finding in self.findings if finding.kind in ("bottleneck", "skew")
        }
        """Ids of components that slow the topology down."""
        self._parts = [part for part in topology.components.values() if not part.is_system]
        """Components of the user."""
        error_counts = Counter[str]()
        for component, error in topology.errors:
            error_counts[component] += error.count
        self.rows: dict[str, dict[str, Any]] = {}
        """Component id -> its row in the table, with the keys of :data:`COLUMNS` and others."""
        for part in self._parts:
            flow_columns = {key: getattr(part.flow, key) for key in _FLOW_COLUMNS}
            self.rows[part.id] = {
                "name": part.id,
                "kind": part.kind,
                "tasks": len(part.tasks),
                "executors": part.parallelism,
                **flow_columns,
                "errors": error_counts[part.id],
                "slow": part.id in self._slow,
                "fused": part.fused_in,
            }
        self.edges = topology.edges
        """(source, target, stream) -> tuples per second."""

    def _parts_of(self, component: str) -> list[ComponentSnapshot]:
        """The component of that id; for an empty id all of the user."""
        return [part for part in self._parts if component in ("", part.id)]

    def lags(self, focus: str) -> list[tuple[str, str, float | None, float | None]]:
        """(component, partition, records, seconds), the largest lag first."""
        rows: list[tuple[str, str, float | None, float | None]] = []
        for part in self._parts_of(focus):
            for partition, (records, seconds) in part.lag_by_partition.items():
                rows.append((part.id, partition, records, seconds))

        def records_of(row: tuple[str, str, float | None, float | None]) -> float:
            _, _, records, _ = row
            return records or 0

        return sorted(rows, key=records_of, reverse=True)

    def center(self, focus: str) -> str:
        """The component around which a large topology is drawn; empty for one that is drawn whole.

        Without a ``focus`` it is the component with the most severe problem: one with a finding,
        then the longest queue, then the highest capacity.
        """
        if len(self.rows) <= _MAX_DRAWN:
            return ""
        worst = max(
            self.rows.values(),
            key=lambda row: (row["slow"], row["waiting"] or 0, row["capacity"] or 0.0),
        )
        return focus or worst["name"]

    def picture(self, focus: str, link: Callable[[str], str] | None) -> str:
        """The graph as SVG; components are links to ``link(name)``, if it is given.

        The streams between two components are one edge. Of a topology with more than
        :data:`_MAX_DRAWN` components only the surroundings of one are drawn: of ``focus``, or of
        the one that :meth:`center` chooses if ``focus`` is empty.
        """
        center = self.center(focus)
        names: Collection[str] = self.rows.keys()
        if center:
            names = neighborhood([(source, target) for source, target, _ in self.edges], center)
        rates: dict[tuple[str, str], float] = {}
        for (source, target, _), rate in self.edges.items():
            rates[source, target] = rates.get((source, target), 0.0) + rate
        components = [
            self._draw_component(name, link(name) if link else "")
            for name in self.rows
            if name in names
        ]
        # graph_picture omits the edges of components that are not drawn.
        edges: list[DrawnEdge] = []
        for (source, target), rate in rates.items():
            # A slow component holds its senders back only while tuples wait for it.
            is_slow = target in self._slow and bool(self.rows[target]["waiting"])
            edges.append(DrawnEdge(source, target, rate, is_slow))
        title = f"Components of {self._topology.name} and what flows between them"
        return graph_picture(components, edges, title)

    def _draw_component(self, name: str, link: str) -> DrawnComponent:
        row = self.rows[name]
        return DrawnComponent(
            name,
            self._state(row),
            row["executors"],
            _lines(row),
            row["capacity"] if row["kind"] == "bolt" else None,
            row["errors"],
            link,
        )

    def _state(self, row: Mapping[str, Any]) -> State:
        """State by which a component is colored; a finding comes before everything else."""
        if row["slow"]:
            return "slow"
        if row["kind"] == "spout":
            return "spout"
        if (row["capacity"] or 0.0) >= _BUSY:
            return "busy"
        return "calm"

    def sorted_rows(self, sort: str) -> list[dict[str, Any]]:
        """Components by name, or by a number, the largest first."""
        rows = sorted(self.rows.values(), key=lambda row: (row["kind"] != "spout", row["name"]))
        if sort != "name":
            rows.sort(key=lambda row: -(row[sort] if row[sort] is not None else -1.0))
        return rows

    def edge_rows(self) -> list[tuple[str, str, str, float]]:
        """(source, stream, target, tuples per second)."""
        return sorted(
            (source, stream, target, rate) for (source, target, stream), rate in self.edges.items()
        )

    def streams(self, component: str) -> list[tuple[str, str, list[int | None]]]:
        """(component, output stream, counts as in :data:`STREAM_METRICS`)."""
        rows: list[tuple[str, str, list[int | None]]] = []
        for part in self._parts_of(component):
            for stream, counts in stream_metrics(part).items():
                numbers = [counts.get(row.key) for row in STREAM_METRICS]
                rows.append((part.id, stream, numbers))
        return sorted(rows, key=lambda row: row[:2])

    def tasks(self, component: str) -> list[dict[str, Any]]:
        """Tasks of a component, or of all (empty), the busiest first."""
        rows: list[dict[str, Any]] = []
        for part in self._parts_of(component):
            rows += [_task_row(task) for task in part.tasks]
        return sorted(
            rows, key=lambda row: (-(row["busy"] or 0.0), -(row["rate"] or 0.0), row["task"])
        )

    def metrics(self, component: str) -> list[tuple[str, str, str, Any]]:
        """(component, task, name, value) of the metrics that tasks report.

        They are those of one component, or of all components for an empty id.
        """
        parts = sorted(self._parts_of(component), key=lambda part: part.id)
        rows: list[tuple[str, str, str, Any]] = []
        for part in parts:
            for task in part.tasks:
                for metric, value in sorted(task.metrics.items()):
                    if metric != "lag_by_partition":  # :meth:`lags` shows it.
                        rows.append((part.id, str(task.id), metric, value))
        return rows

    def workers(self, links: Links) -> list[dict[str, Any]]:
        """Workers with their process, CPU, memory and log."""
        rows: list[dict[str, Any]] = []
        for worker in self._topology.workers:
            base = links.base(worker.host)
            stacks = f"{base}/logview?cmd=jstack&workerPort={worker.port}" if base else ""
            rows.append(
                {
                    "slot": worker.address,
                    "pid": worker.pid,
                    "tasks": len(worker.tasks),
                    "uptime_secs": worker.uptime_secs if worker.pid is not None else None,
                    "cpu": worker.cpu_used,
                    "memory_mb": worker.memory_used_mb,
                    "restarts": worker.restarts,
                    "silent_secs": worker.silent_secs,
                    "log": links.worker(self._topology.id, worker.node, worker.host, worker.port),
                    "stacks": stacks,
                }
            )
        return sorted(rows, key=lambda row: row["slot"])


def _task_row(task: TaskSnapshot) -> dict[str, Any]:
    return {
        "task": task.id,
        "component": task.component,
        "slot": task.worker.address if task.worker is not None else None,
        "status": task.status,
        "uptime_secs": task.uptime_secs if task.reported else None,
        "rate": task.rate,
        "busy": task.busy,
        "waiting": task.waiting if task.reported else None,
    }


def _lines(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Two lines of a component in the graph; the second may be empty."""
    if row["rate"] is None:
        first = "no statistics"
    else:
        first = f"{compact(row['rate'])}/s \u00b7 p95 {latency(row['p95_ms'])}"
    if row["fused"]:
        return first, f"in the query of {row['fused']}"
    if row["kind"] == "bolt":
        if row["waiting"] is None:
            return first, ""
        return first, f"{compact(row['waiting'])} wait"
    parts = [f"lag {compact(row['lag'])}"] if row["lag"] is not None else []
    if row["held"]:
        parts.append(f"held back {percent(row['held'])}")
    return first, " \u00b7 ".join(parts)
