"""Fenced transactions, in which operations write all cluster state.

See ``docs/decisions.md#fenced-writes``. Every transaction checks the version of ``/epoch``. One
that changes an assignment also checks and raises the version of ``/assignments`` (an optimistic
lock: one placement at a time). The loser of a race re-reads the cluster, decides on the fresh state
and retries, until the assignment wait ends. Large assignments are written in parts.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt, StormDagsterError, Unavailable
from storm_dagster.model.records import (
    Assignment,
    AssignmentChange,
    Record,
    decode_record,
    encode_record,
)
from storm_dagster.model.unreported import UnreportedEvent
from storm_dagster.model.view import ClusterView, Versioned
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.inimbus import notify_new_slots
from storm_dagster.operations.steps import step
from storm_dagster.zk.cluster_state import Transaction
from storm_dagster.zk.shards import put_ops, read_sharded
from storm_dagster.zk.state_protocol import read_children

T = TypeVar("T")

_LOST_REPLIES = 5
"""Lost replies after which one more ends the retries."""
_FIRST_PAUSE_SECS = 0.05
"""Pause after the first lost race or reply; each further one is 1.5 times as long."""
_MAX_PAUSE_SECS = 2.0
"""Longest pause between two attempts, without its jitter."""
_DELETES_IN_ONE_TRANSACTION = 100
"""Deleted nodes of one transaction, so that it stays far below the largest size."""
_DELETE_ATTEMPTS = 10
"""Attempts to delete a tree to which other processes add nodes."""

MAX_WHY = 300
"""Characters of a reason in the history of an assignment."""
_MAX_HISTORY = 20
"""Entries in the history of an assignment."""

_MAX_CHANGES = 32
"""Changes that the data of ``/assignments`` names."""
_MAX_NODES = 32
"""Supervisors that one change names; more are any."""
_MAX_BYTES = 8192
"""Largest data of ``/assignments``, because each reader of assignments reads it."""
_Nodes = tuple[str, ...] | None
"""Ids of the supervisors that a change concerns; ``None``: any."""


class ReplyLost(Unavailable):
    """ZooKeeper was lost during a commit.

    Only a new read shows whether the commit was applied.
    """


def bump_assignments_version(
    transaction: Transaction, view: ClusterView, changed: Mapping[str, Assignment | None]
) -> Transaction:
    """Append the write that raises the version of ``/assignments``.

    The commit fails if it has another version than in the view by then. The same write records
    there which topologies change. ``changed``: topology id -> the assignment that the transaction
    writes, ``None`` if it removes the assignment.
    """
    return transaction.set(
        paths.ASSIGNMENTS, append_change(view, changed), view.assignments_version
    )


def check_assignments(transaction: Transaction, view: ClusterView) -> Transaction:
    """Append the check that no assignment has changed since the view was read.

    For a transaction that writes no assignment but follows from a plan: the plan was made from the
    slots of all topologies, so that a healing since then makes it void.
    """
    return transaction.check(paths.ASSIGNMENTS, view.assignments_version)


def commit(ctx: OperationsContext, transaction: Transaction, name: str) -> None:
    """Commit as the step ``name``; a lost connection becomes :class:`ReplyLost`.

    Then the calls that the transaction has for its success are made (``afterwards``).
    """
    with step(ctx, name):
        try:
            transaction.commit()
        except Unavailable as error:
            raise ReplyLost(error.message) from error
        for call in transaction.afterwards:
            call()


def lost_race(error: StormDagsterError) -> bool:
    """True if another transaction changed a node first; the error names the node."""
    return isinstance(error, Conflict) and getattr(error, "path", None) is not None


def retry_on_conflict(
    ctx: OperationsContext, purpose: str, attempt: Callable[[ClusterView], T]
) -> T:
    """Run ``attempt`` on a fresh view; retry after every lost race or lost reply.

    Each call gets a view loaded for it, and ``attempt`` must recognize its own earlier success in
    that view. Pauses between retries have jitter. Gives up after ``nimbus.assignment.wait.secs``,
    or at the sixth lost reply: with :class:`ReplyLost` if the last attempt lost its reply, else
    with :class:`Unavailable`. Other errors pass, and so does a :class:`Conflict` without a node,
    which is not a lost race.
    ``purpose`` names the work in log lines and errors.
    """
    wait = float(ctx.conf.get("nimbus.assignment.wait.secs", 300))
    deadline = ctx.monotonic() + wait
    pause = _FIRST_PAUSE_SECS
    lost_replies = 0
    while True:
        try:
            try:
                view = ctx.cluster.load_view()
            except Unavailable as error:
                if not lost_replies:
                    raise
                # After a lost reply ZooKeeper may be away for an election (seconds), and an earlier
                # attempt may have been applied: the caller must not take this for no effect.
                raise ReplyLost(error.message) from error
            return attempt(view)
        except ReplyLost:
            lost_replies += 1
            if lost_replies > _LOST_REPLIES or ctx.monotonic() >= deadline:
                raise
            ctx.log.warning("%s: ZooKeeper's reply was lost, reading again", purpose)
        except Conflict as error:
            if not lost_race(error):
                raise
            if ctx.monotonic() >= deadline:
                raise Unavailable(
                    f"{purpose}: others changed the cluster without a pause for {wait:g} s "
                    f"({error.message}): try again"
                ) from error
            ctx.log.info("%s: lost a race (%s), trying again", purpose, error.message)
        ctx.sleep(pause * (0.5 + ctx.jitter()))
        pause = min(pause * 1.5, _MAX_PAUSE_SECS)


def epoch_is_over(ctx: OperationsContext, epoch: int) -> bool:
    """True if the leadership epoch is another one now, by a read of ZooKeeper.

    For deletions of blobs, which no transaction can fence.
    """
    stored = ctx.cluster.epoch()
    if stored is None:
        return True
    current, _ = stored
    return current != epoch


def delete_tree(ctx: OperationsContext, epoch: int, path: str, name: str) -> int:
    """Delete ``path`` and all nodes below it in fenced transactions, children first.

    Returns the number of deleted nodes. Nodes that other processes delete at the same time do not
    matter. Ends with :class:`Conflict` if other processes keep adding nodes. ``name`` is the step
    of each transaction.
    """
    removed = 0
    for attempts_left in reversed(range(_DELETE_ATTEMPTS)):
        nodes = _subtree(ctx, path)
        try:
            for start in range(0, len(nodes), _DELETES_IN_ONE_TRANSACTION):
                transaction = ctx.cluster.fenced(epoch)
                part = nodes[start : start + _DELETES_IN_ONE_TRANSACTION]
                for node in part:
                    transaction.delete(node)
                commit(ctx, transaction, name)
                removed += len(part)
            return removed
        except Conflict as lost:
            if not lost_race(lost) or not attempts_left:
                raise
            ctx.sleep(_FIRST_PAUSE_SECS * (0.5 + ctx.jitter()))
    raise AssertionError("unreachable")


def _subtree(ctx: OperationsContext, path: str) -> list[str]:
    """``path`` and all nodes below it, children before parents.

    Empty if ``path`` does not exist.
    """
    children = ctx.cluster.state.find_children(path)
    if children is None:
        return []
    nodes: list[str] = []
    for child in children:
        nodes += _subtree(ctx, f"{path}/{child}")
    nodes.append(path)
    return nodes


def with_change(
    ctx: OperationsContext,
    assignment: Assignment,
    action: str,
    why: str = "",
    *,
    moved: int = 0,
    outage_secs: int = 0,
) -> Assignment:
    """The assignment with one more entry in its history.

    The history keeps the newest 20 entries; the page of the topology shows them. ``moved``: number
    of tasks; ``outage_secs``: longest silence of the workers that a reassignment replaces.
    """
    change = AssignmentChange(
        at_secs=ctx.now_secs(),
        action=action,
        why=why[:MAX_WHY],
        moved=moved,
        outage_secs=outage_secs,
        run=ctx.run,
    )
    history = (change, *assignment.history)[:_MAX_HISTORY]
    return assignment.model_copy(update={"history": history})


def append_assignment(
    ctx: OperationsContext,
    transaction: Transaction,
    view: ClusterView,
    name: str,
    assignment: Assignment,
    *ended: str,
) -> None:
    """Append the writes that create an assignment or replace the one in the view.

    They also raise the version of ``/assignments``, and store the assignment under the topology's
    name, where it survives a kill. A scheduling plug-in is notified of its new slots once the
    transaction is committed. ``ended``: ids of topologies that the same transaction ends.
    """
    changed: dict[str, Assignment | None] = {assignment.topology_id: assignment}
    changed.update(dict.fromkeys(ended))
    bump_assignments_version(transaction, view, changed)
    topology = view.topologies.get(assignment.topology_id)
    former_at = None if topology is None else topology.assignment_at
    raw = encode_record(assignment, limit=None)
    plugin = ctx.inimbus
    if plugin is not None:
        former = None
        if former_at is not None:
            former = ctx.cluster.assignment_info(assignment.topology_id)
        transaction.afterwards.append(lambda: notify_new_slots(plugin, former, assignment))
    path = paths.assignment(assignment.topology_id)
    put_ops(ctx.cluster.state, transaction, path, raw, former_at)
    backup = paths.assignment_backup(name)
    backup_node = ctx.cluster.state.get_data_with_version(backup)
    backup_at: Versioned | None = None
    if backup_node is not None:
        backup_raw, node_at = backup_node
        # An empty node is not a record: put_ops fills it, as if there were none.
        backup_at = node_at if backup_raw else None
    put_ops(ctx.cluster.state, transaction, backup, raw, backup_at)


def read_backup(ctx: OperationsContext, name: str) -> tuple[Assignment | None, Versioned | None]:
    """Newest assignment of a topology of that name, and the version of its node.

    ``None`` and ``None`` without one.
    """
    path = paths.assignment_backup(name)
    stored = read_sharded(ctx.cluster.state, path)
    if stored is None:
        return None, None
    raw, at = stored
    return decode_record(Assignment, raw, path), at


class _Change(msgspec.Struct, frozen=True):
    """One change of assignments, in one transaction."""

    version: int
    """Version of ``/assignments`` after the change."""
    nodes: Mapping[str, _Nodes]
    """Topology id -> supervisors that the change concerns; ``None``: any."""


class _Changes(msgspec.Struct, frozen=True):
    """Data of ``/assignments``: the newest changes, oldest first."""

    changes: tuple[_Change, ...] = ()
    v: int = 1
    """Version of the record's form."""


