"""Executor of gray upgrades: load a snapshot, decide a transition, write it.

See ``docs/decisions.md#gray-upgrade``. The new code is stored beside the old under its own prefix
(``<topology id>.<number>``), so that running code is never overwritten; a rollback only names the
former prefix. The assignment always names the topology's code. While an upgrade is under way its
record names the new code, and the workers in its two lists run that.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.reassignment import causes_still_true
from storm_dagster.core.submission.conf import (
    base_conf,
    total_conf,
)
from storm_dagster.core.upgrade import machine
from storm_dagster.core.upgrade.machine import UpgradeEvent, UpgradeTransition
from storm_dagster.core.upgrade.selection import (
    Selection,
    UpgradeSnapshot,
    check_compatible,
    check_selection,
    selection_of_conf,
    worker_phase,
)
from storm_dagster.model import paths
from storm_dagster.model.errors import (
    Conflict,
    Fenced,
    NotAlive,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.records import Assignment, GrayUpgrade, TopologyStatus, encode_record
from storm_dagster.model.view import ClusterView, TopologyView, UpgradeState
from storm_dagster.operations.context import (
    OperationsContext,
    load_runnable,
    load_stored_conf,
    topology_by_name,
)
from storm_dagster.operations.live.change_records import PlannedOn, take_over_change
from storm_dagster.operations.results import TopologyResult
from storm_dagster.operations.steps import operation
from storm_dagster.operations.submit.code_storage import check_uploaded_archive
from storm_dagster.operations.submit.continuing import continue_under_leaders
from storm_dagster.operations.transactions import (
    announce,
    append_assignment,
    commit,
    note_change,
    retry_on_conflict,
    with_change,
)
from storm_dagster.operations.upgrade_code import (
    read_new_code,
    store_new_code,
    unapplied_by_upgrade,
)
from storm_dagster.zk.cluster_state import Transaction
from storm_dagster.zk.gray_upgrades import create_lists_ops, listed_nodes, put_record_ops

GRAY_UPGRADE = operation(
    "gray_upgrade",
    "sweep.upgraded",
    "version_number",
    "store.stormjar.jar",
    "store.stormconf.ser",
    "store.stormcode.ser",
    "gray_upgrade",
)
CONTINUE_UPGRADE = operation("continue_upgrade", "continue_upgrade")
COMPLETE_UPGRADE = operation("complete_upgrade", "complete_upgrade")
ROLL_BACK = operation("roll_back", "roll_back")
FINISH_ROLLBACK = operation("finish_rollback", "finish_rollback")

_IN_HISTORY = ("begun", "completed", "expired", "rolled back", "abandoned")
"""Outcomes in the history of the assignment: the begin of an upgrade, and its ends.

The begin of a rollback is none, because the workers that a reassignment replaces at the same time
must still be those of its causes. Its end has the reason.
"""
_DELETES_AT_AN_END = 1000
"""Nodes of the two lists that the transaction deletes which ends an upgrade."""


@dataclass(frozen=True)
class UpgradeResult(TopologyResult):
    """Effect of a call on an upgrade, and the upgrade afterwards."""

    status: TopologyStatus
    outcome: str
    """Outcome of the transition.

    Of a wait: ``batch done``, ``completed``, ``rolled back`` or ``under way``.
    """
    changed: bool
    """True if the call wrote a transition, or an earlier attempt of it whose reply was lost."""
    reason: str = ""
    """Reason of the transition; of a wait that of a failure or a rollback."""
    state: UpgradeState | None = None
    """The upgrade afterwards; ``None`` if this call deleted its record."""
    assignment: Assignment | None = None
    """The topology's assignment afterwards."""
    workers: Mapping[str, str] = field(default_factory=dict)
    """Of a wait: ``host:port`` -> last phase of the worker.

    A phase is ``former``, ``upgrading``, ``upgraded`` or ``rolling back``.
    """
    warnings: tuple[str, ...] = ()
    """Of a call that brought code: warnings about its conf."""


