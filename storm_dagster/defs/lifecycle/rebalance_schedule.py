"""`rebalance_schedule`: a run for each topology with a clearly better placement.

It checks every 10 minutes. A check needs no run: the plain-Python planner computes the plan (it
agrees with the PySpark planner task for task). Only if the plan improves the balance by more than
``topology.rebalance.threshold``, `rebalance_topology` plans with PySpark and moves tasks; otherwise
the tick's skip reason explains it.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import dagster as dg

from storm_dagster.client.changes import change_topology
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.defs.binding import bind, op_job
from storm_dagster.defs.forms import verb_config
from storm_dagster.defs.keys import topology_tags
from storm_dagster.defs.metadata import step_errors
from storm_dagster.defs.observe.history import remember_own
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.defs.scheduled_runs import assignment_tags, earlier_request
from storm_dagster.model.dagster_names import (
    PRIORITY_TAGS,
    REBALANCE_JOB,
    SCHEDULED_TAG,
    DagsterNames,
)
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.names import check_topology_reference
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.scheduled_rebalance import scheduled_gain, unsteady_now

_ASK_JOB = "ask_for_rebalance"
"""Job of a schedule outside of the cluster's code location."""

_log = logging.getLogger(__name__)


@contextmanager
def _operations(
    zookeeper: ZooKeeperResource, blobstore: BlobStoreResource
) -> Iterator[OperationsContext]:
    """Operations that plan with the local planner."""
    with zookeeper.cluster() as cluster, blobstore.blobs(cluster) as blobs:
        yield OperationsContext(
            cluster=cluster,
            blobs=blobs,
            conf=zookeeper.conf(),
            planner=plan_placement,
            log=_log,
        )


class AskForRebalanceConfig(verb_config(VERBS["rebalance"])):
    """Config: the topology, and the options of the request."""


def ask_for_rebalance(
    context: dg.OpExecutionContext,
    config: AskForRebalanceConfig,
    nimbus: NimbusResource,
    zookeeper: ZooKeeperResource,
    blobstore: BlobStoreResource,
) -> None:
    """Request the rebalance from nimbus, whose Dagster runs it.

    No request is made if the topology is no longer steady: since the schedule's tick a host may
    have been lost, or a healing may have moved tasks.
    """
    with step_errors(), nimbus.client() as client:
        with _operations(zookeeper, blobstore) as ops:
            reason = unsteady_now(ops, config.name)
        if reason:
            context.log.info(f"{config.name}: {reason}")
            context.add_output_metadata({"topology": config.name, "reason": reason})
            return
        change = change_topology(client, verb="rebalance", wait=False, **config.model_dump())
    context.add_output_metadata({"run_id": str(change.run_id or "none"), "topology": config.name})


@dataclass(frozen=True)
class _Moves:
    """Rebalances that one schedule requests."""

    names: DagsterNames
    selected: frozenset[str] | None
    """Names of the considered topologies; ``None``: all."""
    in_cluster_location: bool
    """True if the run is that of `rebalance_topology`, at the topology's partition."""

    def evaluate(
        self, ops: OperationsContext, instance: dg.DagsterInstance
    ) -> tuple[list[dg.RunRequest], list[str]]:
        """The runs to request, and a reason for each topology, in order of the names."""
        view = ops.cluster.load_view()
        requests: list[dg.RunRequest] = []
        reasons: list[str] = []
        for topology in sorted(view.topologies.values(), key=lambda topology: topology.base.name):
            name = topology.base.name
            if self.selected is not None and name not in self.selected:
                continue
            moved, reason = self._moves_of(ops, view, topology, instance)
            reasons.append(f"{name}: {reason}")
            if moved and topology.assignment_at is not None:
                requests.append(self._request(topology, topology.assignment_at.version, moved))
        return requests, reasons

    def _moves_of(
        self,
        ops: OperationsContext,
        view: ClusterView,
        topology: TopologyView,
        instance: dg.DagsterInstance,
    ) -> tuple[int, str]:
        """Moves of a rebalance of the topology, 0 without one, and the reason."""
        try:
            gain = scheduled_gain(ops, view, topology)
        except StormDagsterError as error:
            return 0, f"left alone, {error.message}"
        if not gain.moved:
            return 0, gain.reason
        if self.in_cluster_location and not instance.has_dynamic_partition(
            self.names.partitions, topology.base.name
        ):
            return 0, "no partition key yet: lifecycle_sensor adds it"
        earlier = earlier_request(instance, topology)
        if earlier:
            return 0, f"{gain.reason}; {earlier}"
        return gain.moved, gain.reason

    def _request(self, topology: TopologyView, version: int, moved: int) -> dg.RunRequest:
        """The run that rebalances the topology, whose assignment has that data version."""
        name = topology.base.name
        # For a tick that Dagster repeats: it compares run keys within one tick.
        run_key = f"{topology.id}:{version}"
        tags = {
            **topology_tags(name),
            **PRIORITY_TAGS,
            **assignment_tags(topology),
            "storm/moved_tasks": str(moved),
        }
        if self.in_cluster_location:
            tags[SCHEDULED_TAG] = "true"
            return dg.RunRequest(run_key=run_key, tags=tags, partition_key=name)
        ops = {self.names.name(f"{_ASK_JOB}_op"): {"config": {"name": name}}}
        return dg.RunRequest(run_key=run_key, tags=tags, run_config={"ops": ops})


def build_rebalance_schedule(
    names: DagsterNames | None = None,
    *,
    name: str = "rebalance_schedule",
    cron_schedule: str = "*/10 * * * *",
    execution_timezone: str | None = None,
    topologies: Iterable[str] | None = None,
    in_cluster_location: bool = False,
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.RUNNING,
) -> dg.ScheduleDefinition:
    """A schedule that rebalances topologies that gain from it.

    It considers ``topologies``, by default all. It uses the resources ``storm_zookeeper``,
    ``storm_blobstore`` and ``storm_nimbus`` of its code location (:func:`build_storm_resources`,
    with the same ``names``) and has its own job, which requests the rebalance from the cluster. In
    the code location of the cluster's own definitions, ``in_cluster_location`` launches
    `rebalance_topology` directly.
    """
    names = names or DagsterNames()
    selected: frozenset[str] | None = None
    if topologies is not None:
        selected = frozenset(check_topology_reference(topology) for topology in topologies)
    ask_job = None if in_cluster_location else op_job(names, _ASK_JOB, ask_for_rebalance)
    moves = _Moves(names, selected, in_cluster_location)

    def schedule(
        context: dg.ScheduleEvaluationContext,
        zookeeper: ZooKeeperResource,
        blobstore: BlobStoreResource,
    ) -> list[dg.RunRequest] | dg.SkipReason:
        """Plan every stable topology, and request a run for those that gain from moves."""
        try:
            with _operations(zookeeper, blobstore) as ops:
                requests, reasons = moves.evaluate(ops, context.instance)
        except StormDagsterError as error:
            return dg.SkipReason(error.message)
        for line in reasons:
            context.log.info(line)
        return requests or dg.SkipReason("; ".join(reasons[:20]) or "no topology runs")

    decorate = dg.schedule(
        name=names.name(name),
        job_name=names.name(REBALANCE_JOB) if in_cluster_location else None,
        job=ask_job,
        cron_schedule=cron_schedule,
        execution_timezone=execution_timezone,
        default_status=default_status,
        description="Rebalances each topology whose balance gains more than "
        "topology.rebalance.threshold; else explains why not.",
    )
    definition = decorate(bind(schedule, names))
    if ask_job is not None:
        remember_own(names.cluster, dg.Definitions(jobs=[ask_job]))
    return definition
