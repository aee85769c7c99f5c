"""Numbers, lists and conf fields that the executor of gray upgrades needs."""

from dataclasses import replace

from storm_dagster.core.submission.conf import base_conf, total_conf
from storm_dagster.core.upgrade.machine import UpgradeEvent
from storm_dagster.core.upgrade.selection import UpgradeSnapshot
from storm_dagster.model import paths
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, load_stored_conf
from storm_dagster.operations.submit.staging import counter_version
from storm_dagster.operations.transactions import commit, retry_on_conflict
from storm_dagster.zk.gray_upgrades import listed_nodes

_DELETES_IN_ONE_TRANSACTION = 100
"""Deleted nodes of one transaction that empties the lists of an ended upgrade."""


def next_number(ctx: OperationsContext, epoch: int) -> int:
    """A number that no other version of any code has.

    So two operators never store code under one prefix.
    """

    def attempt(view: ClusterView) -> int:
        version = counter_version(ctx)
        commit(ctx, ctx.cluster.fenced(epoch).set(paths.COUNTER, b"", version), "version_number")
        return version + 1

    return retry_on_conflict(ctx, "numbering the new code", attempt)


def sweep_lists(ctx: OperationsContext, epoch: int, topology_id: str) -> None:
    """Empty both lists of an ended upgrade; without a record they have no effect.

    No write while an upgrade is under way.
    """

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


def with_base_fields(
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