def append_change(view: ClusterView, changed: Mapping[str, Assignment | None]) -> bytes:
    """The data of ``/assignments`` for these new assignments; ``None`` removes one.

    The data names the topologies of the newest changes, and the supervisors that their old and new
    placements name. A reader that remembers the version up to which it has read every assignment
    learns from one read which others to read; usually there are none. A writer that leaves no
    record, or more changes than are kept, costs its readers one full read. At most 32 changes are
    kept, and no more than fit into 8 KiB.
    """
    nodes: dict[str, _Nodes] = {}
    for topology_id, assignment in changed.items():
        topology = view.topologies.get(topology_id)
        former = None if topology is None else topology.assignment
        nodes[topology_id] = _concerned_nodes(former, assignment)
    change = _Change(view.assignments_version + 1, nodes)
    newest = [*_decode(view.assignment_changes).changes, change][-_MAX_CHANGES:]
    raw = msgspec.json.encode(_Changes(tuple(newest)))
    while len(raw) > _MAX_BYTES and newest:
        del newest[0]
        raw = msgspec.json.encode(_Changes(tuple(newest)))
    return raw


def _concerned_nodes(former: Assignment | None, assignment: Assignment | None) -> _Nodes:
    """Supervisors of both placements, sorted.

    ``None`` (any) without a placement, or for more than 32.
    """
    if former is None and assignment is None:
        return None
    nodes: set[str] = set()
    for placement in (former, assignment):
        if placement is not None:
            nodes.update(worker.node for worker in placement.workers)
    if len(nodes) > _MAX_NODES:
        return None
    return tuple(sorted(nodes))


