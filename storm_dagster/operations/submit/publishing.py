"""Stages 4 to 6 of a submission: place, publish, activate.

One transaction makes the topology visible.
"""

from dataclasses import dataclass, replace
from typing import Any

from storm_dagster.core.reassignment import (
    Runnable,
    assignment_of,
    new_batch,
    offered_supervisors,
    same_workers,
)
from storm_dagster.core.submission.conf import total_conf
from storm_dagster.core.submission.quotas import check_quotas
from storm_dagster.core.submission.tasks import topology_master_task
from storm_dagster.core.transitions import apply_event
from storm_dagster.model import paths
from storm_dagster.model.errors import (
    Conflict,
    Fenced,
    NotAlive,
)
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.placement import (
    PlacementResult,
)
from storm_dagster.model.records import (
    Assignment,
    StateHome,
    StormBase,
    TaskBeats,
    encode_record,
)
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.planning import plan_or_raise, write_reasons
from storm_dagster.operations.results import ActivateResult, AssignmentResult, PublishResult
from storm_dagster.operations.steps import shared_steps
from storm_dagster.operations.submit.code_storage import code_hashes
from storm_dagster.operations.submit.staging import (
    StagedPlacement,
    StagedTasks,
    StagingRecord,
    read_client_token,
    read_placement,
    read_record,
    read_tasks,
    read_topology,
    refuse_cancelled,
    refuse_other_run,
    write_part,
)
from storm_dagster.operations.submit.targets import check_target
from storm_dagster.operations.transactions import (
    announce,
    append_assignment,
    commit,
    read_backup,
    retry_on_conflict,
    with_change,
)
from storm_dagster.zk.cluster_state import Transaction
from storm_dagster.zk.shards import delete_ops

STAGE_ASSIGNMENT = shared_steps("stage_assignment", "stage.placement")
PUBLISH_ASSIGNMENT = shared_steps(
    "publish_assignment", "stage.placement", "publish", "store.placement.json"
)
ACTIVATE_TOPOLOGY = shared_steps("activate_topology", "activate")
_SUBMIT_ACTION = "submitTopology"
"""JStorm's name of a submission, for the listener of actions on topologies."""


def stage_assignment(ctx: OperationsContext, *, token: str) -> AssignmentResult:
    """Stage 4: compute a placement for the current cluster, and stage it.

    Raises the planner's error if the topology does not fit (:class:`Unavailable`), and does not
    wait for free slots. A submission never uses the local planner in place of PySpark. For a
    published topology the staged placement is the result. Raises also the errors of
    :func:`check_target`.
    """
    record, staged, runnable = _read_staged(ctx, token)
    ctx = ctx.accepting_fewer(record.allow_degraded)
    view = ctx.cluster.load_view()
    published = view.topologies.get(record.topology_id)
    if published is not None:
        # No other placement is staged. Later ones may have replaced the staged one since.
        report = _assignment_report(record, read_placement(ctx, token).result, view)
        return replace(report, in_force=published.assignment)
    check_target(view, record)
    planned = _plan(ctx, view, record, staged, runnable)
    write_part(ctx, token, "placement", planned)
    return _assignment_report(record, planned.result, view)


def _assignment_report(
    record: StagingRecord, result: PlacementResult, view: ClusterView
) -> AssignmentResult:
    return AssignmentResult(
        topology_id=record.topology_id,
        name=record.name,
        placement=result.placement(record.name),
        planner=result.planner,
        session_secs=result.session_secs,
        assign_secs=result.assign_secs,
        supervisors=len(offered_supervisors(view, placing=[])),
        result=result,
    )


def _read_staged(ctx: OperationsContext, token: str) -> tuple[StagingRecord, StagedTasks, Runnable]:
    """The staged input of stages 4 and 5; :class:`NotAlive` if a part is missing."""
    record = read_record(ctx, token)
    conf, spec = read_topology(ctx, token)
    return record, read_tasks(ctx, token), Runnable(spec=spec, conf=total_conf(ctx.values(), conf))


