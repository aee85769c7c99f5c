"""Components that the system adds; numbers of executors and tasks, task ids, and the executors that
group them.

See ``docs/decisions.md#executor-unit`` and ``docs/decisions.md#task-numbering``.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from storm_dagster.core.submission.system_components import (
    ACKER_COMPONENT,
    BOLT_ADDITIONS,
    SPOUT_ADDITIONS,
    SYSTEM_COMPONENT,
    TOPOLOGY_MASTER_COMPONENT,
    Additions,
)
from storm_dagster.model.conf import Conf
from storm_dagster.model.conf_layers import LayerName, merged_value
from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.model.groupings import GroupingSpec
from storm_dagster.model.names import ACKER, SYSTEM, TOPOLOGY_MASTER
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.records import ComponentTasks, TaskTable
from storm_dagster.model.topology import ComponentSpec, InputSpec, TopologySpec

_BY_ID = GroupingSpec(type="fields", fields=("id",))


def with_system_components(spec: TopologySpec, conf: Conf) -> TopologySpec:
    """The topology with ``__acker``, ``__topology_master`` and ``__system`` appended to its bolts,
    in this order.

    The worker runs these ids natively; here they stand as ordinary components, so that task
    numbering, the placement and ``show`` treat them like any other. The stored topology does not
    contain them. ``conf`` is the total conf. ``__acker`` stands there even with no ackers (then
    without tasks), is capped by ``topology.max.task.parallelism``, and hears every spout's init and
    every bolt's ack, fail and reset stream; spouts hear its answers on direct streams. ``__system``
    has no tasks.
    """
    ackers = conf.get("topology.acker.executors")
    ackers = 1 if ackers is None else ackers
    if (most := conf.get("topology.max.task.parallelism")) is not None:
        ackers = min(ackers, most)
    inputs = (
        *_acker_inputs(spec.spouts, SPOUT_ADDITIONS),
        *_acker_inputs(spec.bolts, BOLT_ADDITIONS),
    )
    system = {
        ACKER: ACKER_COMPONENT.model_copy(update={"parallelism": ackers, "inputs": inputs}),
        TOPOLOGY_MASTER: TOPOLOGY_MASTER_COMPONENT,
        SYSTEM: SYSTEM_COMPONENT,
    }
    bolts = {name: BOLT_ADDITIONS.add_to(bolt) for name, bolt in spec.bolts.items()}
    spouts = {name: SPOUT_ADDITIONS.add_to(spout) for name, spout in spec.spouts.items()}
    return spec.model_copy(update={"bolts": {**bolts, **system}, "spouts": spouts})


def _acker_inputs(components: Iterable[str], additions: Additions) -> Iterator[InputSpec]:
    """Subscriptions of the acker to the streams for acks that these components have."""
    for component_id in components:
        for stream in additions.outputs:
            if stream.startswith("__ack_"):
                yield InputSpec(component=component_id, stream=stream, grouping=_BY_ID)


def normalize_topology(conf: Conf, spec: TopologySpec) -> TopologySpec:
    """The topology with its final parallelism; normalizing twice changes nothing.

    ``conf`` is the total conf (cluster and topology). The parallelism of a component is that of
    ``topology.bolt.parallelism``/``topology.spout.parallelism`` when it stands there, else the
    code's; then at most ``topology.max.task.parallelism`` (the component's conf before the
    topology's). ``topology.tasks`` (component before topology) is kept, capped likewise, when it is
    at least the parallelism; a smaller one is dropped, because every executor has a task. Except 0:
    then the component does not run.
    """
    changed: dict[str, dict[str, ComponentSpec]] = {}
    for kind, parts in (("bolt", spec.bolts), ("spout", spec.spouts)):
        given = conf.get(f"topology.{kind}.parallelism") or {}
        changed[f"{kind}s"] = {
            name: _normalized(name, part, conf, given) for name, part in parts.items()
        }
    return spec.model_copy(update=changed)


def _normalized(
    component_id: str, part: ComponentSpec, conf: Conf, overrides: dict[str, Any]
) -> ComponentSpec:
    parallelism = overrides.get(component_id, part.parallelism)
    if not isinstance(parallelism, int) or isinstance(parallelism, bool):
        raise InvalidTopology(
            f"component {component_id!r} has parallelism {parallelism!r}: give a whole number of at least 1"
        )
    layers: dict[LayerName, Conf] = {"total": conf, "component": part.conf}
    tasks = merged_value(layers, "topology.tasks")
    most = merged_value(layers, "topology.max.task.parallelism")
    if most is not None:
        parallelism = min(parallelism, most)
        tasks = None if tasks is None else min(tasks, most)
    kept = {key: value for key, value in part.conf.items() if key != "topology.tasks"}
    if tasks is not None and (tasks >= parallelism or tasks == 0):
        kept["topology.tasks"] = tasks
    elif conf.get("topology.tasks") is not None and part.conf.get("topology.tasks", 0) is None:
        # It takes back the topology's value, also when this is normalized again.
        kept["topology.tasks"] = None
    return part.model_copy(update={"parallelism": parallelism, "conf": kept})


def wanted_executors(spec_with_system: TopologySpec) -> dict[str, int]:
    """Component -> executors of a topology that has its system components; those without any are
    left out.
    """
    return {
        component_id: part.parallelism
        for component_id, _, part in spec_with_system.components()
        if part.parallelism > 0 and part.conf.get("topology.tasks") != 0
    }


def _task_count(part: ComponentSpec, conf: Conf) -> int:
    if part.parallelism < 1 or part.conf.get("topology.tasks") == 0:
        return 0
    count = max(part.parallelism, part.conf.get("topology.tasks") or 0)
    most = part.conf.get("topology.max.task.parallelism") or conf.get(
        "topology.max.task.parallelism"
    )
    return min(count, most) if most else count


def number_tasks(spec_with_system: TopologySpec, conf: Conf) -> TaskTable:
    """Task ids 1, 2, ... for a normalized topology that has its system components.

    Bolts in declared order, then ``__acker``, then ``__topology_master``, then spouts in declared
    order; one contiguous block each; ``topology.max.task.parallelism`` of the total ``conf`` caps
    every block. Components without tasks (``__system``; ``__acker`` without ackers) are not in the
    table. Raises :class:`InvalidTopology` when there is no task of the user's.
    """
    components: dict[str, ComponentTasks] = {}
    first = 1
    for component_id, kind, part in spec_with_system.components():
        if count := _task_count(part, conf):
            components[component_id] = ComponentTasks(
                type=kind, tasks=encode_ranges(range(first, first + count))
            )
            first += count
    if all(component_id.startswith("__") for component_id in components):
        raise InvalidTopology(
            f"topology {spec_with_system.name!r} has no task: give a component a parallelism and topology.tasks of at least 1"
        )
    return TaskTable(components=components)


def topology_master_task(table: TaskTable) -> int:
    """Task id of the topology master."""
    master = table.components.get(TOPOLOGY_MASTER)
    if master is None or len(master.ids) != 1:
        raise InvalidTopology(
            f"the task table has no single {TOPOLOGY_MASTER} task: it was not made by this system"
        )
    return master.ids[0]


def partition(ids: Sequence[int], groups: int) -> tuple[tuple[int, ...], ...]:
    """The ids as ``groups`` runs of nearly equal length, larger ones first; never more groups than
    ids.

    Five ids in three groups are 2, 2 and 1.
    """
    groups = min(groups, len(ids))
    if groups < 1:
        return ()
    size, larger = divmod(len(ids), groups)
    ends = [(index + 1) * size + min(index + 1, larger) for index in range(groups)]
    return tuple(tuple(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False))


def executors_of(
    table: TaskTable, executors: Mapping[str, int]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Component -> its executors, each a run of its task ids.

    ``executors`` (component -> number, as in StormBase) may leave a component out: then each of its
    tasks is an executor of its own.
    """
    return {
        component_id: partition(part.ids, executors.get(component_id) or len(part.ids))
        for component_id, part in table.components.items()
    }


