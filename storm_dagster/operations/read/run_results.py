"""Sentences and numbers on the effects of a verb. Pure functions of its result."""

from storm_dagster.model.records import Assignment
from storm_dagster.model.run_result import RunResult
from storm_dagster.operations.results import LifecycleResult, RebalanceResult
from storm_dagster.operations.upgrade import UpgradeResult


def rebalance_result(report: RebalanceResult) -> RunResult:
    """The result of a rebalance."""
    where = _size_of(report.assignment)
    if report.reason:
        text = f"nothing is moved: {report.reason}"
    elif report.moved:
        text = f"{report.moved} tasks moved: {where}"
    elif report.tasks_added or report.tasks_removed:
        added = len(report.tasks_added)
        removed = len(report.tasks_removed)
        text = f"no task moved, {added} were added and {removed} removed: {where}"
    elif report.resized:
        text = f"no task moved, memory and CPU of workers are those of the conf: {where}"
    elif report.limits:
        text = f"nothing to move: {where}, {report.limits}"
    else:
        text = f"nothing to move: {where} are even"
    return RunResult(report.outcome, report.moved, text, report.all_warnings)


def _size_of(assignment: Assignment | None) -> str:
    """Numbers of workers and hosts, in words."""
    workers = assignment.workers if assignment is not None else ()
    hosts = len({worker.host for worker in workers})
    worker_word = "worker" if len(workers) == 1 else "workers"
    host_word = "host" if hosts == 1 else "hosts"
    return f"{len(workers)} {worker_word} on {hosts} {host_word}"


def moved_tasks(before: Assignment | None, after: Assignment | None) -> int:
    """Number of tasks of both assignments that have another slot afterwards."""
    former = before.task_slots() if before is not None else {}
    current = after.task_slots() if after is not None else {}
    return sum(1 for task, slot in current.items() if former.get(task, slot) != slot)


def lifecycle_result(
    verb: str, result: LifecycleResult | UpgradeResult, moved: int = 0
) -> RunResult:
    """The result of any other verb; ``moved`` is its number of tasks that moved."""
    if isinstance(result, UpgradeResult):
        return RunResult(result.outcome, moved, result.reason)
    if not result.changed:
        return RunResult("unchanged", moved, f"nothing to do: it is {result.status} already")
    text = f"{moved} tasks moved" if verb == "update" else ""
    return RunResult("changed", moved, text)