def _plan(
    ctx: OperationsContext,
    view: ClusterView,
    record: StagingRecord,
    staged: StagedTasks,
    runnable: Runnable,
) -> StagedPlacement:
    """Plan the staged tasks on the view; raises the planner's error."""
    # For a topology with the conf key ``use.old.assignment``.
    backup, _ = read_backup(ctx, record.name)
    batch = new_batch(
        view,
        name=record.name,
        topology_id=record.topology_id,
        runnable=runnable,
        table=staged.table,
        executors=staged.executors,
        workers=staged.workers,
        backup=backup,
        replaces=record.replaces,
    )
    result = plan_or_raise(ctx, batch, record.name, view)
    placing = [record.topology_id]
    if record.replaces:
        placing.append(record.replaces)
    workers = result.placement(record.name).workers
    check_quotas(ctx.values(), view, staged.owner, workers, placing)
    return StagedPlacement(assignments_version=view.assignments_version, result=result)


def publish_assignment(ctx: OperationsContext, *, token: str) -> PublishResult:
    """Stage 5: publish the topology.

    One fenced transaction makes it visible, INACTIVE, with its target status. If the cluster has
    changed since the placement was computed, the placement is recomputed, and after every lost race
    once more, until the assignment wait ends. A published topology is not written. Raises
    :class:`AlreadyAlive` if another topology has taken the name, :class:`Fenced` if the epoch of
    the staged conf is over, :class:`NotAlive` if the submission was cancelled,
    :class:`Unavailable` if the topology no longer fits.
    """
    record, staged, runnable = _read_staged(ctx, token)
    ctx = ctx.accepting_fewer(record.allow_degraded)
    planned = read_placement(ctx, token)
    publication = _Publication(ctx, token, record, staged, runnable, planned)
    purpose = f"publishing {record.topology_id}"
    report = retry_on_conflict(ctx, purpose, publication.attempt)
    report = replace(report, attempts=publication.attempts, replanned=publication.replanned)
    # Not for a topology that was published earlier and has another placement by now.
    if same_workers(report.assignment, report.placement):
        write_reasons(ctx, record.topology_id, publication.planned.result, record.name)
    ctx.log.info("published %s in %d attempts", report.topology_id, report.attempts)
    return report


@dataclass
class _Publication:
    """Publication of one staged topology, over several attempts."""

    ctx: OperationsContext
    token: str
    record: StagingRecord
    staged: StagedTasks
    runnable: Runnable
    planned: StagedPlacement
    """The staged placement; after an attempt the one that it tried to publish."""
    attempts: int = 0
    replanned: int = 0
    """Number of placements that were computed by the attempts."""

    def attempt(self, view: ClusterView) -> PublishResult:
        """Publish on this view, with another placement if the staged one may not fit."""
        self.attempts += 1
        record = self.record
        published = view.topologies.get(record.topology_id)
        if published is not None:
            return _published_result(record, self.planned, published)
        self._check_epoch(view)
        check_target(view, record)
        is_current = self.planned.assignments_version == view.assignments_version
        if not is_current or not _fits(self.planned, record, self.staged, view):
            self.planned = _plan(self.ctx, view, record, self.staged, self.runnable)
            self.replanned += 1
            write_part(self.ctx, self.token, "placement", self.planned)
        return _publish(self.ctx, self.token, record, self.staged, self.planned, view)

    def _check_epoch(self, view: ClusterView) -> None:
        """Raise :class:`Fenced` if the epoch of the staged conf is over."""
        record = self.record
        if view.epoch == record.epoch:
            return
        # The reason that a user knows comes first: a kill stays in force under a new leader.
        stored = read_client_token(self.ctx, self.token)
        if stored is not None:
            token_record, _ = stored
            refuse_cancelled(self.token, token_record)
        raise Fenced(
            f"topology {record.name!r} was staged under leadership epoch {record.epoch}, "
            f"which is over (now {view.epoch}): materialize storm/topology_conf again"
        )


def _published_result(
    record: StagingRecord, planned: StagedPlacement, topology: TopologyView
) -> PublishResult:
    """Result for a topology that an earlier attempt has published."""
    assert topology.assignment is not None and topology.assignment_at is not None
    return PublishResult(
        topology_id=record.topology_id,
        name=record.name,
        status=topology.base.status,
        assignment=topology.assignment,
        placement=planned.result.placement(record.name),
        planner=planned.result.planner,
        versions={
            paths.assignment(topology.id): topology.assignment_at.version,
            paths.topology(topology.id): topology.base_at.version,
        },
        already=True,
    )


