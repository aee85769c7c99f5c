"""Free slots, and the choice of a supervisor for each new worker (``docs/decisions.md#supervisor-choice``)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from storm_dagster.core.scheduling.history import Slot
from storm_dagster.model.placement import SupervisorSlots, TopologyToPlace
from storm_dagster.model.placement_reasons import Reason, slot_rival

Load = tuple[int, int, str]
"""Minus the free ports, used ports, supervisor id. The least is the least loaded."""


class Pool:
    """The slots of a cluster while its topologies are served, one after the other."""

    def __init__(self, supervisors: Iterable[SupervisorSlots], holders: dict[Slot, int]) -> None:
        """``holders``: slot -> number of topologies of the batch that hold it; it is free for none of them."""
        self.hosts: dict[str, str] = {}
        """Supervisor id -> host, in ascending order of id."""
        self.free: dict[str, list[int]] = {}
        """Supervisor id -> free ports, ascending."""
        self.total: int = 0
        self._ports: dict[str, int] = {}
        self._reusable: set[Slot] = set()
        for supervisor in sorted(supervisors, key=lambda supervisor: supervisor.id):
            node = supervisor.id
            ports, used = set(supervisor.ports), set(supervisor.used)
            self.hosts[node] = supervisor.host
            self._ports[node] = len(ports)
            self.free[node] = sorted(port for port in ports - used if not holders.get((node, port)))
            self._reusable |= {(node, port) for port in ports - used if holders.get((node, port)) == 1}
            self.total += len(self.free[node])
        self.loads: list[Load] = sorted(map(self.load, self.free))

    def load(self, node: str) -> Load:
        """Sort key of the supervisor by load."""
        free = len(self.free[node])
        return (-free, self._ports[node] - free, node)

    def may_keep(self, slot: Slot) -> bool:
        """Whether the topology that holds the slot may reuse it: it is offered, and only one topology holds it."""
        return slot in self._reusable

    def take(self, slot: Slot) -> None:
        """Mark the slot as used."""
        _drop(self.loads, self.load(slot[0]))
        self.free[slot[0]].remove(slot[1])
        insort(self.loads, self.load(slot[0]))
        self.total -= 1

    def put(self, slot: Slot) -> None:
        """Mark the slot as free."""
        _drop(self.loads, self.load(slot[0]))
        insort(self.free[slot[0]], slot[1])
        insort(self.loads, self.load(slot[0]))
        self.total += 1


def _drop(loads: list[Load], load: Load) -> None:
    del loads[bisect_left(loads, load)]


class Offer:
    """The slots that one topology may be given now. Taking one removes it from the pool."""

    def __init__(self, pool: Pool, isolation: Sequence[str]) -> None:
        """``isolation`` are hosts; they bind as soon as one of them has a supervisor."""
        self._pool = pool
        chosen = {node: host for node, host in pool.hosts.items() if host in isolation} if isolation else {}
        self.isolated: bool = bool(chosen)
        """Only supervisors of ``isolation.scheduler.machines`` are in it."""
        self.hosts: dict[str, str] = chosen or pool.hosts
        """Supervisor id -> host, of the supervisors that the topology may use, in ascending order of id."""
        self._loads = sorted(map(pool.load, chosen)) if chosen else pool.loads
        self._released: set[Slot] = set()
        self._taken: list[Slot] = []

    @property
    def total(self) -> int:
        """Free slots in all."""
        return sum(len(self._pool.free[node]) for node in self.hosts) if self.isolated else self._pool.total

    def ports(self, node: str) -> list[int]:
        """Free ports of a supervisor, ascending; none when the topology may not use it."""
        return self._pool.free[node] if node in self.hosts else []

    def counts(self) -> list[tuple[str, int]]:
        """(supervisor id, free ports) of all that the topology may use."""
        return [(node, len(self._pool.free[node])) for node in self.hosts]

    def has(self, slot: Slot) -> bool:
        """Whether that slot is free here."""
        return slot[1] in self.ports(slot[0])

    def may_keep(self, slot: Slot) -> bool:
        """Whether a slot that the topology holds is on a usable supervisor that can release it."""
        return slot[0] in self.hosts and self._pool.may_keep(slot)

    def release_own(self, slot: Slot) -> None:
        """Free a slot that the topology holds, for this topology only."""
        if self._pool.may_keep(slot) and slot not in self._released:
            self._released.add(slot)
            self._change(slot, self._pool.put)

    def take(self, slot: Slot) -> Slot:
        """Take the slot and return it."""
        self._change(slot, self._pool.take)
        self._taken.append(slot)
        return slot

    def _change(self, slot: Slot, step: Callable[[Slot], None]) -> None:
        mine = self.isolated and slot[0] in self.hosts
        if mine:
            _drop(self._loads, self._pool.load(slot[0]))
        step(slot)
        if mine:
            insort(self._loads, self._pool.load(slot[0]))

    def by_load(self) -> Iterator[Load]:
        """Supervisors with a free port, the least loaded first."""
        for load in self._loads:
            if not load[0]:
                return
            yield load

    def close(self, *, refused: bool) -> None:
        """Leave to the next topology what is free for all; release everything when it was refused."""
        for slot in self._released:
            if slot[1] in self._pool.free[slot[0]]:
                self._pool.take(slot)
        for slot in self._taken if refused else ():
            if slot not in self._released:
                self._pool.put(slot)


def offer_for(topology: TopologyToPlace, pool: Pool, own: Iterable[Slot]) -> Offer:
    """Offer to the topology: free slots and its own, on its isolation hosts if any of those is there."""
    offer = Offer(pool, topology.isolation)
    for slot in sorted(own):
        offer.release_own(slot)
    return offer


@dataclass(frozen=True)
class DifferNeed:
    """A component whose executors run on different supervisors."""

    component: str
    units: int
    """Number still to be placed."""
    blocked: frozenset[str]
    """Supervisors that hold one already."""


def spread_workers(
    offer: Offer, count: int, nodes: list[str], needs: tuple[DifferNeed, ...], alone: bool
) -> list[tuple[Slot, Reason, str]]:
    """Take ``count`` new slots, one at a time, each on the supervisor with the most free ports.

    ``nodes`` are the supervisors that the topology already has workers on in this event. Only when so few
    slots remain to be chosen that a ``task.on.differ.node`` component would be left without enough
    supervisors is the choice narrowed to supervisors that help it; with ``alone`` one of the slots goes to
    the topology master and helps nobody. With each slot comes why, and against which supervisor.
    """
    chosen = set(nodes)
    missing = {need.component: need.units - len(chosen - need.blocked) for need in needs}
    slots: list[tuple[Slot, Reason, str]] = []
    for remaining in range(count, 0, -1):
        useful = max(1, remaining - 1 if alone else remaining)
        tight = [need for need in needs if missing[need.component] >= useful]
        node, why, against = _least_loaded(offer)
        if tight:
            helpful = (
                other
                for _, _, other in offer.by_load()
                if other not in chosen and all(other not in need.blocked for need in tight)
            )
            best = next(helpful, node)
            if best != node:
                node, why, against = best, Reason.SLOT_DIFFER, ""
        slots.append((offer.take((node, offer.ports(node)[0])), why, against))
        if node not in chosen:
            chosen.add(node)
            for need in needs:
                missing[need.component] -= node not in need.blocked
    return slots


def _least_loaded(offer: Offer) -> tuple[str, Reason, str]:
    loads = offer.by_load()
    best, rival = next(loads), next(loads, None)
    if rival is None:
        return best[2], Reason.SLOT_ONLY, ""
    why = Reason.SLOT_LOWEST_ID
    if best[:2] != rival[:2]:
        why = Reason.SLOT_MOST_FREE if best[0] != rival[0] else Reason.SLOT_FEWEST_USED
    return best[2], why, slot_rival(why, best, rival)


def interleaved(offer: Offer) -> list[Slot]:
    """Free slots in turn from host to host, hosts with more free slots first, as in Storm.

    Inside a host it is the turn of its supervisors likewise. Equal ones go by the lower supervisor id.
    """
    by_host: dict[str, list[list[Slot]]] = {}
    for node, host in offer.hosts.items():
        by_host.setdefault(host, []).append([(node, port) for port in offer.ports(node)])
    return _deal([_deal(groups) for groups in by_host.values()])


def _deal(groups: list[list[Slot]]) -> list[Slot]:
    ordered = sorted(groups, key=len, reverse=True)
    longest = len(ordered[0]) if ordered else 0
    return [group[turn] for turn in range(longest) for group in ordered if turn < len(group)]
