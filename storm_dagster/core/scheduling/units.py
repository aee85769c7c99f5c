"""Conf, components and executors of a topology, as placement rules read them.

The rules know components by number and executors by position. Spark's Python workers import these
modules: at import they need the standard library and constants of ``model`` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from storm_dagster.model.names import ACKER, TOPOLOGY_MASTER
from storm_dagster.model.placement_reasons import MASTER_ALONE_FROM

if TYPE_CHECKING:
    from storm_dagster.model.placement import Event, TopologyToPlace

Row = dict[str, Any]
"""A row that a step of the placement hands on."""

Codes = dict[str, int]
"""Component -> its number in this event, in order of appearance."""


class TopologySummary(NamedTuple):
    """Conf and components of a topology, for one event.

    Fields without a line have the meaning of those of :class:`TopologyToPlace`.
    """

    name: str
    strategy: str
    event: Event
    reassign: bool
    use_old: bool
    user_workers: bool
    """True if there are user-defined workers."""
    workers: int
    executors: int
    """Parallelism of all components but the topology master."""
    single_master: bool | None
    isolation: Sequence[str]
    reserve: int
    memory: int
    """Bytes of each worker, if none are requested; ``master_memory`` of the topology master's."""
    master_memory: int | None
    cpu: int
    acker: int
    """Number of the component, negative without one; so is ``master``."""
    master: int
    related: Sequence[Sequence[int]]
    """Component -> components that it trades tuples with: a bolt's inputs, a spout's readers."""
    units: Sequence[int]
    """Component -> number of its executors."""
    differ: Sequence[int]
    """Components with ``task.on.differ.node``, in order of ``differ_names``."""
    differ_names: Sequence[str]

    @property
    def system(self) -> frozenset[int]:
        """Components that are placed last, and never by the components they trade with."""
        return frozenset((self.acker, self.master))

    @property
    def keeps(self) -> bool:
        """True if the event is a rebalance that moves the fewest tasks."""
        return self.event == "rebalance" and not self.reassign


class Executors:
    """Executors of one topology by position, in ascending order of their first tasks."""

    __slots__ = ("component", "groups", "unit")

    def __init__(
        self, unit: list[int], component: list[int], groups: list[Sequence[int]] | None
    ) -> None:
        self.unit = unit
        """First task ids, ascending."""
        self.component = component
        self.groups = groups
        """Tasks of each, ascending; ``None`` when every executor has one task."""

    def __len__(self) -> int:
        return len(self.unit)

    def tasks(self) -> Sequence[Sequence[int]]:
        """The tasks of each executor."""
        if self.groups is None:
            return [(unit,) for unit in self.unit]
        return self.groups


def service_order(topologies: Sequence[TopologyToPlace]) -> list[TopologyToPlace]:
    """Sort the topologies by priority, lower first, then by name."""
    return sorted(topologies, key=lambda topology: (topology.priority, topology.name))


def executors_of(topology: TopologyToPlace, codes: Codes) -> Executors:
    """Return the topology's executors; a task in no group is an executor.

    Numbers new components in ``codes``.
    """
    several = several_tasks(topology)
    first_tasks = set(topology.tasks)
    for tasks in several.values():
        first_tasks.difference_update(tasks[1:])
    unit = sorted(first_tasks)
    component = [codes.setdefault(topology.tasks[task], len(codes)) for task in unit]
    groups: list[Sequence[int]] | None = None
    if several:
        groups = [several.get(task, (task,)) for task in unit]
    return Executors(unit, component, groups)


def several_tasks(topology: TopologyToPlace) -> dict[int, tuple[int, ...]]:
    """First task -> tasks, ascending, of executors with several tasks."""
    groups = (tuple(sorted(group)) for group in topology.executors if len(group) > 1)
    return {group[0]: group for group in groups if group[0] in topology.tasks}


def summary_of(topology: TopologyToPlace, codes: Codes, counts: Sequence[int]) -> TopologySummary:
    """Return the summary of a topology for one event.

    ``codes`` are all components of the event, ``counts`` the number of executors of each.
    """
    readers: dict[str, list[str]] = {}
    for reader, sources in topology.inputs.items():
        for source in sources:
            readers.setdefault(source, []).append(reader)
    related: list[list[int]] = []
    for name in codes:
        partners = topology.inputs.get(name) or readers.get(name, ())
        related.append(sorted({codes[partner] for partner in partners if partner in codes}))
    differ = sorted(name for name in set(topology.differ_node) if name in codes)
    return TopologySummary(
        name=topology.name,
        strategy=topology.strategy,
        event=topology.event,
        reassign=topology.reassign,
        use_old=topology.use_old,
        user_workers=bool(topology.user_workers),
        workers=topology.workers,
        executors=sum(topology.parallelism.values()),
        single_master=topology.single_master,
        isolation=topology.isolation,
        reserve=topology.reserve,
        memory=topology.memory_bytes,
        master_memory=topology.master_memory_bytes,
        cpu=topology.cpu,
        acker=codes.get(ACKER, -2),
        master=codes.get(TOPOLOGY_MASTER, -2),
        related=related,
        units=counts,
        differ=[codes[name] for name in differ],
        differ_names=differ,
    )


def worker_count(
    workers: int | None, executors: int, single_master: bool | None
) -> tuple[int, bool]:
    """Return the number of workers, and True if one is the topology master's alone.

    ``executors`` is the parallelism of all components but the topology master. As in JStorm, the
    number is the smaller of ``workers`` and ``executors``. It is one more if the master is to be
    alone. If the conf does not say, the master is alone from ten workers on.
    """
    count = executors if workers is None else min(workers, executors)
    master_alone = single_master
    if master_alone is None:
        master_alone = count >= MASTER_ALONE_FROM
    if master_alone:
        count += 1
    return max(1, count), master_alone
