"""Placement of all tasks of a topology in one engine, without other workers.

The test harness and local runs use it.
"""

from collections.abc import Mapping
from typing import Any

from storm_dagster.model.names import ACKER
from storm_dagster.model.slot import Slot
from storm_dagster.model.topology import TopologySpec
from storm_dagster.worker.dataplane.routes import Placement


def number_tasks(spec: TopologySpec, conf: Mapping[str, Any]) -> dict[int, str]:
    """Return task id -> component, for the topology as its worker runs it (after fusion).

    Tasks are numbered in the order of the components. There is one acker, the last task, unless
    ``topology.acker.executors`` is 0: all acks meet in one process.
    """
    components: dict[int, str] = {}
    for component, _, part in spec.components():
        for _ in range(part.conf.get("topology.tasks") or part.parallelism):
            components[len(components) + 1] = component
    if conf.get("topology.acker.executors") != 0:
        components[len(components) + 1] = ACKER
    return components


def place_all(components: Mapping[int, str], slot: Slot) -> Placement:
    """Return the placement in which ``slot`` has all tasks, and all of them are open."""
    tasks = frozenset(components)
    slots = dict.fromkeys(components, slot)
    return Placement(0, slots, {}, components, tasks, tasks)
