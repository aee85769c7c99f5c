"""The correctness rules of the cluster (design section 4) as questions to one view. Pure.

Each function returns one sentence for every violation, and nothing for a sound cluster. The asset checks
show them; tests call them directly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from storm_dagster.model.names import code_key, conf_key, jar_key
from storm_dagster.model.ranges import decode_ranges, encode_ranges
from storm_dagster.model.view import ClusterView, TopologyView

__all__ = [
    "VIEW_RULES",
    "assigned_to_live_slots",
    "base_implies_published",
    "blobs_present",
    "one_live_owner",
    "one_slot_per_task",
    "records_intact",
    "slots_not_shared",
]


def _published(view: ClusterView) -> Iterator[TopologyView]:
    return (topology for topology in view.topologies.values() if topology.base.status != "KILLED")


def one_slot_per_task(view: ClusterView) -> Iterator[str]:
    """Every task of a topology stands in exactly one slot of its assignment, and no other task does."""
    for topology in _published(view):
        if topology.assignment is None or topology.tasks is None:
            continue
        known = set(topology.tasks.component_of())
        seen: set[int] = set()
        twice: set[int] = set()
        for worker in topology.assignment.workers:
            ids = set(worker.ids)
            twice |= seen & ids
            seen |= ids
        if twice:
            yield f"topology {topology.id}: tasks {encode_ranges(twice)} stand in more than one slot"
        if seen - known:
            yield f"topology {topology.id}: tasks {encode_ranges(seen - known)} are assigned but belong to no component"
        if known - seen:
            yield f"topology {topology.id}: tasks {encode_ranges(known - seen)} have no slot"


def slots_not_shared(view: ClusterView) -> Iterator[str]:
    """No slot is given to two topologies, nor twice to one."""
    owners: dict[tuple[str, int], str] = {}
    for topology in view.topologies.values():
        for worker in topology.assignment.workers if topology.assignment else ():
            other = owners.setdefault(worker.slot, topology.id)
            if other != topology.id:
                yield f"slot {worker.node}:{worker.port} is given to {other} and to {topology.id}"
        if topology.assignment is not None:
            counts = Counter(worker.slot for worker in topology.assignment.workers)
            for (node, port), count in sorted(counts.items()):
                if count > 1:
                    yield f"topology {topology.id} lists slot {node}:{port} {count} times"


def assigned_to_live_slots(view: ClusterView) -> Iterator[str]:
    """Every assigned slot belongs to a supervisor that lives and offers that port."""
    for topology in _published(view):
        for worker in topology.assignment.workers if topology.assignment else ():
            supervisor = view.supervisors.get(worker.node)
            if supervisor is None:
                yield f"topology {topology.id}: supervisor {worker.node} of slot {worker.port} is gone"
            elif worker.port not in supervisor.ports:
                yield f"topology {topology.id}: supervisor {worker.node} does not offer port {worker.port}"


def base_implies_published(view: ClusterView) -> Iterator[str]:
    """A topology that is visible is published whole: its tasks and its assignment exist."""
    for topology in _published(view):
        missing = [
            what
            for what, part in (("task table", topology.tasks), ("assignment", topology.assignment))
            if part is None
        ]
        if missing:
            yield f"topology {topology.id} is {topology.base.status} but has no {' and no '.join(missing)}"


def one_live_owner(view: ClusterView) -> Iterator[str]:
    """At most one live process runs a task.

    Two workers that name the same task are a violation when both run and apply the same version of the
    assignment; with different versions one of them is handing the task over and has paused it.
    """
    for topology in view.topologies.values():
        owner: dict[tuple[int, int], tuple[str, int]] = {}
        for slot, worker in sorted(topology.live_workers.items()):
            if worker.status != "running":
                continue
            for task in decode_ranges(worker.tasks):
                other = owner.setdefault((task, worker.version), slot)
                if other != slot:
                    yield (
                        f"topology {topology.id}: task {task} runs in {other[0]}:{other[1]} and in {slot[0]}:{slot[1]}"
                    )


def records_intact(view: ClusterView) -> Iterator[str]:
    """Every record in ZooKeeper can be read; a damaged one is never guessed at."""
    for path, reason in sorted(view.corrupt.items()):
        yield f"{path}: {reason}"


def blobs_present(view: ClusterView, sha256_of: Callable[[str], str | None]) -> Iterator[str]:
    """The three blobs of every topology are stored, each with its hash; ``sha256_of`` answers ``None`` if not."""
    for topology in _published(view):
        prefix = topology.assignment.code_dir if topology.assignment else topology.id
        for key in (jar_key(prefix), conf_key(prefix), code_key(prefix)):
            if not sha256_of(key):
                yield f"topology {topology.id}: blob {key} is missing"


VIEW_RULES: Mapping[str, Callable[[ClusterView], Iterator[str]]] = {
    "one_slot_per_task": one_slot_per_task,
    "slots_not_shared": slots_not_shared,
    "assigned_to_live_slots": assigned_to_live_slots,
    "base_implies_published": base_implies_published,
    "one_live_owner": one_live_owner,
    "records_intact": records_intact,
}
"""The rules that a view alone decides, by the name of their asset check."""
