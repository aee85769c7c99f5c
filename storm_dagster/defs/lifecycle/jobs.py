"""One op job for each verb of a topology's life. Each waits for its effect and then reports it."""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import time
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from storm_dagster.defs.binding import op_job
from storm_dagster.defs.failures import step_errors
from storm_dagster.defs.forms import KillConfig, NameConfig, UpdateConfig
from storm_dagster.defs.keys import ACTIVE_TOPOLOGY, PUBLISHED_ASSIGNMENT, TOPOLOGY_TAG
from storm_dagster.defs.lifecycle.sensor import may_drop
from storm_dagster.defs.resources.nimbus import NimbusResource, upload_of
from storm_dagster.defs.resources.operating import Handles, operations
from storm_dagster.defs.submission.metadata import stored_metadata
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.results import LifecycleResult

_POLL_SECS = 0.5
# After the delay the leader and lifecycle_sensor remove the topology too: this run lets them, and does it
# itself when neither is there.
_GRACE_SECS = 2.0
# A run that waits holds a process: longer delays are left to the leader and lifecycle_sensor.
_LONGEST_WAIT_SECS = 600
_LONGEST_START_SECS = 60.0


def observe_change(
    context: dg.OpExecutionContext,
    handles: Handles,
    verb: str,
    name: str,
    outcome: str,
    metadata: Mapping[str, Any],
) -> None:
    """Record at the topology's asset what ``verb`` came to, and tag the run with the topology's name."""
    context.log_event(
        dg.AssetObservation(
            asset_key=handles.zookeeper.asset_key(ACTIVE_TOPOLOGY),
            partition=name,
            description=f"{verb}: {outcome}",
            metadata={"verb": verb, **metadata},
        )
    )
    context.add_output_metadata(dict(metadata))
    if not context.has_tag(TOPOLOGY_TAG):
        context.instance.add_run_tags(context.run.run_id, {TOPOLOGY_TAG: name})


def _observe(
    context: dg.OpExecutionContext,
    handles: Handles,
    verb: str,
    report: LifecycleResult,
    began: float,
    gap_secs: float | None = None,
) -> None:
    metadata = {
        "topology_id": report.topology_id,
        "status": report.status or "gone",
        "previous": report.previous or "unknown",
        "changed": report.changed,
        **({"drain_secs": round(report.drain_secs, 3)} if report.drain_secs else {}),
        "seconds": round(time.monotonic() - began, 3),
        **({} if gap_secs is None else {"gap_secs": round(gap_secs, 3)}),
    }
    observe_change(context, handles, verb, report.name, report.status or "gone", metadata)


def _verb_job(
    names: DagsterNames,
    verb: str,
    description: str,
    operation: Callable[[OperationsContext, str], LifecycleResult],
) -> dg.JobDefinition:
    def verb_op(context: dg.OpExecutionContext, config: NameConfig, handles: Handles) -> None:
        began = time.monotonic()
        with operations(context, handles) as ops:
            report = operation(ops, config.name)
        _observe(context, handles, verb, report, began)

    return op_job(names, f"{verb}_topology", description, verb_op)


_KILL = "Silence the topology's spouts, wait, and end it: workers, cluster state, code, and its partition."


def kill_topology(context: dg.OpExecutionContext, config: KillConfig, names: DagsterNames, handles: Handles) -> None:
    """Kill the topology, see it removed, then drop its partition key."""
    began = time.monotonic()
    with operations(context, handles) as ops:
        report = lifecycle.kill(ops, config.name, config.wait_secs)
        if report.status is not None:
            context.log.info(f"{report.topology_id} is silent, it ends in {report.delay_secs} s")
            if (report.delay_secs or 0) <= _LONGEST_WAIT_SECS:
                report = _await_removal(ops, report)
        gone = ops.cluster.load_view().topology_named(report.name) is None
        cluster_id = ops.cluster.cluster_id()
    _observe(context, handles, "kill", report, began)
    if gone and may_drop(context.instance, names, report.name, cluster_id):
        # The history stays; a later submission of the name shows it again.
        context.instance.delete_dynamic_partition(names.partitions, report.name)


def _await_removal(ops: OperationsContext, report: LifecycleResult) -> LifecycleResult:
    """Wait until the killed topology is gone; remove it here when nobody has by the end of its delay."""
    deadline = ops.monotonic() + (report.delay_secs or 0) + _GRACE_SECS
    while ops.monotonic() < deadline:
        if report.topology_id not in ops.cluster.load_view().topologies:
            return LifecycleResult(report.topology_id, report.name, None, changed=True, previous=report.previous)
        ops.sleep(_POLL_SECS)
    return lifecycle.remove(ops, report.topology_id)


_UPDATE = "Run new code in the place of the running topology (hot deploy): checked, stored and placed first."


def update_topology(
    context: dg.OpExecutionContext, config: UpdateConfig, handles: Handles, nimbus: NimbusResource
) -> None:
    """Upload if need be, then replace; the old topology is touched only when the new one stands ready."""
    began = time.monotonic()
    with step_errors():
        handle = upload_of(context.log, nimbus, config.handle, config.target, config.conf, config.allow_degraded)
        if handle is None and not config.token:
            raise InvalidRequest(f"nothing to run in the place of {config.name!r}: give `target` in the form")
    with operations(context, handles) as ops:
        report = lifecycle.update(
            ops,
            config.name,
            token=config.token or context.run.run_id,
            handle=handle,
            allow_degraded=config.allow_degraded,
        )
        gap = _await_workers(ops, report) if report.drain_secs else None
        found = ops.cluster.read_assignment(report.topology_id)
        table = ops.cluster.read_tasks(report.topology_id)
    _observe(context, handles, "update", report, began, gap)
    if found is None or table is None:
        return  # Killed in the meantime.
    shown = stored_metadata(found[0], table.component_of(), report.name)
    common = {"topology_id": report.topology_id, "status": report.status or "gone"}
    for key, metadata in ((PUBLISHED_ASSIGNMENT, {**common, **shown}), (ACTIVE_TOPOLOGY, common)):
        context.log_event(
            dg.AssetMaterialization(
                asset_key=handles.zookeeper.asset_key(key), partition=report.name, metadata=metadata
            )
        )


def _await_workers(ops: OperationsContext, report: LifecycleResult) -> float | None:
    """Seconds from the last tuple of the old topology until every worker of the new one runs; ``None``: not in time."""
    began = ops.monotonic()
    while ops.monotonic() - began < _LONGEST_START_SECS:
        topology = ops.cluster.load_view().topologies.get(report.topology_id)
        if topology is None or topology.assignment is None:
            return None
        slots = {worker.slot for worker in topology.assignment.workers}
        if slots <= {slot for slot, node in topology.live_workers.items() if node.status == "running"}:
            return (report.swap_secs or 0.0) + ops.monotonic() - began
        ops.sleep(_POLL_SECS / 5)
    return None


def build_lifecycle_jobs(names: DagsterNames) -> list[dg.JobDefinition]:
    """The jobs that kill, activate, deactivate, restart and update a topology."""
    return [
        op_job(names, "kill_topology", _KILL, kill_topology),
        op_job(names, "update_topology", _UPDATE, update_topology),
        _verb_job(names, "activate", "Let the topology's spouts emit.", lifecycle.activate),
        _verb_job(names, "deactivate", "Stop the topology's spouts; its workers stay.", lifecycle.deactivate),
        _verb_job(
            names,
            "restart",
            "Restart the topology from its own code, under a new id, with its current parallelism.",
            lambda ops, name: lifecycle.restart(ops, name),
        ),
    ]
