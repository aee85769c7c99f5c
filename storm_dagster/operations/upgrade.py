"""Executor of gray upgrades: load a snapshot, let the state machine decide, write
(``docs/decisions.md#gray-upgrade``).

The new code stands beside the old under a prefix of its own (``<topology id>.<number>``), so that
nothing that runs is ever overwritten: rolling back is naming the former prefix again. The
assignment names the topology's code all the time; while an upgrade is under way its record names
the new one, and the workers in its two lists run that.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.reassignment import causes_still_true
from storm_dagster.core.submission.conf import (
    UPGRADE_KEYS,
    stored_document,
    submitted_keys,
    total_conf,
)
from storm_dagster.core.submission.validation import normalize_submission
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
    InvalidTopology,
    NotAlive,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.names import make_code_dir
from storm_dagster.model.records import Assignment, GrayUpgrade, TopologyStatus, encode_record
from storm_dagster.model.view import ClusterView, TopologyView, UpgradeState
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
from storm_dagster.operations.results import TopologyResult
from storm_dagster.operations.steps import operation
from storm_dagster.operations.submit.code_storage import check_uploaded_archive, store_code
from storm_dagster.operations.submit.staging import counter_version
from storm_dagster.operations.submit.submission import read_source
from storm_dagster.operations.transactions import (
    announce,
    append_assignment,
    commit,
    note_change,
    retry_on_conflict,
    with_change,
)
from storm_dagster.zk.gray_upgrades import create_lists_ops, listed_nodes, put_record_ops

GRAY_UPGRADE = operation(
    "gray_upgrade",
    *("sweep.upgraded", "version_number"),
    *("store.stormjar.jar", "store.stormconf.ser", "store.stormcode.ser", "gray_upgrade"),
)
CONTINUE_UPGRADE = operation("continue_upgrade", "continue_upgrade")
COMPLETE_UPGRADE = operation("complete_upgrade", "complete_upgrade")
ROLL_BACK = operation("roll_back", "roll_back")
FINISH_ROLLBACK = operation("finish_rollback", "finish_rollback")

_DELETES_IN_ONE_TRANSACTION = 100
_DELETES_AT_AN_END = 1000
_POLL_SECS = 0.25


@dataclass(frozen=True)
class UpgradeResult(TopologyResult):
    """Effect of a call on an upgrade, and the upgrade afterwards."""

    status: TopologyStatus
    outcome: str
    """That of the transition; of a wait ``batch done``, ``completed``, ``rolled back`` or ``under
    way``.
    """
    changed: bool
    reason: str = ""
    state: UpgradeState | None = None
    assignment: Assignment | None = None
    workers: Mapping[str, str] = field(default_factory=dict)
    """Of a wait: ``host:port`` -> ``former``, ``upgrading``, ``upgraded`` or ``rolling back``, as
    last seen.
    """


def gray_upgrade(
    ctx: OperationsContext,
    name: str,
    selection: Selection,
    *,
    handle: str | None = None,
    token: str = "",
    allow_degraded: bool = False,
) -> UpgradeResult:
    """Begin an upgrade with the uploaded code of ``handle``, or go on with the one under way (no
    ``handle``).

    Asks for one batch; the topology master's supervisor picks it. With an empty selection a new
    upgrade takes that of the new code's own conf (``topology.upgrade.worker.num``, ``.component``,
    ``.workers``). Repeated with the ``token`` that began it or asked for its newest batch, nothing
    is done again, also when it has ended since. Everything is checked, stored and replicated before
    the topology is touched.

    Raises :class:`NotAlive`; :class:`Conflict` when the topology is not ACTIVE, when new code is
    given while an upgrade is under way, or while a batch is; :class:`InvalidRequest` for a wrong
    selection, a topology master that shares its worker, or nothing to go on with;
    :class:`InvalidTopology` for code that cannot run beside the old.
    """
    topology, snapshot = _load(ctx, ctx.cluster.load_view(), name)
    base = topology.base
    known = snapshot.state.record or base.last_upgrade
    if known is not None and token and token in (known.token, known.batch_token):
        state, reason = replace(snapshot.state, record=known), known.reason or ""
        return UpgradeResult(
            topology.id, base.name, base.status, "begun", False, reason, state, snapshot.assignment
        )
    if handle is None:
        return _execute(ctx, base.name, UpgradeEvent("continue", selection=selection, token=token))
    machine.check_begin(base, snapshot)
    epoch = ctx.current_epoch()
    ctx = ctx.accepting_fewer(allow_degraded)
    submitted, spec, _, archive = read_source(ctx, handle, topology)
    spec = spec.model_copy(update={"name": base.name})
    conf, spec = normalize_submission(ctx.values(), submitted, spec, topology.id)
    total = total_conf(ctx.values(), conf)
    if selection.empty:
        selection = selection_of_conf(conf)
    check_selection(selection, snapshot)
    check_compatible(base.name, load_runnable(ctx, topology).spec, spec)
    check_uploaded_archive(ctx, archive, spec, total)
    ttl_secs = int(total.get("topology.upgrade.ttl") or 86_400_000) / 1000
    # Asked for this time; a restart of the topology is no upgrade.
    conf = {key: value for key, value in conf.items() if key not in UPGRADE_KEYS}
    _sweep_lists(ctx, epoch, topology.id)
    code_dir = make_code_dir(topology.id, _next_number(ctx, epoch))
    keys = submitted_keys(submitted)
    stored = store_code(
        ctx,
        code_dir,
        name=base.name,
        archive=archive,
        conf=stored_document(conf, keys),
        spec=spec,
        keep=False,
        allow_degraded=allow_degraded,
    )
    ttl = max(1, round(ttl_secs))
    begun = GrayUpgrade(
        expires=ctx.now_secs() + ttl,
        ttl_secs=ttl,
        code_dir=code_dir,
        token=token,
        code=stored.hashes,
    )
    event = UpgradeEvent(
        "begin",
        selection=selection,
        record=begun,
        former=topology.code_dir,
        submitted_keys=keys,
    )
    return _execute(ctx, topology.id, event, epoch)


def check_upgrade(ctx: OperationsContext, name: str, selection: Selection, *, new: bool) -> None:
    """Whether :func:`gray_upgrade` would take the request now, as far as that can be told without
    the new code.

    Changes nothing; raises what the call would raise.
    """
    topology, snapshot = _load(ctx, ctx.cluster.load_view(), name)
    if not new:
        machine.check_continue(topology.base, snapshot, selection)
        return
    machine.check_begin(topology.base, snapshot)
    if not selection.empty:
        check_selection(selection, snapshot)


def complete_upgrade(ctx: OperationsContext, name: str) -> UpgradeResult:
    """End the upgrade here: its code is the topology's from now on, and its record goes.

    Workers that were not upgraded keep their process and get the new code at their next start.
    :class:`Conflict` when no upgrade is under way, or when it is being rolled back.
    """
    return _execute(ctx, name, UpgradeEvent("complete"))


def roll_back(ctx: OperationsContext, name: str, reason: str | None = None) -> UpgradeResult:
    """Take every worker that was picked back to the former code. :func:`advance_upgrades` ends it.

    Nothing is stored or fetched: the former code was never replaced. Rolling back what is being
    rolled back changes nothing. :class:`Conflict` when no upgrade is under way.
    """
    return _execute(ctx, name, UpgradeEvent("roll_back", reason))


def roll_back_if_upgraded(
    ctx: OperationsContext, topology_id: str, causes: Iterable[Cause]
) -> None:
    """Roll the upgrade back when a worker that it took was judged dead."""
    view = ctx.cluster.load_view()
    topology = view.topologies.get(topology_id)
    if topology is None or topology.base.status != "UPGRADING" or topology.assignment is None:
        return
    state = ctx.cluster.read_upgrade(topology_id)
    true = {cause.slot: cause for cause in causes_still_true(view, topology, causes)}
    for worker in topology.assignment.workers:
        if worker.slot in true and worker_phase(worker.address, state) != "former":
            with suppress(Conflict, NotAlive):  # It ended meanwhile.
                roll_back(ctx, topology_id, true[worker.slot].describe())
            return


def advance_upgrades(
    ctx: OperationsContext, seen: dict[str, float] | None = None, view: ClusterView | None = None
) -> list[UpgradeResult]:
    """Do what is due about every upgrade; the results of those that it changed. For the leader and
    the sensor.

    Complete when all workers are upgraded, expire, roll back when an upgraded worker failed, end a
    rollback. Each topology fails alone; only :class:`Fenced` ends the whole call. ``seen``: the
    caller's memory of when it first saw each upgrade, by code; without it none expires. ``view``
    spares a read of the cluster: each upgrade is read by itself.
    """
    results: list[UpgradeResult] = []
    before, now = dict(seen or {}), ctx.monotonic()
    if seen is not None:
        seen.clear()
    for topology in (view or ctx.cluster.load_view()).topologies.values():
        if topology.base.status not in ("UPGRADING", "ROLLBACK"):
            continue
        try:
            state = ctx.cluster.read_upgrade(topology.id)
            assignment, tasks = (
                ctx.cluster.assignment_info(topology.id),
                ctx.cluster.read_tasks(topology.id),
            )
            if assignment is None or tasks is None:
                continue
            snapshot = UpgradeSnapshot(state, assignment, tasks)
            since = now
            if seen is not None and state.record is not None:
                since = seen[state.record.code_dir] = before.get(state.record.code_dir, now)
            if (event := machine.due(snapshot, age_secs=now - since)) is not None:
                results.append(_execute(ctx, topology.id, event))
        except Fenced:
            raise
        except (Conflict, NotAlive) as error:
            ctx.log.info("upgrade of %s: %s", topology.id, error.message)
        except StormDagsterError as error:
            ctx.log.warning("upgrade of %s: %s", topology.id, error.message)
    return [result for result in results if result.changed]


def await_upgrade(
    ctx: OperationsContext,
    request: UpgradeResult,
    *,
    wait_secs: float,
    on_worker: Callable[[str, str], object],
    back: bool = False,
) -> UpgradeResult:
    """Wait until no worker is changing its code any more, or with ``back`` until every worker runs
    the former code.

    ``under way`` when ``wait_secs`` are over first. ``on_worker`` is called with ``host:port`` and
    state of each worker whose state changed. :class:`InvalidTopology` when the upgrade was rolled
    back because of what the new code did, :class:`Conflict` when somebody asked for that,
    :class:`NotAlive` when the topology was killed. What is due is done here as well: the leader may
    be away.
    """
    deadline = ctx.monotonic() + wait_secs
    workers: Mapping[str, str] = {}
    reason = request.reason

    def notify(phases: Mapping[str, str]) -> None:
        for worker, phase in phases.items():
            if workers.get(worker, "former") != phase:
                on_worker(worker, phase)

    while True:
        assignment = ctx.cluster.assignment_info(request.topology_id)
        table = ctx.cluster.read_tasks(request.topology_id)
        state = ctx.cluster.read_upgrade(request.topology_id)
        if assignment is None or table is None or state.record is None:
            result = _ended(ctx, replace(request, workers=workers, reason=reason), back)
            # The end may come between two polls, with the last changes of workers.
            notify(result.workers)
            return result
        snapshot = UpgradeSnapshot(state, assignment, table)
        reason = state.record.reason or reason
        notify(snapshot.workers)
        workers = snapshot.workers
        outcome = "under way" if ctx.monotonic() >= deadline else ""
        if not back and snapshot.phase == "paused" and not snapshot.complete:
            outcome = "batch done"
        if outcome:
            status = "ROLLBACK" if snapshot.phase == "rolling back" else "UPGRADING"
            return replace(request, status=status, outcome=outcome, workers=workers, reason=reason)
        if machine.due(snapshot) is not None:
            advance_upgrades(ctx)
        ctx.sleep(_POLL_SECS)


def _load(
    ctx: OperationsContext, view: ClusterView, name: str
) -> tuple[TopologyView, UpgradeSnapshot]:
    """A topology by name or id, and its upgrade; :class:`NotAlive`, :class:`Unavailable` without an
    assignment.
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
    """Apply the event to a fresh snapshot, again after every lost race; ``epoch``: that of the
    writes.
    """
    fence = ctx.current_epoch() if epoch is None else epoch
    sent: list[UpgradeTransition] = []

    def attempt(view: ClusterView) -> UpgradeResult:
        topology, snapshot = _load(ctx, view, name)
        base, state, assignment = topology.base, snapshot.state, snapshot.assignment
        if sent and machine.landed(sent[0], base, snapshot):
            made = replace(sent[0], base=base)
        else:
            made = machine.transition(base, snapshot, event)
            if made.step is not None:
                sent[:] = [made]
                assignment = _write(ctx, fence, view, topology, snapshot, made)
                state = None if made.record is None else replace(state, record=made.record)
                reason = made.reason or "it was asked for"
                ctx.log.info("gray upgrade of %s: %s (%s)", topology.id, made.outcome, reason)
        changed = made.step is not None
        return UpgradeResult(
            topology.id,
            base.name,
            made.base.status,
            made.outcome,
            changed,
            made.reason,
            state,
            assignment,
        )

    return retry_on_conflict(ctx, f"gray upgrade of {name}: {event.action}", attempt)


