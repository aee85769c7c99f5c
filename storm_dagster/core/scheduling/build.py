"""The planner's input for one topology.

It is built from the topology's normalized form, its merged conf and its task table.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from storm_dagster.model.conf import Conf
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.names import SYSTEM, TOPOLOGY_MASTER
from storm_dagster.model.placement import TopologyToPlace, UserWorker
from storm_dagster.model.records import TaskTable
from storm_dagster.model.topology import ComponentSpec, TopologySpec


def user_workers(entries: Any) -> tuple[UserWorker, ...]:
    """Parse the workers of ``use.userdefine.assignment``.

    :class:`InvalidRequest` names the first wrong entry.
    """
    workers: list[UserWorker] = []
    for number, entry in enumerate(entries or (), 1):
        try:
            workers.append(UserWorker.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            place = f"use.userdefine.assignment, worker {number}"
            if first["loc"]:
                place += ": " + ".".join(str(part) for part in first["loc"])
            raise InvalidRequest(
                f"{place}: {first['msg']}: "
                "give host, port, memory_bytes, cpu and components (component: number of tasks)"
            ) from None
    return tuple(workers)


def topology_to_place(
    *,
    name: str,
    topology_id: str,
    spec: TopologySpec,
    conf: Conf,
    tasks: TaskTable,
    executors: Mapping[str, Sequence[tuple[int, ...]]],
) -> TopologyToPlace:
    """Build a ``new`` event of the topology.

    Callers change event, old assignment, dead and unstopped tasks. ``spec`` is normalized and need
    not hold system components, ``conf`` is the total conf, ``executors`` are the groups of each
    component of ``tasks``. ``task.on.differ.node`` is read from each component's conf only. Raises
    :class:`InvalidRequest` for a malformed ``use.userdefine.assignment``.
    """
    user_components: dict[str, ComponentSpec] = {
        component: part
        for component, _, part in spec.components()
        if not component.startswith("__")
    }
    inputs: dict[str, tuple[str, ...]] = {}
    for component, part in user_components.items():
        if part.inputs:
            sources = [source.component for source in part.inputs]
            user_sources = [source for source in sources if source in user_components]
            inputs[component] = tuple(dict.fromkeys(user_sources))
    parallelism: dict[str, int] = {}
    for component, groups in executors.items():
        if groups and component not in (TOPOLOGY_MASTER, SYSTEM):
            parallelism[component] = len(groups)
    if conf.get("storm.cluster.mode") == "local":
        strategy = "local"
    else:
        strategy = _value(conf, "topology.scheduler.strategy", "balanced")
    return TopologyToPlace(
        name=name,
        topology_id=topology_id,
        priority=_value(conf, "topology.priority", 29),
        strategy=strategy,
        workers=_value(conf, "topology.workers", 1),
        tasks=tasks.component_of(),
        executors=_grouped_executors(executors),
        inputs=inputs,
        parallelism=parallelism,
        differ_node=tuple(
            component
            for component, part in user_components.items()
            if part.conf.get("task.on.differ.node")
        ),
        single_master=conf.get("topology.master.single.worker"),
        user_workers=user_workers(conf.get("use.userdefine.assignment")),
        use_old=bool(conf.get("use.old.assignment")),
        isolation=tuple(conf.get("isolation.scheduler.machines") or ()),
        reserve=_value(conf, "jstorm.reserve.workers", 0),
        memory_bytes=_value(conf, "worker.memory.size", 2 * 1024**3),
        master_memory_bytes=conf.get("topology.master.worker.memory.size"),
        cpu=_value(conf, "worker.cpu.slot.num", 1),
        conf=dict(conf),
    )


def _grouped_executors(
    executors: Mapping[str, Sequence[tuple[int, ...]]],
) -> tuple[tuple[int, ...], ...]:
    """All executors, those of one task first; empty if every executor has one task."""
    single: list[tuple[int, ...]] = []
    several: list[tuple[int, ...]] = []
    for groups in executors.values():
        single += [tuple(group) for group in groups if len(group) == 1]
        several += [tuple(group) for group in groups if len(group) > 1]
    return (*single, *several) if several else ()


def _value(conf: Conf, key: str, default: Any) -> Any:
    value = conf.get(key)
    return default if value is None else value