def gray_upgrade(
    ctx: OperationsContext,
    name: str,
    selection: Selection,
    *,
    handle: str | None = None,
    token: str = "",
    allow_degraded: bool = False,
    request_id: str = "",
) -> UpgradeResult:
    """Begin an upgrade with the code of ``handle``.

    ``handle`` names the upload. Without it, continue the current upgrade. Requests one batch; the
    topology master's supervisor picks its workers. With an empty selection a new upgrade takes the
    selection of the new code's own conf (``topology.upgrade.worker.num``, ``.component``,
    ``.workers``). A repetition with the ``token`` that began the upgrade or requested its newest
    batch has no further effect, also after the upgrade has ended. The request is checked, and the
    code stored and replicated, before the topology is touched. If the leader changes before the
    request is stored, the call continues under the next one, and takes over the record of
    ``request_id``, the request for which a leader launched this run. It ends if the topology was
    changed or killed since.

    Raises :class:`NotAlive`; :class:`Conflict` if the topology is not ACTIVE, if new code is given
    while an upgrade is under way, or while a batch is; :class:`InvalidRequest` for a wrong
    selection, a topology master that shares its worker, or if no upgrade can be continued;
    :class:`InvalidTopology` for code that cannot run beside the old; :class:`Fenced` at the third
    change of the leader: the request then has no effect.
    """
    # The state of the topology that the first attempt found.
    planned: list[PlannedOn] = []

    def attempt() -> UpgradeResult:
        view = ctx.cluster.load_view()
        target = planned[0].topology_id if planned else name
        topology, snapshot = _load(ctx, view, target)
        if not planned:
            planned.append(PlannedOn(topology.id, topology.base_at.version))
        request = _BatchRequest(selection, handle, token, allow_degraded)
        return _request_batch(ctx, topology, snapshot, request)

    def take_over(next_epoch: int) -> None:
        for state in planned:
            take_over_change(ctx, request_id, state, next_epoch)

    try:
        return continue_under_leaders(ctx, attempt, take_over)
    except Fenced as error:
        raise _not_requested(name, token, new=handle is not None) from error


@dataclass(frozen=True)
class _BatchRequest:
    """Request of one batch: the arguments of :func:`gray_upgrade` with these names."""

    selection: Selection
    handle: str | None
    token: str
    allow_degraded: bool


def _not_requested(name: str, token: str, *, new: bool) -> Fenced:
    """The error of a request that met a change of the leader.

    ``new``: it brought code.
    """
    effect = "no further worker was picked, and the upgrade continues as before"
    if new:
        effect = "no worker was upgraded, and the topology runs its former code"
    remedy = "request it again"
    if token:
        remedy = f"request it again, with the same token ({token}), so that it is done once"
    return Fenced(
        f"another nimbus leads since this gray upgrade of {name!r} was requested: {effect}; "
        f"{remedy}"
    )


def _request_batch(
    ctx: OperationsContext,
    topology: TopologyView,
    snapshot: UpgradeSnapshot,
    request: _BatchRequest,
) -> UpgradeResult:
    """Request one batch of an upgrade, as :func:`gray_upgrade` describes."""
    base = topology.base
    token = request.token
    record = snapshot.state.record or base.last_upgrade
    if record is not None and token and token in (record.token, record.batch_token):
        return UpgradeResult(
            topology.id,
            base.name,
            base.status,
            outcome="begun",
            changed=False,
            reason=record.reason or "",
            state=replace(snapshot.state, record=record),
            assignment=snapshot.assignment,
        )
    if request.handle is None:
        event = UpgradeEvent("continue", selection=request.selection, token=token)
        return _execute(ctx, topology.id, event)
    machine.check_begin(base, snapshot)
    epoch = ctx.current_epoch()
    ctx = ctx.accepting_fewer(request.allow_degraded)
    code = read_new_code(ctx, topology, request.handle)
    selection = request.selection
    if selection.empty:
        selection = selection_of_conf(code.conf)
    check_selection(selection, snapshot)
    former = load_runnable(ctx, topology)
    check_compatible(base.name, former.spec, code.spec)
    check_uploaded_archive(ctx, code.archive, code.spec, code.total)
    unapplied, size_warnings = unapplied_by_upgrade(base, former, code)
    new_record = store_new_code(ctx, epoch, topology, code, token, request.allow_degraded)
    event = UpgradeEvent(
        "begin",
        selection=selection,
        record=new_record.model_copy(update={"unapplied_sizes": unapplied}),
        former=topology.code_dir,
        submitted_keys=code.submitted_keys,
    )
    result = _execute(ctx, topology.id, event, epoch)
    return replace(result, warnings=(*code.warnings, *size_warnings))


