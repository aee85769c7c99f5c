"""Plan of a rebalance: the tasks and slots afterwards, and the report about them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from storm_dagster.core.reassignment import (
    Runnable,
    offered_supervisors,
    same_resources,
    same_workers,
)
from storm_dagster.core.scheduling.obstacles import slot_limits
from storm_dagster.core.submission.conf import base_conf, with_base_conf
from storm_dagster.core.submission.quotas import check_quotas
from storm_dagster.core.submission.tasks import fixed_task_components, rescale
from storm_dagster.core.submission.validation import check_size_limits, check_task_limit
from storm_dagster.core.usable_slots import usable_slots
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.placement import PlacementResult
from storm_dagster.model.records import BaseConf, StormBase, TaskTable
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.rebalance_placement import place_request
from storm_dagster.operations.live.rebalance_request import PendingRebalance, rebalance_warnings
from storm_dagster.operations.results import RebalanceResult


@dataclass(frozen=True)
class RebalancePlan:
    """A rebalance that fits, and its effect."""

    request: PendingRebalance
    table: TaskTable
    """The topology's tasks afterwards."""
    result: PlacementResult
    changed: bool
    """True if the request has an effect, on tasks or only on the base."""
    disturbs: bool
    """True if tasks are moved, added or removed.

    Otherwise at most the base changes, and no spout has to pause.
    """
    resizes: bool
    """True if no task is moved, but workers get other memory or CPU by the conf.

    The workers continue: a supervisor reads both from the assignment.
    """
    bound: bool
    """True if the moves depend on more than sizes.

    These are a user-defined assignment, isolation, and rules that keep tasks apart or together.
    """
    base_conf: BaseConf
    """Fields of the base that follow from the conf."""
    limits: str
    """As :attr:`RebalanceResult.limits`."""


def plan_request(
    ctx: OperationsContext,
    view: ClusterView,
    topology: TopologyView,
    runnable: Runnable,
    request: PendingRebalance,
) -> RebalancePlan:
    """Plan the request with the planner of the context.

    :class:`Unavailable` without an assignment; the planner's error if the request does not fit.
    """
    if topology.tasks is None or topology.assignment is None:
        raise Unavailable(
            f"topology {topology.base.name!r} has no assignment yet: wait until it is healed"
        )
    current_executors = topology.base.executors
    changed_executors = {
        component: count
        for component, count in request.executors.items()
        if count != current_executors.get(component)
    }
    _check_growth(ctx, topology, topology.tasks, request)
    table = rescale(topology.tasks, changed_executors, fixed_task_components(runnable.spec))
    batch, result = place_request(ctx, view, topology, runnable, table, request)
    placement = result.placement(topology.base.name)
    check_quotas(ctx.values(), view, topology.base.owner, placement.workers, [topology.id])
    disturbs = not same_workers(topology.assignment, placement) or table != topology.tasks
    resizes = not disturbs and not same_resources(topology.assignment, placement)
    base_fields = base_conf(runnable.conf)
    changed = (
        disturbs
        or resizes
        or request.workers != topology.base.workers
        or request.executors != topology.base.executors
        # After a gray upgrade that a leader of an earlier release completed.
        or with_base_conf(topology.base, base_fields) is not topology.base
    )
    (to_place,) = batch.topologies
    bound = bool(
        to_place.user_workers or to_place.differ_node or to_place.isolation or to_place.executors
    )
    limits = _limits(view, topology, runnable, request)
    return RebalancePlan(
        request, table, result, changed, disturbs, resizes, bound, base_fields, limits
    )


