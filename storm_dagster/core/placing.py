"""A topology's conf, components and tasks as the planners' input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from storm_dagster.model.conf import Conf
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.placement import TopologyToPlace, UserWorker
from storm_dagster.model.records import TaskTable
from storm_dagster.model.topology import TopologySpec

__all__ = ["to_place", "user_workers"]


def user_workers(conf: Conf) -> tuple[UserWorker, ...]:
    """``use.userdefine.assignment``, checked; :class:`InvalidTopology` names the entry that is wrong."""
    found: list[UserWorker] = []
    for index, entry in enumerate(conf.get("use.userdefine.assignment") or ()):
        try:
            found.append(UserWorker.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidTopology(
                f"use.userdefine.assignment[{index}]: {where}: {first['msg']}: "
                "an entry may have host, port, memory_bytes, cpu and components"
            ) from None
    return tuple(found)


def to_place(
    *,
    name: str,
    topology_id: str,
    spec: TopologySpec,
    conf: Conf,
    table: TaskTable,
    executors: Mapping[str, Sequence[tuple[int, ...]]],
    workers: int,
    **event: Any,
) -> TopologyToPlace:
    """The planner's input for a normalised topology without system components and its total conf.

    ``executors`` groups the tasks of ``table``; ``event`` holds the fields that depend on the event.
    """
    return TopologyToPlace(
        name=name,
        topology_id=topology_id,
        priority=conf.get("topology.priority", 29),
        strategy=conf.get("topology.scheduler.strategy", "balanced"),
        workers=workers,
        tasks=dict(sorted(table.component_of().items())),
        executors=tuple(sorted(group for groups in executors.values() for group in groups)),
        inputs={
            component_id: tuple(dict.fromkeys(given.component for given in part.inputs))
            for component_id, part in spec.bolts.items()
            if part.inputs
        },
        parallelism={
            component_id: len(groups)
            for component_id, groups in executors.items()
            if component_id != TOPOLOGY_MASTER
        },
        differ_node=tuple(
            component_id
            for component_id, _, part in spec.components()
            if part.conf.get("task.on.differ.node", False)
        ),
        single_master=conf.get("topology.master.single.worker"),
        user_workers=user_workers(conf),
        use_old=conf.get("use.old.assignment", False),
        isolation=tuple(conf.get("isolation.scheduler.machines") or ()),
        reserve=conf.get("jstorm.reserve.workers", 0),
        memory_bytes=conf.get("worker.memory.size", 2 * 1024**3),
        master_memory_bytes=conf.get("topology.master.worker.memory.size"),
        cpu=conf.get("worker.cpu.slot.num", 1),
        conf=dict(conf),
        **event,
    )
