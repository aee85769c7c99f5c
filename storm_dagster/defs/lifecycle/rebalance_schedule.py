"""`rebalance_schedule`: every 10 minutes, a run for each topology whose placement has a clearly better one.

A check costs no run: the plain-Python planner computes the plan (it agrees with the PySpark planner
task for task). Only when that improves the balance by more than ``topology.rebalance.threshold`` does
`rebalance_topology` plan with PySpark and move tasks; otherwise the tick's skip reason explains it.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import dagster as dg

from storm_dagster.client.changes import change_topology
from storm_dagster.core.balance import imbalance
from storm_dagster.core.scheduling import plan_placement
from storm_dagster.defs.binding import bind, op_job
from storm_dagster.defs.failures import step_errors
from storm_dagster.defs.forms import verb_config
from storm_dagster.defs.keys import topology_tags
from storm_dagster.defs.observe.history import remember_own
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.nimbus import NimbusResource
from storm_dagster.model.dagster_names import PRIORITY_TAGS, REBALANCE_JOB, DagsterNames
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.names import check_topology_reference
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, load_runnable
from storm_dagster.operations.live.rebalance import rebalance

_ASK_JOB = "ask_for_rebalance"
REBALANCE_TEXT = (
    "Ask the cluster to rebalance a topology; the rebalance itself is a run in the cluster's code location."
)

_log = logging.getLogger(__name__)


def _unstable(view: ClusterView) -> dict[str, int]:
    """Names of topologies that a rebalance may touch now, with the version of their assignment."""
    busy = _busy(view)
    return {
        topology.base.name: topology.assignment_at.version
        for topology in view.topologies.values()
        if topology.base.name not in busy and topology.assignment_at is not None
    }


def _busy(view: ClusterView) -> dict[str, str]:
    """Names of topologies that are left alone, with the reason."""
    found: dict[str, str] = {}
    for topology in view.topologies.values():
        base, assignment = topology.base, topology.assignment
        if base.status not in ("ACTIVE", "INACTIVE") or base.wanted_status != base.status:
            found[base.name] = f"it is {base.status}, wanted {base.wanted_status}"
        elif assignment is None or topology.assignment_at is None:
            found[base.name] = "it has no assignment"
        elif missing := [worker for worker in assignment.workers if worker.slot not in topology.live_workers]:
            # What is dead is healed first: a rebalance would move tasks that are about to move anyway.
            found[base.name] = f"{len(missing)} of its workers do not live, healing comes first"
    return found


@dataclass(frozen=True)
class _Gain:
    """Gain of a rebalance of one topology."""

    topology_id: str
    moved: int
    skipped: str | None
    """Reason why it is not worth a run; ``None`` when it is."""
    text: str


def _gain(ops: OperationsContext, view: ClusterView, name: str) -> _Gain:
    """The fewest moves that restore balance, or the reason why they are not worth it."""
    report = rebalance(ops, name, dry_run=True, view=view)
    if not report.moved or report.assignment is None or report.placement is None:
        return _Gain(report.topology_id, 0, "it is balanced, no plan would change it", "")
    threshold = float(load_runnable(ops, view.topologies[report.topology_id]).conf["topology.rebalance.threshold"])
    supervisors = sum(1 for info in view.supervisors.values() if info.ports and info.host not in view.blacklist)
    now, then = (
        imbalance(spread, wanted=report.workers, supervisors=supervisors)
        for spread in (
            [(worker.node, len(worker.ids)) for worker in report.assignment.workers],
            [(worker.node, len(worker.tasks)) for worker in report.placement.workers],
        )
    )
    text = f"{report.moved} tasks would move, imbalance {now:.2f} would become {then:.2f}"
    worth = now - then > threshold
    skipped = None if worth else f"{text}, which gains no more than topology.rebalance.threshold {threshold:g}"
    return _Gain(report.topology_id, report.moved, skipped, text)


class AskForRebalanceConfig(verb_config(VERBS["rebalance"])):
    """Config: the topology, and the options of the request."""


def ask_for_rebalance(context: dg.OpExecutionContext, config: AskForRebalanceConfig, nimbus: NimbusResource) -> None:
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
    """A schedule that rebalances each topology (of ``topologies``, default: all) that gains from it.

    It uses the resources ``storm_zookeeper``, ``storm_blobstore`` and ``storm_nimbus`` of its code location
    (:func:`build_storm_resources`, under the same ``names``) and brings its own job, which asks the cluster to rebalance. In the
    code location that holds the cluster's own definitions, ``in_cluster_location`` launches `rebalance_topology`
    directly.
    """
    names = names or DagsterNames()
    only = None if topologies is None else {check_topology_reference(topology) for topology in topologies}

    def schedule(
        context: dg.ScheduleEvaluationContext, zookeeper: ZooKeeperResource, blobstore: BlobStoreResource
    ) -> list[dg.RunRequest] | dg.SkipReason:
        return _evaluate(context, zookeeper, blobstore, only, names, in_cluster_location)

    ask = None if in_cluster_location else op_job(names, _ASK_JOB, REBALANCE_TEXT, ask_for_rebalance)
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
    remember_own(names.cluster, dg.Definitions(jobs=[ask] if ask is not None else [], schedules=[made]))
    return made


def _request(gain: _Gain, name: str, version: int, names: DagsterNames, in_cluster_location: bool) -> dg.RunRequest:
    tags = {**topology_tags(name), **PRIORITY_TAGS, "storm/moved_tasks": str(gain.moved)}
    run_key = f"{gain.topology_id}:{version}"
    if not in_cluster_location:
        run_config = {"ops": {names.name(f"{_ASK_JOB}_op"): {"config": {"name": name}}}}
        return dg.RunRequest(run_key=run_key, run_config=run_config, tags=tags)
    return dg.RunRequest(run_key=run_key, partition_key=name, tags=tags)


def _evaluate(
    context: dg.ScheduleEvaluationContext,
    zookeeper: ZooKeeperResource,
    blobstore: BlobStoreResource,
    only: set[str] | None,
    names: DagsterNames,
    in_cluster_location: bool,
) -> list[dg.RunRequest] | dg.SkipReason:
    """Plan every stable topology with what it has, and request a run where tasks would move."""
    requests: list[dg.RunRequest] = []
    why: list[str] = []
    try:
        with zookeeper.cluster() as cluster, blobstore.blobs(cluster) as blobs:
            ops = OperationsContext(
                cluster=cluster, blobs=blobs, conf=zookeeper.conf(), planner=plan_placement, log=_log
            )
            view = cluster.load_view()
            for name, version in sorted(_unstable(view).items()):
                if only is not None and name not in only:
                    continue
                try:
                    gain = _gain(ops, view, name)
                except StormDagsterError as error:
                    why.append(f"{name} is left alone: {error.message}")
                    continue
                if gain.skipped:
                    why.append(f"{name}: {gain.skipped}")
                elif in_cluster_location and not context.instance.has_dynamic_partition(names.partitions, name):
                    why.append(f"{name} has no partition key yet: lifecycle_sensor adds it")
                else:
                    context.log.info(f"{name}: {gain.text}")
                    requests.append(_request(gain, name, version, names, in_cluster_location))
    except StormDagsterError as error:
        return dg.SkipReason(error.message)
    why += [f"{name}: {reason}" for name, reason in sorted(_busy(view).items()) if only is None or name in only]
    for line in why:
        context.log.info(line)
    return requests or dg.SkipReason("; ".join(why[:20]) or "no topology runs")