def _write(
    ctx: OperationsContext,
    epoch: int,
    view: ClusterView,
    topology: TopologyView,
    snapshot: UpgradeSnapshot,
    made: UpgradeTransition,
) -> Assignment:
    """Write a transition in one transaction; the assignment afterwards."""
    transaction, assignment = ctx.cluster.fenced(epoch), snapshot.assignment
    path, version = paths.topology(topology.id), topology.base_at.version
    if made.code_dir is not None:
        code = snapshot.state.record.code if snapshot.state.record is not None else {}
        changes = {
            **{"code_dir": made.code_dir, "timestamp_ms": ctx.now_secs() * 1000, "type": "Assign"},
            "code": code,
        }
        assignment = with_change(
            ctx, assignment.model_copy(update=changes), f"upgrade {made.outcome}", made.reason
        )
        append_assignment(ctx, transaction, view, topology.base.name, assignment)
    if made.base is topology.base:
        transaction.check(path, version)
    else:
        base = (
            made.base
            if made.record
            else made.base.model_copy(update={"last_upgrade": snapshot.state.record})
        )
        transaction.set(path, encode_record(base), version)
    if made.record is not None or snapshot.state.record is not None:
        put_record_ops(transaction, topology.id, snapshot.state, made.record)
    if made.record is None:
        # Of very long lists a rest stays, which means nothing without a record: the next upgrade
        # sweeps it.
        for node in list(listed_nodes(ctx.cluster.state, topology.id))[:_DELETES_AT_AN_END]:
            transaction.delete(node)
    elif snapshot.state.record is None:
        create_lists_ops(transaction, ctx.cluster.state, topology.id)
    if made.action is not None:
        announce(ctx, transaction, topology.id, made.action)
    note_change(
        ctx,
        transaction,
        topology.id,
        topology.base.name,
        previous=topology.base.status,
        status=made.base.status,
    )
    commit(ctx, transaction, made.step or "")
    return assignment


