"""Actions on topologies, for the listener ``nimbus.topology.action.notifier.plugin.class`` (Storm, JStorm).

An operation appends its action to the very transaction that does it, as a sequential node, so that the
listener is notified of every action, in order, whichever process did it. The leader reads the nodes, calls the
listener, and deletes them. Without a listener nothing is written.
"""

from dataclasses import dataclass
from typing import Literal

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt
from storm_dagster.model.records import Record, decode_record, encode_record
from storm_dagster.operations.context import OperationsContext
from storm_dagster.zk.cluster_state import Transaction

NOTIFIER_KEY = "nimbus.topology.action.notifier.plugin.class"

Action = Literal[
    "submitTopology",
    "activate",
    "deactivate",
    "rebalance",
    "restart",
    "updateTopology",
    "grayUpgrade",
    "completeUpgrade",
    "rollbackTopology",
    "killTopology",
]
"""JStorm's names; Storm's ``deactivate`` in the place of its ``inactivate``."""


class _ActionRecord(Record):
    topology_id: str
    action: str


@dataclass(frozen=True)
class PendingAction:
    """An action that the listener was not notified of yet."""

    node: str
    """Name of its node below ``/actions``."""
    topology_id: str
    action: str


def announce(ctx: OperationsContext, transaction: Transaction, topology_id: str, action: Action) -> None:
    """Append the action to the transaction that does it; nothing without a configured listener."""
    if ctx.conf.get(NOTIFIER_KEY):
        record = _ActionRecord(topology_id=topology_id, action=action)
        transaction.create(f"{paths.ACTIONS}/a", encode_record(record), sequence=True)


def pending_actions(ctx: OperationsContext) -> list[PendingAction]:
    """The pending actions, oldest first. One that cannot be read has an empty ``action``."""
    state = ctx.cluster.state
    # ZooKeeper's numbers have ten digits, so that names sort as they do.
    names = sorted(state.find_children(paths.ACTIONS) or ())
    found = []
    for name, stored in zip(names, state.get_many([f"{paths.ACTIONS}/{name}" for name in names]), strict=True):
        if stored is None:
            continue
        try:
            record = decode_record(_ActionRecord, stored[0], f"{paths.ACTIONS}/{name}")
        except Corrupt:
            record = _ActionRecord(topology_id="", action="")
        found.append(PendingAction(name, record.topology_id, record.action))
    return found


def forget_action(ctx: OperationsContext, action: PendingAction) -> None:
    """Delete an action once the listener was notified. :class:`Fenced` for a deposed leader: the next one repeats it."""
    transaction = ctx.cluster.fenced(ctx.current_epoch()).delete(f"{paths.ACTIONS}/{action.node}")
    try:
        transaction.commit()
    except Conflict:
        return
