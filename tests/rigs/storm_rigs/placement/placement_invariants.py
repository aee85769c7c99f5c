"""Invariants of every placement, whichever planner computed it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from storm_dagster.model.placement import (
    PlacementBatch,
    PlacementResult,
    TopologyPlacement,
    TopologyToPlace,
)
from storm_dagster.model.placement_reasons import MASTER_ALONE_FROM
from storm_dagster.model.slot import Slot


def placement_faults(batch: PlacementBatch, result: PlacementResult) -> list[str]:
    """Sentences about faults of the result; none when it keeps every rule.

    Every task once; no slot of two topologies; only slots that are offered, or that the topology
    had; the order of service; whole executors; one component never twice on a supervisor when it
    must not be; isolation, also of others; the number of workers; sizes as even as they can be in a
    new assignment.
    """
    faults: list[str] = []
    order = [
        topology.name for topology in sorted(batch.topologies, key=lambda t: (t.priority, t.name))
    ]
    if [placement.name for placement in result.placements] != order:
        faults.append(f"topologies were not served by priority and name: {order}")
        return faults
    by_name = {topology.name: topology for topology in batch.topologies}
    owners: dict[Slot, str] = {}
    for topology in batch.topologies:
        placement = result.placement(topology.name)
        # What a failed event leaves as it is still holds its slots.
        slots = {worker.slot for worker in placement.workers} | (
            {worker.slot for worker in topology.old} if placement.status == "failed" else set()
        )
        faults.extend(
            f"slot {slot} was given to {owners[slot]} and {topology.name}"
            for slot in slots
            if owners.setdefault(slot, topology.name) != topology.name
        )
    for placement in result.placements:
        topology = by_name[placement.name]
        faults.extend(
            f"{placement.name}: {text}" for text in _faults_of(batch, topology, placement)
        )
    return faults


def _faults_of(
    batch: PlacementBatch, topology: TopologyToPlace, placement: TopologyPlacement
) -> Iterator[str]:
    if placement.status == "failed":
        if placement.workers or not placement.error or not placement.error_type:
            yield "failed without a reason, or with workers"
        return
    placed = Counter(task for worker in placement.workers for task in worker.ids)
    placed.update(placement.unassigned.keys())
    if placed != Counter(topology.tasks.keys()):
        yield f"tasks are not placed once each: {placed}"
    if placement.reasons.keys() | placement.unassigned.keys() != topology.tasks.keys():
        yield "a task has no reason"
    if placement.worker_reasons.keys() != {worker.slot.key for worker in placement.workers}:
        yield "a worker has no reason"
    yield from _slot_faults(batch, topology, placement)
    for group in topology.executors:
        if sum(1 for worker in placement.workers if set(group) & set(worker.ids)) > 1:
            yield f"executor {group} was torn apart"
    if topology.strategy == "balanced":
        yield from _balance_faults(topology, placement)


def _slot_faults(
    batch: PlacementBatch, topology: TopologyToPlace, placement: TopologyPlacement
) -> Iterator[str]:
    had = {worker.slot: set(worker.ids) for worker in topology.old}
    theirs = {
        worker.slot for other in batch.topologies if other is not topology for worker in other.old
    }
    nodes = {node.id: node for node in batch.supervisors}
    isolated = {node.id for node in batch.supervisors if node.info.host in topology.isolation}
    closed = {host for other in batch.topologies for host in other.isolation}
    for worker in placement.workers:
        slot = worker.slot
        kept = slot.key in placement.kept
        if kept != (slot in had):
            yield f"{slot} is marked kept={kept}"
        stays = topology.event != "new" and had.get(slot, set()) & set(topology.tasks) == set(
            worker.ids
        )
        if stays:
            continue
        node = nodes.get(worker.node)
        if (
            node is None
            or worker.port not in node.info.ports
            or worker.port in node.used
            or slot in theirs
        ):
            yield f"{slot} was not offered"
        elif worker.host != node.info.host:
            yield f"{slot} is on {node.info.host}, not on {worker.host}"
        elif topology.event != "monitor" and isolated and worker.node not in isolated:
            yield f"{slot} is outside of {topology.isolation}"
        elif (
            not isolated
            and node.info.host in closed
            and (topology.event == "new" or slot not in had)
        ):
            yield f"{slot} is on a host that others are isolated on"


def _balance_faults(topology: TopologyToPlace, placement: TopologyPlacement) -> Iterator[str]:
    workers = placement.workers
    wanted = min(topology.workers, sum(topology.parallelism.values()))
    alone = (
        topology.single_master
        if topology.single_master is not None
        else wanted >= MASTER_ALONE_FROM
    )
    if topology.event == "new" and len(workers) > max(1, wanted + bool(alone)):
        yield f"{len(workers)} workers instead of {wanted + bool(alone)}"
    requested = bool(topology.user_workers or topology.use_old)
    if not requested:
        yield from _differ_faults(topology, placement)
    if topology.event != "new" or requested:
        return
    masters = [worker for worker in workers if "__topology_master" in _owners(topology, worker.ids)]
    if alone and len(topology.tasks) > 1 and any(len(worker.ids) > 1 for worker in masters):
        yield "the topology master is not alone"
    others = [worker for worker in workers if not (alone and worker in masters)]
    sizes = {len(worker.ids) for worker in others}
    if (
        not topology.executors
        and not topology.differ_node
        and sizes
        and max(sizes) - min(sizes) > 1
    ):
        yield f"workers hold {sorted(sizes)} tasks"


def _owners(topology: TopologyToPlace, tasks: tuple[int, ...]) -> set[str]:
    return {topology.tasks[task] for task in tasks}


def _differ_faults(topology: TopologyToPlace, placement: TopologyPlacement) -> Iterator[str]:
    before = {task: worker.slot for worker in topology.old for task in worker.ids}
    if topology.event == "new":
        before = {}
    firsts = {group[0]: group for group in topology.executors} or {
        task: (task,) for task in topology.tasks
    }
    for component in topology.differ_node:
        on_node: dict[str, list[tuple[int, bool]]] = defaultdict(list)
        for worker in placement.workers:
            for task in worker.ids:
                if task in firsts and topology.tasks[task] == component:
                    stayed = before.get(task) == worker.slot
                    on_node[worker.node].append((task, stayed))
        for node, tasks in on_node.items():
            # Two that were together before a monitor event are left alone by it.
            if len(tasks) > 1 and not all(stayed for _, stayed in tasks):
                yield f"{component} is more than once on {node}: {tasks}"