def check_upgrade(ctx: OperationsContext, name: str, selection: Selection, *, new: bool) -> None:
    """Raise the error with which :func:`gray_upgrade` would refuse the request now.

    ``new``: the request brings new code; otherwise it continues an upgrade. The code itself is not
    checked, so that its errors are not found. Changes no state.
    """
    topology, snapshot = _load(ctx, ctx.cluster.load_view(), name)
    if not new:
        machine.check_continue(topology.base, snapshot, selection)
        return
    machine.check_begin(topology.base, snapshot)
    if not selection.empty:
        check_selection(selection, snapshot)


def complete_upgrade(ctx: OperationsContext, name: str) -> UpgradeResult:
    """End the upgrade: its code becomes the topology's, and its record is deleted.

    Workers that were not upgraded keep their process and get the new code at their next start.
    :class:`Conflict` if no upgrade is under way, or if it is being rolled back.
    """
    return _execute(ctx, name, UpgradeEvent("complete"))


def roll_back(
    ctx: OperationsContext, name: str, reason: str | None = None, worker: str = ""
) -> UpgradeResult:
    """Return every picked worker to the former code.

    ``worker`` is the ``host:port`` whose failure is the reason, if it is one.
    :func:`advance_upgrades` ends the rollback. No code is stored or fetched, because the former
    code was never replaced. A call during a rollback has no effect. :class:`Conflict` if no upgrade
    is under way.
    """
    return _execute(ctx, name, UpgradeEvent("roll_back", reason, worker))


def roll_back_if_upgraded(
    ctx: OperationsContext, topology_id: str, causes: Iterable[Cause]
) -> None:
    """Roll the upgrade back if one of the workers that it has taken was judged dead.

    No effect if the topology is not being upgraded, or if no such cause still holds.
    """
    view = ctx.cluster.load_view()
    topology = view.topologies.get(topology_id)
    if topology is None or topology.base.status != "UPGRADING" or topology.assignment is None:
        return
    state = ctx.cluster.read_upgrade(topology_id)
    true_causes = causes_still_true(view, topology, causes)
    cause_of_slot = {cause.slot: cause for cause in true_causes}
    for worker in topology.assignment.workers:
        if worker.slot in cause_of_slot and worker_phase(worker.address, state) != "former":
            with suppress(Conflict, NotAlive):  # The upgrade has ended since the view was read.
                reason = cause_of_slot[worker.slot].describe()
                roll_back(ctx, topology_id, reason, worker.address)
            return


def advance_upgrades(
    ctx: OperationsContext,
    memory: dict[str, float] | None = None,
    view: ClusterView | None = None,
) -> list[UpgradeResult]:
    """Execute the due transition of every upgrade; for the leader and the sensor.

    An upgrade completes when all workers are upgraded, expires, is rolled back when an upgraded
    worker failed; a rollback ends. Returns the results of the upgrades that changed. Each topology
    fails alone; only :class:`Fenced` ends the whole call. ``memory``: prefix of the new code ->
    monotonic clock at which the caller first saw its upgrade. It is changed in place, for the next
    call; without it no upgrade expires. ``view`` spares a read of the cluster; each upgrade is read
    separately.
    """
    results: list[UpgradeResult] = []
    first_seen = dict(memory or {})
    now = ctx.monotonic()
    if memory is not None:
        memory.clear()
    for topology in (view or ctx.cluster.load_view()).topologies.values():
        if topology.base.status not in ("UPGRADING", "ROLLBACK"):
            continue
        try:
            state = ctx.cluster.read_upgrade(topology.id)
            assignment = ctx.cluster.assignment_info(topology.id)
            tasks = ctx.cluster.read_tasks(topology.id)
            if assignment is None or tasks is None:
                continue
            snapshot = UpgradeSnapshot(state, assignment, tasks)
            since = now
            if memory is not None and state.record is not None:
                code_dir = state.record.code_dir
                since = first_seen.get(code_dir, now)
                memory[code_dir] = since
            event = machine.due(snapshot, age_secs=now - since)
            if event is not None:
                results.append(_execute(ctx, topology.id, event))
        except Fenced:
            raise
        except (Conflict, NotAlive) as error:
            ctx.log.info("upgrade of %s: %s", topology.id, error.message)
        except StormDagsterError as error:
            ctx.log.warning("upgrade of %s: %s", topology.id, error.message)
    return [result for result in results if result.changed]