def changes_since(raw: bytes, now: int, since: int) -> dict[str, _Nodes] | None:
    """Topology id -> supervisors concerned by the changes after version ``since``.

    The changes count up to version ``now``. ``None`` if the data does not hold all of them, or if
    ``since`` is later than ``now``: the reader must read every assignment.
    """
    changes = {change.version: change for change in _decode(raw).changes}
    if since > now or not all(version in changes for version in range(since + 1, now + 1)):
        return None
    concerned: dict[str, _Nodes] = {}
    for version in range(since + 1, now + 1):
        for topology_id, nodes in changes[version].nodes.items():
            earlier = concerned.get(topology_id, ())
            if nodes is None or earlier is None:
                concerned[topology_id] = None
            else:
                concerned[topology_id] = (*earlier, *nodes)
    return concerned


def _decode(raw: bytes) -> _Changes:
    """The changes in the data of ``/assignments``; none for data of another form."""
    try:
        return msgspec.json.decode(raw, type=_Changes)
    except ValueError:
        return _Changes()


NOTIFIER_KEY = "nimbus.topology.action.notifier.plugin.class"
"""Conf key of the listener of actions on topologies."""


class _ActionRecord(Record):
    """Content of a node below ``/actions``."""

    topology_id: str
    action: str


@dataclass(frozen=True)
class PendingAction:
    """An action of which the listener was not notified yet."""

    node: str
    """Name of its node below ``/actions``."""
    topology_id: str
    action: str
    """JStorm's name of the action; empty if the node is unreadable."""


