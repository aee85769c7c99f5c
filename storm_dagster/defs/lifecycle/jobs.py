"""One op job for each verb of a topology's life. Each waits for its effect and then reports it.

A verb that the leader executes (:attr:`Verb.executed_by`) is only asked for: without a leader the
run fails, and has changed nothing.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from storm_dagster.client.changes import change_topology
from storm_dagster.client.waiting import wait_for_run
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.defs.binding import op_job
from storm_dagster.defs.forms import verb_config
from storm_dagster.defs.keys import ACTIVE_TOPOLOGY, PUBLISHED_ASSIGNMENT, TOPOLOGY_TAG
from storm_dagster.defs.lifecycle.sensor import may_drop
from storm_dagster.defs.metadata import step_errors, stored_metadata, table
from storm_dagster.defs.resources.operating import Handles, claim_record, end_record, operations
from storm_dagster.defs.resources.processes import NimbusResource, upload_of
from storm_dagster.model import paths
from storm_dagster.model.dagster_names import REQUEST_TAG, DagsterNames
from storm_dagster.model.errors import InvalidRequest, NotAlive, Unavailable
from storm_dagster.model.requests import parse_workers
from storm_dagster.model.verbs import VERBS, RunEffect, Verb
from storm_dagster.operations.context import OperationsContext, topology_by_name
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.results import LifecycleResult
from storm_dagster.operations.upgrade import UpgradeResult, await_upgrade

_POLL_SECS = 0.5
# After the delay the leader and lifecycle_sensor remove the topology too: this run lets them, and
# does it itself when neither is there.
_GRACE_SECS = 2.0
# A run that waits holds a process: longer delays are left to the leader and lifecycle_sensor.
_LONGEST_WAIT_SECS = 600
_LONGEST_START_SECS = 60.0
# A leader of a former release executes the verb in another run.
_LONGEST_RUN_SECS = 300.0
MAX_QUEUED_SECS = 30.0


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

    def ask_leader(self) -> LifecycleResult:
        """Ask the leader for the verb; the topology afterwards.

        A leader of a former release launches a run of the same job for it, which is waited for.
        """
        view = self.ops.cluster.load_view()
        previous = topology_by_name(view, self.config.name).base.status
        fields = {
            name: getattr(self.config, name)
            for name in self.verb.request.model_fields
            if name != "dry_run"
        }
        with self.nimbus.client() as client:
            change = change_topology(
                client, self.config.name, verb=self.verb.name, wait=False, **fields
            )
            if change.run_id:
                deadline = time.monotonic() + _LONGEST_RUN_SECS
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
        """A check of the run that a leader of a former release launched: :class:`Unavailable` if it
        is queued for long in the queue of this run, whose place it may be waiting for.
        """
        until = time.monotonic() + MAX_QUEUED_SECS

        def check(document: Mapping[str, Any]) -> None:
            if document.get("status") != "QUEUED" or time.monotonic() < until:
                return
            run_id = str(document["run_id"])
            if self.context.instance.get_run_by_id(run_id) is None:
                return  # Of another Dagster, whose queue has no place for this run.
            raise Unavailable(
                f"the leading nimbus is of the release before and launched run {run_id} for the {self.verb.name} of "
                f"{self.config.name!r}, which is queued while this run occupies a place of the queue: that run starts "
                "when this one ends; raise concurrency.runs.max_concurrent_runs, or upgrade nimbus first"
            )

        return check

    def execute(self) -> LifecycleResult | UpgradeResult:
        """Have the verb executed: by the leader, or in this run when a leader launched it for that.

        A leader of a former release launches runs that execute the verb, tagged with the request.
        Asking it would launch another one.
        """
        if self.verb.executed_by == "run" or _request_of(self.context) is not None:
            return self.operate()
        return self.ask_leader()

    def operate(self, *args: Any, **more: Any) -> Any:
        """The result of the verb's operation, by default with the fields of its request."""
        fields = {
            name: getattr(self.config, name)
            for name in self.verb.request.model_fields
            if name != "dry_run"
        }
        operation = lifecycle.OPERATIONS[self.verb.name]
        return operation(self.ops, self.config.name, *args, **(more or fields))

    def observe(self, name: str, outcome: str, metadata: Mapping[str, Any]) -> None:
        """Record something at the topology's asset."""
        self.context.log_event(
            dg.AssetObservation(
                asset_key=self.handles.zookeeper.asset_key(ACTIVE_TOPOLOGY),
                partition=name,
                description=f"{self.verb.name}: {outcome}",
                metadata={"verb": self.verb.name, **metadata},
            )
        )


