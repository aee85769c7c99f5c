"""Drain of a topology before its successor takes its place."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storm_dagster.core.transitions import apply_event
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, StormDagsterError
from storm_dagster.model.records import encode_record
from storm_dagster.model.security import Security
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.worker_curve import link_key_of
from storm_dagster.operations.steps import operation
from storm_dagster.operations.transactions import commit, retry_on_conflict

DRAIN = operation("drain", "drain")
UNDO_DRAIN = operation("undo_drain", "undo_drain")

_POLL_SECS = 0.05
_ANSWER_SECS = 0.5
_ASKED_AT_ONCE = 16
_SPARE_SECS = 30
"""Added to the drain's own limit: only then may somebody take it for abandoned and let the spouts run again."""


def drain(ctx: OperationsContext, topology_id: str, longest_secs: float) -> float:
    """Silence the spouts and wait until no tuple is under way, at most ``longest_secs``; the seconds it took.

    If nobody ends the drain, ``lifecycle_sensor`` or the leader makes the topology ACTIVE again. What is still under way
    at the end is replayed by its spouts. An INACTIVE topology is not drained: its spouts are silent already.
    """
    began = ctx.monotonic()
    if not _silence(ctx, topology_id, round(longest_secs) + _SPARE_SECS):
        return 0.0
    security = Security.of(ctx.conf)
    quiet = 0
    while ctx.monotonic() - began < longest_secs:
        topology = ctx.cluster.load_view().topologies.get(topology_id)
        if topology is None or topology.assignment is None:
            break
        # Twice: what is on its way between two workers is in neither while they are asked.
        quiet = quiet + 1 if _quiet(topology, link_key_of(security, topology_id)) else 0
        if quiet == 2:
            break
        ctx.sleep(_POLL_SECS)
    taken = ctx.monotonic() - began
    if quiet < 2:
        ctx.log.warning("%s still has tuples under way after %.1f s", topology_id, taken)
    return taken


def _silence(ctx: OperationsContext, topology_id: str, delay_secs: int) -> bool:
    epoch = ctx.current_epoch()

    def attempt(view: ClusterView) -> bool:
        topology = view.topologies.get(topology_id)
        if topology is None or topology.base.status not in ("ACTIVE", "INACTIVE"):
            raise Conflict(f"topology {topology_id} was changed by somebody else meanwhile: try again")
        if topology.base.status == "INACTIVE":
            return topology.base.delay_secs == delay_secs
        after = apply_event(topology.base, "drain", delay_secs=delay_secs)
        transaction = ctx.cluster.fenced(epoch)
        transaction.set(paths.topology(topology_id), encode_record(after), topology.base_at.version)
        commit(ctx, transaction, "drain")
        return True

    return retry_on_conflict(ctx, f"draining {topology_id}", attempt)


def undo_drain(ctx: OperationsContext, topology_id: str) -> None:
    """Let the spouts run again: the successor did not come. A topology that is not being drained stays as it is."""
    epoch = ctx.current_epoch()

    def attempt(view: ClusterView) -> None:
        topology = view.topologies.get(topology_id)
        if topology is None or topology.base.status != "INACTIVE" or topology.base.delay_secs is None:
            return
        after = apply_event(topology.base, "activate")
        transaction = ctx.cluster.fenced(epoch)
        transaction.set(paths.topology(topology_id), encode_record(after), topology.base_at.version)
        commit(ctx, transaction, "undo_drain")

    retry_on_conflict(ctx, f"letting {topology_id} go on", attempt)


def _quiet(topology: TopologyView, link_key: str) -> bool:
    """Whether no worker has a tuple waiting or a tree open. One that does not answer has nothing under way if dead."""
    assert topology.assignment is not None
    tokens = {slot: node.token for slot, node in topology.live_workers.items()}
    asked = [worker for worker in topology.assignment.workers if worker.slot in tokens]
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        return all(pool.map(lambda one: _worker_quiet(one.host, one.port, tokens[one.slot], link_key), asked))


def _worker_quiet(host: str, port: int, token: str, link_key: str) -> bool:
    # Every Dagster process loads this module; only a hot deploy needs ZeroMQ.
    from storm_dagster.operations.live.worker_requests import ask_worker

    try:
        answer = ask_worker(host, port, token, "stats", _ANSWER_SECS, link_key)
    except StormDagsterError:
        return False
    systems: list[Mapping[str, Any]] = [
        worker.get("system") or {}
        for name, worker in (answer.get("workers") or {}).items()
        if name.endswith(f":{port}")
    ]
    return all(not one.get("waiting_tuples") and not one.get("open_trees") for one in systems)
