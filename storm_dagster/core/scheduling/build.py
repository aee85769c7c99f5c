"""The planner's input for one topology, from its normalized form, its merged conf and its task
table.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from storm_dagster.model.conf import Conf
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.names import SYSTEM, TOPOLOGY_MASTER
from storm_dagster.model.placement import TopologyToPlace, UserWorker
from storm_dagster.model.records import TaskTable
from storm_dagster.model.topology import TopologySpec


def user_workers(entries: Any) -> tuple[UserWorker, ...]:
    """The workers of ``use.userdefine.assignment``; :class:`InvalidRequest` names the first wrong
    entry.
    """
    workers: list[UserWorker] = []
    for number, entry in enumerate(entries or (), 1):
        try:
            workers.append(UserWorker.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidRequest(
                f"use.userdefine.assignment, worker {number}: {where + ': ' if where else ''}{first['msg']}: "
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
    """Build a ``new`` event of the topology; callers change event, old assignment, dead and
    unstopped tasks.

    ``spec`` is normalized and need not hold system components, ``conf`` is the total conf,
    ``executors`` are the groups of each component of ``tasks``. ``task.on.differ.node`` is read
    from each component's conf only. Raises :class:`InvalidRequest` for a malformed
    ``use.userdefine.assignment``.
    """
    users = {
        component: part
        for component, _, part in spec.components()
        if not component.startswith("__")
    }
    single = [group[0] for groups in executors.values() for group in groups if len(group) == 1]
    several = tuple(
        tuple(group) for groups in executors.values() for group in groups if len(group) > 1
    )
    return TopologyToPlace(
        name=name,
        topology_id=topology_id,
        priority=_value(conf, "topology.priority", 29),
        strategy="local"
        if conf.get("storm.cluster.mode") == "local"
        else _value(conf, "topology.scheduler.strategy", "balanced"),
        workers=_value(conf, "topology.workers", 1),
        tasks=tasks.component_of(),
        executors=(*((task,) for task in single), *several) if several else (),
        inputs={
            component: tuple(
                dict.fromkeys(given.component for given in part.inputs if given.component in users)
            )
            for component, part in users.items()
            if part.inputs
        },
        parallelism={
            component: len(groups)
            for component, groups in executors.items()
            if groups and component not in (TOPOLOGY_MASTER, SYSTEM)
        },
        differ_node=tuple(
            component for component, part in users.items() if part.conf.get("task.on.differ.node")
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


def _value(conf: Conf, key: str, default: Any) -> Any:
    value = conf.get(key)
    return default if value is None else value
