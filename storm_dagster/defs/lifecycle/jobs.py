"""One op job for each verb of a topology's life.

Each job waits for its effect and then reports it. A verb that the leader executes
(:attr:`Verb.executed_by`) is only requested: without a leader the run fails without an effect.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from storm_dagster.client.changes import change_topology
from storm_dagster.client.waiting import wait_for_run
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.defs.binding import op_job
from storm_dagster.defs.forms import verb_config
from storm_dagster.defs.keys import ACTIVE_TOPOLOGY, PUBLISHED_ASSIGNMENT, TOPOLOGY_TAG
from storm_dagster.defs.lifecycle.sensor import drop_key
from storm_dagster.defs.metadata import changes_metadata, step_errors, stored_metadata, table
from storm_dagster.defs.resources.operating import (
    Handles,
    claim_record,
    end_record,
    operations,
    recorded_request,
)
from storm_dagster.defs.resources.processes import NimbusResource, upload_of
from storm_dagster.model import paths
from storm_dagster.model.dagster_names import REQUEST_TAG, DagsterNames
from storm_dagster.model.errors import InvalidRequest, NotAlive, Unavailable
from storm_dagster.model.records import TopologyStatus
from storm_dagster.model.requests import parse_workers
from storm_dagster.model.run_result import RunResult
from storm_dagster.model.verbs import VERBS, RunEffect, Verb
from storm_dagster.operations.context import OperationsContext, topology_by_name
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.cancelling import is_being_submitted
from storm_dagster.operations.read.run_results import lifecycle_result, moved_tasks
from storm_dagster.operations.results import LifecycleResult
from storm_dagster.operations.upgrade import UpgradeResult
from storm_dagster.operations.upgrade_waiting import await_upgrade

_POLL_SECS = 0.5
"""Pause between two polls of a removal."""
_WORKER_POLL_SECS = 0.1
"""Pause between two polls of starting workers: a run reports the time until they run."""
_GRACE_SECS = 2.0
"""Time after the delay of a kill in which this run leaves the removal to others.

The leader and lifecycle_sensor remove the topology as well; this run does if neither does.
"""
_MAX_WAIT_SECS = 600
"""Longest delay of a kill for which a run waits.

