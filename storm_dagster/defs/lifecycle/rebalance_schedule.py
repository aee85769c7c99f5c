"""`rebalance_schedule`: every 10 minutes, a run for each topology whose placement has a clearly
better one.

A check costs no run: the plain-Python planner computes the plan (it agrees with the PySpark planner
task for task). Only when that improves the balance by more than ``topology.rebalance.threshold``
does `rebalance_topology` plan with PySpark and move tasks; otherwise the tick's skip reason
explains it.
"""

import logging
from collections.abc import Iterable
from typing import Any

import dagster as dg

from storm_dagster.client.changes import change_topology
from storm_dagster.core.liveness.causes import SPREAD_PAUSE_SECS
from storm_dagster.core.reassignment import imbalance
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.core.transitions import STEADY
from storm_dagster.defs.binding import bind, op_job
from storm_dagster.defs.forms import verb_config
from storm_dagster.defs.keys import topology_tags
from storm_dagster.defs.metadata import step_errors
from storm_dagster.defs.observe.history import remember_own
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.model.dagster_names import PRIORITY_TAGS, REBALANCE_JOB, DagsterNames
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.names import check_topology_reference
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext, load_runnable
from storm_dagster.operations.live.rebalance import rebalance

_ASK_JOB = "ask_for_rebalance"

_log = logging.getLogger(__name__)


def _busy(topology: TopologyView, now_secs: int) -> str | None:
    """Why a topology is left alone; ``None`` when a rebalance may touch it now."""
    base, assignment = topology.base, topology.assignment
    if base.status not in STEADY or base.wanted_status != base.status:
        return f"it is {base.status}, wanted {base.wanted_status}"
    if assignment is None or topology.assignment_at is None:
        return "it has no assignment"
    if topology.missing_workers:
        # What is dead is healed first: a rebalance would move tasks that are about to move anyway.
        return f"{len(topology.missing_workers)} of its workers do not live, healing comes first"
    age = now_secs - assignment.timestamp_ms // 1000
    if topology.assignment_at.version and 0 <= age < SPREAD_PAUSE_SECS:
        return f"it was placed {age} s ago: it is rebalanced again after {SPREAD_PAUSE_SECS:g} s"
    return None


def _gain(ops: OperationsContext, view: ClusterView, topology: TopologyView) -> tuple[int, str]:
    """The fewest moves that restore balance, 0 when they are not worth a run; and what they gain,
    in words.
    """
    report = rebalance(ops, topology.id, dry_run=True, view=view)
    if not report.moved or report.assignment is None or report.placement is None:
        return 0, "it is balanced, no plan would change it"
    threshold = float(load_runnable(ops, topology).conf["topology.rebalance.threshold"])
    supervisors = sum(
        1 for info in view.supervisors.values() if info.ports and info.host not in view.blacklist
    )
    now, then = (
        imbalance(spread, wanted=report.workers, supervisors=supervisors)
        for spread in (
            [(worker.node, len(worker.ids)) for worker in report.assignment.workers],
            [(worker.node, len(worker.ids)) for worker in report.placement.workers],
        )
    )
    text = f"{report.moved} tasks would move, imbalance {now:.2f} would become {then:.2f}"
    if now - then > threshold:
        return report.moved, text
    return 0, f"{text}, which gains no more than topology.rebalance.threshold {threshold:g}"


class AskForRebalanceConfig(verb_config(VERBS["rebalance"])):
    """Config: the topology, and the options of the request."""


def ask_for_rebalance(
    context: dg.OpExecutionContext, config: AskForRebalanceConfig, nimbus: NimbusResource
) -> None:
    """Ask nimbus, whose Dagster runs the rebalance itself."""
    with step_errors(), nimbus.client() as client:
        asked = change_topology(client, verb="rebalance", wait=False, **config.model_dump())
    context.add_output_metadata({"run_id": str(asked.run_id or "none"), "topology": config.name})


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
    """A schedule that rebalances each topology (of ``topologies``, default: all) that gains from
    it.

    It uses the resources ``storm_zookeeper``, ``storm_blobstore`` and ``storm_nimbus`` of its code
    location (:func:`build_storm_resources`, under the same ``names``) and brings its own job, which
    asks the cluster to rebalance. In the code location that holds the cluster's own definitions,
    ``in_cluster_location`` launches `rebalance_topology` directly.
    """
    names = names or DagsterNames()
    only = (
        None
        if topologies is None
        else {check_topology_reference(topology) for topology in topologies}
    )

    def schedule(
        context: dg.ScheduleEvaluationContext,
        zookeeper: ZooKeeperResource,
        blobstore: BlobStoreResource,
    ) -> list[dg.RunRequest] | dg.SkipReason:
        """Plan every stable topology with what it has, and request a run where tasks would move."""
        requests: list[dg.RunRequest] = []
        why: list[str] = []
        try:
            with zookeeper.cluster() as cluster, blobstore.blobs(cluster) as blobs:
                ops = OperationsContext(
                    cluster=cluster,
                    blobs=blobs,
                    conf=zookeeper.conf(),
                    planner=plan_placement,
                    log=_log,
                )
                view = cluster.load_view()
                for topology in sorted(
                    view.topologies.values(), key=lambda topology: topology.base.name
                ):
                    name, reason = topology.base.name, _busy(topology, ops.now_secs())
                    if only is not None and name not in only:
                        continue
                    moved = 0
                    try:
                        if reason is None:
                            moved, reason = _gain(ops, view, topology)
                    except StormDagsterError as error:
                        reason = f"left alone, {error.message}"
                    if (
                        moved
                        and in_cluster_location
                        and not context.instance.has_dynamic_partition(names.partitions, name)
                    ):
                        moved, reason = 0, "no partition key yet: lifecycle_sensor adds it"
                    why.append(f"{name}: {reason}")
                    if moved and topology.assignment_at is not None:
                        run_key = f"{topology.id}:{topology.assignment_at.version}"
                        tags = {
                            **topology_tags(name),
                            **PRIORITY_TAGS,
                            "storm/moved_tasks": str(moved),
                        }
                        ask = {"ops": {names.name(f"{_ASK_JOB}_op"): {"config": {"name": name}}}}
                        run: dict[str, Any] = (
                            {"partition_key": name} if in_cluster_location else {"run_config": ask}
                        )
                        requests.append(dg.RunRequest(run_key=run_key, tags=tags, **run))
        except StormDagsterError as error:
            return dg.SkipReason(error.message)
        for line in why:
            context.log.info(line)
        return requests or dg.SkipReason("; ".join(why[:20]) or "no topology runs")

    ask = None if in_cluster_location else op_job(names, _ASK_JOB, ask_for_rebalance)
    made = dg.schedule(
        name=names.name(name),
        job_name=names.name(REBALANCE_JOB) if in_cluster_location else None,
        job=ask,
        cron_schedule=cron_schedule,
        execution_timezone=execution_timezone,
        default_status=default_status,
        description="Rebalances each topology whose balance gains more than topology.rebalance.threshold; else explains "
        "why not.",
    )(bind(schedule, names))
    if ask is not None:
        remember_own(names.cluster, dg.Definitions(jobs=[ask]))
    return made
