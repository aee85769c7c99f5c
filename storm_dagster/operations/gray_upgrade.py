"""Gray upgrade: begin, go on, complete, roll back, and what is due (seed 004, design 8.12, cases G).

The new code stands beside the old under a prefix of its own (``<topology id>.<number>``), so that nothing that runs
is ever overwritten: rolling back is naming the former prefix again. The assignment names the topology's code all the
time; while an upgrade is under way its record names the new one, and the workers in its two lists run that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from storm_dagster.core.causes import Cause
from storm_dagster.core.gray_upgrade import (
    Due,
    Selection,
    check_master_alone,
    check_selection,
    due,
    selection_of_conf,
    upgrade_document,
)
from storm_dagster.core.reassignment import causes_still_true
from storm_dagster.core.submission import total_conf
from storm_dagster.core.transitions import apply_event
from storm_dagster.core.upgrade_compatibility import check_compatible
from storm_dagster.model import paths
from storm_dagster.model.errors import (
    Conflict,
    Fenced,
    InvalidRequest,
    NotAlive,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.names import make_code_dir
from storm_dagster.model.records import Assignment, GrayUpgrade, TaskTable, TopologyStatus, encode_record
from storm_dagster.model.view import ClusterView, TopologyView, UpgradeState
from storm_dagster.operations.actions import announce
from storm_dagster.operations.archive_check import check_uploaded_archive
from storm_dagster.operations.code_storage import store_code
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
from storm_dagster.operations.records_io import append_assignment, append_backup
from storm_dagster.operations.steps import operation
from storm_dagster.operations.submission import normalised, read_source
from storm_dagster.operations.turnstile import commit, fenced, raise_turnstile, take_turns
from storm_dagster.zk.gray_upgrades import listed_nodes, put_record_ops

__all__ = [
    "UpgradeReport",
    "advance_upgrades",
    "check_request",
    "complete_upgrade",
    "gray_upgrade",
    "roll_back",
    "roll_back_if_upgraded",
]

GRAY_UPGRADE = operation(
    "gray_upgrade",
    *("sweep.upgraded", "store.stormjar.jar", "store.stormconf.ser", "store.stormcode.ser", "gray_upgrade"),
)
CONTINUE_UPGRADE = operation("continue_upgrade", "continue_upgrade")
COMPLETE_UPGRADE = operation("complete_upgrade", "complete_upgrade", "sweep.upgraded")
ROLL_BACK = operation("roll_back", "roll_back")
FINISH_ROLLBACK = operation("finish_rollback", "finish_rollback", "sweep.upgraded")

_UPGRADE_KEYS = ("topology.upgrade", "topology.upgrade.workers", "topology.upgrade.component")
_DELETES_IN_ONE_TRANSACTION = 100


@dataclass(frozen=True)
class UpgradeReport:
    """What a call did to an upgrade, and what the upgrade has come to."""

    topology_id: str
    name: str
    status: TopologyStatus
    outcome: str
    """``begun``, ``continued``, ``completed``, ``expired``, ``rolling back``, ``rolled back``, ``abandoned``,
    ``unchanged``."""
    changed: bool
    reason: str = ""
    state: UpgradeState | None = None
    assignment: Assignment | None = None
    table: TaskTable | None = None

    @property
    def document(self) -> dict[str, Any] | None:
        """The upgrade for people; ``None`` when none is under way."""
        if self.state is None or self.assignment is None or self.table is None:
            return None
        return upgrade_document(self.state, self.assignment, self.table)


@dataclass(frozen=True)
class _Facts:
    """One look at a topology that may be upgraded."""

    topology: TopologyView
    assignment: Assignment
    table: TaskTable
    state: UpgradeState

    def report(self, outcome: str, *, status: TopologyStatus | None = None, **more: Any) -> UpgradeReport:
        base = self.topology.base
        given: dict[str, Any] = {"changed": True, "state": self.state, **more}
        return UpgradeReport(
            topology_id=self.topology.id,
            name=base.name,
            status=status or base.status,
            outcome=outcome,
            assignment=self.assignment,
            table=self.table,
            **given,
        )


def _facts(ctx: OperationsContext, view: ClusterView, name: str) -> _Facts:
    topology = topology_by_name(view, name)
    if topology.assignment is None or topology.tasks is None:
        raise Unavailable(f"topology {name!r} has no assignment yet: wait until it is healed")
    state = ctx.cluster.read_upgrade(topology.id)
    if state.at < 0:
        raise Conflict(f"topology {name!r} is being removed: there is nothing to upgrade")
    return _Facts(topology, topology.assignment, topology.tasks, state)


def _with_facts(
    ctx: OperationsContext, name: str, what: str, attempt: Callable[[ClusterView, _Facts], UpgradeReport]
) -> UpgradeReport:
    return take_turns(ctx, what, lambda view: attempt(view, _facts(ctx, view, name)))


def gray_upgrade(
    ctx: OperationsContext,
    name: str,
    selection: Selection,
    *,
    handle: str | None = None,
    token: str = "",
    allow_degraded: bool = False,
) -> UpgradeReport:
    """Begin an upgrade with the uploaded code of ``handle``, or go on with the one under way (no ``handle``).

    Asks for one batch; the topology master picks it. With an empty selection a new upgrade takes that of the new
    code's own conf (``topology.upgrade.worker.num``, ``.component``, ``.workers``). Repeated with the ``token`` that
    began it, nothing is done again. Everything is checked, stored and replicated before the topology is touched.

    Raises :class:`NotAlive`; :class:`Conflict` when the topology is not ACTIVE, when new code is given while an
    upgrade is under way, or while a batch is; :class:`InvalidRequest` for a wrong selection, a topology master that
    shares its worker, or nothing to go on with; :class:`InvalidTopology` for code that cannot run beside the old.
    """
    view = ctx.cluster.load_view()
    facts = _facts(ctx, view, name)
    record = facts.state.record
    if record is not None and token and record.token == token:
        return facts.report("begun", changed=False)
    if handle is None:
        return _go_on(ctx, name, selection)
    _check_new(facts, name)
    return _begin(ctx, facts, name, selection, handle, token, allow_degraded)


def _check_new(facts: _Facts, name: str) -> None:
    if facts.state.record is not None and not facts.state.record.rollback:
        raise Conflict(
            f"topology {name!r} is being upgraded already: go on without new code, complete the upgrade, or roll it back"
        )
    apply_event(facts.topology.base, "upgrade")
    check_master_alone(name, facts.assignment, facts.table)


def _begin(
    ctx: OperationsContext,
    facts: _Facts,
    name: str,
    selection: Selection,
    handle: str,
    token: str,
    allow_degraded: bool,
) -> UpgradeReport:
    epoch = ctx.current_epoch()
    topology = facts.topology
    submitted, spec, _, archive = read_source(ctx, token or "none", handle, None)
    spec = spec.model_copy(update={"name": topology.base.name})
    conf, spec = normalised(ctx, submitted, spec, topology.id)
    total = total_conf(ctx.values(), conf)
    if selection.empty:
        selection = selection_of_conf(conf)
    check_selection(name, selection, facts.assignment, facts.table)
    check_compatible(name, load_runnable(ctx, topology.code_dir).spec, spec)
    check_uploaded_archive(ctx, archive, spec, total)
    ttl_secs = int(total.get("topology.upgrade.ttl") or 86_400_000) / 1000
    # Asked for this time; a restart of the topology is no upgrade.
    conf = {key: value for key, value in conf.items() if key not in _UPGRADE_KEYS}
    conf.pop("topology.upgrade.worker.num", None)
    _sweep(ctx, epoch, topology.id)
    code_dir = make_code_dir(topology.id, ctx.cluster.next_topology_number())
    store_code(
        ctx,
        code_dir,
        name=name,
        archive=archive,
        conf=conf,
        spec=spec,
        keep=False,
        allow_degraded=allow_degraded,
    )
    record = GrayUpgrade(
        number=selection.number,
        component=selection.component,
        workers=selection.workers,
        expires=ctx.now_secs() + max(1, round(ttl_secs)),
        code_dir=code_dir,
        token=token,
    ).model_copy(update={"continue_": True})

    def attempt(view: ClusterView, now: _Facts) -> UpgradeReport:
        if now.state.record is not None and now.state.record.code_dir == code_dir:
            return now.report("begun")  # The reply of our own commit was lost.
        _check_new(now, name)
        if now.topology.id != topology.id or now.topology.code_dir != topology.code_dir:
            raise Conflict(f"topology {name!r} was replaced meanwhile: upgrade it again")
        check_selection(name, selection, now.assignment, now.table)
        after = apply_event(now.topology.base, "upgrade")
        transaction = fenced(ctx, epoch)
        transaction.set(paths.topology(topology.id), encode_record(after), now.topology.base_at.version)
        put_record_ops(transaction, topology.id, now.state, record)
        announce(ctx, transaction, topology.id, "grayUpgrade")
        commit(ctx, transaction, "gray_upgrade")
        ctx.log.info("%s is being upgraded to %s", topology.id, code_dir)
        return now.report("begun", status=after.status, state=replace(now.state, record=record))

    return _with_facts(ctx, topology.id, f"upgrading {name}", attempt)


def _check_next_batch(now: _Facts, name: str, selection: Selection) -> GrayUpgrade:
    """The record of the upgrade that may go on with that selection; the error that says why not."""
    record, status = now.state.record, now.topology.base.status
    if status == "ACTIVE":
        raise InvalidRequest(f"topology {name!r} is not being upgraded: give the new code (TARGET) to begin")
    if record is not None and record.rollback:
        raise Conflict(f"the upgrade of {name!r} is being rolled back: wait until that has ended")
    if record is None or status != "UPGRADING":
        # In the table's words.
        apply_event(now.topology.base, "upgrade")
        raise Conflict(f"the upgrade of {name!r} is about to end: try again")
    if record.continue_ or now.state.upgrading:
        waiting = ", ".join(sorted(now.state.upgrading)) or "not picked yet"
        raise Conflict(
            f"a batch of the upgrade of {name!r} is under way ({waiting}): wait until its workers run the new code"
        )
    check_selection(name, selection, now.assignment, now.table, now.state.upgraded)
    return record


def check_request(ctx: OperationsContext, name: str, selection: Selection, *, new: bool) -> UpgradeReport:
    """Whether :func:`gray_upgrade` would take the request now, as far as that can be told without the new code.

    Changes nothing; raises what the call would raise.
    """
    facts = _facts(ctx, ctx.cluster.load_view(), name)
    if new:
        _check_new(facts, name)
        if not selection.empty:
            check_selection(name, selection, facts.assignment, facts.table)
    else:
        _check_next_batch(facts, name, selection)
    return facts.report("unchanged", changed=False)


def _go_on(ctx: OperationsContext, name: str, selection: Selection) -> UpgradeReport:
    epoch = ctx.current_epoch()
    written: list[GrayUpgrade] = []

    def attempt(view: ClusterView, now: _Facts) -> UpgradeReport:
        state = now.state
        if written and written[0] == state.record:
            return now.report("continued")
        record = _check_next_batch(now, name, selection)
        after = record.model_copy(
            update={
                "number": selection.number,
                "component": selection.component,
                "workers": selection.workers,
                "continue_": True,
            }
        )
        written[:] = [after]
        transaction = fenced(ctx, epoch)
        transaction.check(paths.topology(now.topology.id), now.topology.base_at.version)
        put_record_ops(transaction, now.topology.id, state, after)
        announce(ctx, transaction, now.topology.id, "grayUpgrade")
        commit(ctx, transaction, "continue_upgrade")
        return now.report("continued", state=replace(state, record=after))

    return _with_facts(ctx, name, f"upgrading {name}", attempt)


def complete_upgrade(ctx: OperationsContext, name: str) -> UpgradeReport:
    """End the upgrade here: its code is the topology's from now on, and its record goes (G15).

    Workers that were not upgraded keep their process and get the new code at their next start. :class:`Conflict` when
    no upgrade is under way, or when it is being rolled back.
    """
    return _end(ctx, name, "completed", "it was asked for")


def _end(ctx: OperationsContext, name: str, outcome: str, reason: str) -> UpgradeReport:
    epoch = ctx.current_epoch()
    made: list[str] = []

    def attempt(view: ClusterView, now: _Facts) -> UpgradeReport:
        topology, record = now.topology, now.state.record
        if made and topology.code_dir == made[0] and topology.base.status == "ACTIVE":
            return now.report(outcome, reason=reason)
        if record is not None and record.rollback:
            raise Conflict(f"the upgrade of {name!r} is being rolled back: wait until that has ended")
        if topology.base.status != "UPGRADING":
            raise Conflict(f"topology {name!r} is {topology.base.status}: no upgrade is under way")
        if record is None:
            return _close(ctx, epoch, now, "abandoned", reason)
        after = apply_event(topology.base, "end_upgrade")
        assert topology.assignment_at is not None
        assignment = now.assignment.model_copy(
            update={"code_dir": record.code_dir, "timestamp_ms": ctx.now_secs() * 1000, "type": "Assign"}
        )
        made[:] = [record.code_dir]
        transaction = raise_turnstile(fenced(ctx, epoch), view)
        transaction.set(paths.topology(topology.id), encode_record(after), topology.base_at.version)
        append_assignment(ctx, transaction, assignment, topology.assignment_at)
        append_backup(ctx, transaction, topology.base.name, assignment)
        put_record_ops(transaction, topology.id, now.state, None)
        announce(ctx, transaction, topology.id, "completeUpgrade")
        commit(ctx, transaction, "complete_upgrade")
        ctx.log.info("the upgrade of %s to %s is %s: %s", topology.id, record.code_dir, outcome, reason)
        return replace(
            now.report(outcome, status=after.status, reason=reason, state=None), assignment=assignment
        )

    report = _with_facts(ctx, name, f"ending the upgrade of {name}", attempt)
    _sweep(ctx, epoch, report.topology_id)
    return report


def roll_back(ctx: OperationsContext, name: str, reason: str | None = None) -> UpgradeReport:
    """Take every worker that was picked back to the former code (G13). :func:`advance_upgrades` ends it.

    Nothing is stored or fetched: the former code was never replaced. Rolling back what is being rolled back changes
    nothing. :class:`Conflict` when no upgrade is under way.
    """
    epoch = ctx.current_epoch()

    def attempt(view: ClusterView, now: _Facts) -> UpgradeReport:
        topology, record = now.topology, now.state.record
        if topology.base.status == "ROLLBACK":
            return now.report("rolling back", changed=False, reason=(record and record.reason) or "")
        if topology.base.status != "UPGRADING":
            raise Conflict(
                f"topology {name!r} is {topology.base.status}, no upgrade is under way: there is nothing to roll back"
            )
        if record is None:
            return _close(ctx, epoch, now, "abandoned", "its upgrade record is gone")
        base = apply_event(topology.base, "rollback")
        after = record.model_copy(
            update={"rollback": True, "continue_": False, "workers": (), "reason": reason}
        )
        transaction = fenced(ctx, epoch)
        transaction.set(paths.topology(topology.id), encode_record(base), topology.base_at.version)
        put_record_ops(transaction, topology.id, now.state, after)
        announce(ctx, transaction, topology.id, "rollbackTopology")
        commit(ctx, transaction, "roll_back")
        ctx.log.info("the upgrade of %s is rolled back: %s", topology.id, reason or "it was asked for")
        return now.report(
            "rolling back",
            status=base.status,
            reason=reason or "",
            state=replace(now.state, record=after),
        )

    return _with_facts(ctx, name, f"rolling {name} back", attempt)


def _close(ctx: OperationsContext, epoch: int, now: _Facts, outcome: str, reason: str) -> UpgradeReport:
    """The record goes, the status is ACTIVE again, the code stays what it was."""
    topology = now.topology
    after = apply_event(topology.base, "end_upgrade")
    transaction = fenced(ctx, epoch)
    transaction.set(paths.topology(topology.id), encode_record(after), topology.base_at.version)
    if now.state.record is not None:
        put_record_ops(transaction, topology.id, now.state, None)
    commit(ctx, transaction, "finish_rollback")
    ctx.log.info("the upgrade of %s is %s: %s", topology.id, outcome, reason)
    return now.report(outcome, status=after.status, reason=reason, state=None)


def _finish_rollback(ctx: OperationsContext, topology_id: str) -> UpgradeReport:
    epoch = ctx.current_epoch()

    def attempt(view: ClusterView, now: _Facts) -> UpgradeReport:
        found = due(now.state, now.assignment, now.table, now_secs=ctx.now_secs())
        if found is None or found.action not in ("finish_rollback", "abandon"):
            return now.report("unchanged", changed=False)
        return _close(ctx, epoch, now, "rolled back", found.reason)

    report = _with_facts(ctx, topology_id, f"ending the rollback of {topology_id}", attempt)
    _sweep(ctx, epoch, report.topology_id)
    return report


def _sweep(ctx: OperationsContext, epoch: int, topology_id: str) -> None:
    """Empty both lists of an upgrade that has ended. Without a record nobody acts on them."""

    def attempt(view: ClusterView) -> None:
        state = ctx.cluster.read_upgrade(topology_id)
        if state.record is not None or state.at < 0:
            return
        nodes = list(listed_nodes(ctx.cluster.state, topology_id))
        for start in range(0, len(nodes), _DELETES_IN_ONE_TRANSACTION):
            transaction = fenced(ctx, epoch).check(paths.gray_upgrade(topology_id), state.at)
            for node in nodes[start : start + _DELETES_IN_ONE_TRANSACTION]:
                transaction.delete(node)
            commit(ctx, transaction, "sweep.upgraded")

    take_turns(ctx, f"clearing the lists of {topology_id}", attempt)


def roll_back_if_upgraded(
    ctx: OperationsContext, topology_id: str, causes: Iterable[Cause]
) -> UpgradeReport | None:
    """Roll the upgrade back when a worker that it took was judged dead (design 8.12); ``None`` when there is none."""
    topology = ctx.cluster.load_view().topologies.get(topology_id)
    if topology is None or topology.base.status != "UPGRADING" or topology.assignment is None:
        return None
    state = ctx.cluster.read_upgrade(topology_id)
    taken = state.upgrading.keys() | state.upgraded.keys()
    true = {(cause.node, cause.port): cause for cause in causes_still_true(topology, causes)}
    lost = [w for w in topology.assignment.workers if w.slot in true and w.address in taken]
    if state.record is None or not lost:
        return None
    try:
        return roll_back(ctx, topology_id, true[lost[0].slot].describe())
    except (Conflict, NotAlive):
        return None  # It ended meanwhile.


def advance_upgrades(ctx: OperationsContext, view: ClusterView | None = None) -> list[UpgradeReport]:
    """Do what is due about every upgrade; the reports of those that it changed. For the leader and the sensor.

    Complete when all workers are upgraded, expire, roll back when an upgraded worker failed, end a rollback. Each
    topology fails alone; only :class:`Fenced` ends the whole call.
    """
    reports: list[UpgradeReport] = []
    for topology in (view or ctx.cluster.load_view()).topologies.values():
        if topology.base.status not in ("UPGRADING", "ROLLBACK"):
            continue
        if topology.assignment is None or topology.tasks is None:
            continue
        try:
            state = ctx.cluster.read_upgrade(topology.id)
            found = due(state, topology.assignment, topology.tasks, now_secs=ctx.now_secs())
            if found is not None:
                reports.append(_do(ctx, topology.id, found))
        except Fenced:
            raise
        except (Conflict, NotAlive) as error:
            ctx.log.info("upgrade of %s: %s", topology.id, error.message)
        except StormDagsterError as error:
            ctx.log.warning("upgrade of %s: %s", topology.id, error.message)
    return [report for report in reports if report.changed]


def _do(ctx: OperationsContext, topology_id: str, found: Due) -> UpgradeReport:
    if found.action in ("finish_rollback", "abandon"):
        return _finish_rollback(ctx, topology_id)
    if found.action == "roll_back":
        return roll_back(ctx, topology_id, found.reason)
    return _end(ctx, topology_id, "expired" if found.action == "expire" else "completed", found.reason)
