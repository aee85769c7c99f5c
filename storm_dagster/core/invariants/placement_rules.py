"""I1 and I2: every task has one slot, and one live process. Pure; each yields (thing, reason) pairs."""

from __future__ import annotations

from collections import Counter

from storm_dagster.core.invariants.snapshot import ClusterSnapshot, Found, WorkerPid, title, visible
from storm_dagster.model.ranges import decode_ranges, encode_ranges

# -- I1: every task has one slot ----------------------------------------------------------------------------


def one_slot_per_task(snapshot: ClusterSnapshot) -> Found:
    """Every task of every topology has exactly one slot."""
    for topology in visible(snapshot.view):
        if topology.assignment is None or topology.tasks is None:
            continue
        known = set(topology.tasks.component_of())
        times = Counter(task for worker in topology.assignment.workers for task in worker.ids)
        twice = {task for task, count in times.items() if count > 1}
        if twice:
            yield title(topology), f"tasks {encode_ranges(twice)} stand in more than one slot"
        if unknown := times.keys() - known:
            yield (title(topology), f"tasks {encode_ranges(unknown)} are assigned but belong to no component")
        if without := known - times.keys() - snapshot.unschedulable.get(topology.id, frozenset()):
            yield title(topology), f"tasks {encode_ranges(without)} have no slot, and no reason says why"


def slots_not_shared(snapshot: ClusterSnapshot) -> Found:
    """No slot is given to two topologies."""
    owners: dict[tuple[str, int], str] = {}
    for topology in snapshot.view.topologies.values():
        counts = Counter(worker.slot for worker in topology.workers)
        for (node, port), count in sorted(counts.items()):
            other = owners.setdefault((node, port), topology.id)
            if other != topology.id:
                yield f"slot {node}:{port}", f"is given to {other} and to {topology.id}"
            if count > 1:
                yield title(topology), f"lists slot {node}:{port} {count} times"


def assigned_to_live_slots(snapshot: ClusterSnapshot) -> Found:
    """Every assigned slot belongs to a supervisor that lives and offers it."""
    for topology in visible(snapshot.view):
        for worker in topology.workers:
            supervisor = snapshot.view.supervisors.get(worker.node)
            if supervisor is None:
                yield title(topology), f"supervisor {worker.node} of slot {worker.port} is gone"
            elif worker.port not in supervisor.ports:
                yield title(topology), f"supervisor {worker.node} does not offer port {worker.port}"


# -- I2: one live process per task --------------------------------------------------------------------------


def one_live_owner(snapshot: ClusterSnapshot) -> Found:
    """At most one live process runs a task."""
    for topology in snapshot.view.topologies.values():
        owner: dict[tuple[int, int], tuple[str, int]] = {}
        for slot, worker in sorted(topology.live_workers.items()):
            # With different versions of the assignment one of the two is handing the task over.
            for task in decode_ranges(worker.tasks) if worker.status == "running" else ():
                other = owner.setdefault((task, worker.version), slot)
                if other != slot:
                    yield title(topology), f"task {task} runs in {other[0]}:{other[1]} and in {slot[0]}:{slot[1]}"


def one_process_per_slot(snapshot: ClusterSnapshot) -> Found:
    """At most one worker process runs in a slot, the one that holds its node."""
    if snapshot.processes is None:
        return
    here: dict[tuple[str, int], list[WorkerPid]] = {}
    for process in snapshot.processes:
        here.setdefault((process.node, process.port), []).append(process)
    for (node, port), found in sorted(here.items()):
        if len(found) > 1:
            pids = ", ".join(f"{part.pid} ({part.topology_id})" for part in found)
            yield f"slot {node}:{port}", f"{len(found)} worker processes run in it: {pids}"
    for topology in snapshot.view.topologies.values():
        for (node, port), worker in sorted(topology.live_workers.items()):
            found = here.get((node, port), [])
            if found and all(part.pid != worker.pid for part in found):
                reason = f"process {found[0].pid} runs in it, but process {worker.pid} holds its node"
                yield f"slot {node}:{port}", reason
