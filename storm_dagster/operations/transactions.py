"""Fenced transactions: the only way in which operations write cluster state
(``docs/decisions.md#fenced-writes``).

Every transaction checks the version of ``/epoch``. One that changes an assignment also checks and
raises the version of ``/assignments`` (an optimistic lock: one placement at a time); the loser of a
race re-reads the cluster, decides again and tries again, until the assignment wait ends. Large
assignments are written in parts.
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
_FIRST_PAUSE_SECS = 0.05
_LONGEST_PAUSE_SECS = 2.0
_DELETES_IN_ONE_TRANSACTION = 100


class ReplyLost(Unavailable):
    """ZooKeeper was lost during a commit: whether it was applied is known only after reading
    again.
    """


def bump_assignments_version(
    transaction: Transaction, view: ClusterView, changed: Mapping[str, Assignment | None]
) -> Transaction:
    """Check ``/assignments`` against the view, raise its version and leave there what changes, in
    one operation.

    ``changed``: topology id -> the assignment that the transaction writes, ``None`` when it removes
    it.
    """
    return transaction.set(
        paths.ASSIGNMENTS, append_change(view, changed), view.assignments_version
    )


def commit(ctx: OperationsContext, transaction: Transaction, name: str) -> None:
    """Commit as the step ``name``; a lost connection becomes :class:`ReplyLost`."""
    with step(ctx, name):
        try:
            transaction.commit()
        except Unavailable as error:
            raise ReplyLost(error.message) from error
        for call in transaction.afterwards:
            call()


def lost_race(error: StormDagsterError) -> bool:
    """Whether a transaction failed because a node had moved on: the error names the node."""
    return isinstance(error, Conflict) and getattr(error, "path", None) is not None


def retry_on_conflict(ctx: OperationsContext, what: str, attempt: Callable[[ClusterView], T]) -> T:
    """Run ``attempt`` on a fresh view, again after every lost race or lost reply, with jitter.

    It is called with a view loaded for it and must recognize its own earlier success in it. After a
    lost reply ZooKeeper may be away for an election (seconds). Gives up with :class:`Unavailable`
    after ``nimbus.assignment.wait.secs``.
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
                raise ReplyLost(error.message) from error
            return attempt(view)
        except ReplyLost:
            lost_replies += 1
            if lost_replies > _LOST_REPLIES or ctx.monotonic() >= deadline:
                raise
            ctx.log.warning("%s: ZooKeeper's reply was lost, reading again", what)
        except Conflict as error:
            if not lost_race(error):
                raise
            if ctx.monotonic() >= deadline:
                raise Unavailable(
                    f"{what}: others changed the cluster without a pause for {wait:g} s ({error.message}): try again"
                ) from error
            ctx.log.info("%s: lost a race (%s), trying again", what, error.message)
        ctx.sleep(pause * (0.5 + ctx.jitter()))
        pause = min(pause * 1.5, _LONGEST_PAUSE_SECS)


def delete_tree(ctx: OperationsContext, epoch: int, path: str, name: str) -> int:
    """Delete ``path`` and all below it in fenced transactions, children first; the number of nodes.

    Nodes that others delete at the same time do not matter. Ends with :class:`Conflict` when others
    keep adding nodes.
    """
    removed = 0
    for attempts_left in range(9, -1, -1):
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
    """``path`` and all nodes below it, children before parents; empty when it does not exist."""
    children = ctx.cluster.state.find_children(path)
    if children is None:
        return []
    return [*(node for child in children for node in _subtree(ctx, f"{path}/{child}")), path]


MAX_WHY = 300
_KEPT_CHANGES = 20


def with_change(
    ctx: OperationsContext,
    assignment: Assignment,
    action: str,
    why: str = "",
    *,
    moved: int = 0,
    outage_secs: int = 0,
) -> Assignment:
    """The assignment with one more entry in its history, which keeps the newest 20: the page of the
    topology shows it.
    """
    change = AssignmentChange(
        at_secs=ctx.now_secs(),
        action=action,
        why=why[:MAX_WHY],
        moved=moved,
        outage_secs=outage_secs,
        run=ctx.run,
    )
    return assignment.model_copy(update={"history": (change, *assignment.history)[:_KEPT_CHANGES]})


def append_assignment(
    ctx: OperationsContext,
    transaction: Transaction,
    view: ClusterView,
    name: str,
    assignment: Assignment,
    *ended: str,
) -> None:
    """Append what creates the assignment or replaces the one in the view, and raises the version of
    ``/assignments``.

    It is also kept under the topology's name, where it survives a kill. A scheduling plug-in is
    notified of its new slots once the transaction is committed. ``ended``: ids of topologies that
    go in the same transaction.
    """
    bump_assignments_version(
        transaction, view, {assignment.topology_id: assignment, **dict.fromkeys(ended)}
    )
    known = view.topologies.get(assignment.topology_id)
    at = None if known is None else known.assignment_at
    raw = encode_record(assignment, limit=None)
    if (plugin := ctx.inimbus) is not None:
        before = None if at is None else ctx.cluster.assignment_info(assignment.topology_id)
        transaction.afterwards.append(lambda: notify_new_slots(plugin, before, assignment))
    put_ops(ctx.cluster.state, transaction, paths.assignment(assignment.topology_id), raw, at)
    backup = paths.assignment_backup(name)
    found = ctx.cluster.state.get_data_with_version(backup)
    put_ops(
        ctx.cluster.state,
        transaction,
        backup,
        raw,
        found[1] if found is not None and found[0] else None,
    )


