"""Numbers of executors and tasks of a topology, task ids, and their groups.

The components that the system adds are among them. See ``docs/decisions.md#executor-unit`` and
``docs/decisions.md#task-numbering``.
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
"""Grouping by the root of a tuple tree: one acker task gets all of its messages."""


def with_system_components(spec: TopologySpec, conf: Conf) -> TopologySpec:
    """The topology with the components of the system.

    ``__acker``, ``__topology_master`` and ``__system`` are appended to its bolts, in this order.
    The worker runs these ids natively. Here they are ordinary components, so that task numbering,
    the placement and ``show`` treat them like any other. The stored topology does not contain them.
    ``conf`` is the total conf.

    ``__acker`` is there even with no ackers (then without tasks), and is capped by
    ``topology.max.task.parallelism``. It reads every spout's init stream and every bolt's ack, fail
    and reset streams; spouts read its responses on direct streams. ``__system`` has no tasks.
    """
    ackers = conf.get("topology.acker.executors")
    if ackers is None:
        ackers = 1
    max_parallelism = conf.get("topology.max.task.parallelism")
    if max_parallelism is not None:
        ackers = min(ackers, max_parallelism)
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
    """Subscriptions of the acker to the ack streams of these components."""
    for component_id in components:
        for stream in additions.outputs:
            if stream.startswith("__ack_"):
                yield InputSpec(component=component_id, stream=stream, grouping=_BY_ID)


def normalize_topology(conf: Conf, spec: TopologySpec) -> TopologySpec:
    """The topology with its final parallelism; a normalized topology does not change.

    ``conf`` is the total conf (cluster and topology). The parallelism of a component is its value
    in ``topology.bolt.parallelism``/``topology.spout.parallelism``, or the code's without such a
    value; then at most ``topology.max.task.parallelism`` (the component's conf before the
    topology's). ``topology.tasks`` (component before topology) is kept, capped likewise, if it is
    at least the parallelism; a smaller value is dropped, because every executor has a task. 0 is an
    exception: the component does not run.
    """
    return spec.model_copy(
        update={
            "bolts": _normalize_components(spec.bolts, conf, "topology.bolt.parallelism"),
            "spouts": _normalize_components(spec.spouts, conf, "topology.spout.parallelism"),
        }
    )


def _normalize_components(
    components: Mapping[str, ComponentSpec], conf: Conf, parallelism_key: str
) -> dict[str, ComponentSpec]:
    parallelism_of = conf.get(parallelism_key) or {}
    return {
        component_id: _normalize_component(component_id, part, conf, parallelism_of)
        for component_id, part in components.items()
    }


def _normalize_component(
    component_id: str, part: ComponentSpec, conf: Conf, parallelism_of: Mapping[str, Any]
) -> ComponentSpec:
    """The component with its final parallelism and ``topology.tasks``.

    ``parallelism_of`` is the conf's map of parallelism by component. Raises
    :class:`InvalidTopology` for a parallelism that is no whole number.
    """
    parallelism = parallelism_of.get(component_id, part.parallelism)
    if not isinstance(parallelism, int) or isinstance(parallelism, bool):
        raise InvalidTopology(
            f"component {component_id!r} has parallelism {parallelism!r}: "
            "give a whole number of at least 1"
        )
    layers: dict[LayerName, Conf] = {"total": conf, "component": part.conf}
    tasks = merged_value(layers, "topology.tasks")
    max_parallelism = merged_value(layers, "topology.max.task.parallelism")
    if max_parallelism is not None:
        parallelism = min(parallelism, max_parallelism)
        tasks = None if tasks is None else min(tasks, max_parallelism)
    part_conf = {key: value for key, value in part.conf.items() if key != "topology.tasks"}
    if tasks is not None and (tasks >= parallelism or tasks == 0):
        part_conf["topology.tasks"] = tasks
    elif conf.get("topology.tasks") is not None and part.conf.get("topology.tasks", 0) is None:
        # The component overrides the topology's value with null. The null stays, so that a second
        # normalization has the same result.
        part_conf["topology.tasks"] = None
    return part.model_copy(update={"parallelism": parallelism, "conf": part_conf})


def executor_counts(spec_with_system: TopologySpec) -> dict[str, int]:
    """Component -> number of executors.

    The topology has its system components. Components without executors are omitted.
    """
    counts: dict[str, int] = {}
    for component_id, _, part in spec_with_system.components():
        if part.parallelism > 0 and part.conf.get("topology.tasks") != 0:
            counts[component_id] = part.parallelism
    return counts


def task_count(part: ComponentSpec, conf: Conf) -> int:
    """Number of tasks of a normalized component; 0 if it does not run."""
    if part.parallelism < 1 or part.conf.get("topology.tasks") == 0:
        return 0
    count = max(part.parallelism, part.conf.get("topology.tasks") or 0)
    max_parallelism = part.conf.get("topology.max.task.parallelism")
    if not max_parallelism:
        max_parallelism = conf.get("topology.max.task.parallelism")
    return min(count, max_parallelism) if max_parallelism else count


def number_tasks(spec_with_system: TopologySpec, conf: Conf) -> TaskTable:
    """Task ids 1, 2, ... for a normalized topology that has its system components.

    Bolts in declared order, then ``__acker``, then ``__topology_master``, then spouts in declared
    order; one contiguous block each; ``topology.max.task.parallelism`` of the total ``conf`` caps
    every block. Components without tasks (``__system``; ``__acker`` without ackers) are not in the
    table. Raises :class:`InvalidTopology` if no component of the user has a task.
    """
    components: dict[str, ComponentTasks] = {}
    first = 1
    for component_id, kind, part in spec_with_system.components():
        count = task_count(part, conf)
        if count:
            tasks = encode_ranges(range(first, first + count))
            components[component_id] = ComponentTasks(type=kind, tasks=tasks)
            first += count
    if all(component_id.startswith("__") for component_id in components):
        raise InvalidTopology(
            f"topology {spec_with_system.name!r} has no task: "
            "give a component a parallelism and topology.tasks of at least 1"
        )
    return TaskTable(components=components)


def topology_master_task(table: TaskTable) -> int:
    """Task id of the topology master.

    Raises :class:`InvalidTopology` for a table without exactly one such task.
    """
    master = table.components.get(TOPOLOGY_MASTER)
    if master is None or len(master.ids) != 1:
        raise InvalidTopology(
            f"the task table has no single {TOPOLOGY_MASTER} task: it was not made by this system"
        )
    return master.ids[0]


def partition(ids: Sequence[int], groups: int) -> tuple[tuple[int, ...], ...]:
    """Split the ids into ``groups`` runs of nearly equal length, larger ones first.

    Five ids in three groups are 2, 2 and 1. There are never more groups than ids.
    """
    groups = min(groups, len(ids))
    if groups < 1:
        return ()
    size, larger_groups = divmod(len(ids), groups)
    runs: list[tuple[int, ...]] = []
    start = 0
    for index in range(groups):
        end = start + size + (1 if index < larger_groups else 0)
        runs.append(tuple(ids[start:end]))
        start = end
    return tuple(runs)


def executors_of(
    table: TaskTable, executors: Mapping[str, int]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Component -> its executors, each a run of its task ids.

    ``executors`` is component -> number, as in StormBase. If it omits a component, each task of the
    component is a separate executor.
    """
    return {
        component_id: partition(part.ids, executors.get(component_id) or len(part.ids))
        for component_id, part in table.components.items()
    }


def fixed_task_components(spec: TopologySpec) -> frozenset[str]:
    """Components of a normalized topology whose number of tasks is configured.

    ``topology.tasks`` fixes it.
    """
    return frozenset(
        name for name, _, part in spec.components() if part.conf.get("topology.tasks") is not None
    )


def rescale(
    table: TaskTable, executors: Mapping[str, int], fixed: Collection[str] = ()
) -> TaskTable:
    """The task table for new numbers of executors, by component.

    A component in ``fixed`` keeps its ids, and more executors than tasks are refused. Any other
    component gets as many tasks as executors: new ids are above the highest of the topology, in the
    table's order, and the highest ids are removed first. Ids of components that ``executors`` does
    not name never change. Raises :class:`InvalidRequest`.
    """
    highest = max(table.component_of(), default=0)
    components = dict(table.components)
    for component_id, part in table.components.items():
        count = executors.get(component_id)
        if count is None:
            continue
        ids = part.ids
        if component_id in fixed:
            if count > len(ids):
                raise InvalidRequest(
                    f"component {component_id!r} has {len(ids)} tasks by topology.tasks "
                    f"and cannot have {count} executors: ask for at most {len(ids)}, "
                    "or submit it again with more tasks"
                )
            continue
        if count > len(ids):
            missing = count - len(ids)
            ids = (*ids, *range(highest + 1, highest + 1 + missing))
            highest += missing
        else:
            ids = ids[:count]
        components[component_id] = part.model_copy(update={"tasks": encode_ranges(ids)})
    return table.model_copy(update={"components": components})
