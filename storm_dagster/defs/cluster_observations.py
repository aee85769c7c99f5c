"""Supervisors, workers and topologies as observations: tables, pictures, and numbers that Dagster plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import dagster as dg

from storm_dagster.defs.cluster_picture import DrawnSlot, DrawnSupervisor, cluster_picture, curves_picture
from storm_dagster.defs.keys import SUPERVISORS, TOPOLOGIES, WORKERS
from storm_dagster.defs.metadata import component_counts, table
from storm_dagster.defs.svg import data_uri
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.view import ClusterView

__all__ = [
    "Curves",
    "drawn_supervisors",
    "supervisors_observation",
    "supervisors_state",
    "topologies_observation",
    "topologies_state",
    "workers_observation",
    "workers_state",
]

_MOST_SAMPLES = 60
_MOST_CURVES = 20


def picture_of(svg: str, words: str = "tasks on slots") -> dg.MarkdownMetadataValue:
    """The picture inline: nothing is fetched to show it."""
    return dg.MetadataValue.md(f"![{words}]({data_uri(svg)})")


def drawn_supervisors(view: ClusterView) -> list[DrawnSupervisor]:
    """The supervisors of ``view``, those that assignments name but that are gone included."""
    slots: dict[str, dict[int, DrawnSlot]] = {
        supervisor_id: {port: DrawnSlot(port) for port in info.ports}
        for supervisor_id, info in view.supervisors.items()
    }
    hosts = {supervisor_id: info.host for supervisor_id, info in view.supervisors.items()}
    for topology in view.topologies.values():
        if topology.assignment is None:
            continue
        components = topology.tasks.component_of() if topology.tasks is not None else {}
        for worker in topology.assignment.workers:
            live = topology.live_workers.get(worker.slot)
            state = "dead" if live is None else "running" if live.status == "running" else "starting"
            hosts.setdefault(worker.node, worker.host)
            slots.setdefault(worker.node, {})[worker.port] = DrawnSlot(
                worker.port, topology.base.name, component_counts(worker.ids, components), state
            )
    return [
        DrawnSupervisor(
            node,
            hosts[node],
            [slot for _, slot in sorted(members.items())],
            gone=node not in view.supervisors,
        )
        for node, members in sorted(slots.items(), key=lambda item: (hosts[item[0]], item[0]))
    ]


def supervisors_state(view: ClusterView) -> Any:
    """What must change for the supervisors to be observed again."""
    used = view.used_ports()
    return {
        key: (info.host, info.ports, sorted(used.get(key, ())), info.restarting, info.version)
        for key, info in view.supervisors.items()
    }


def supervisors_observation(view: ClusterView, key: dg.AssetKey = SUPERVISORS) -> dg.AssetObservation:
    """The supervisors of ``view`` with their slots, as an observation."""
    used = view.used_ports()
    rows: list[dict[str, str | int | float | bool | None]] = [
        {
            "supervisor": supervisor_id,
            "host": info.host,
            "ports": encode_ranges(info.ports).replace(",", ", "),
            "used": encode_ranges(used.get(supervisor_id, ())).replace(",", ", "),
            "free": len(set(info.ports) - used.get(supervisor_id, set())),
            "restarting": encode_ranges(info.restarting),
            "blacklisted": info.host in view.blacklist,
            "version": info.version,
        }
        for supervisor_id, info in sorted(view.supervisors.items())
    ]
    slots = sum(len(info.ports) for info in view.supervisors.values())
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "supervisors": table(
                [
                    ("supervisor", "string"),
                    ("host", "string"),
                    ("ports", "string"),
                    ("used", "string"),
                    ("free", "int"),
                    ("restarting", "string"),
                    ("blacklisted", "bool"),
                    ("version", "string"),
                ],
                rows,
            ),
            "tasks_on_slots": picture_of(cluster_picture(drawn_supervisors(view), "Supervisors and slots")),
            "live": len(rows),
            "slots": slots,
            "slots_free": sum(int(row["free"] or 0) for row in rows),
            "topologies": len(view.topologies),
        },
    )


def workers_state(view: ClusterView) -> Any:
    """What must change for the workers to be observed again."""
    return {
        topology.id: sorted(
            (node, port, record.pid, record.token, record.status, record.tasks)
            for (node, port), record in topology.live_workers.items()
        )
        for topology in view.topologies.values()
    }


def workers_observation(
    view: ClusterView, key: dg.AssetKey = WORKERS, now: float = 0.0
) -> dg.AssetObservation:
    """Every slot that an assignment names, and the process in it."""
    rows: list[dict[str, str | int | float | bool | None]] = []
    for topology in view.topologies.values():
        for worker in topology.assignment.workers if topology.assignment is not None else ():
            live = topology.live_workers.get(worker.slot)
            rows.append(
                {
                    "topology": topology.base.name,
                    "host": worker.host,
                    "port": worker.port,
                    "pid": live.pid if live is not None else None,
                    "status": live.status if live is not None else "dead",
                    "uptime_secs": max(0, int(now - live.started_ms / 1000)) if live is not None else None,
                    "tasks": encode_ranges(worker.ids),
                }
            )
    rows.sort(key=lambda row: (str(row["topology"]), str(row["host"]), int(row["port"] or 0)))
    running = sum(1 for row in rows if row["status"] == "running")
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "workers": table(
                [
                    ("topology", "string"),
                    ("host", "string"),
                    ("port", "int"),
                    ("pid", "int"),
                    ("status", "string"),
                    ("uptime_secs", "int"),
                    ("tasks", "string"),
                ],
                rows,
            ),
            "tasks_on_slots": picture_of(cluster_picture(drawn_supervisors(view), "Workers by topology")),
            "wanted": len(rows),
            "running": running,
            "not_running": len(rows) - running,
        },
    )


@dataclass(frozen=True)
class Curves:
    """The newest hour of samples of each topology, one a minute: what the sensor's cursor keeps."""

    samples: Mapping[str, list[list[float]]] = field(default_factory=dict)
    """Topology id -> [epoch secs, tuples executed in all, seconds of executing, mean complete latency in ms]."""

    @staticmethod
    def from_json(document: Any) -> Curves:
        """The curves of a cursor; nothing from anything else."""
        if not isinstance(document, dict):
            return Curves()
        try:
            return Curves(
                {
                    str(name): [[float(part) for part in row] for row in rows if len(row) == 4]
                    for name, rows in document.items()
                }
            )
        except (TypeError, ValueError):
            return Curves()

    def to_json(self) -> Any:
        """For the cursor."""
        return {
            name: [[round(part, 3) for part in row] for row in rows] for name, rows in self.samples.items()
        }

    def with_sample(self, documents: Mapping[str, Mapping[str, Any]], now: float) -> Curves:
        """One more sample of each topology in ``documents`` (name -> `show`); those that are gone are forgotten."""
        found: dict[str, list[list[float]]] = {}
        for name, document in list(documents.items())[:_MOST_CURVES]:
            rows = [row for row in self.samples.get(name, []) if row[0] < now]
            found[name] = [*rows, [now, *_figures(document)]][-_MOST_SAMPLES:]
        return Curves(found)

    def rates(self, name: str) -> list[tuple[float, float]]:
        """(time, tuples executed per second) between neighbouring samples; a counter that fell began anew."""
        rows = self.samples.get(name, [])
        return [
            (
                after[0],
                max(0.0, after[1] - (before[1] if after[1] >= before[1] else 0.0)) / (after[0] - before[0]),
            )
            for before, after in pairwise(rows)
            if after[0] > before[0]
        ]

    def latencies(self, name: str) -> list[tuple[float, float]]:
        """(time, mean complete latency in ms)."""
        return [(row[0], row[3]) for row in self.samples.get(name, [])]