def _fits(
    planned: StagedPlacement, record: StagingRecord, staged: StagedTasks, view: ClusterView
) -> bool:
    """True if every slot of the placement is still offered and free.

    The assignments version does not show it, because supervisors come and go without a version.
    """
    placing = [record.topology_id]
    if record.replaces:
        placing.append(record.replaces)
    offered = offered_supervisors(view, placing=placing, isolation=staged.isolation)
    unused = {supervisor.id: supervisor.unused for supervisor in offered}
    workers = planned.result.placement(record.name).workers
    return all(worker.port in unused.get(worker.node, ()) for worker in workers)


def _publish(
    ctx: OperationsContext,
    token: str,
    record: StagingRecord,
    staged: StagedTasks,
    planned: StagedPlacement,
    view: ClusterView,
) -> PublishResult:
    """Publish the planned topology in one transaction, INACTIVE.

    The same transaction marks the token as published, and ends the replaced topology. A
    :class:`Conflict` of the transaction is a lost race. Raises the errors of
    :func:`_read_unpublished_token`.
    """
    topology_id = record.topology_id
    token_record, token_version = _read_unpublished_token(ctx, token, record)
    replaced = view.topologies.get(record.replaces) if record.replaces else None
    now = ctx.now_secs()
    assignment = _first_assignment(ctx, record, planned, replaced, now)
    base = _new_base(record, staged, replaced, token, now)
    transaction = ctx.cluster.fenced(record.epoch)
    published = token_record.model_copy(update={"published": True, "ended": False, "request": {}})
    transaction.set(paths.token(token), encode_record(published), token_version)
    ended_ids: list[str] = []
    if replaced is not None:
        _end_replaced(ctx, transaction, replaced)
        ended_ids.append(replaced.id)
    created_paths = _create_nodes(transaction, topology_id, staged)
    append_assignment(ctx, transaction, view, record.name, assignment, *ended_ids)
    transaction.create(paths.topology(topology_id), encode_record(base))
    # Workers may write this node, and must not create nodes below the base.
    transaction.create(paths.state_home(topology_id), encode_record(StateHome(marker="")))
    action = _SUBMIT_ACTION if replaced is None else VERBS["update"].action
    announce(ctx, transaction, topology_id, action)
    commit(ctx, transaction, "publish")
    assignment_version = ctx.cluster.state.get_version(paths.assignment(topology_id))
    return PublishResult(
        topology_id=topology_id,
        name=record.name,
        status="INACTIVE",
        assignment=assignment,
        placement=planned.result.placement(record.name),
        planner=planned.result.planner,
        versions={
            paths.ASSIGNMENTS: view.assignments_version + 1,
            **dict.fromkeys(created_paths, 0),
            paths.assignment(topology_id): assignment_version or 0,
            paths.topology(topology_id): 0,
        },
        replaced=replaced.id if replaced else None,
    )


def _read_unpublished_token(
    ctx: OperationsContext, token: str, record: StagingRecord
) -> tuple[TokenRecord, int]:
    """Read the record of a token that this run may publish, and its version.

    :class:`NotAlive` if the token has expired or its submission was cancelled, :class:`Conflict` if
    its topology was published before and is gone, or another run has taken the submission over.
    """
    expired = NotAlive(f"token {token!r} has expired: submit topology {record.name!r} again")
    stored_token = read_client_token(ctx, token)
    if stored_token is None:
        raise expired
    token_record, version = stored_token
    if token_record.topology_id != record.topology_id:
        # It was used again after it had expired.
        raise expired
    refuse_cancelled(token, token_record)
    refuse_other_run(ctx, token, token_record)
    if token_record.published:
        raise Conflict(
            f"{record.topology_id} was published before and has been killed: submit with a new "
            "token"
        )
    return token_record, version


