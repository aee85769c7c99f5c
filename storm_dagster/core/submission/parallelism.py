"""Numbers of executors and tasks of each component (``docs/decisions.md#executor-unit``)."""

from __future__ import annotations

from typing import Any

from storm_dagster.model.conf import Conf
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.topology import ComponentSpec, TopologySpec


def normalize_topology(conf: Conf, spec: TopologySpec) -> TopologySpec:
    """The topology with its final parallelism; normalizing twice changes nothing.

    ``conf`` is the total conf (cluster and topology). The parallelism of a component is that of
    ``topology.bolt.parallelism``/``topology.spout.parallelism`` when it stands there, else the code's; then
    at most ``topology.max.task.parallelism`` (the component's conf before the topology's).
    ``topology.tasks`` (component before topology) is kept, capped likewise, when it is at least the
    parallelism; a smaller one is dropped, because every executor has a task. Except 0: then the component does not run.
    """
    changed: dict[str, dict[str, ComponentSpec]] = {}
    for kind, parts in (("bolt", spec.bolts), ("spout", spec.spouts)):
        given = conf.get(f"topology.{kind}.parallelism") or {}
        changed[f"{kind}s"] = {name: _normalized(name, part, conf, given) for name, part in parts.items()}
    return spec.model_copy(update=changed)


def _normalized(component_id: str, part: ComponentSpec, conf: Conf, overrides: dict[str, Any]) -> ComponentSpec:
    parallelism = overrides.get(component_id, part.parallelism)
    if not isinstance(parallelism, int) or isinstance(parallelism, bool):
        raise InvalidTopology(
            f"component {component_id!r} has parallelism {parallelism!r}: give a whole number of at least 1"
        )
    own = {**conf, **{key: value for key, value in part.conf.items() if value is not None}}
    tasks, most = own.get("topology.tasks"), own.get("topology.max.task.parallelism")
    if most is not None:
        parallelism = min(parallelism, most)
        tasks = None if tasks is None else min(tasks, most)
    kept = {key: value for key, value in part.conf.items() if key != "topology.tasks"}
    if tasks is not None and (tasks >= parallelism or tasks == 0):
        kept["topology.tasks"] = tasks
    return part.model_copy(update={"parallelism": parallelism, "conf": kept})


def wanted_executors(spec_with_system: TopologySpec) -> dict[str, int]:
    """Component -> executors of a topology that has its system components; those without any are left out."""
    return {
        component_id: part.parallelism
        for component_id, _, part in spec_with_system.components()
        if part.parallelism > 0 and part.conf.get("topology.tasks") != 0
    }