def _figures(document: Mapping[str, Any]) -> tuple[float, float, float]:
    executed = busy = 0.0
    complete: list[tuple[float, float]] = []
    for task in document.get("tasks", ()):
        stats = task.get("stats") or {}
        if str(task.get("component", "")).startswith("__"):
            continue
        count = float(stats.get("executed") or 0)
        executed += count
        busy += count * float(stats.get("execute_ms") or 0.0) / 1000
        if stats.get("complete_ms") and stats.get("acked"):
            complete.append((float(stats["acked"]), float(stats["complete_ms"])))
    acked = sum(weight for weight, _ in complete)
    mean = sum(weight * value for weight, value in complete) / acked if acked else 0.0
    return executed, busy, mean


def topologies_state(view: ClusterView, documents: Mapping[str, Mapping[str, Any]]) -> Any:
    """What must change for the topologies to be observed again: figures too, so busy ones are, each minute."""
    return {
        topology.base.name: (
            topology.id,
            topology.base.status,
            topology.assignment_at.version if topology.assignment_at is not None else -1,
            _figures(documents.get(topology.base.name, {})),
            len(documents.get(topology.base.name, {}).get("errors", ())),
        )
        for topology in view.topologies.values()
    }


def topologies_observation(
    view: ClusterView,
    documents: Mapping[str, Mapping[str, Any]],
    curves: Curves,
    key: dg.AssetKey = TOPOLOGIES,
) -> dg.AssetObservation:
    """Every topology with its figures, the curves of the last hour, and sums that Dagster plots."""
    rows: list[dict[str, str | int | float | bool | None]] = []
    for topology in sorted(view.topologies.values(), key=lambda item: item.base.name):
        name = topology.base.name
        document = documents.get(name, {})
        rates, latencies = curves.rates(name), curves.latencies(name)
        wanted = topology.assignment.workers if topology.assignment is not None else ()
        rows.append(
            {
                "topology": name,
                "status": topology.base.status,
                "workers": f"{sum(1 for w in wanted if w.slot in topology.live_workers)}/{len(wanted)}",
                "tasks": len(topology.tasks.component_of()) if topology.tasks is not None else 0,
                "executed_per_sec": round(rates[-1][1], 1) if rates else None,
                "complete_ms": round(latencies[-1][1], 3) if latencies else None,
                "errors": len(document.get("errors", ())),
            }
        )
    metadata: dict[str, Any] = {
        "topologies": table(
            [
                ("topology", "string"),
                ("status", "string"),
                ("workers", "string"),
                ("tasks", "int"),
                ("executed_per_sec", "float"),
                ("complete_ms", "float"),
                ("errors", "int"),
            ],
            rows,
        ),
        "live": len(rows),
        "errors": sum(int(row["errors"] or 0) for row in rows),
        "executed_per_sec": round(sum(float(row["executed_per_sec"] or 0) for row in rows), 1),
        "complete_ms_max": max((float(row["complete_ms"] or 0) for row in rows), default=0.0),
        "not_active": sum(1 for row in rows if row["status"] != "ACTIVE"),
    }
    if any(curves.rates(name) for name in curves.samples):
        metadata["curves"] = picture_of(
            curves_picture(
                {
                    "tuples executed per second": {name: curves.rates(name) for name in curves.samples},
                    "complete latency, ms": {name: curves.latencies(name) for name in curves.samples},
                },
                "Throughput and latency",
            ),
            "throughput and latency",
        )
    errors = [
        {
            "topology": name,
            "component": e.get("component"),
            "task": e.get("task"),
            "error": str(e.get("error"))[:300],
        }
        for name, document in sorted(documents.items())
        for e in document.get("errors", ())
    ]
    if errors:
        metadata["newest_errors"] = table(
            [("topology", "string"), ("component", "string"), ("task", "int"), ("error", "string")],
            errors[:50],
        )
    return dg.AssetObservation(asset_key=key, metadata=metadata)
