"""Bounds of what the live topologies of one user may hold together."""

from collections.abc import Collection, Iterable

from storm_dagster.model.conf import Conf
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.records import WorkerSlot
from storm_dagster.model.view import ClusterView


def check_quotas(
    cluster: Conf,
    view: ClusterView,
    owner: str,
    workers: Iterable[WorkerSlot],
    placing: Collection[str],
) -> None:
    """Raise :class:`InvalidRequest` if the user's topologies would exceed a bound.

    ``workers`` are those of the new placement, which replaces the topology ids ``placing``. Counted
    are the assigned workers of the owner's other topologies; one without an assignment counts with
    its requested workers. A topology without an owner is not bounded. A smaller placement is
    accepted even above the bound.
    """
    max_slots = cluster.get("nimbus.user.slots.max")
    max_bytes = cluster.get("nimbus.user.memory.max")
    if not owner or (max_slots is None and max_bytes is None):
        return
    default_bytes = int(cluster.get("worker.memory.size") or 0)
    slots = 0
    memory = 0
    former_slots = 0
    former_memory = 0
    for topology in view.topologies.values():
        if topology.base.owner != owner:
            continue
        sizes = [worker.memory_bytes or default_bytes for worker in topology.workers]
        if not sizes:
            sizes = [default_bytes] * topology.base.workers
        if topology.id in placing:
            former_slots += len(sizes)
            former_memory += sum(sizes)
        else:
            slots += len(sizes)
            memory += sum(sizes)
    new_sizes = [worker.memory_bytes or default_bytes for worker in workers]
    _check(owner, "nimbus.user.slots.max", max_slots, slots, len(new_sizes), former_slots)
    _check(owner, "nimbus.user.memory.max", max_bytes, memory, sum(new_sizes), former_memory)


def _check(
    owner: str, key: str, limit: int | None, others: int, requested: int, former: int
) -> None:
    """Raise :class:`InvalidRequest` if ``requested`` beside ``others`` exceeds the limit."""
    if limit is None or requested <= former or others + requested <= limit:
        return
    unit = "slots" if key.endswith("slots.max") else "bytes of memory"
    raise InvalidRequest(
        f"user {owner!r} would hold {others + requested} {unit} ({requested} for this topology), "
        f"{key} allows {limit}: ask for fewer workers, or kill another topology of the user"
    )