A waiting run occupies a process: longer delays are left to the leader and lifecycle_sensor.
"""
_MAX_START_SECS = 60.0
"""Time in which restarted or replaced workers should run."""
_MAX_RUN_SECS = 300.0
"""Longest wait for the other run in which a leader of an earlier release executes the verb."""
MAX_QUEUED_SECS = 30.0
"""Time in which that other run may be queued."""


@dataclass
class _VerbRun:
    """One run of a verb's job."""

    verb: Verb
    context: dg.OpExecutionContext
    config: Any
    names: DagsterNames
    handles: Handles
    ops: OperationsContext
    nimbus: NimbusResource

    def request_fields(self) -> dict[str, Any]:
        """The fields of the verb's request, from the run's config."""
        return {
            name: getattr(self.config, name)
            for name in self.verb.request.model_fields
            if name != "dry_run"
        }

    def request_from_leader(self) -> LifecycleResult:
        """Request the verb from the leader; the topology afterwards.

        A leader of an earlier release launches a run of the same job. This call waits for that run,
        for five minutes; :class:`Unavailable` if it stays in the queue that this run occupies.
        """
        view = self.ops.cluster.load_view()
        previous: TopologyStatus | None = None
        try:
            previous = topology_by_name(view, self.config.name).base.status
        except NotAlive:
            # A kill cancels a submission, too.
            if self.verb.effect != "removed":
                raise
            if not is_being_submitted(self.ops, self.config.name):
                raise
        with self.nimbus.client() as client:
            change = change_topology(
                client,
                self.config.name,
                verb=self.verb.name,
                wait=False,
                **self.request_fields(),
            )
            if change.run_id:
                deadline = time.monotonic() + _MAX_RUN_SECS
                wait_for_run(
                    client,
                    change.run_id,
                    deadline=deadline,
                    on_document=self._refuse_full_queue(),
                )
        topology_id = str(change.id)
        base = self.ops.cluster.storm_base(topology_id)
        return LifecycleResult(
            topology_id,
            change.name,
            None if base is None else base.status,
            changed=base is None or base.status != previous,
            delay_secs=None if base is None else base.delay_secs,
            previous=previous,
        )

    def _refuse_full_queue(self) -> Callable[[Mapping[str, Any]], None]:
        """A check of the run that a leader of an earlier release launched.

        It raises :class:`Unavailable` if that run stays queued in the queue of this run, because it
        may be waiting for the place of this run.
        """
        queue_deadline = time.monotonic() + MAX_QUEUED_SECS

        def check(document: Mapping[str, Any]) -> None:
            if document.get("status") != "QUEUED" or time.monotonic() < queue_deadline:
                return
            run_id = str(document["run_id"])
            if self.context.instance.get_run_by_id(run_id) is None:
                return  # A run of another Dagster, which has its own queue.
            raise Unavailable(
                f"the leading nimbus is of the release before and launched run {run_id} for the "
                f"{self.verb.name} of {self.config.name!r}, which is queued while this run "
                "occupies a place of the queue: that run starts when this one ends; "
                "raise concurrency.runs.max_concurrent_runs, or upgrade nimbus first"
            )

        return check

    def execute(self) -> LifecycleResult | UpgradeResult:
        """Execute the verb by the leader, or here if a leader launched this run.

        A leader of an earlier release launches runs that execute the verb, tagged with the request.
        A request to it would launch another run.
        """
        if self.verb.executed_by == "run" or _request_of(self.context) is not None:
            return self.operate()
        return self.request_from_leader()

    def operate(self, *args: Any, **more: Any) -> Any:
        """The result of the verb's operation.

        It gets ``args`` and the fields ``more``, by default those of the verb's request.
        """
        operation = lifecycle.OPERATIONS[self.verb.name]
        fields = more or self.request_fields()
        return operation(self.ops, self.config.name, *args, **fields)

    def warn(self, warnings: Sequence[str]) -> None:
        """Log warnings about the submitted conf, and tag the run with them.

        The client of the verb reads the tag.
        """
        for warning in warnings:
            self.context.log.warning(warning)
        if warnings:
            tags = RunResult(warnings=tuple(warnings)).to_tags()
            self.context.instance.add_run_tags(self.context.run.run_id, tags)

    def observe(self, name: str, outcome: str, metadata: Mapping[str, Any]) -> None:
        """Record an observation of the topology's asset."""
        self.context.log_event(
            dg.AssetObservation(
                asset_key=self.handles.zookeeper.asset_key(ACTIVE_TOPOLOGY),
                partition=name,
                description=f"{self.verb.name}: {outcome}",
                metadata={"verb": self.verb.name, **metadata},
            )
        )


_Report = tuple[LifecycleResult | UpgradeResult, dict[str, Any]]
"""The result, and metadata that it does not contain."""


def _kill(run: _VerbRun) -> _Report:
    """Kill the topology, wait for its removal, and drop its partition key.

    The removal after a delay of more than ten minutes is not waited for. The key stays while it is
    in use (:func:`drop_key`).
    """
    report = run.execute()
    if isinstance(report, LifecycleResult) and report.status is not None:
        run.context.log.info(
            f"the spouts of {report.topology_id} pause, it ends in {report.delay_secs} s"
        )
        if (report.delay_secs or 0) <= _MAX_WAIT_SECS:
            report = _await_removal(run.ops, report)
    is_removed = run.ops.cluster.load_view().topology_named(report.name) is None
    instance = run.context.instance
    if is_removed:
        # The history stays, and is shown with a later submission of the name.
        drop_key(instance, run.names, report.name, run.ops.cluster.cluster_id())
    return report, {}