def read_backup(ctx: OperationsContext, name: str) -> tuple[Assignment | None, Versioned | None]:
    """The newest assignment that a topology of that name had, and the version of its node."""
    path = paths.assignment_backup(name)
    found = read_sharded(ctx.cluster.state, path)
    return (None, None) if found is None else (decode_record(Assignment, found[0], path), found[1])


_MOST_CHANGES = 32
_MOST_NODES = 32
_MOST_BYTES = 8192
_Nodes = tuple[str, ...] | None


class _Change(msgspec.Struct, frozen=True):
    version: int
    nodes: Mapping[str, _Nodes]
    """Topology id -> supervisors that it concerns; ``None``: any."""


class _Changes(msgspec.Struct, frozen=True):
    changes: tuple[_Change, ...] = ()
    v: int = 1


def append_change(view: ClusterView, changed: Mapping[str, Assignment | None]) -> bytes:
    """The data of ``/assignments`` that goes with these new assignments; ``None`` removes one.

    It names the topologies of the newest changes, and the supervisors that their old and new
    placements name. Who remembers the version up to which it has read everything learns from one
    read what else to read: usually nothing. A writer that leaves no record, or more changes than
    are kept, costs its readers one full read.
    """
    nodes: dict[str, _Nodes] = {}
    for topology_id, assignment in changed.items():
        known = view.topologies.get(topology_id)
        placements = [each for each in (assignment, known and known.assignment) if each is not None]
        named = {worker.node for placement in placements for worker in placement.workers}
        nodes[topology_id] = (
            tuple(sorted(named)) if placements and len(named) <= _MOST_NODES else None
        )
    kept = [
        *_decode(view.assignment_changes).changes,
        _Change(view.assignments_version + 1, nodes),
    ][-_MOST_CHANGES:]
    while len(raw := msgspec.json.encode(_Changes(tuple(kept)))) > _MOST_BYTES and kept:
        del kept[0]
    return raw


def changes_since(raw: bytes, now: int, since: int) -> dict[str, _Nodes] | None:
    """Topology id -> supervisors concerned, of the changes after version ``since`` up to ``now``;
    ``None``: not known.
    """
    found: dict[str, _Nodes] = {}
    known = {change.version: change for change in _decode(raw).changes}
    if since > now or not all(version in known for version in range(since + 1, now + 1)):
        return None
    for version in range(since + 1, now + 1):
        for topology_id, nodes in known[version].nodes.items():
            before = found.get(topology_id, ())
            found[topology_id] = None if nodes is None or before is None else (*before, *nodes)
    return found


def _decode(raw: bytes) -> _Changes:
    try:
        return msgspec.json.decode(raw, type=_Changes)
    except ValueError:
        return _Changes()


NOTIFIER_KEY = "nimbus.topology.action.notifier.plugin.class"


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


def announce(
    ctx: OperationsContext, transaction: Transaction, topology_id: str, action: str
) -> None:
    """Append the action (:attr:`Verb.action`) to the transaction that executes it.

    It is a sequential node; without a configured listener there is none. So the listener (Storm,
    JStorm) is notified of every action, in order, whichever process executed it. The leader reads
    the nodes, calls the listener, and deletes them.
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
    """Append the event of a verb that the leader executes, as a sequential node below
    ``/unreported``, to the transaction that changes the status. Without a verb, as in other
    processes, no event is appended.

    So Dagster is notified of each change that took place, also if the leader is lost right after
    it. The leader moves the events into its record, and reports them.
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
    """The pending actions, oldest first. One that cannot be read has an empty ``action``."""
    found = []
    # ZooKeeper's numbers have ten digits, so that names sort as they do.
    for name, (raw, _) in read_children(ctx.cluster.state, paths.ACTIONS).items():
        try:
            record = decode_record(_ActionRecord, raw, f"{paths.ACTIONS}/{name}")
        except Corrupt:
            record = _ActionRecord(topology_id="", action="")
        found.append(PendingAction(name, record.topology_id, record.action))
    return found


def forget_action(ctx: OperationsContext, action: PendingAction) -> None:
    """Delete an action once the listener was notified. :class:`Fenced` for a deposed leader: the
    next one repeats it.
    """
    transaction = ctx.cluster.fenced(ctx.current_epoch()).delete(f"{paths.ACTIONS}/{action.node}")
    with suppress(Conflict):
        transaction.commit()