def _load(
    ctx: OperationsContext, view: ClusterView, name: str
) -> tuple[TopologyView, UpgradeSnapshot]:
    """A topology by name or id, and its upgrade.

    :class:`NotAlive` without the topology, :class:`Unavailable` without an assignment,
    :class:`Conflict` while the topology is being removed.
    """
    topology = topology_by_name(view, name)
    if topology.assignment is None or topology.tasks is None:
        raise Unavailable(f"topology {name!r} has no assignment yet: wait until it is healed")
    state = ctx.cluster.read_upgrade(topology.id)
    if state.at < 0:
        raise Conflict(f"topology {name!r} is being removed: there is nothing to upgrade")
    return topology, UpgradeSnapshot(state, topology.assignment, topology.tasks)


def _execute(
    ctx: OperationsContext, name: str, event: UpgradeEvent, epoch: int | None = None
) -> UpgradeResult:
    """Apply the event to a fresh snapshot; retry after every lost race.

    ``epoch``: the epoch of the writes, by default the current one. No write if the transition needs
    none. Raises the errors of :func:`machine.transition`.
    """
    fence = ctx.current_epoch() if epoch is None else epoch
    # The newest transition that was written, if any; the reply of its commit may be lost.
    attempted: list[UpgradeTransition] = []

    def attempt(view: ClusterView) -> UpgradeResult:
        topology, snapshot = _load(ctx, view, name)
        base = topology.base
        state: UpgradeState | None = snapshot.state
        assignment = snapshot.assignment
        if attempted and machine.landed(attempted[0], base, snapshot):
            # It took effect; the base may have changed since.
            transition = replace(attempted[0], base=base)
        else:
            transition = machine.transition(base, snapshot, _with_base_fields(ctx, snapshot, event))
            if transition.step is not None:
                attempted[:] = [transition]
                assignment = _write(ctx, fence, view, topology, snapshot, transition)
                state = None
                if transition.record is not None:
                    state = replace(snapshot.state, record=transition.record)
                ctx.log.info(
                    "gray upgrade of %s: %s (%s)",
                    topology.id,
                    transition.outcome,
                    transition.reason or "it was requested",
                )
        return UpgradeResult(
            topology.id,
            base.name,
            transition.base.status,
            outcome=transition.outcome,
            changed=transition.step is not None,
            reason=transition.reason,
            state=state,
            assignment=assignment,
        )

    return retry_on_conflict(ctx, f"gray upgrade of {name}: {event.action}", attempt)


def _with_base_fields(
    ctx: OperationsContext, snapshot: UpgradeSnapshot, event: UpgradeEvent
) -> UpgradeEvent:
    """The event with the fields that the base gets from the new code's conf.

    Read from the stored conf only for the end of an upgrade that a leader of the release before
    began; otherwise the record has them. A conf that cannot be read does not prevent the end: the
    next rebalance writes the fields.
    """
    record = snapshot.state.record
    if event.action not in ("complete", "expire") or record is None or record.base_conf:
        return event
    try:
        total = total_conf(ctx.values(), load_stored_conf(ctx, record.code_dir))
    except StormDagsterError as error:
        ctx.log.warning("isolation and owner of %s stay: %s", record.code_dir, error.message)
        return event
    return replace(event, base_conf=base_conf(total))


