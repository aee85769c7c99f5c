"""Runs of equal executors: the short form in which executors go to Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from storm_dagster.core.scheduling.units import Codes, Executors, several_tasks

if TYPE_CHECKING:
    from storm_dagster.model.placement import TopologyToPlace

Run = tuple[int, int, int, int, Sequence[int] | None]
"""(component, first task, executors, tasks in each, tasks of an irregular one).

A run has executors of consecutive tasks, or is a single executor whose tasks are not consecutive.
"""


def executor_runs(topology: TopologyToPlace, codes: Codes) -> Iterator[Run]:
    """Runs of a topology; a component of a thousand tasks is one run.

    New components get their numbers in ``codes``.
    """
    several = several_tasks(topology)
    for first, tasks in several.items():
        irregular = list(tasks) if tasks[-1] - first + 1 != len(tasks) else None
        component = codes.setdefault(topology.tasks[first], len(codes))
        yield component, first, 1, len(tasks), irregular
    grouped: set[int] = set()
    for tasks in several.values():
        grouped.update(tasks)
    # The run that is being collected: ``count`` executors of one task from ``first`` on.
    first = 0
    count = 0
    owner = ""
    for task, component_id in sorted(topology.tasks.items()):
        if task in grouped:
            continue
        if count and component_id == owner and task == first + count:
            count += 1
            continue
        if count:
            yield codes.setdefault(owner, len(codes)), first, count, 1, None
        first = task
        count = 1
        owner = component_id
    if count:
        yield codes.setdefault(owner, len(codes)), first, count, 1, None


def executors_of_runs(runs: Sequence[Run]) -> Executors:
    """The executors of one topology from all of its runs, in any order."""
    units: list[int] = []
    components: list[int] = []
    has_groups = any(size > 1 for _, _, _, size, _ in runs)
    groups: list[Sequence[int]] | None = [] if has_groups else None
    # By their first tasks: executors are in this order.
    for component, first, count, size, irregular in sorted(runs, key=itemgetter(1)):
        firsts = range(first, first + count * size, size)
        units += firsts
        components += [component] * count
        if groups is None:
            continue
        if irregular is None:
            groups += [range(unit, unit + size) for unit in firsts]
        else:
            groups.append(irregular)
    return Executors(units, components, groups)
