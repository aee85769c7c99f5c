"""Snapshots of one topology, and its `show` document, without a cluster around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storm_dagster.core.snapshot.topology import TopologySnapshot, snapshot_topology
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import topology_by_name
from storm_dagster.operations.read.status import show_document


def snapshot_alone(
    topology: TopologyView, report: Mapping[str, Any] | None = None, **options: Any
) -> TopologySnapshot:
    """The snapshot of a topology that is the only one, in a cluster without supervisors."""
    view = ClusterView(
        cluster_id="c",
        epoch=0,
        assignments_version=0,
        supervisors={},
        topologies={topology.id: topology},
    )
    return snapshot_topology(view, topology, report, **options)


def show(
    view: ClusterView, name: str, report: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """The ``show`` document of a topology by name or id."""
    return show_document(snapshot_topology(view, topology_by_name(view, name), report, **options))
