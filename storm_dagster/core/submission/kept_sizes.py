"""Numbers of workers and executors that an update keeps from rebalances of the former topology."""

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
    workers: int | None = None
    if WORKERS_KEY not in named and new.workers == former.workers != base.workers:
        workers = base.workers
    executors: dict[str, int] = {}
    for component, count in new.executors.items():
        current = base.executors.get(component, count)
        is_named = component in named or former.executors.get(component) != count
        if component == TOPOLOGY_MASTER or is_named or current == count:
            continue
        executors[component] = min(current, limits.get(component, current))
    return KeptSizes(workers, executors)


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