_Report = tuple[LifecycleResult | UpgradeResult, dict[str, Any]]
"""The result, and metadata that it does not hold."""


def _kill(run: _VerbRun) -> _Report:
    """Have the topology killed, see it removed, then drop its partition key."""
    report = run.execute()
    if isinstance(report, LifecycleResult) and report.status is not None:
        run.context.log.info(f"{report.topology_id} is silent, it ends in {report.delay_secs} s")
        if (report.delay_secs or 0) <= _LONGEST_WAIT_SECS:
            report = _await_removal(run.ops, report)
    gone = run.ops.cluster.load_view().topology_named(report.name) is None
    instance = run.context.instance
    if gone and may_drop(instance, run.names, report.name, run.ops.cluster.cluster_id()):
        # The history stays; a later submission of the name shows it again.
        instance.delete_dynamic_partition(run.names.partitions, report.name)
    return report, {}


def _await_removal(ops: OperationsContext, report: LifecycleResult) -> LifecycleResult:
    """Wait until the killed topology is gone; remove it here when no other process has by the end
    of its delay.
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
    """Restart, and see every worker replaced."""
    former = topology_by_name(run.ops.cluster.load_view(), run.config.name).live_workers.values()
    report = run.operate()
    if former and not _await_workers(run.ops, report.topology_id, {node.token for node in former}):
        raise Unavailable(
            f"not every worker of {report.name!r} runs again {_LONGEST_START_SECS:g} s after its restart: its supervisors "
            f"go on; see `storm-dagster show {report.name}` and `storm-dagster errors {report.name}`"
        )
    return report, {}


def _update(run: _VerbRun, handle: str | None) -> _Report:
    """Replace the old topology, which is touched only when the new one stands ready."""
    token, allowed = run.config.token or run.context.run.run_id, run.config.allow_degraded
    if handle is None and not run.config.token:
        raise InvalidRequest(
            f"nothing to run in the place of {run.config.name!r}: give `target` in the form"
        )
    report: LifecycleResult = run.operate(token=token, handle=handle, allow_degraded=allowed)
    began = run.ops.monotonic()
    gap: dict[str, Any] = {}
    if report.drain_secs and _await_workers(run.ops, report.topology_id):
        gap["gap_secs"] = round((report.swap_secs or 0.0) + run.ops.monotonic() - began, 3)
    found = run.ops.cluster.read_assignment(report.topology_id)
    tasks = run.ops.cluster.read_tasks(report.topology_id)
    if found is None or tasks is None:
        return report, gap  # Killed in the meantime.
    shown = stored_metadata(found[0], tasks.component_of(), report.name)
    common = {"topology_id": report.topology_id, "status": report.status or "gone"}
    for key, metadata in ((PUBLISHED_ASSIGNMENT, {**common, **shown}), (ACTIVE_TOPOLOGY, common)):
        asset = run.handles.zookeeper.asset_key(key)
        run.context.log_event(
            dg.AssetMaterialization(asset_key=asset, partition=report.name, metadata=metadata)
        )
    return report, gap


def _await_workers(ops: OperationsContext, topology_id: str, former: Collection[str] = ()) -> bool:
    """Whether every worker runs in time, none of them with a start token of ``former``."""
    began = ops.monotonic()
    while ops.monotonic() - began < _LONGEST_START_SECS:
        topology = ops.cluster.load_view().topologies.get(topology_id)
        if topology is None or topology.assignment is None:
            return False
        live = topology.live_workers.items()
        running = {
            slot for slot, node in live if node.status == "running" and node.token not in former
        }
        if {worker.slot for worker in topology.assignment.workers} <= running:
            return True
        ops.sleep(_POLL_SECS / 5)
    return False


def _gray_upgrade(run: _VerbRun, handle: str | None) -> _Report:
    """Ask for the batch, and watch it."""
    config = run.config
    selection = Selection(parse_workers(config.workers), config.component or None, config.number)
    token = config.token or run.context.run.run_id
    request = run.operate(
        selection, handle=handle, token=token, allow_degraded=config.allow_degraded
    )
    run.context.log.info(f"the upgrade of {request.topology_id} is {request.outcome}")
    return _watch(run, request)


def _watch(run: _VerbRun, request: UpgradeResult, *, back: bool = False) -> _Report:
    """Wait for the workers, and show each one's change in the run and at the topology's asset."""

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
    """The result of a change of an upgrade, also when the leader made it."""
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
    shown: dict[str, Any] = {"topology_id": result.topology_id, "status": result.status or "gone"}
    if isinstance(result, UpgradeResult):
        return f"{result.outcome}, {result.status}", {**shown, "outcome": result.outcome}
    drained = {"drain_secs": round(result.drain_secs, 3)} if result.drain_secs else {}
    return shown["status"], {
        **shown,
        "previous": result.previous or "unknown",
        "changed": result.changed,
        **drained,
    }


def _request_of(context: dg.OpExecutionContext) -> str | None:
    """The request that a leader launched this run for; ``None`` for one that a user launched, or
    executes again.
    """
    return context.run.tags.get(REQUEST_TAG) if context.run.parent_run_id is None else None


def _done_by_former_leader(context: dg.OpExecutionContext, ops: OperationsContext) -> bool:
    """True if a leader of a former release has done what it launched this run for: doing it again
    may undo a later change.
    """
    request = _request_of(context)
    if request is None:
        return False
    ops.cluster.state.sync_path(paths.UNREPORTED)
    return request.encode() in (ops.cluster.state.get_data(paths.UNREPORTED) or b"")


@functools.lru_cache(maxsize=128)
def _verb_job(names: DagsterNames, verb: Verb) -> dg.JobDefinition:
    def perform(
        context: dg.OpExecutionContext,
        config: Any,
        names: DagsterNames,
        handles: Handles,
        nimbus: NimbusResource,
        *handle: str | None,
    ) -> None:
        began = time.monotonic()
        effect = _EFFECTS[verb.effect]
        with operations(context, handles) as ops:
            if verb.executed_by == "leader" and _done_by_former_leader(context, ops):
                context.log.warning(
                    f"{verb.name} of {config.name}: done by the leader, to whom Dagster did not answer in time"
                )
                return
            run = _VerbRun(verb, context, config, names, handles, ops, nimbus)
            if not verb.has_token_record:
                claim_record(context, ops)
            try:
                result, more = effect(run, *handle)
            finally:
                end_record(context, ops)
        outcome, metadata = _metadata(result)
        metadata = {**metadata, **more, "seconds": round(time.monotonic() - began, 3)}
        run.observe(result.name, outcome, metadata)
        context.add_output_metadata(metadata)
        if not context.has_tag(TOPOLOGY_TAG):
            context.instance.add_run_tags(context.run.run_id, {TOPOLOGY_TAG: result.name})

    def verb_op(
        context: dg.OpExecutionContext,
        config: Any,
        names: DagsterNames,
        handles: Handles,
        nimbus: NimbusResource,
    ) -> None:
        perform(context, config, names, handles, nimbus)

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
        perform(context, config, names, handles, nimbus, handle)

    op = code_op if verb.brings_code else verb_op
    op.__annotations__["config"] = verb_config(verb)
    return op_job(names, verb.job, op, verb.summary)


def build_lifecycle_jobs(names: DagsterNames) -> list[dg.JobDefinition]:
    """Build the job of every verb whose run does not materialize assets."""
    return [_verb_job(names, verb) for verb in VERBS.values() if not verb.places_tasks]
