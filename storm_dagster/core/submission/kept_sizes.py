"""Numbers of workers and executors that an update keeps from rebalances of the former topology.

A gray upgrade changes neither of them, whatever its code asks for. These numbers are noted in the
base (``unapplied_sizes``), because they differ from those of the code without a rebalance.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from storm_dagster.core.submission.tasks import executor_counts, with_system_components
from storm_dagster.model.conf import Conf
from storm_dagster.model.conf_layers import LayerName, merged_value
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.records import StormBase
from storm_dagster.model.topology import ComponentSpec, TopologySpec

WORKERS_KEY = "topology.workers"
_PARALLELISM_KEYS = ("topology.bolt.parallelism", "topology.spout.parallelism")
"""Keys of maps of component to number of executors."""
_RESOURCE_KEYS = ("worker.memory.size", "topology.master.worker.memory.size", "worker.cpu.slot.num")
"""Keys of which a placement copies the values into the assignment."""


def named_sizes(submitted: Conf) -> tuple[str, ...]:
    """Sizes that a call's own conf names: ``topology.workers``, and ids of components."""
    names: set[str] = set()
    if WORKERS_KEY in submitted:
        names.add(WORKERS_KEY)
    for key in _PARALLELISM_KEYS:
        names.update(submitted.get(key) or {})
    return tuple(sorted(names))


@dataclass(frozen=True)
class Sizes:
    """Workers and executors that a code asks for, without a rebalance."""

    workers: int
    executors: Mapping[str, int]
    """Component -> number of executors, system components included."""


@dataclass(frozen=True)
class KeptSizes:
    """Numbers that an update keeps."""

    workers: int | None = None
    """``None``: the new code's."""
    executors: Mapping[str, int] = field(default_factory=dict)
    """Component -> number of executors; the others have those of the new code."""


def sizes_of(spec: TopologySpec, total: Conf) -> Sizes:
    """Sizes of a normalized topology with its total conf."""
    return Sizes(int(total[WORKERS_KEY]), executor_counts(with_system_components(spec, total)))


def kept_sizes(
    base: StormBase,
    former: Sizes,
    new: Sizes,
    *,
    named: Collection[str],
    limits: Mapping[str, int],
) -> KeptSizes:
    """Numbers that a rebalance of the former topology set, and that the update does not name.

    A number is named by the call (``named`` are those of :func:`named_sizes`), or by a new code
    whose number is another one than that of the ``former`` code. ``limits`` are those of
    :func:`executor_limits` for the new code.
    """
    not_kept = {*named, *base.unapplied_sizes}
    workers: int | None = None
    if WORKERS_KEY not in not_kept and new.workers == former.workers != base.workers:
        workers = base.workers
    executors: dict[str, int] = {}
    for component, count in new.executors.items():
        current = base.executors.get(component, count)
        is_named = component in not_kept or former.executors.get(component) != count
        if component == TOPOLOGY_MASTER or is_named or current == count:
            continue
        executors[component] = min(current, limits.get(component, current))
    return KeptSizes(workers, executors)


def unapplied_sizes(base: StormBase, former: Sizes, new: Sizes) -> dict[str, tuple[int, int]]:
    """Sizes that the code of a gray upgrade changes, and that stay as they are.

    Name -> (number that stays, number of the ``new`` code), sorted. A number that a rebalance has
    set, another one than that of the ``former`` code, is the operator's and left out.
    """
    changes: dict[str, tuple[int, int]] = {}
    if former.workers == base.workers != new.workers:
        changes[WORKERS_KEY] = (base.workers, new.workers)
    for component, count in sorted(new.executors.items()):
        current = base.executors.get(component)
        if current is None or component == TOPOLOGY_MASTER:
            continue
        if former.executors.get(component) == current != count:
            changes[component] = (current, count)
    return changes


def describe_unapplied(name: str, sizes: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
    """Warnings of a gray upgrade of the topology ``name`` about :func:`unapplied_sizes`."""
    warnings: list[str] = []
    for size, (current, asked) in sizes.items():
        if size == WORKERS_KEY:
            number, option = f"{current} workers", f"-n {asked}"
        else:
            number, option = f"{current} executors of {size!r}", f"-e {size}={asked}"
        warnings.append(
            f"topology {name!r} keeps {number} in a gray upgrade, although the new code asks for "
            f"{asked}: `storm-dagster rebalance {name} {option}` changes them, and so does the "
            "next update"
        )
    return tuple(warnings)


def describe_unapplied_resources(name: str, former: Conf, new: Conf) -> tuple[str, ...]:
    """Warnings of a gray upgrade about memory and CPU of workers, which stand in the assignment.

    ``former`` and ``new`` are the total confs of both codes of the topology ``name``.
    """
    changed_keys = [key for key in _RESOURCE_KEYS if former.get(key) != new.get(key)]
    return tuple(
        f"topology {name!r} keeps {key} {former.get(key)} in a gray upgrade, although the new code "
        f"asks for {new.get(key)}: `storm-dagster rebalance {name}` applies it after the upgrade"
        for key in changed_keys
    )


def with_unapplied_sizes(base: StormBase, names: Collection[str]) -> StormBase:
    """The base after a gray upgrade whose code has changed the sizes of these names."""
    if not names:
        return base
    all_names = {*base.unapplied_sizes, *names}
    return base.model_copy(update={"unapplied_sizes": tuple(sorted(all_names))})


def with_rebalanced_sizes(base: StormBase, workers: int, executors: Mapping[str, int]) -> StormBase:
    """The base with the numbers of a rebalance; those that it changes are the operator's."""
    changed = {name for name, count in executors.items() if count != base.executors.get(name)}
    if workers != base.workers:
        changed.add(WORKERS_KEY)
    remaining = tuple(name for name in base.unapplied_sizes if name not in changed)
    return base.model_copy(
        update={
            "workers": workers,
            "executors": dict(executors),
            "unapplied_sizes": remaining,
        }
    )


def executor_limits(spec: TopologySpec, total: Conf) -> dict[str, int]:
    """Component -> most executors that it may have; without those that have no limit.

    Each executor has a task, of ``topology.tasks`` and ``topology.max.task.parallelism``.
    """
    limits: dict[str, int] = {}
    for component, _, part in spec.components():
        layers: dict[LayerName, Conf] = {"total": total, "component": part.conf}
        for key in ("topology.tasks", "topology.max.task.parallelism"):
            value = merged_value(layers, key)
            if value is not None:
                limits[component] = min(int(value), limits.get(component, int(value)))
    return limits


def with_parallelism(spec: TopologySpec, parallelism: Mapping[str, int]) -> TopologySpec:
    """The topology with these numbers of executors."""

    def scale(components: Mapping[str, ComponentSpec]) -> dict[str, ComponentSpec]:
        scaled = dict(components)
        for name, component in components.items():
            if name in parallelism:
                update = {"parallelism": parallelism[name]}
                scaled[name] = component.model_copy(update=update)
        return scaled

    return spec.model_copy(update={"spouts": scale(spec.spouts), "bolts": scale(spec.bolts)})
