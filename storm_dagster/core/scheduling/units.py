"""Units of placement: executors, whose tasks stay together, and the number of workers for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from storm_dagster.model.names import ACKER, TOPOLOGY_MASTER
from storm_dagster.model.placement import TopologyToPlace
from storm_dagster.model.placement_reasons import MASTER_ALONE_FROM


@dataclass(frozen=True)
class Unit:
    """One executor: tasks of one component that are never separated."""

    component: str
    tasks: tuple[int, ...]
    """Ascending."""

    @property
    def first(self) -> int:
        """Lowest task id: identifies the unit and orders units."""
        return self.tasks[0]

    @property
    def is_system(self) -> bool:
        """Whether it is an acker or the topology master."""
        return self.component in (ACKER, TOPOLOGY_MASTER)

    @property
    def is_master(self) -> bool:
        """Whether it is the topology master."""
        return self.component == TOPOLOGY_MASTER


def units_of(topology: TopologyToPlace) -> tuple[Unit, ...]:
    """The topology's executors in ascending order of their first task; a task in no group is one of its own."""
    grouped: set[int] = set()
    units: list[Unit] = []
    for group in topology.executors:
        tasks = tuple(sorted(group))
        if tasks and tasks[0] in topology.tasks:
            units.append(Unit(topology.tasks[tasks[0]], tasks))
            grouped.update(tasks)
    units.extend(Unit(component, (task,)) for task, component in topology.tasks.items() if task not in grouped)
    return tuple(sorted(units, key=lambda unit: unit.first))


def task_count(units: Iterable[Unit]) -> int:
    """Number of tasks of the units together."""
    return sum(len(unit.tasks) for unit in units)


def exchanges(topology: TopologyToPlace) -> dict[str, frozenset[str]]:
    """Component -> components that it trades tuples with: a bolt's inputs, a spout's readers."""
    related: dict[str, frozenset[str]] = {}
    for component in {*topology.tasks.values(), *topology.inputs}:
        inputs = topology.inputs.get(component, ())
        related[component] = frozenset(inputs) or frozenset(
            reader for reader, sources in topology.inputs.items() if component in sources
        )
    return related


def worker_count(workers: int | None, executors: int, single_master: bool | None) -> tuple[int, bool]:
    """Number of workers of a topology, and whether its topology master has one of them for itself.

    ``executors`` is the parallelism of all components but the topology master. As in JStorm,
    the smaller of the two, and one more for the master when it is to be alone, or when the conf does not say
    and there are at least ten.
    """
    count = executors if workers is None else min(workers, executors)
    alone = single_master if single_master is not None else count >= MASTER_ALONE_FROM
    return max(1, count + 1 if alone else count), alone
