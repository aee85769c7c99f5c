"""Checks of a current assignment against the placement rules. Pure; one sentence for each fault.

Healing moves nothing that lives, so an assignment may become uneven until the next rebalance.
Requested workers (user-defined and old ones) may ask for an uneven one: then quotas are not
checked.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from storm_dagster.core.scheduling.plan import event_of
from storm_dagster.model.placement import TopologyToPlace
from storm_dagster.model.ranges import decode_ranges
from storm_dagster.model.slot import Slot


def quota_faults(topology: TopologyToPlace) -> Iterator[str]:
    """More workers than asked for, or an uneven spread of executors. ``old`` is the current
    assignment.
    """
    if topology.user_workers or topology.use_old or topology.differ_node:
        return
    event = event_of(topology)
    if not event.strategy.spreads:
        return
    wanted, alone = event.strategy.workers(event.about)
    component, master = event.executors.component, event.about.master
    workers = [
        [component[position] for position in worker.holds]
        for worker in event.history.old
        if worker.holds
    ]
    if len(workers) > wanted:
        yield f"{topology.name} has {len(workers)} workers and wants {wanted}"
    if alone and len(workers) > 1 and any(master in held and len(held) > 1 for held in workers):
        yield f"{topology.name}: the topology master is not alone in its worker"
    sizes = [len(held) for held in workers if not (alone and master in held)]
    if sizes and max(sizes) - min(sizes) > 1:
        yield f"{topology.name}: workers hold {min(sizes)} to {max(sizes)} executors"


def isolation_faults(topology: TopologyToPlace, hosts: Collection[str]) -> Iterator[str]:
    """Workers outside of ``isolation.scheduler.machines``, while one of these is among the live
    ``hosts``.
    """
    if not set(topology.isolation) & set(hosts):
        return
    for worker in topology.old:
        if worker.host not in topology.isolation:
            yield f"{topology.name}: {worker.slot.key} is on {worker.host}, not on its isolation hosts"


def differ_node_faults(topology: TopologyToPlace) -> Iterator[str]:
    """Supervisors with two executors of a component that has ``task.on.differ.node``."""
    event = event_of(topology)
    if not event.strategy.spreads:
        return  # one supervisor takes everything: there is no other node
    for component, name in zip(event.about.differ, event.about.differ_names, strict=True):
        on_node = Counter(
            worker.node
            for worker in event.history.old
            for position in worker.holds
            if event.executors.component[position] == component
        )
        for node, count in sorted(on_node.items()):
            if count > 1:
                yield f"{topology.name}: {count} executors of {name!r} are on {node}"


def move_faults(
    name: str, moves: Mapping[str, Any], workers: Mapping[str, Collection[int]]
) -> Iterator[str]:
    """A rebalance that moved more tasks than the change of worker sizes makes necessary.

    ``moves`` is the record of the rebalance: ``before`` (``node:port`` -> task ranges) and
    ``slack`` (tasks that may move for other reasons). ``workers`` is its result.
    """
    before = {key: set(decode_ranges(tasks)) for key, tasks in moves["before"].items()}
    now = {task: key for key, tasks in workers.items() for task in tasks}
    held = {key: {task for task in tasks if task in now} for key, tasks in before.items()}
    moved = sum(now[task] != key for key, tasks in held.items() for task in tasks)
    left = Counter(Slot.parse(key).node for key in workers)
    had: list[int] = []
    for key, tasks in sorted(held.items(), key=lambda item: -len(item[1])):
        # Of a supervisor that has fewer workers now, the smallest had to go.
        node = Slot.parse(key).node
        had += [len(tasks)] if left[node] > 0 else []
        left[node] -= 1
    has = sorted((len(tasks) for tasks in workers.values()), reverse=True)
    needed = sum(map(len, held.values())) - sum(map(min, had, has))
    if moved > needed + moves["slack"]:
        yield f"{name}: the last rebalance moved {moved} tasks where {needed + moves['slack']} were enough"
