"""Move of a topology off the hosts whose supervisors drain.

See ``docs/decisions.md#drain-at-term``. The leader executes it: a rebalance that changes no numbers
and waits only until no tuple is under way.
"""

from collections.abc import Mapping

from storm_dagster.core.submission.conf import message_timeout_secs
from storm_dagster.model.multimap import multimap
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
from storm_dagster.operations.live.deploy import wait_until_idle
from storm_dagster.operations.live.rebalance import finish_rebalance, rebalance
from storm_dagster.operations.results import RebalanceResult

_MAX_IDLE_SECS = 30
"""Longest wait for the tuples under way; the message timeout may be shorter."""


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

    Its spouts pause until no tuple is under way, at most for the message timeout and 30 s. So no
    tuple is replayed, unless one takes longer. The move is planned before the spouts pause. If this
    process dies, the next leader finishes the move after that time. Raises the errors of
    :func:`~storm_dagster.operations.live.rebalance.rebalance`, such as :class:`Unavailable` without
    a free slot elsewhere and :class:`Conflict` during a gray upgrade.
    """
    topology = topology_by_name(ctx.cluster.load_view(), name)
    timeout_secs = message_timeout_secs(load_runnable(ctx, topology).conf)
    max_secs = min(timeout_secs, _MAX_IDLE_SECS)
    report = rebalance(ctx, name, wait_secs=max(1, max_secs), stay=False)
    if report.outcome != "waiting":
        return report
    if not wait_until_idle(ctx, report.topology_id, max_secs):
        ctx.log.warning(
            "%s still has tuples under way after %d s: they are replayed", name, max_secs
        )
    return finish_rebalance(ctx, report.topology_id)
