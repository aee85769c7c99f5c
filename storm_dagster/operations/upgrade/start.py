"""Gray upgrade: begin, continue, complete, roll back, expire (``docs/decisions.md#gray-upgrade``).

The new code stands beside the old under a prefix of its own (``<topology id>.<number>``), so that nothing that runs
is ever overwritten: rolling back is naming the former prefix again. The assignment names the topology's code all the
time; while an upgrade is under way its record names the new one, and the workers in its two lists run that.
"""

from __future__ import annotations

from dataclasses import replace

from storm_dagster.core.gray_upgrade import (
    Selection,
    check_compatible,
    check_master_alone,
    check_selection,
    selection_of_conf,
)
from storm_dagster.core.submission import ONE_TIME_KEYS, SUBMITTED_KEYS, normalize_submission, total_conf
from storm_dagster.core.transitions import apply_event
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt, InvalidRequest
from storm_dagster.model.names import make_code_dir
from storm_dagster.model.records import GrayUpgrade, encode_record
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.actions import announce
from storm_dagster.operations.context import OperationsContext, load_runnable
from storm_dagster.operations.steps import operation
from storm_dagster.operations.submit.archive_check import check_uploaded_archive
from storm_dagster.operations.submit.code_storage import store_code
from storm_dagster.operations.submit.submission import read_source
from storm_dagster.operations.transactions import commit, fenced_transaction, retry_on_conflict
from storm_dagster.operations.upgrade.facts import (
    UpgradeFacts,
    UpgradeReport,
    read_facts,
    sweep_lists,
    with_facts,
)
from storm_dagster.zk.gray_upgrades import put_record_ops

__all__ = ["check_request", "gray_upgrade"]

GRAY_UPGRADE = operation(
    "gray_upgrade",
    *("sweep.upgraded", "version_number"),
    *("store.stormjar.jar", "store.stormconf.ser", "store.stormcode.ser", "gray_upgrade"),
)
CONTINUE_UPGRADE = operation("continue_upgrade", "continue_upgrade")


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
    facts = read_facts(ctx, view, name)
    name, record = facts.topology.base.name, facts.state.record
    if record is not None and token and record.token == token:
        return facts.report("begun", changed=False)
    if handle is None:
        return _go_on(ctx, name, selection)
    _check_new(facts, name)
    return _begin(ctx, facts, name, selection, handle, token, allow_degraded)


def _check_new(facts: UpgradeFacts, name: str) -> None:
    if facts.state.record is not None and not facts.state.record.rollback:
        raise Conflict(
            f"topology {name!r} is being upgraded already: go on without new code, complete the upgrade, or roll it back"
        )
    apply_event(facts.topology.base, "upgrade")
    check_master_alone(name, facts.assignment, facts.table)


def _begin(
    ctx: OperationsContext,
    facts: UpgradeFacts,
    name: str,
    selection: Selection,
    handle: str,
    token: str,
    allow_degraded: bool,
) -> UpgradeReport:
    epoch = ctx.current_epoch()
    topology = facts.topology
    submitted, spec, _, archive = read_source(ctx, token or "none", handle, None, topology.code_dir)
    spec = spec.model_copy(update={"name": topology.base.name})
    conf, spec = normalize_submission(ctx.values(), submitted, spec, topology.id)
    total = total_conf(ctx.values(), conf)
    if selection.empty:
        selection = selection_of_conf(conf)
    check_selection(name, selection, facts.assignment, facts.table)
    check_compatible(name, load_runnable(ctx, topology.code_dir).spec, spec)
    check_uploaded_archive(ctx, archive, spec, total)
    ttl_secs = int(total.get("topology.upgrade.ttl") or 86_400_000) / 1000
    # Asked for this time; a restart of the topology is no upgrade.
    conf = {key: value for key, value in conf.items() if key not in ONE_TIME_KEYS or key == SUBMITTED_KEYS}
    sweep_lists(ctx, epoch, topology.id)
    code_dir = make_code_dir(topology.id, _next_number(ctx, epoch))
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

    def attempt(view: ClusterView, now: UpgradeFacts) -> UpgradeReport:
        if now.state.record is not None and now.state.record.code_dir == code_dir:
            return now.report("begun")  # The reply of our own commit was lost.
        _check_new(now, name)
        if now.topology.id != topology.id or now.topology.code_dir != topology.code_dir:
            raise Conflict(f"topology {name!r} was replaced meanwhile: upgrade it again")
        check_selection(name, selection, now.assignment, now.table)
        after = apply_event(now.topology.base, "upgrade")
        transaction = fenced_transaction(ctx, epoch)
        transaction.set(paths.topology(topology.id), encode_record(after), now.topology.base_at.version)
        put_record_ops(transaction, topology.id, now.state, record)
        announce(ctx, transaction, topology.id, "grayUpgrade")
        commit(ctx, transaction, "gray_upgrade")
        ctx.log.info("%s is being upgraded to %s", topology.id, code_dir)
        return now.report("begun", status=after.status, state=replace(now.state, record=record))

    return with_facts(ctx, topology.id, f"upgrading {name}", attempt)


def _next_number(ctx: OperationsContext, epoch: int) -> int:
    """A number that no other version of any code has: two operators never store under one prefix."""

    def attempt(view: ClusterView) -> int:
        version = ctx.cluster.state.get_version(paths.COUNTER)
        if version is None:
            raise Corrupt(f"{paths.COUNTER} does not exist below the root: the cluster's state is incomplete")
        commit(ctx, fenced_transaction(ctx, epoch).set(paths.COUNTER, b"", version), "version_number")
        return version + 1

    return retry_on_conflict(ctx, "numbering the new code", attempt)


def _check_next_batch(now: UpgradeFacts, name: str, selection: Selection) -> GrayUpgrade:
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
    facts = read_facts(ctx, ctx.cluster.load_view(), name)
    name = facts.topology.base.name
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

    def attempt(view: ClusterView, now: UpgradeFacts) -> UpgradeReport:
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
        transaction = fenced_transaction(ctx, epoch)
        transaction.check(paths.topology(now.topology.id), now.topology.base_at.version)
        put_record_ops(transaction, now.topology.id, state, after)
        announce(ctx, transaction, now.topology.id, "grayUpgrade")
        commit(ctx, transaction, "continue_upgrade")
        return now.report("continued", state=replace(state, record=after))

    return with_facts(ctx, name, f"upgrading {name}", attempt)
