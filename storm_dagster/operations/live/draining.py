"""Move of a topology off the hosts whose supervisors drain.

See ``docs/decisions.md#drain-at-term``. The leader executes it: a rebalance that changes no
numbers, and begins as soon as no tuple is under way.
"""

from collections.abc import Mapping

from storm_dagster.core.submission.conf import message_timeout_secs
from storm_dagster.model.multimap import multimap
from storm_dagster.model.records import decode_record
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
from storm_dagster.operations.live.rebalance import finish_rebalance, rebalance
from storm_dagster.operations.live.rebalance_request import PendingRebalance, pending_path
from storm_dagster.operations.live.spout_pause import MAX_IDLE_SECS, wait_until_idle
from storm_dagster.operations.results import RebalanceResult


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


def begun_moves(ctx: OperationsContext, view: ClusterView) -> list[str]:
    """Names of the topologies whose move off hosts that drain has begun and not ended.

    Those hosts may be gone by now: then no record names the drain any longer.
    """
    return [
        topology.base.name
        for topology in view.topologies.values()
        if topology.base.status == "REBALANCING" and _is_move_pending(ctx, topology.id)
    ]


def move_off_draining(ctx: OperationsContext, name: str) -> RebalanceResult:
    """Move the tasks of a topology off the hosts that drain; the fewest tasks move.

    The move is planned before the topology is touched. Then its spouts pause until no tuple is
    under way, at most for the message timeout and 30 s, and until all workers that stay know the
    new assignment. So no tuple is replayed, unless one takes longer. If too few slots are free
    elsewhere, as many workers move as find one. A move that a former leader began is continued.
    Raises the errors of :func:`~storm_dagster.operations.live.rebalance.rebalance`, such as
    :class:`Unavailable` without a free slot elsewhere and :class:`Conflict` during a gray upgrade.
    """
    topology = topology_by_name(ctx.cluster.load_view(), name)
    if topology.base.status == "REBALANCING" and _is_move_pending(ctx, topology.id):
        timeout_secs = float(message_timeout_secs(load_runnable(ctx, topology).conf))
        max_secs = min(timeout_secs, MAX_IDLE_SECS)
        wait_until_idle(ctx, topology.id, max_secs, except_lost=True)
        return finish_rebalance(ctx, topology.id)
    return rebalance(ctx, name, drains=True)


def _is_move_pending(ctx: OperationsContext, topology_id: str) -> bool:
    """True if the tasks are about to leave hosts that drain, by the stored request."""
    path = pending_path(topology_id)
    raw = ctx.cluster.state.get_data(path)
    return raw is not None and decode_record(PendingRebalance, raw, path).drains
