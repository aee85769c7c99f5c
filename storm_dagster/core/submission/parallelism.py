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
    parallelism; a smaller one is dropped, because every executor has a task.
    """
    return spec.model_copy(
        update={
            "bolts": {
                component_id: _normalized(component_id, part, conf, conf.get("topology.bolt.parallelism") or {})
                for component_id, part in spec.bolts.items()
            },
            "spouts": {
                component_id: _normalized(component_id, part, conf, conf.get("topology.spout.parallelism") or {})
                for component_id, part in spec.spouts.items()
            },
        }
    )


def _normalized(component_id: str, part: ComponentSpec, conf: Conf, overrides: dict[str, Any]) -> ComponentSpec:
    parallelism = overrides.get(component_id, part.parallelism)
    if not isinstance(parallelism, int) or isinstance(parallelism, bool):
        raise InvalidTopology(
            f"component {component_id!r} has parallelism {parallelism!r}: give a whole number of at least 1"
        )
    tasks = part.conf.get("topology.tasks")
    if tasks is None:
        tasks = conf.get("topology.tasks")
    most = part.conf.get("topology.max.task.parallelism")
    if most is None:
        most = conf.get("topology.max.task.parallelism")
    if most is not None:
        parallelism = min(parallelism, most)
        tasks = None if tasks is None else min(tasks, most)
    own = {key: value for key, value in part.conf.items() if key != "topology.tasks"}
    if tasks is not None and tasks >= parallelism:
        own["topology.tasks"] = tasks
    return part.model_copy(update={"parallelism": parallelism, "conf": own})


def wanted_executors(spec_with_system: TopologySpec) -> dict[str, int]:
    """Component -> executors of a topology that has its system components; those without any are left out."""
    return {
        component_id: part.parallelism
        for component_id, _, part in spec_with_system.components()
        if part.parallelism > 0
    }