def _ended(ctx: OperationsContext, last: UpgradeResult, back: bool) -> UpgradeResult:
    """The end of the upgrade of which ``last`` was seen last."""
    topology = ctx.cluster.load_view().topologies.get(last.topology_id)
    if topology is None:
        raise NotAlive(
            f"topology {last.name!r} was killed while it was {'rolled back' if back else 'upgraded'}"
        )
    status, record = topology.base.status, last.state.record if last.state is not None else None
    if back:
        workers = dict.fromkeys(last.workers, "former")
        return replace(last, status=status, outcome="rolled back", workers=workers)
    if topology.code_dir == (record.code_dir if record is not None else ""):
        workers = dict.fromkeys(last.workers, "upgraded")
        return replace(last, status=status, outcome="completed", workers=workers, reason="")
    if last.reason:
        raise InvalidTopology(
            f"the upgrade of {last.name!r} was rolled back, the former code runs again: {last.reason}"
        )
    raise Conflict(
        f"the upgrade of {last.name!r} was rolled back by somebody else: the former code runs again"
    )


def _next_number(ctx: OperationsContext, epoch: int) -> int:
    """A number that no other version of any code has: two operators never store under one
    prefix.
    """

    def attempt(view: ClusterView) -> int:
        version = counter_version(ctx)
        commit(ctx, ctx.cluster.fenced(epoch).set(paths.COUNTER, b"", version), "version_number")
        return version + 1

    return retry_on_conflict(ctx, "numbering the new code", attempt)


def _sweep_lists(ctx: OperationsContext, epoch: int, topology_id: str) -> None:
    """Empty both lists of an upgrade that has ended. Without a record nobody acts on them."""

    def attempt(view: ClusterView) -> None:
        state = ctx.cluster.read_upgrade(topology_id)
        if state.record is not None or state.at < 0:
            return
        nodes = list(listed_nodes(ctx.cluster.state, topology_id))
        for start in range(0, len(nodes), _DELETES_IN_ONE_TRANSACTION):
            transaction = ctx.cluster.fenced(epoch).check(paths.gray_upgrade(topology_id), state.at)
            for node in nodes[start : start + _DELETES_IN_ONE_TRANSACTION]:
                transaction.delete(node)
            commit(ctx, transaction, "sweep.upgraded")

    retry_on_conflict(ctx, f"clearing the lists of {topology_id}", attempt)
