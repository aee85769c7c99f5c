"""A declared topology with its settings, and snapshots of its running state."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from storm_dagster.blobstore.store import BlobStore
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.core.snapshot.topology import snapshot_topology
from storm_dagster.defs.declared.checks import (
    FreshnessAttributes,
    ScheduleAttributes,
    TopologyAlerts,
    check_results,
)
from storm_dagster.defs.declared.declaration import (
    DATA_VERSION_TAG,
    Declaration,
    LoadedFiles,
    RunningTopology,
    TargetDescription,
)
from storm_dagster.defs.declared.deploy import DeployPolicy, read_actual
from storm_dagster.defs.declared.op_settings import OpAttributes
from storm_dagster.defs.declared.owner import ownership_problem
from storm_dagster.defs.declared.reports import (
    REPORTS_CHECK,
    reports_result,
    stored_undefined,
)
from storm_dagster.defs.keys import topology_tags
from storm_dagster.defs.metadata import MAX_LOGS, log_link
from storm_dagster.defs.observe.sensors import statistics_links
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, topology_by_name
from storm_dagster.operations.read.status import show_document
from storm_dagster.zk.storm_cluster_state import StormClusterState


@dataclass(frozen=True)
class DeclaredSnapshot:
    """Snapshot of the running state of one declared topology."""

    check_results: Mapping[str, dg.AssetCheckResult]
    """Check -> result; empty if the cluster was not read."""
    actual: RunningTopology | None = None
    """``None`` if the topology does not exist."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Its state in a few values, which are constant while the topology is unchanged."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Workers with links to their logs, links to statistics."""
    components: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Component -> its numbers of tasks and executors."""

    @property
    def runs(self) -> bool:
        """True if all tasks run."""
        return bool(self.check_results) and self.check_results["all_tasks_run"].passed

    @property
    def problems(self) -> list[str]:
        """Problems, as texts without permanently changing numbers."""
        # The descriptions of the other checks have numbers that change all the time.
        names = ("all_tasks_run", "as_declared")
        results = [self.check_results[name] for name in names if name in self.check_results]
        return [str(result.description) for result in results]