def announce(
    ctx: OperationsContext, transaction: Transaction, topology_id: str, action: str
) -> None:
    """Append the action, as a sequential node, to the transaction that performs it.

    So the listener (Storm, JStorm) is notified of every action, in order, whichever process
    performed it. The leader reads the nodes, calls the listener, and deletes them. Without a
    configured listener no node is appended.
    """
    if ctx.conf.get(NOTIFIER_KEY):
        record = _ActionRecord(topology_id=topology_id, action=action)
        transaction.create(f"{paths.ACTIONS}/a", encode_record(record), sequence=True)


def note_change(
    ctx: OperationsContext,
    transaction: Transaction,
    topology_id: str,
    name: str,
    *,
    previous: str,
    status: str,
) -> None:
    """Append the event of a status change to the transaction that makes it.

    The event is a sequential node below ``/unreported``. It is appended only for a verb that the
    leader executes, not in other processes. So Dagster is notified of each change that took place,
    also if the leader is lost right after it. The leader moves the events into its record, and
    reports them.
    """
    if not ctx.verb:
        return
    event = UnreportedEvent(
        asset=("storm", "active_topology"),
        partition=name,
        description=f"{ctx.verb}: {topology_id} is {status}",
        metadata={
            "verb": ctx.verb,
            "topology_id": topology_id,
            "status": status,
            "previous": previous,
        },
    )
    transaction.create(f"{paths.UNREPORTED}/e", encode_record(event), sequence=True)


def pending_actions(ctx: OperationsContext) -> list[PendingAction]:
    """The pending actions, oldest first; an unreadable one has an empty ``action``."""
    actions: list[PendingAction] = []
    # ZooKeeper's numbers have ten digits, so that the names sort like the numbers.
    for name, (raw, _) in read_children(ctx.cluster.state, paths.ACTIONS).items():
        try:
            record = decode_record(_ActionRecord, raw, f"{paths.ACTIONS}/{name}")
        except Corrupt:
            record = _ActionRecord(topology_id="", action="")
        actions.append(PendingAction(name, record.topology_id, record.action))
    return actions


def forget_action(ctx: OperationsContext, action: PendingAction) -> None:
    """Delete an action once the listener was notified.

    An action that is deleted already is not an error. :class:`Fenced` for a deposed leader; the
    next leader then repeats the notification.
    """
    transaction = ctx.cluster.fenced(ctx.current_epoch()).delete(f"{paths.ACTIONS}/{action.node}")
    with suppress(Conflict):
        transaction.commit()