def _await_removal(ops: OperationsContext, report: LifecycleResult) -> LifecycleResult:
    """Wait for the removal of the killed topology.

    If no other process has removed it by the end of its delay, it is removed here.
    """
    deadline = ops.monotonic() + (report.delay_secs or 0) + _GRACE_SECS
    while ops.monotonic() < deadline:
        if report.topology_id not in ops.cluster.load_view().topologies:
            return LifecycleResult(
                report.topology_id, report.name, None, changed=True, previous=report.previous
            )
        ops.sleep(_POLL_SECS)
    return lifecycle.remove(ops, report.topology_id)


def _restart(run: _VerbRun) -> _Report:
    """Restart, and wait until every worker is replaced.

    :class:`Unavailable` after a minute, :class:`NotAlive` if the topology is killed. A topology
    without a live worker is not waited for.
    """
    topology = topology_by_name(run.ops.cluster.load_view(), run.config.name)
    former_tokens = {node.token for node in topology.live_workers.values()}
    report = run.operate(request_id=recorded_request(run.context))
    if former_tokens and not _await_workers(run.ops, report, "restarted", former_tokens):
        raise Unavailable(
            f"not every worker of {report.name!r} runs again {_MAX_START_SECS:g} s after its "
            f"restart: its supervisors continue; see `storm-dagster show {report.name}` and "
            f"`storm-dagster errors {report.name}`"
        )
    return report, {}


def _update(run: _VerbRun, handle: str | None) -> _Report:
    """Replace the old topology, which is touched only when the new one is ready.

    Materializes the published assignment and the active topology. The metadata list what the update
    changes (``changes``), and have the seconds without tuples (``gap_secs``) if the old topology
    was drained, and the new workers run within a minute. :class:`NotAlive` if the topology is
    killed.
    """
    if handle is None and not run.config.token:
        raise InvalidRequest(
            f"no topology is given to replace {run.config.name!r}: give `target` in the form"
        )
    former = topology_by_name(run.ops.cluster.load_view(), run.config.name).assignment
    report: LifecycleResult = run.operate(
        token=run.config.token or run.context.run.run_id,
        handle=handle,
        allow_degraded=run.config.allow_degraded,
    )
    run.warn(report.warnings)
    began = run.ops.monotonic()
    gap: dict[str, Any] = {}
    if report.drain_secs and _await_workers(run.ops, report, "updated"):
        gap["gap_secs"] = round((report.swap_secs or 0.0) + run.ops.monotonic() - began, 3)
    stored_assignment = run.ops.cluster.read_assignment(report.topology_id)
    tasks = run.ops.cluster.read_tasks(report.topology_id)
    if stored_assignment is None or tasks is None:
        raise _killed(report.name, "updated")
    common = {"topology_id": report.topology_id, "status": report.status or "gone"}
    assignment, _ = stored_assignment
    published = stored_metadata(assignment, tasks.component_of(), report.name)
    changes = changes_metadata(report.changes)
    for key, metadata in (
        (PUBLISHED_ASSIGNMENT, {**common, **published, **changes}),
        (ACTIVE_TOPOLOGY, common),
    ):
        asset = run.handles.zookeeper.asset_key(key)
        run.context.log_event(
            dg.AssetMaterialization(asset_key=asset, partition=report.name, metadata=metadata)
        )
    return report, {**gap, **changes, "moved_tasks": moved_tasks(former, assignment)}


def _killed(name: str, done: str) -> NotAlive:
    """The error of a topology that is killed while it is ``done``, such as "restarted"."""
    return NotAlive(f"topology {name!r} was killed while it was {done}: submit it again")


