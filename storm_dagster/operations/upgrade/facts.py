"""One look at a topology that is, or is to be, upgraded; and what every operation on upgrades does with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from storm_dagster.core.gray_upgrade import upgrade_document
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Unavailable
from storm_dagster.model.records import Assignment, TaskTable, TopologyStatus
from storm_dagster.model.view import ClusterView, TopologyView, UpgradeState
from storm_dagster.operations.context import OperationsContext, topology_by_name
from storm_dagster.operations.transactions import commit, fenced_transaction, retry_on_conflict
from storm_dagster.zk.cluster_state import Transaction
from storm_dagster.zk.gray_upgrades import listed_nodes

__all__ = ["UpgradeFacts", "UpgradeReport", "clear_lists_ops", "read_facts", "sweep_lists", "with_facts"]

_DELETES_IN_ONE_TRANSACTION = 100
_DELETES_AT_AN_END = 1000


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
class UpgradeFacts:
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


def read_facts(ctx: OperationsContext, view: ClusterView, name: str) -> UpgradeFacts:
    """The facts of a topology by name or id; :class:`NotAlive`, :class:`Unavailable` without an assignment."""
    topology = topology_by_name(view, name)
    if topology.assignment is None or topology.tasks is None:
        raise Unavailable(f"topology {name!r} has no assignment yet: wait until it is healed")
    state = ctx.cluster.read_upgrade(topology.id)
    if state.at < 0:
        raise Conflict(f"topology {name!r} is being removed: there is nothing to upgrade")
    return UpgradeFacts(topology, topology.assignment, topology.tasks, state)


def with_facts(
    ctx: OperationsContext,
    name: str,
    what: str,
    attempt: Callable[[ClusterView, UpgradeFacts], UpgradeReport],
) -> UpgradeReport:
    """``attempt`` on fresh facts, again after every lost race."""
    return retry_on_conflict(ctx, what, lambda view: attempt(view, read_facts(ctx, view, name)))


def clear_lists_ops(ctx: OperationsContext, transaction: Transaction, topology_id: str) -> None:
    """Append what empties both lists. Of very long ones a rest stays, which means nothing without a record: the next
    upgrade sweeps it before it begins."""
    for node in list(listed_nodes(ctx.cluster.state, topology_id))[:_DELETES_AT_AN_END]:
        transaction.delete(node)


def sweep_lists(ctx: OperationsContext, epoch: int, topology_id: str) -> None:
    """Empty both lists of an upgrade that has ended. Without a record nobody acts on them."""

    def attempt(view: ClusterView) -> None:
        state = ctx.cluster.read_upgrade(topology_id)
        if state.record is not None or state.at < 0:
            return
        nodes = list(listed_nodes(ctx.cluster.state, topology_id))
        for start in range(0, len(nodes), _DELETES_IN_ONE_TRANSACTION):
            transaction = fenced_transaction(ctx, epoch).check(paths.gray_upgrade(topology_id), state.at)
            for node in nodes[start : start + _DELETES_IN_ONE_TRANSACTION]:
                transaction.delete(node)
            commit(ctx, transaction, "sweep.upgraded")

    retry_on_conflict(ctx, f"clearing the lists of {topology_id}", attempt)
