"""Move of a topology off the hosts whose supervisors drain.

See ``docs/decisions.md#drain-at-term``. The leader executes it: a rebalance that changes no
numbers, while the spouts pause and no tuple is under way.
"""

from collections.abc import Mapping
from typing import Any

from storm_dagster.core.submission.conf import message_timeout_secs
from storm_dagster.model.errors import NotAlive, StormDagsterError, Unavailable
from storm_dagster.model.multimap import multimap
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
from storm_dagster.operations.live.deploy import drain, workers_answer
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.live.worker_requests import WorkerLinks
from storm_dagster.operations.results import RebalanceResult
from storm_dagster.operations.submit.publishing import finish_activation

_MAX_IDLE_SECS = 30.0
"""Longest wait for the tuples under way; the message timeout may be shorter."""
_MAX_APPLY_SECS = 4.0
"""Longest wait until the workers apply the new assignment.

Five seconds after the move another process activates the topology in any case.
"""
_POLL_SECS = 0.05
"""Pause between two polls of the workers."""


def topologies_to_move(view: ClusterView) -> Mapping[str, list[str]]:
    """Name of a topology -> hosts that drain and have workers of it.

    A topology that is being killed is left out: its workers end with it.
    """
    places: set[tuple[str, str]] = set()
    for topology in view.topologies.values():
        if topology.base.status == "KILLED":
            continue
        for worker in topology.workers:
            if view.drains(worker.node):
                places.add((topology.base.name, worker.host))
    return multimap(sorted(places))


def move_off_draining(ctx: OperationsContext, name: str) -> RebalanceResult:
    """Move the tasks of a topology off the hosts that drain; the fewest tasks move.

    The move is planned before the topology is touched. Then its spouts pause until no tuple is
    under way, at most for the message timeout and 30 s, and until all workers that stay know the
    new assignment. So no tuple is replayed, unless one takes longer. If this process dies, another
    one activates the topology, as after an update that was not finished. Raises the errors of
    :func:`~storm_dagster.operations.live.rebalance.rebalance`, such as :class:`Unavailable` without
    a free slot elsewhere and :class:`Conflict` during a gray upgrade.
    """
    plan = rebalance(ctx, name, dry_run=True)
    if plan.outcome != "planned":
        return plan
    topology = topology_by_name(ctx.cluster.load_view(), name)
    timeout_secs = float(message_timeout_secs(load_runnable(ctx, topology).conf))
    try:
        if topology.live_workers:
            drain(ctx, topology.id, min(timeout_secs, _MAX_IDLE_SECS))
        result = rebalance(ctx, name, wait_secs=0)
        if result.version is not None:
            _await_version(ctx, topology.id, result.version)
    finally:
        _resume(ctx, topology.id)
    return result


def _await_version(ctx: OperationsContext, topology_id: str, version: int) -> None:
    """Wait until each live worker applies that version of the assignment, or a newer one.

    A worker that does not know it yet would send tuples to tasks that have moved away.
    """

    def applies(worker: Mapping[str, Any]) -> bool:
        return int(worker.get("version") or 0) >= version

    links = WorkerLinks.of(ctx.conf)
    began = ctx.monotonic()
    while ctx.monotonic() - began < _MAX_APPLY_SECS:
        try:
            topology = ctx.cluster.load_view().topologies.get(topology_id)
        except Unavailable:
            topology = None
        else:
            if topology is None or topology.assignment is None:
                return
        if topology is not None and workers_answer(topology, links, applies):
            return
        ctx.sleep(_POLL_SECS)


def _resume(ctx: OperationsContext, topology_id: str) -> None:
    """Give the topology the status that it should have.

    If that fails, another process does it a few seconds later.
    """
    try:
        finish_activation(ctx, topology_id, ctx.current_epoch())
    except NotAlive:
        pass  # It was killed during the move.
    except StormDagsterError as error:
        ctx.log.warning("%s is activated later: %s", topology_id, error.message)
