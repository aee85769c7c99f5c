"""Supervisors, workers and topologies as observations of their state: never of counters, which always move.

Dagster keeps these events for ever. Statistics are at the leader, to whose pages the metadata links.
"""

from __future__ import annotations

from typing import Any

import dagster as dg

from storm_dagster.defs.keys import SUPERVISORS, TOPOLOGIES, WORKERS
from storm_dagster.defs.pictures.cluster import DrawnSlot, DrawnSupervisor, cluster_picture
from storm_dagster.defs.pictures.metadata import component_counts, table
from storm_dagster.defs.pictures.svg import data_uri
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.view import ClusterView


def statistics_links(http: str) -> dict[str, dg.UrlMetadataValue]:
    """Links to the current state of the topologies at the leader at ``http``; none without a leader."""
    pages = {"statistics": "/v1/topologies", "metrics": "/metrics"} if http else {}
    return {name: dg.MetadataValue.url(f"{http.rstrip('/')}{path}") for name, path in pages.items()}


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
            hosts.setdefault(worker.node, worker.host)
            slots.setdefault(worker.node, {})[worker.port] = DrawnSlot(
                worker.port, topology.base.name, component_counts(worker.ids, components)
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
    """State of the supervisors whose change is observed."""
    used = view.used_ports()
    return {
        key: (info.host, info.ports, sorted(used.get(key, ())), info.host in view.blacklist, info.version)
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
            "blacklisted": info.host in view.blacklist,
            "version": info.version,
        }
        for supervisor_id, info in sorted(view.supervisors.items())
    ]
    slots = sum(len(info.ports) for info in view.supervisors.values())
    picture = cluster_picture(drawn_supervisors(view), "Supervisors and slots")
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
                    ("blacklisted", "bool"),
                    ("version", "string"),
                ],
                rows,
            ),
            "tasks_on_slots": dg.MetadataValue.md(f"![tasks on slots]({data_uri(picture)})"),
            "live": len(rows),
            "slots": slots,
            "slots_free": sum(int(row["free"] or 0) for row in rows),
            "topologies": len(view.topologies),
        },
    )


def workers_state(view: ClusterView) -> Any:
    """State of the workers whose change is observed; a process that was replaced in place is no change."""
    return [(row["topology"], row["host"], row["port"], row["status"]) for row in _workers(view)]


def _workers(view: ClusterView) -> list[dict[str, str | int | float | bool | None]]:
    rows: list[dict[str, str | int | float | bool | None]] = []
    for topology in view.topologies.values():
        for worker in topology.assignment.workers if topology.assignment is not None else ():
            live = topology.live_workers.get(worker.slot)
            rows.append(
                {
                    "topology": topology.base.name,
                    "host": worker.host,
                    "port": worker.port,
                    "status": live.status if live is not None else "dead",
                    "tasks": encode_ranges(worker.ids),
                }
            )
    return sorted(rows, key=lambda row: (str(row["topology"]), str(row["host"]), int(row["port"] or 0)))


def workers_observation(view: ClusterView, key: dg.AssetKey = WORKERS) -> dg.AssetObservation:
    """Every slot that an assignment names, and whether its process runs."""
    rows = _workers(view)
    running = sum(1 for row in rows if row["status"] == "running")
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "workers": table(
                [
                    ("topology", "string"),
                    ("host", "string"),
                    ("port", "int"),
                    ("status", "string"),
                    ("tasks", "string"),
                ],
                rows,
            ),
            "wanted": len(rows),
            "running": running,
            "not_running": len(rows) - running,
        },
    )


def topologies_state(view: ClusterView, http: str) -> Any:
    """State of the topologies whose change is observed."""
    return [
        http,
        *(
            (topology.id, topology.base.status, topology.assignment_at and topology.assignment_at.version)
            for _, topology in sorted(view.topologies.items())
        ),
    ]


def topologies_observation(view: ClusterView, http: str, key: dg.AssetKey = TOPOLOGIES) -> dg.AssetObservation:
    """Every topology, and where its statistics are: at ``http``, the leader."""
    rows: list[dict[str, str | int | float | bool | None]] = [
        {
            "topology": topology.base.name,
            "status": topology.base.status,
            "workers": len(topology.assignment.workers) if topology.assignment is not None else 0,
            "tasks": len(topology.tasks.component_of()) if topology.tasks is not None else 0,
        }
        for topology in sorted(view.topologies.values(), key=lambda item: item.base.name)
    ]
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "topologies": table(
                [("topology", "string"), ("status", "string"), ("workers", "int"), ("tasks", "int")], rows
            ),
            "live": len(rows),
            "not_active": sum(1 for row in rows if row["status"] != "ACTIVE"),
            **statistics_links(http),
        },
    )
