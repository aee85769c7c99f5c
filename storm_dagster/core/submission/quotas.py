"""Bounds for the live topologies of one user together."""

from collections.abc import Collection, Iterable

from storm_dagster.core.usable_slots import UserBounds
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
    bounds = UserBounds.from_conf(cluster)
    if not owner or bounds.is_empty:
        return
    all_slots, all_memory = bounds.held_by(view, owner)
    slots, memory = bounds.held_by(view, owner, without=placing)
    former_slots = all_slots - slots
    former_memory = all_memory - memory
    new_sizes = [worker.memory_bytes or bounds.worker_bytes for worker in workers]
    new_slots = len(new_sizes)
    new_memory = sum(new_sizes)
    _check(owner, "nimbus.user.slots.max", bounds.max_slots, slots, new_slots, former_slots)
    _check(owner, "nimbus.user.memory.max", bounds.max_bytes, memory, new_memory, former_memory)


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
