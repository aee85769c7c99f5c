"""A declared topology with its settings, and snapshots of its running state with the metadata that
show it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from storm_dagster.blobstore.store import BlobStore
from storm_dagster.core.snapshot.topology import snapshot_topology
from storm_dagster.defs.declared.checks import (
    FreshnessAttributes,
    ScheduleAttributes,
    TopologyAlerts,
    check_results,
)
from storm_dagster.defs.declared.declaration import (
    DATA_VERSION_TAG,
    Actual,
    Declaration,
    Described,
    LoadedFiles,
)
from storm_dagster.defs.declared.deploy import DeployPolicy, read_actual
from storm_dagster.defs.metadata import MAX_LOGS, log_link
from storm_dagster.defs.observe.sensors import statistics_links
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import topology_by_name
from storm_dagster.operations.read.status import show_document
from storm_dagster.zk.storm_cluster_state import StormClusterState


@dataclass(frozen=True)
class DeclaredSnapshot:
    """Snapshot of the running state of one declared topology."""

    check_results: Mapping[str, dg.AssetCheckResult]
    actual: Actual | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Its state in a few values, none of which changes while nothing happens."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Workers with links to their logs, links to statistics."""
    components: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Component -> how many tasks and executors it has."""

    @property
    def runs(self) -> bool:
        """Whether all tasks run."""
        return bool(self.check_results) and self.check_results["all_tasks_run"].passed

    @property
    def problems(self) -> list[str]:
        """Problems, as text without numbers that change all the time."""
        shown = ("all_tasks_run", "as_declared")
        return [
            str(self.check_results[name].description)
            for name in shown
            if name in self.check_results
        ]


@dataclass(frozen=True)
class DeclaredTopology:
    """Inputs of the definitions of one declared topology."""

    declaration: Declaration
    described: Described
    files: LoadedFiles
    identifier: str
    specs: Sequence[dg.AssetSpec]
    """The topology's, then those of its components."""
    components: Mapping[str, dg.AssetKey]
    policy: DeployPolicy
    batch: Mapping[str, Any]
    alerts: TopologyAlerts
    freshness: FreshnessAttributes
    schedule: ScheduleAttributes
    zookeeper: ZooKeeperResource
    blobstore: BlobStoreResource
    nimbus: NimbusResource

    @property
    def key(self) -> dg.AssetKey:
        """The topology's own."""
        return self.specs[0].key

    @property
    def name(self) -> str:
        """The topology's own."""
        return self.declaration.name

    @contextmanager
    def connect(
        self, ticks_in: dg.DagsterInstance | None = None
    ) -> Iterator[tuple[StormClusterState, BlobStore]]:
        """One session, of a tick in that instance; :class:`Unavailable` when the cluster is out of
        reach.
        """
        with self.zookeeper.cluster(ticks_in) as cluster, self.blobstore.blobs(cluster) as blobs:
            yield cluster, blobs

    def snapshot(
        self,
        cluster: StormClusterState,
        blobs: BlobStore,
        view: ClusterView,
        measure: Callable[[str], Mapping[str, Any] | None] = lambda _: None,
    ) -> DeclaredSnapshot:
        """Take a snapshot. ``measure`` asks nimbus for `show`, with the statistics that only limits
        need.
        """
        actual = read_actual(cluster, blobs, self.name, view)
        document, measured = None, None
        if actual is not None:
            limited = any(limit is not None for limit in self.alerts.model_dump().values())
            measured = measure(self.name) if limited else None
            launch_secs = self.zookeeper.conf()["nimbus.task.launch.secs"]
            document = measured or show_document(
                snapshot_topology(
                    view,
                    topology_by_name(view, actual.topology_id),
                    now_secs=int(time.time()),
                    launch_secs=launch_secs,
                )
            )
        found = check_results(
            self.declaration,
            self.described,
            actual,
            document,
            self.alerts,
            newer=self.files.changed(),
            measured=measured is not None,
        )
        metadata = topology_state(document)
        if actual is None or document is None:
            return DeclaredSnapshot(found, metadata=metadata)
        metadata["running_code_version"] = actual.code_version or "none"
        led, services = (
            cluster.epoch(),
            {node: info.http for node, info in view.supervisors.items()},
        )
        details: dict[str, Any] = {**statistics_links(led[1].http if led else "", self.name)}
        details["workers_and_logs"] = workers_markdown(document, services)
        parts: Mapping[str, Any] = document.get("components") or {}
        components = {
            name: {"tasks": len(p["tasks"]), "executors": p["executors"]}
            for name, p in parts.items()
        }
        return DeclaredSnapshot(found, actual, metadata, details, components)


def newest_version(instance: dg.DagsterInstance, key: dg.AssetKey) -> str | None:
    """The data version of the newest materialization, ``None`` when there is none."""
    event = instance.get_latest_materialization_event(key)
    made = event.asset_materialization if event is not None else None
    return None if made is None else (made.tags or {}).get(DATA_VERSION_TAG, "")


def topology_state(document: Mapping[str, Any] | None) -> dict[str, Any]:
    """The topology in a few numbers, none of which changes while nothing happens."""
    if document is None:
        return {
            "topology_id": "none",
            "status": "NOT RUNNING",
            "workers": 0,
            "tasks": 0,
            "running": 0,
        }
    return {
        "topology_id": str(document["id"]),
        "status": str(document["status"]),
        "workers": len(document["workers"]),
        "tasks": len(document["tasks"]),
        "running": sum(1 for task in document["tasks"] if task["status"] == "running"),
    }


def workers_markdown(
    document: Mapping[str, Any], services: Mapping[str, str | None]
) -> dg.MarkdownMetadataValue:
    """A row for each worker, which links to its log. ``services``: supervisor id -> its HTTP
    service.
    """
    rows = ["| worker | pid | tasks | code |", "|---|---|---|---|"]
    for worker in document["workers"][:MAX_LOGS]:
        linked = log_link(
            document["id"], worker["host"], worker["port"], services.get(worker["node"])
        )
        tasks, code = encode_ranges(worker["tasks"]), str(worker["version"] or "")[:16]
        rows.append(f"| {linked} | {worker['pid'] or 'none'} | {tasks} | {code} |")
    if len(document["workers"]) > MAX_LOGS:
        rows.append(f"| ... and {len(document['workers']) - MAX_LOGS} more | | | |")
    return dg.MetadataValue.md("\n".join(rows))
