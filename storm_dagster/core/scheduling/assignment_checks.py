"""Checks of a current assignment against the placement rules.

Pure; a check yields one sentence for each fault. Healing does not move live tasks, so an assignment
may become uneven until the next rebalance. Requested workers (user-defined and old ones) may be
uneven: then quotas are not checked.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from storm_dagster.core.scheduling.plan import event_of
from storm_dagster.model.placement import TopologyToPlace
from storm_dagster.model.ranges import decode_ranges
from storm_dagster.model.slot import Slot


def quota_faults(topology: TopologyToPlace) -> Iterator[str]:
    """Yield a fault for too many workers, and for an uneven spread of executors.

    ``old`` of the topology is the current assignment.
    """
    if topology.user_workers or topology.use_old or topology.differ_node:
        return
    event = event_of(topology)
    if not event.strategy.spreads:
        return
    max_workers, master_alone = event.strategy.workers(event.about)
    workers = [worker for worker in event.history.old if worker.holds]
    if len(workers) > max_workers:
        yield f"{topology.name} has {len(workers)} workers and wants {max_workers}"
    sizes: list[int] = []
    for worker in workers:
        kinds = {event.executors.component[position] for position in worker.holds}
        size = len(worker.holds)
        if not master_alone or event.about.master not in kinds:
            sizes.append(size)
        elif size > 1 and len(workers) > 1:
            yield f"{topology.name}: the topology master is not alone in its worker"
    if sizes and max(sizes) - min(sizes) > 1:
        yield f"{topology.name}: workers hold {min(sizes)} to {max(sizes)} executors"


def isolation_faults(topology: TopologyToPlace, hosts: Collection[str]) -> Iterator[str]:
    """Yield a fault for each worker outside of ``isolation.scheduler.machines``.

    They are faults only while one of these machines is among the live ``hosts``.
    """
    if not set(topology.isolation) & set(hosts):
        return
    for worker in topology.old:
        if worker.host not in topology.isolation:
            place = f"{topology.name}: {worker.slot.key} is on {worker.host}"
            yield f"{place}, not on its isolation hosts"


def differ_node_faults(topology: TopologyToPlace) -> Iterator[str]:
    """Yield a fault for each supervisor with two executors of a component.

    Only components with ``task.on.differ.node`` are checked.
    """
    event = event_of(topology)
    if not event.strategy.spreads:
        return  # one supervisor takes all tasks
    for component, name in zip(event.about.differ, event.about.differ_names, strict=True):
        on_node = Counter[str]()
        for worker in event.history.old:
            kinds = [event.executors.component[position] for position in worker.holds]
            on_node[worker.node] += kinds.count(component)
        for node, count in sorted(on_node.items()):
            if count > 1:
                yield f"{topology.name}: {count} executors of {name!r} are on {node}"


def move_faults(
    name: str, moves: Mapping[str, Any], workers: Mapping[str, Collection[int]]
) -> Iterator[str]:
    """Yield a fault if a rebalance moved more tasks than it needed to.

    The change of worker sizes makes some moves necessary. ``moves`` is the record of the rebalance:
    ``before`` (``node:port`` -> task ranges) and ``slack`` (tasks that may move for other reasons).
    ``workers`` is its result.
    """
    slot_of: dict[int, str] = {}
    for key, tasks in workers.items():
        slot_of.update(dict.fromkeys(tasks, key))
    # Only tasks that still exist count.
    old_tasks: dict[str, list[int]] = {}
    for key, ranges in moves["before"].items():
        old_tasks[key] = [task for task in set(decode_ranges(ranges)) if task in slot_of]
    moved = 0
    for key, tasks in old_tasks.items():
        moved += sum(slot_of[task] != key for task in tasks)
    free_workers = Counter(Slot.parse(key).node for key in workers)
    old_sizes: list[int] = []
    for key, tasks in sorted(old_tasks.items(), key=lambda entry: -len(entry[1])):
        # Of a supervisor that has fewer workers now, the smallest had to end.
        node = Slot.parse(key).node
        if free_workers[node] > 0:
            old_sizes.append(len(tasks))
        free_workers[node] -= 1
    new_sizes = sorted((len(tasks) for tasks in workers.values()), reverse=True)
    # Workers are compared by size: the fullest old one with the fullest new one.
    may_stay = sum(map(min, old_sizes, new_sizes))
    needed = sum(map(len, old_tasks.values())) - may_stay + moves["slack"]
    if moved > needed:
        yield f"{name}: the last rebalance moved {moved} tasks where {needed} were enough"
