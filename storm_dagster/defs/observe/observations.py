"""Supervisors, workers and topologies as observations of their state: never of counters, which always move.

Dagster keeps these events for ever. Statistics are at the leader, to whose pages the metadata links.
"""

from __future__ import annotations

from typing import Any

import dagster as dg

from storm_dagster.core.pictures.cluster import DrawnSlot, DrawnSupervisor, cluster_picture
from storm_dagster.defs.keys import SUPERVISORS, TOPOLOGIES, WORKERS
from storm_dagster.defs.pictures.metadata import component_counts, picture_markdown, table
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.view import ClusterView


def statistics_links(http: str, name: str = "") -> dict[str, dg.UrlMetadataValue]:
    """Links to the current state of the topologies, or of one, at the leader at ``http``; none without a leader."""
    one = f"/{name}" if name else ""
    page = f"/topologies{one}" if name else "/"
    pages = {"page": page, "statistics": f"/v1/topologies{one}", "metrics": "/metrics"} if http else {}
    return {name: dg.MetadataValue.url(f"{http.rstrip('/')}{path}") for name, path in pages.items()}


def drawn_supervisors(view: ClusterView) -> list[DrawnSupervisor]:
    """The supervisors of ``view``, those that assignments name but that are gone included."""
    slots: dict[str, dict[int, DrawnSlot]] = {
        supervisor_id: {port: DrawnSlot(port) for port in info.ports}
        for supervisor_id, info in view.supervisors.items()
    }
    hosts = {supervisor_id: info.host for supervisor_id, info in view.supervisors.items()}
    for topology in view.topologies.values():
        components = topology.tasks.component_of() if topology.tasks is not None else {}
        for worker in topology.workers:
            hosts.setdefault(worker.node, worker.host)
            slots.setdefault(worker.node, {})[worker.port] = DrawnSlot(
                worker.port, topology.base.name, component_counts(worker.ids, components)
            )
    return [
        DrawnSupervisor(
            node, hosts[node], [slot for _, slot in sorted(members.items())], gone=node not in view.supervisors
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
    free = {node: len(set(info.ports) - used.get(node, set())) for node, info in view.supervisors.items()}
    rows = [
        (
            node,
            info.host,
            encode_ranges(info.ports).replace(",", ", "),
            encode_ranges(used.get(node, ())).replace(",", ", "),
            free[node],
            info.host in view.blacklist,
            info.version,
        )
        for node, info in sorted(view.supervisors.items())
    ]
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "supervisors": table("supervisor host ports used free:int blacklisted:bool version", rows),
            "tasks_on_slots": picture_markdown(cluster_picture(drawn_supervisors(view), "Supervisors and slots")),
            "live": len(rows),
            "slots": sum(len(info.ports) for info in view.supervisors.values()),
            "slots_free": sum(free.values()),
            "topologies": len(view.topologies),
        },
    )


def workers_state(view: ClusterView) -> Any:
    """State of the workers whose change is observed; a process that was replaced in place is no change."""
    return [row[:-1] for row in _workers(view)]


def _workers(view: ClusterView) -> list[tuple[str, str, int, str, str]]:
    """(topology, host, port, status, tasks) of each worker."""
    rows: list[tuple[str, str, int, str, str]] = []
    for topology in view.topologies.values():
        for worker in topology.workers:
            live = topology.live_workers.get(worker.slot)
            status = live.status if live is not None else "dead"
            rows.append((topology.base.name, worker.host, worker.port, status, encode_ranges(worker.ids)))
    return sorted(rows, key=lambda row: row[:3])


def workers_observation(view: ClusterView, key: dg.AssetKey = WORKERS) -> dg.AssetObservation:
    """Every slot that an assignment names, and whether its process runs."""
    rows = _workers(view)
    running = sum(status == "running" for _, _, _, status, _ in rows)
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "workers": table("topology host port:int status tasks", rows),
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
    rows = [
        (
            topology.base.name,
            topology.base.status,
            len(topology.workers),
            len(topology.tasks.component_of()) if topology.tasks is not None else 0,
        )
        for topology in sorted(view.topologies.values(), key=lambda item: item.base.name)
    ]
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "topologies": table("topology status workers:int tasks:int", rows),
            "live": len(rows),
            "not_active": sum(status != "ACTIVE" for _, status, _, _ in rows),
            **statistics_links(http),
        },
    )
