"""Slots that a topology may use: the only rule for them.

Placement, healing, explanations, rebalances and refusals ask :func:`usable_slots`. See
``docs/decisions.md#usable-slots``.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from storm_dagster.core.scheduling.free_slots import confined_to, slots_beyond
from storm_dagster.model.multimap import multimap
from storm_dagster.model.placement import SupervisorSlots
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView


@dataclass(frozen=True)
class UserBounds:
    """Bounds for the topologies of one user together; ``None``: any number."""

    max_slots: int | None = None
    """``nimbus.user.slots.max``."""
    max_bytes: int | None = None
    """``nimbus.user.memory.max``."""
    worker_bytes: int = 0
    """``worker.memory.size``: memory of a worker whose record does not name it."""

    @staticmethod
    def from_conf(conf: Any) -> "UserBounds":
        """Read the bounds from a conf, or from a topology's total conf."""
        return UserBounds(
            max_slots=conf.get("nimbus.user.slots.max"),
            max_bytes=conf.get("nimbus.user.memory.max"),
            worker_bytes=int(conf.get("worker.memory.size") or 0),
        )

    @property
    def is_empty(self) -> bool:
        """True if no user is bounded."""
        return self.max_slots is None and self.max_bytes is None

    def size_of(self, topology: TopologyView) -> tuple[int, int]:
        """Return (slots, bytes) that a topology holds.

        One without an assignment counts with its requested workers.
        """
        sizes = [worker.memory_bytes or self.worker_bytes for worker in topology.workers]
        if not sizes:
            sizes = [self.worker_bytes] * topology.base.workers
        return len(sizes), sum(sizes)

    def held_by(
        self, view: ClusterView, owner: str, without: Collection[str] = ()
    ) -> tuple[int, int]:
        """Return (slots, bytes) of the owner's topologies; the ids ``without`` are left out."""
        total_slots = 0
        total_bytes = 0
        for topology in view.topologies.values():
            if topology.base.owner != owner or topology.id in without:
                continue
            slots, size = self.size_of(topology)
            total_slots += slots
            total_bytes += size
        return total_slots, total_bytes

    def more_workers(self, view: ClusterView, topology: TopologyView) -> int | None:
        """Number of workers that a topology may get in addition; ``None``: any number.

        A topology without an owner is not bounded.
        """
        owner = topology.base.owner
        if not owner or self.is_empty:
            return None
        slots, size = self.held_by(view, owner)
        limits: list[int] = []
        if self.max_slots is not None:
            limits.append(self.max_slots - slots)
        if self.max_bytes is not None and self.worker_bytes:
            limits.append((self.max_bytes - size) // self.worker_bytes)
        return max(0, min(limits)) if limits else None


@dataclass(frozen=True)
class ClosedHosts:
    """Hosts of live supervisors that a topology must not use."""

    blacklisted: frozenset[str]
    isolated: Mapping[str, tuple[TopologyView, ...]]
    """Host -> the other topologies that are isolated on it; blacklisted hosts are left out."""

    def __contains__(self, host: object) -> bool:
        return host in self.blacklisted or host in self.isolated


@dataclass(frozen=True)
class UsableSlots:
    """Supervisors and free slots that a topology may use."""

    supervisors: tuple[SupervisorSlots, ...]
    """Supervisors that may get its work, by id, with the ports that are in use.

    The planner confines new workers of an isolated topology to some of them, :attr:`confined`.
    """
    confined: tuple[SupervisorSlots, ...]
    """Those of :attr:`supervisors` that its new workers may use (:func:`confined_to`)."""
    free: tuple[Slot, ...]
    """Free slots that its new workers may take, by supervisor and port."""
    reserve: int = 0
    """Number of these that must stay free (``jstorm.reserve.workers``)."""
    more_workers: int | None = None
    """Number of workers that its user may have in addition; ``None``: any number."""

    @property
    def count(self) -> int:
        """Number of workers that it may get in addition."""
        count = slots_beyond(len(self.free), self.reserve)
        return count if self.more_workers is None else min(count, self.more_workers)


def hosts_closed_to(
    view: ClusterView, placing: Collection[str] = (), isolation: Collection[str] = ()
) -> ClosedHosts:
    """The hosts that the topology ids ``placing`` must not use.

    They are blacklisted, or only other topologies are isolated on them. ``isolation`` are hosts
    that ``placing`` are isolated on, besides those in the view.
    """
    hosts = {info.host for info in view.supervisors.values()}
    own_hosts = set(isolation)
    for topology_id in placing:
        topology = view.topologies.get(topology_id)
        if topology is not None:
            own_hosts.update(topology.base.isolation)
    blacklisted = hosts & view.blacklist
    candidates = hosts - blacklisted - own_hosts
    isolating: list[tuple[str, TopologyView]] = []
    for topology in view.topologies.values():
        if topology.id not in placing:
            isolating += [(host, topology) for host in candidates & set(topology.base.isolation)]
    isolated = multimap(isolating)
    return ClosedHosts(
        blacklisted=frozenset(blacklisted),
        isolated={host: tuple(topologies) for host, topologies in isolated.items()},
    )


def usable_slots(
    view: ClusterView,
    *,
    placing: Collection[str],
    isolation: Collection[str] = (),
    avoid: Collection[str] = (),
    withheld: Collection[Slot] = (),
    reserve: int = 0,
    bounds: UserBounds | None = None,
) -> UsableSlots:
    """The supervisors and free slots that the topology ids ``placing`` may use.

    Supervisors that drain, those in ``avoid`` and those on closed hosts (:func:`hosts_closed_to`)
    are left out. Ports of topologies outside ``placing`` are in use, and so are ``withheld`` slots:
    those of workers that are dead in this round. Slots of ``placing`` are not in use, and are not
    free either: they are their own. ``isolation`` are hosts that ``placing`` are isolated on,
    besides those in the view. ``bounds`` are those of users; the first of ``placing`` decides whose
    they are.
    """
    used = view.used_ports(without=frozenset(placing))
    for node, port in withheld:
        used.setdefault(node, set()).add(port)
    closed = hosts_closed_to(view, placing, isolation)
    supervisors: list[SupervisorSlots] = []
    for supervisor_id, info in sorted(view.supervisors.items()):
        is_open = info.host not in closed and not info.draining
        if supervisor_id not in avoid and is_open:
            ports = tuple(sorted(used.get(supervisor_id, ())))
            supervisors.append(SupervisorSlots(id=supervisor_id, info=info, used=ports))
    own_topologies = [view.topologies[key] for key in placing if key in view.topologies]
    own_hosts = set(isolation)
    own_slots: set[Slot] = set()
    for topology in own_topologies:
        own_hosts.update(topology.base.isolation)
        own_slots.update(worker.slot for worker in topology.workers)
    more_workers = None
    if bounds is not None and own_topologies:
        more_workers = bounds.more_workers(view, own_topologies[0])
    confined = _confined(supervisors, own_hosts)
    return UsableSlots(
        supervisors=tuple(supervisors),
        confined=confined,
        free=_free_slots(confined, own_slots),
        reserve=reserve,
        more_workers=more_workers,
    )


def _confined(
    supervisors: Collection[SupervisorSlots], isolation: Collection[str]
) -> tuple[SupervisorSlots, ...]:
    """The supervisors that new workers of a topology with this isolation may use."""
    hosts = {supervisor.id: supervisor.info.host for supervisor in supervisors}
    confined = confined_to(hosts, isolation)
    if confined is None:
        return tuple(supervisors)
    return tuple(supervisor for supervisor in supervisors if supervisor.id in confined)


def _free_slots(
    supervisors: Collection[SupervisorSlots], own: Collection[Slot]
) -> tuple[Slot, ...]:
    """Unused slots of the supervisors, without the topology's ``own``."""
    free: list[Slot] = []
    for supervisor in supervisors:
        slots = [Slot(supervisor.id, port) for port in sorted(supervisor.unused)]
        free += [slot for slot in slots if slot not in own]
    return tuple(free)


def draining_slots(view: ClusterView, topology: TopologyView) -> list[Slot]:
    """Slots of the topology on supervisors that drain, by supervisor and port."""
    return sorted(worker.slot for worker in topology.workers if view.drains(worker.node))