def _check_growth(
    ctx: OperationsContext, topology: TopologyView, table: TaskTable, request: PendingRebalance
) -> None:
    """Check the cluster's limits for one topology, each for a number that grows.

    A limit that was lowered after the submission does not prevent other rebalances.
    """
    base = topology.base
    cluster = ctx.values()
    tasks = _requested_tasks(table, request.executors)
    if tasks > _requested_tasks(table, {}):
        check_task_limit(cluster, base.name, tasks)
    executors = _own_executors(request.executors)
    if executors > _own_executors(base.executors):
        check_size_limits(cluster, base.name, executors=executors)
    if request.workers > base.workers:
        check_size_limits(cluster, base.name, workers=request.workers)


def _own_executors(executors: Mapping[str, int]) -> int:
    """Number of executors without those of system components."""
    return sum(count for component, count in executors.items() if not component.startswith("__"))


def _limits(
    view: ClusterView, topology: TopologyView, runnable: Runnable, request: PendingRebalance
) -> str:
    """Limits of the slots that the topology may use, in words; empty without one."""
    reserve = int(runnable.conf.get("jstorm.reserve.workers") or 0)
    usable = usable_slots(view, placing=[topology.id], avoid=request.avoid, reserve=reserve)
    executors = sum(
        count for component, count in request.executors.items() if component != TOPOLOGY_MASTER
    )
    lacks_workers = len(topology.workers) < min(request.workers, executors)
    return slot_limits(view, topology, usable, lacks_workers=lacks_workers)


def _requested_tasks(table: TaskTable, executors: Mapping[str, int]) -> int:
    """Number of tasks that the topology has after the request.

    Components whose number of executors grows get as many tasks.
    """
    total = 0
    for component, part in table.components.items():
        if component != TOPOLOGY_MASTER:
            total += max(len(part.ids), executors.get(component) or 0)
    return total


def report_of_plan(
    topology: TopologyView, base: StormBase, plan: RebalancePlan, outcome: str, *, delay: int = 0
) -> RebalanceResult:
    """The result of a plan; ``topology`` is before it, ``base`` that of the result.

    The assignment is still that of ``topology``.
    """
    before = topology.tasks.component_of() if topology.tasks else {}
    after = plan.table.component_of()
    placement = plan.result.placement(base.name)
    return replace(
        unchanged_result(topology),
        status=base.status,
        outcome=outcome,
        workers=plan.request.workers,
        executors=plan.request.executors,
        moved=placement.moved,
        delay_secs=delay,
        planner=plan.result.planner,
        placement=placement,
        tasks_added=tuple(sorted(after.keys() - before.keys())),
        tasks_removed=tuple(sorted(before.keys() - after.keys())),
        components={**before, **after},
        assign_secs=plan.result.assign_secs,
        warnings=rebalance_warnings(topology, plan.request),
        limits=plan.limits,
        resized=plan.resizes,
    )


def unchanged_result(topology: TopologyView) -> RebalanceResult:
    """The result of a rebalance without an effect, with the current numbers."""
    base = topology.base
    return RebalanceResult(
        topology_id=topology.id,
        name=base.name,
        status=base.status,
        outcome="unchanged",
        workers=base.workers,
        executors=base.executors,
        assignment=topology.assignment,
        version=topology.assignment_at.version if topology.assignment_at else None,
    )


def moves_input(view: ClusterView, topology: TopologyView, plan: RebalancePlan) -> dict[str, Any]:
    """Input of the asset check ``fewest_moves``, for the blob with the reasons.

    ``before`` are the tasks of each former slot, ``slack`` the moves that are allowed beyond the
    fewest: one, because a topology master that is alone may move as well. Empty if every task was
    reassigned, if more than sizes decides the moves, or if a former slot is not offered, so that
    its tasks must move.
    """
    if plan.request.reassign or topology.assignment is None or plan.bound:
        return {}
    offered: set[str] = set()
    for supervisor in offered_supervisors(view, placing=[topology.id]):
        offered.update(Slot(supervisor.id, port).key for port in supervisor.info.ports)
    before = {worker.slot.key: worker.tasks for worker in topology.assignment.workers}
    if not before.keys() <= offered:
        return {}
    return {"moves": {"before": before, "slack": 1}}
