"""Waits while the spouts of a topology pause: for its tuples, for its workers, for a delay.

An update, a rebalance and a drain move tasks while no tuple is under way, and resume the spouts
when every worker knows the new places. See ``docs/decisions.md#moves-without-replay``.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storm_dagster.model.errors import NotAlive, StormDagsterError, Unavailable
from storm_dagster.model.records import WorkerSlot
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import TopologyView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.worker_requests import WorkerLinks, ask_worker
from storm_dagster.security.server_identity import TrustedServers

MAX_IDLE_SECS = 30.0
"""Longest wait for the tuples under way; the message timeout may be shorter."""
ABANDONED_SECS = 30
"""Time beyond a wait's own limit, seconds.

Only after it may another process regard the wait as abandoned.
"""
_MAX_APPLY_SECS = 4.0
"""Longest wait until the workers apply a new assignment."""
RESUME_SECS = 5
"""Time after which another process resumes the spouts of a topology whose tasks have moved.

It is more than :data:`_MAX_APPLY_SECS`.
"""
_POLL_SECS = 0.05
"""Pause between two polls of the workers."""
_DELAY_POLL_SECS = 2.0
"""Interval at which a rebalance that waits for its delay polls if its topology was killed."""
_ANSWER_SECS = 0.5
"""Time in which a worker must answer; otherwise it counts as busy."""
_PARALLEL_REQUESTS = 16
"""Workers that are polled at the same time."""


def wait_until_idle(
    ctx: OperationsContext, topology_id: str, max_secs: float, *, except_lost: bool = False
) -> bool:
    """Wait until no tuple of the topology is under way, at most ``max_secs``; false if some are.

    Its spouts have to pause. It ends early if the topology loses its assignment. With
    ``except_lost``, open trees are not waited for from the loss of a worker on: those of its tuples
    are never acked, and would keep the spouts paused until they time out.
    """
    links = WorkerLinks.of(ctx.conf)
    accepts = _has_nothing_under_way
    tokens: dict[Slot, str] = {}
    began = ctx.monotonic()
    idle_polls = 0
    while ctx.monotonic() - began < max_secs:
        try:
            topology = ctx.cluster.load_view().topologies.get(topology_id)
        except Unavailable:  # An election of ZooKeeper is not a reason to give up.
            idle_polls = 0
            ctx.sleep(_POLL_SECS)
            continue
        if topology is None or topology.assignment is None:
            break
        if except_lost and _has_lost_worker(topology, tokens):
            # For the rest of the wait: a worker that was started again has not its former tuples.
            accepts = _has_no_tuple_waiting
        # Two polls in a row: a tuple between two workers is in neither of their answers.
        if _workers_answer(topology, links, accepts):
            idle_polls += 1
        else:
            idle_polls = 0
        if idle_polls == 2:
            return True
        ctx.sleep(_POLL_SECS)
    ctx.log.warning("%s still has tuples under way after %g s", topology_id, max_secs)
    return False


def wait_until_applied(ctx: OperationsContext, topology_id: str, version: int) -> None:
    """Wait until each live worker applies the assignment, which has at least that version.

    A worker that does not know it yet would send tuples to tasks that have moved away. It ends
    after four seconds, and when another process has given the topology another status.
    """
    newest = version

    def applies(worker: Mapping[str, Any]) -> bool:
        return int(worker.get("version") or 0) >= newest

    links = WorkerLinks.of(ctx.conf)
    began = ctx.monotonic()
    while ctx.monotonic() - began < _MAX_APPLY_SECS:
        try:
            topology = ctx.cluster.load_view().topologies.get(topology_id)
        except Unavailable:
            ctx.sleep(_POLL_SECS)
            continue
        if topology is None or topology.assignment is None:
            return
        if topology.base.status != "REBALANCING":
            return
        if topology.assignment_at is not None:
            # A healing may have followed the move.
            newest = max(newest, topology.assignment_at.version)
        if _workers_answer(topology, links, applies):
            return
        ctx.sleep(_POLL_SECS)
    ctx.log.warning("not every worker of %s applied its new assignment in time", topology_id)


def wait_for_delay(ctx: OperationsContext, topology_id: str, delay_secs: float) -> None:
    """Sleep for the delay of a rebalance; :class:`NotAlive` once the topology is killed."""
    remaining_secs = delay_secs
    while remaining_secs > 0:
        pause_secs = min(remaining_secs, _DELAY_POLL_SECS)
        ctx.sleep(pause_secs)
        remaining_secs -= pause_secs
        try:
            base = ctx.cluster.storm_base(topology_id)
        except Unavailable:
            continue  # An election of ZooKeeper is not a reason to give up.
        if base is None or base.status == "KILLED":
            raise killed_meanwhile(topology_id)


def killed_meanwhile(topology_id: str) -> NotAlive:
    """The error of a rebalance whose topology was killed."""
    return NotAlive(f"topology {topology_id} was killed while it was rebalanced: submit it again")


def _has_nothing_under_way(worker: Mapping[str, Any]) -> bool:
    """True if the spouts of the worker pause, and no tuple waits and no tree is open."""
    system = worker.get("system") or {}
    return not system.get("open_trees") and _has_no_tuple_waiting(worker)


def _has_no_tuple_waiting(worker: Mapping[str, Any]) -> bool:
    """True if the spouts of the worker pause, and no tuple waits; trees may be open."""
    system = worker.get("system") or {}
    # With "active", its spouts have not heard yet that they pause. A worker of a former release
    # does not say it.
    return not system.get("waiting_tuples") and not system.get("active")


def _has_lost_worker(topology: TopologyView, tokens: dict[Slot, str]) -> bool:
    """True if a worker has ended that was alive before; one that starts is not lost.

    ``tokens`` are the start tokens of the workers that were seen alive; new ones are added.
    """
    live_workers = topology.live_workers
    for slot, token in tokens.items():
        node = live_workers.get(slot)
        if node is None or node.token != token:
            return True
    tokens.update({slot: node.token for slot, node in live_workers.items()})
    return False


def _workers_answer(
    topology: TopologyView, links: WorkerLinks, accepts: Callable[[Mapping[str, Any]], bool]
) -> bool:
    """True if each live worker of the assignment answers with statistics that ``accepts`` takes.

    A dead worker is left out. One that is alive and does not answer in time makes it false.
    """
    assert topology.assignment is not None
    tokens = {slot: node.token for slot, node in topology.live_workers.items()}
    key, trusted = links.to(topology)
    live_workers = [worker for worker in topology.assignment.workers if worker.slot in tokens]

    def is_accepted(worker: WorkerSlot) -> bool:
        token = tokens[worker.slot]
        documents = _ask_statistics(worker.host, worker.port, token, key, trusted)
        return documents is not None and all(accepts(document) for document in documents)

    with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        return all(pool.map(is_accepted, live_workers))


def _ask_statistics(
    host: str, port: int, token: str, link_key: str, trusted: TrustedServers
) -> list[Mapping[str, Any]] | None:
    """Statistics of a worker by itself; ``None`` if it does not answer in time.

    ``token`` is its start token.
    """
    try:
        answer = ask_worker(host, port, token, "stats", _ANSWER_SECS, link_key, trusted)
    except StormDagsterError:
        return None
    documents: Mapping[str, Any] = answer.get("workers") or {}
    # The topology master answers for the other workers as well.
    return [document for name, document in documents.items() if name.endswith(f":{port}")]