def _create_nodes(transaction: Transaction, topology_id: str, staged: StagedTasks) -> list[str]:
    """Append the nodes of a published topology, and return their paths."""
    beats = TaskBeats(topology_id=topology_id, topology_master=topology_master_task(staged.table))
    contents = {
        paths.tasks(topology_id): encode_record(staged.table),
        paths.taskbeats(topology_id): encode_record(beats),
        paths.task_errors(topology_id): b"",
        paths.metrics(topology_id): b"",
        paths.workers(topology_id): b"",
        paths.gray_upgrade(topology_id): b"",
    }
    for path, content in contents.items():
        transaction.create(path, content)
    return list(contents)


def _end_replaced(ctx: OperationsContext, transaction: Transaction, replaced: TopologyView) -> None:
    """Append the deletion of a replaced topology's base and assignment.

    Its other nodes and its blobs are garbage afterwards.
    """
    state = ctx.cluster.state
    delete_ops(state, transaction, paths.assignment(replaced.id))
    for child in state.find_children(paths.topology(replaced.id)) or ():
        transaction.delete(f"{paths.topology(replaced.id)}/{child}")
    transaction.delete(paths.topology(replaced.id), replaced.base_at.version)


def _first_assignment(
    ctx: OperationsContext,
    record: StagingRecord,
    planned: StagedPlacement,
    replaced: TopologyView | None,
    now_secs: int,
) -> Assignment:
    """The assignment of a new topology; it continues the history of a replaced one."""
    assignment = assignment_of(
        planned.result.placement(record.name),
        topology_id=record.topology_id,
        previous=None,
        now_secs=now_secs,
    )
    changes: dict[str, Any] = {"code": code_hashes(ctx, record.topology_id)}
    if replaced is not None and replaced.assignment is not None:
        changes["history"] = replaced.assignment.history
    assignment = assignment.model_copy(update=changes)
    action = "submitted" if replaced is None else "updated"
    return with_change(ctx, assignment, action, f"as {record.topology_id}")


def _new_base(
    record: StagingRecord,
    staged: StagedTasks,
    replaced: TopologyView | None,
    token: str,
    now_secs: int,
) -> StormBase:
    """The base of a new topology; it has the target status of a replaced one."""
    submitted_keys: dict[str, tuple[str, ...]] = {}
    if record.submitted_keys is not None:
        submitted_keys[record.topology_id] = record.submitted_keys
    return StormBase(
        name=record.name,
        launch_time_secs=now_secs,
        status="INACTIVE",
        wanted_status=record.wanted_status if replaced is None else replaced.base.wanted_status,
        workers=staged.workers,
        executors=staged.executors,
        token=token,
        owner=staged.owner,
        isolation=staged.isolation,
        submitted_keys=submitted_keys,
    )


def activate_topology(ctx: OperationsContext, *, token: str) -> ActivateResult:
    """Stage 6: a second fenced transaction sets the target status.

    Raises the errors of :func:`finish_activation`.
    """
    return finish_activation(ctx, read_record(ctx, token).topology_id, ctx.current_epoch())


def finish_activation(ctx: OperationsContext, topology_id: str, epoch: int) -> ActivateResult:
    """Give a published topology its target status; also ends an abandoned drain.

    No write unless it is INACTIVE and should be ACTIVE. :class:`NotAlive` if it is not published or
    no longer exists, or was killed.
    """

    def attempt(view: ClusterView) -> ActivateResult:
        topology = view.topologies.get(topology_id)
        if topology is None:
            raise NotAlive(
                f"topology {topology_id} is not published or was killed: "
                "materialize storm/published_assignment first"
            )
        base = topology.base
        version = topology.base_at.version
        if base.status != "INACTIVE" or base.wanted_status != "ACTIVE":
            if base.status == "KILLED":
                raise NotAlive(
                    f"topology {base.name!r} was killed before it was activated: submit it again"
                )
            return ActivateResult(
                topology_id, base.name, base.status, changed=False, version=version
            )
        changed = apply_event(base, "activate")
        transaction = ctx.cluster.fenced(epoch).set(
            paths.topology(topology_id), encode_record(changed), version
        )
        # With a delay this undoes an abandoned drain, of which the listener was not notified.
        if base.delay_secs is None:
            announce(ctx, transaction, topology_id, VERBS["activate"].action)
        commit(ctx, transaction, "activate")
        return ActivateResult(
            topology_id, base.name, changed.status, changed=True, version=version + 1
        )

    return retry_on_conflict(ctx, f"activating {topology_id}", attempt)