def _await_workers(
    ops: OperationsContext, report: LifecycleResult, done: str, former: Collection[str] = ()
) -> bool:
    """True if every worker runs within a minute, without a start token of ``former``.

    False if the topology has no assignment. :class:`NotAlive` if it is killed while it is ``done``.
    """
    began = ops.monotonic()
    while ops.monotonic() - began < _MAX_START_SECS:
        topology = ops.cluster.load_view().topologies.get(report.topology_id)
        if topology is None or topology.base.status == "KILLED":
            raise _killed(report.name, done)
        if topology.assignment is None:
            return False
        running = {
            slot
            for slot, node in topology.live_workers.items()
            if node.status == "running" and node.token not in former
        }
        if {worker.slot for worker in topology.assignment.workers} <= running:
            return True
        ops.sleep(_WORKER_POLL_SECS)
    return False


def _gray_upgrade(run: _VerbRun, handle: str | None) -> _Report:
    """Request the batch, and watch it."""
    config = run.config
    selection = Selection(parse_workers(config.workers), config.component or None, config.number)
    token = config.token or run.context.run.run_id
    request = run.operate(
        selection,
        handle=handle,
        token=token,
        allow_degraded=config.allow_degraded,
        request_id=recorded_request(run.context),
    )
    run.warn(request.warnings)
    run.context.log.info(f"the upgrade of {request.topology_id} is {request.outcome}")
    return _watch(run, request)


def _watch(run: _VerbRun, request: UpgradeResult, *, back: bool = False) -> _Report:
    """Wait for the workers, and record the change of each.

    The changes are logged in the run and observed at the topology's asset. With ``back``, wait for
    a rollback. Raises the errors of :func:`await_upgrade`.
    """

    def on_worker(worker: str, state: str) -> None:
        run.context.log.info(f"{worker}: {state}")
        metadata = {"worker": worker, "code": state, "topology_id": request.topology_id}
        run.observe(request.name, f"{worker} {state}", metadata)

    result = await_upgrade(
        run.ops, request, wait_secs=run.config.wait_secs, on_worker=on_worker, back=back
    )
    count = Counter(result.workers.values())
    metadata: dict[str, Any] = {
        phase: count[phase] for phase in ("upgraded", "upgrading", "former")
    }
    metadata["workers"] = table("worker code", sorted(result.workers.items()))
    if result.state is not None and result.state.record is not None:
        metadata["code"] = result.state.record.code_dir
    if result.reason:
        metadata["reason"] = result.reason
    return result, metadata


def _complete(run: _VerbRun) -> _Report:
    result = _as_upgrade(run.execute(), "completed")
    assignment = run.ops.cluster.assignment_info(result.topology_id)
    return result, {"code": assignment.code_dir if assignment is not None else ""}


def _rollback(run: _VerbRun) -> _Report:
    return _watch(run, _as_upgrade(run.execute(), "rolling back"), back=True)


def _as_upgrade(result: LifecycleResult | UpgradeResult, outcome: str) -> UpgradeResult:
    """The result of a change of an upgrade, also if the leader made it."""
    if isinstance(result, UpgradeResult):
        return result
    if result.status is None:
        raise NotAlive(
            f"topology {result.name!r} was killed while its upgrade ended: submit it again"
        )
    return UpgradeResult(result.topology_id, result.name, result.status, outcome, result.changed)


def _execute(run: _VerbRun) -> _Report:
    return run.execute(), {}


_EFFECTS: Mapping[RunEffect, Callable[..., _Report]] = {
    "executed": _execute,
    "removed": _kill,
    "restarted": _restart,
    "replaced": _update,
    "batch_upgraded": _gray_upgrade,
    "upgrade_completed": _complete,
    "rolled_back": _rollback,
}
"""Effect of a run -> the function that executes its verb and waits for the effect.

It takes the run; that of a verb that brings code also the handle of the upload.
"""


