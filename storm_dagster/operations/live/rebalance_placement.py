"""Placement of a requested rebalance."""

from collections.abc import Callable, Collection, Sequence

from storm_dagster.core.reassignment import (
    Runnable,
    present_workers,
    rebalance_batch,
)
from storm_dagster.core.usable_slots import draining_slots
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.placement import PlacementBatch, PlacementResult
from storm_dagster.model.records import TaskTable
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.rebalance_request import PendingRebalance
from storm_dagster.operations.planning import plan_or_raise

Placed = tuple[PlacementBatch, PlacementResult]
"""Input and result of the planner."""


def place_request(
    ctx: OperationsContext,
    view: ClusterView,
    topology: TopologyView,
    runnable: Runnable,
    table: TaskTable,
    request: PendingRebalance,
) -> Placed:
    """Input and result of the planner for a request.

    The planner is that of the context: a run never takes the local planner in place of PySpark. A
    move off hosts that drain changes no other worker. If too few slots are free elsewhere, the
    fewest workers on these hosts stay; none is put into fewer workers than the topology has.
    """

    def place(workers: int, staying: Collection[Slot]) -> Placed:
        batch = rebalance_batch(
            view,
            topology,
            runnable,
            table,
            executors=request.executors,
            workers=workers,
            reassign=request.reassign,
            avoid=request.avoid,
            staying=staying,
        )
        return batch, plan_or_raise(ctx, batch, topology.base.name, view)

    if not request.drains:
        return place(request.workers, ())
    draining = draining_slots(view, topology)
    others = {worker.slot for worker in topology.workers} - {*draining}
    try:
        return place(request.workers, others)
    except Unavailable:
        workers = present_workers(view, topology, runnable, table)
        fitting = _place_partly(lambda staying: place(workers, {*others, *staying}), draining)
        if fitting is None:
            raise
        return fitting


def _place_partly(
    place: Callable[[Sequence[Slot]], Placed], draining: Sequence[Slot]
) -> Placed | None:
    """Place the topology so that the fewest of the slots ``draining`` keep their workers.

    ``place`` gets those that do, and raises :class:`Unavailable` if they are too few. ``None`` if
    all of them would have to: then no task leaves its host.
    """
    fitting: Placed | None = None
    fewest = 0
    most = len(draining) - 1
    while fewest <= most:
        number = (fewest + most) // 2
        try:
            fitting = place(draining[len(draining) - number :])
        except Unavailable:
            fewest = number + 1
        else:
            most = number - 1
    return fitting