def fixed_task_components(spec: TopologySpec) -> frozenset[str]:
    """Components of a normalized topology whose number of tasks is fixed by ``topology.tasks``."""
    return frozenset(
        name for name, _, part in spec.components() if part.conf.get("topology.tasks") is not None
    )


def rescale(
    table: TaskTable, executors: Mapping[str, int], fixed: Collection[str] = ()
) -> TaskTable:
    """The task table for new numbers of executors.

    A component in ``fixed`` keeps its ids, and more executors than tasks are refused; of any other
    the tasks become as many as its executors: new ids above the highest of the topology, in the
    table's order, and the highest ids are removed first. Ids of components that are not named never
    change. Raises :class:`InvalidRequest`.
    """
    highest = max((task for part in table.components.values() for task in part.ids), default=0)
    components = dict(table.components)
    for component_id, part in table.components.items():
        wanted = executors.get(component_id)
        if wanted is None:
            continue
        ids = part.ids
        if component_id in fixed:
            if wanted > len(ids):
                raise InvalidRequest(
                    f"component {component_id!r} has {len(ids)} tasks by topology.tasks and cannot have {wanted} "
                    f"executors: ask for at most {len(ids)}, or submit it again with more tasks"
                )
            continue
        if wanted > len(ids):
            added = tuple(range(highest + 1, highest + 1 + wanted - len(ids)))
            highest = added[-1]
            ids = ids + added
        else:
            ids = ids[:wanted]
        components[component_id] = part.model_copy(update={"tasks": encode_ranges(ids)})
    return table.model_copy(update={"components": components})