def _metadata(result: LifecycleResult | UpgradeResult) -> tuple[str, dict[str, Any]]:
    """Outcome in words, and metadata."""
    status = result.status or "gone"
    metadata: dict[str, Any] = {"topology_id": result.topology_id, "status": status}
    if isinstance(result, UpgradeResult):
        metadata["outcome"] = result.outcome
        return f"{result.outcome}, {result.status}", metadata
    metadata["previous"] = result.previous or "unknown"
    metadata["changed"] = result.changed
    if result.drain_secs:
        metadata["drain_secs"] = round(result.drain_secs, 3)
    return status, metadata


def _request_of(context: dg.OpExecutionContext) -> str | None:
    """The request for which a leader launched this run.

    ``None`` for a run that a user launched or re-executes.
    """
    if context.run.parent_run_id is not None:
        return None
    return context.run.tags.get(REQUEST_TAG)


def _done_by_former_leader(context: dg.OpExecutionContext, ops: OperationsContext) -> bool:
    """True if a leader of an earlier release has executed this run's request itself.

    A second execution may undo a later change.
    """
    request = _request_of(context)
    if request is None:
        return False
    ops.cluster.state.sync_path(paths.UNREPORTED)
    return request.encode() in (ops.cluster.state.get_data(paths.UNREPORTED) or b"")


def _perform(
    verb: Verb,
    context: dg.OpExecutionContext,
    config: Any,
    names: DagsterNames,
    handles: Handles,
    nimbus: NimbusResource,
    *handle: str | None,
) -> None:
    """Execute the verb in its run, wait for the effect, and report it.

    ``handle`` is given for a verb that brings code. No effect if a leader of an earlier release has
    executed the request already.
    """
    began = time.monotonic()
    effect = _EFFECTS[verb.effect]
    with operations(context, handles) as ops:
        if verb.executed_by == "leader" and _done_by_former_leader(context, ops):
            context.log.warning(
                f"{verb.name} of {config.name}: done by the leader, "
                "because Dagster did not answer it in time"
            )
            return
        run = _VerbRun(verb, context, config, names, handles, ops, nimbus)
        # An update has the record of its token, in place of one that a run claims.
        if not verb.has_token_record:
            claim_record(context, ops)
        try:
            result, more = effect(run, *handle)
        finally:
            end_record(context, ops)
    moved = int(more.get("moved_tasks", 0))
    outcome, metadata = _metadata(result)
    metadata = {**metadata, **more, "seconds": round(time.monotonic() - began, 3)}
    run.observe(result.name, outcome, metadata)
    context.add_output_metadata(metadata)
    done = lifecycle_result(verb.name, result, moved)
    context.instance.add_run_tags(context.run.run_id, done.to_tags())
    if not context.has_tag(TOPOLOGY_TAG):
        context.instance.add_run_tags(context.run.run_id, {TOPOLOGY_TAG: result.name})


@functools.lru_cache(maxsize=128)
def _verb_job(names: DagsterNames, verb: Verb) -> dg.JobDefinition:
    """The job of the verb; equal calls return the same one."""

    def verb_op(
        context: dg.OpExecutionContext,
        config: Any,
        names: DagsterNames,
        handles: Handles,
        nimbus: NimbusResource,
    ) -> None:
        _perform(verb, context, config, names, handles, nimbus)

    def code_op(
        context: dg.OpExecutionContext,
        config: Any,
        names: DagsterNames,
        handles: Handles,
        nimbus: NimbusResource,
    ) -> None:
        with step_errors():
            handle = upload_of(
                context.log,
                nimbus,
                config.handle,
                config.target,
                config.conf,
                config.allow_degraded,
            )
        _perform(verb, context, config, names, handles, nimbus, handle)

    op = code_op if verb.brings_code else verb_op
    # Dagster makes the form of the annotation, which differs for each verb.
    op.__annotations__["config"] = verb_config(verb)
    return op_job(names, verb.job, op, verb.summary)


def build_lifecycle_jobs(names: DagsterNames) -> list[dg.JobDefinition]:
    """Build the job of every verb whose run does not materialize assets."""
    return [_verb_job(names, verb) for verb in VERBS.values() if not verb.places_tasks]