def _write(
    ctx: OperationsContext,
    epoch: int,
    view: ClusterView,
    topology: TopologyView,
    snapshot: UpgradeSnapshot,
    transition: UpgradeTransition,
) -> Assignment:
    """Write a transition in one transaction, and return the assignment afterwards.

    ``view``, ``topology`` and ``snapshot`` are those that it was decided on. :class:`Conflict` if
    one of the written nodes has changed since.
    """
    transaction = ctx.cluster.fenced(epoch)
    assignment = _next_assignment(ctx, snapshot, transition)
    if transition.outcome in _IN_HISTORY:
        append_assignment(ctx, transaction, view, topology.base.name, assignment)
    else:
        # The selection, and the phases of the workers, follow from the assignment.
        assert topology.assignment_at is not None
        transaction.check(paths.assignment(topology.id), topology.assignment_at.version)
    _write_base(ctx, transaction, topology, snapshot.state.record, transition)
    _write_record(ctx, transaction, topology.id, snapshot.state, transition.record)
    if transition.action is not None:
        announce(ctx, transaction, topology.id, transition.action)
    note_change(
        ctx,
        transaction,
        topology.id,
        topology.base.name,
        previous=topology.base.status,
        status=transition.base.status,
    )
    commit(ctx, transaction, transition.step or "")
    return assignment


def _next_assignment(
    ctx: OperationsContext, snapshot: UpgradeSnapshot, transition: UpgradeTransition
) -> Assignment:
    """The assignment after a transition, with its code and the entry in its history."""
    assignment = snapshot.assignment
    former_record = snapshot.state.record
    if transition.code_dir is not None:
        changes = {
            "code_dir": transition.code_dir,
            "timestamp_ms": ctx.now_secs() * 1000,
            "type": "Assign",
            "code": former_record.code if former_record is not None else {},
        }
        assignment = assignment.model_copy(update=changes)
    if transition.outcome not in _IN_HISTORY:
        return assignment
    reason = transition.reason
    if transition.record is not None:
        reason = _describe_request(transition.record)
    return with_change(ctx, assignment, f"upgrade {transition.outcome}", reason)


def _write_base(
    ctx: OperationsContext,
    transaction: Transaction,
    topology: TopologyView,
    former_record: GrayUpgrade | None,
    transition: UpgradeTransition,
) -> None:
    """Append the write of the topology's base, or the check that it is unchanged."""
    path = paths.topology(topology.id)
    version = topology.base_at.version
    base = transition.base
    if base is topology.base:
        # The base must still be that which the transition was decided on.
        transaction.check(path, version)
        return
    if transition.record is None:
        # The tokens of an ended upgrade stay known, for repetitions of its requests, and so does
        # the reason of its rollback.
        ended_record = former_record
        if ended_record is not None:
            ended_record = ended_record.model_copy(update={"ended_secs": ctx.now_secs()})
        base = base.model_copy(update={"last_upgrade": ended_record})
    transaction.set(path, encode_record(base), version)


def _write_record(
    ctx: OperationsContext,
    transaction: Transaction,
    topology_id: str,
    former: UpgradeState,
    record: GrayUpgrade | None,
) -> None:
    """Append the writes of the upgrade's record and of the lists of its workers.

    ``former`` is the upgrade before, ``record`` the record afterwards: ``None`` ends it.
    """
    if record is not None or former.record is not None:
        put_record_ops(transaction, topology_id, former, record)
    if record is None:
        # The end of very long lists stays. Without a record it has no effect, and the next upgrade
        # sweeps it.
        for node in list(listed_nodes(ctx.cluster.state, topology_id))[:_DELETES_AT_AN_END]:
            transaction.delete(node)
    elif former.record is None:
        create_lists_ops(transaction, ctx.cluster.state, topology_id)


def _describe_request(record: GrayUpgrade) -> str:
    """The first batch and the new code, in words."""
    code = f"to {record.code_dir}"
    if record.workers:
        return f"{code}: first {', '.join(record.workers)}"
    number = f"{record.number} of the" if record.number else "all"
    workers = "workers"
    if record.component is not None:
        workers = f"workers of {record.component}"
    return f"{code}: first {number} {workers}"