@dataclass(frozen=True)
class DeclaredTopology:
    """Inputs of the definitions of one declared topology."""

    declaration: Declaration
    described: TargetDescription
    files: LoadedFiles
    identifier: str
    """The name in names of jobs and ops."""
    specs: Sequence[dg.AssetSpec]
    """The topology's spec, then those of its components."""
    components: Mapping[str, dg.AssetKey]
    """Component -> its asset key."""
    policy: DeployPolicy
    batch: Mapping[str, Any]
    """Batches of a gray upgrade, as :attr:`Reconciler.batch`."""
    alerts: TopologyAlerts
    freshness: FreshnessAttributes
    schedule: ScheduleAttributes
    zookeeper: ZooKeeperResource
    blobstore: BlobStoreResource
    nimbus: NimbusResource
    schedule_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.RUNNING
    """Status of its schedules until a user starts or stops them."""
    targets: Mapping[tuple[str, ...], dg.AssetKey] = field(default_factory=dict)
    """(Bolt, parts of the asset that it writes) -> key of the target's asset."""
    op: OpAttributes = field(default_factory=OpAttributes)
    """Settings of the op that deploys it."""
    job_tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of the jobs and runs that change it."""

    @property
    def key(self) -> dg.AssetKey:
        """Asset key of the topology."""
        return self.specs[0].key

    @property
    def name(self) -> str:
        """Name of the topology."""
        return self.declaration.name

    @property
    def run_tags(self) -> dict[str, str]:
        """Tags of the runs of this topology alone: those of the YAML, and its name."""
        return {**self.job_tags, **topology_tags(self.name)}

    @contextmanager
    def connect(
        self, ticks_in: dg.DagsterInstance | None = None
    ) -> Iterator[tuple[StormClusterState, BlobStore]]:
        """Connect to the cluster for one session, of a tick in the instance ``ticks_in``.

        :class:`Unavailable` if the cluster is unreachable.
        """
        with self.zookeeper.cluster(ticks_in) as cluster, self.blobstore.blobs(cluster) as blobs:
            yield cluster, blobs

    def operations(self, cluster: StormClusterState, blobs: BlobStore) -> OperationsContext:
        """Operations on the topology's cluster that plan with the local planner."""
        conf = self.zookeeper.conf()
        return OperationsContext(cluster=cluster, blobs=blobs, conf=conf, planner=plan_placement)

    def snapshot(
        self,
        cluster: StormClusterState,
        blobs: BlobStore,
        view: ClusterView,
        instance: dg.DagsterInstance,
        measure: Callable[[str], Mapping[str, Any] | None] = lambda _: None,
    ) -> DeclaredSnapshot:
        """Take a snapshot of the topology in ``view``.

        ``instance`` has the newest evaluation of the check `reports`, whose undefined assets
        `topology_events_sensor` finds. ``measure`` reads `show` from nimbus, with the statistics;
        it is called only if a limit is set. Without its document limits are not checked.
        """
        actual = read_actual(cluster, blobs, self.name, view)
        document = None
        measured = None
        if actual is not None:
            has_limits = any(limit is not None for limit in self.alerts.model_dump().values())
            if has_limits:
                measured = measure(self.name)
            document = measured or self._show_document(view, actual.topology_id)
        results = check_results(
            self.declaration,
            self.described,
            actual,
            document,
            self.alerts,
            newer=self.files.changed(),
            measured=measured is not None,
        )
        results[REPORTS_CHECK] = self._reports_result(cluster, instance, actual)
        metadata = topology_state(document)
        if actual is None or document is None:
            return DeclaredSnapshot(results, metadata=metadata)
        metadata["running_code_version"] = actual.code_version or "none"
        if actual.owner is not None:
            metadata["owner"] = actual.owner
        stored_epoch = cluster.epoch()
        http = ""
        if stored_epoch is not None:
            _, leader = stored_epoch
            http = leader.http
        services = {node: info.http for node, info in view.supervisors.items()}
        details: dict[str, Any] = {**statistics_links(http, self.name)}
        details["workers_and_logs"] = workers_markdown(document, services)
        parts: Mapping[str, Any] = document.get("components") or {}
        components = {
            name: {"tasks": len(part["tasks"]), "executors": part["executors"]}
            for name, part in parts.items()
        }
        return DeclaredSnapshot(results, actual, metadata, details, components)

    def _reports_result(
        self,
        cluster: StormClusterState,
        instance: dg.DagsterInstance,
        actual: RunningTopology | None,
    ) -> dg.AssetCheckResult:
        """Result of the check `reports`; the events of another owner are not this location's."""
        owned_by = None if actual is None else actual.owner
        event_log = None
        if ownership_problem(self.name, self.declaration.owner, owned_by) is None:
            event_log = cluster.event_log(self.name)
        return reports_result(event_log, stored_undefined(instance, self.key), time.time())

    def _show_document(self, view: ClusterView, topology_id: str) -> dict[str, Any]:
        """The document of `show` without statistics."""
        snapshot = snapshot_topology(
            view,
            topology_by_name(view, topology_id),
            now_secs=int(time.time()),
            launch_secs=self.zookeeper.conf()["nimbus.task.launch.secs"],
        )
        return show_document(snapshot)


def newest_version(instance: dg.DagsterInstance, key: dg.AssetKey) -> str | None:
    """The data version of the newest materialization.

    ``None`` without a materialization, ``""`` for one without a version.
    """
    event = instance.get_latest_materialization_event(key)
    materialization = event.asset_materialization if event is not None else None
    if materialization is None:
        return None
    return (materialization.tags or {}).get(DATA_VERSION_TAG, "")


def topology_state(document: Mapping[str, Any] | None) -> dict[str, Any]:
    """State of the topology in a few values; constant while it is unchanged."""
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
    """A table with a row for each worker, which links to its log.

    ``document`` is that of :func:`show_document`, ``services`` maps a supervisor id to the URL of
    its HTTP service, if it has one. Of more than :data:`MAX_LOGS` workers the last row has the
    number of the rest.
    """
    rows = ["| worker | pid | tasks | code |", "|---|---|---|---|"]
    for worker in document["workers"][:MAX_LOGS]:
        service = services.get(worker["node"])
        link = log_link(document["id"], worker["host"], worker["port"], service)
        tasks = encode_ranges(worker["tasks"])
        # The start of the hash of its code; empty without a process.
        code = str(worker["version"] or "")[:16]
        rows.append(f"| {link} | {worker['pid'] or 'none'} | {tasks} | {code} |")
    if len(document["workers"]) > MAX_LOGS:
        rows.append(f"| ... and {len(document['workers']) - MAX_LOGS} more | | | |")
    return dg.MetadataValue.md("\n".join(rows))
