"""Free slots, and the choice of a supervisor for each new worker (design 8.4, 8.5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storm_dagster.core.scheduling.history import Slot
from storm_dagster.model.placement import SupervisorSlots, TopologyToPlace
from storm_dagster.model.placement_reasons import Reason

__all__ = ["DifferNeed", "Offer", "free_ports", "interleaved", "offer_for", "spread_workers"]


@dataclass
class Offer:
    """The slots that one topology may be given now. Taking one removes it."""

    hosts: dict[str, str]
    """Supervisor id -> host, of the supervisors that the topology may use, in ascending order of id."""
    free: dict[str, list[int]]
    """Supervisor id -> free ports, ascending."""
    ports: dict[str, int]
    """Supervisor id -> how many ports it has in all."""
    usable: dict[str, frozenset[int]]
    """Supervisor id -> ports that the topology may go on using when it holds them."""
    isolated: bool = False
    """Only supervisors of ``isolation.scheduler.machines`` are in it."""

    @property
    def total(self) -> int:
        """Free slots in all."""
        return sum(len(ports) for ports in self.free.values())

    def has(self, slot: Slot) -> bool:
        """Whether that slot is free here."""
        return slot[1] in self.free.get(slot[0], ())

    def give_back(self, slot: Slot) -> None:
        """Frees a slot that the topology held."""
        self.free[slot[0]] = sorted({*self.free[slot[0]], slot[1]})

    def take(self, slot: Slot) -> Slot:
        """The slot, which is not free any more."""
        self.free[slot[0]].remove(slot[1])
        return slot

    def load(self, node: str) -> tuple[int, int, str]:
        """The order of design 8.4: most free ports, then fewest used ones, then the lower id."""
        free = len(self.free[node])
        return (-free, self.ports[node] - free, node)


def free_ports(
    supervisors: Iterable[SupervisorSlots], held: Iterable[tuple[str, int]]
) -> dict[str, list[int]]:
    """Supervisor id -> ports that nobody holds, ascending."""
    busy = set(held)
    return {
        supervisor.id: sorted(
            port
            for port in set(supervisor.ports)
            if port not in supervisor.used and (supervisor.id, port) not in busy
        )
        for supervisor in supervisors
    }


def offer_for(
    topology: TopologyToPlace,
    supervisors: Iterable[SupervisorSlots],
    free: Mapping[str, list[int]],
    own: Iterable[Slot],
    contested: frozenset[Slot],
) -> Offer:
    """What the topology may use: free slots and its own, on its isolation hosts if any of those is there.

    ``contested`` are slots that several topologies of the batch name as theirs: none of them gets one again.
    """
    ordered = sorted(supervisors, key=lambda supervisor: supervisor.id)
    chosen = [supervisor for supervisor in ordered if supervisor.host in topology.isolation]
    isolated = bool(chosen)
    used = chosen or ordered
    usable = {
        supervisor.id: frozenset(
            port
            for port in supervisor.ports
            if port not in supervisor.used and (supervisor.id, port) not in contested
        )
        for supervisor in used
    }
    again = [slot for slot in own if slot[1] in usable.get(slot[0], ())]
    return Offer(
        {supervisor.id: supervisor.host for supervisor in used},
        {
            supervisor.id: sorted(
                {*free[supervisor.id], *(port for node, port in again if node == supervisor.id)}
            )
            for supervisor in used
        },
        {supervisor.id: len(set(supervisor.ports)) for supervisor in used},
        usable,
        isolated,
    )


@dataclass(frozen=True)
class DifferNeed:
    """A component whose executors run on different supervisors."""

    component: str
    units: int
    """How many are still to be placed."""
    blocked: frozenset[str]
    """Supervisors that hold one already."""

    def missing(self, nodes: Iterable[str]) -> int:
        """How many supervisors it still lacks when the topology has workers on ``nodes``."""
        return self.units - len(set(nodes) - self.blocked)


def spread_workers(
    offer: Offer, count: int, nodes: list[str], needs: tuple[DifferNeed, ...], alone: bool
) -> list[tuple[Slot, Reason]]:
    """``count`` new slots, one at a time, each on the supervisor with the most free ports (design 8.4).

    ``nodes`` are the supervisors that the topology already has workers on in this event. Only when so few
    slots remain to be chosen that a ``task.on.differ.node`` component would be left without enough
    supervisors is the choice narrowed to supervisors that help it; with ``alone`` one of the slots goes to
    the topology master and helps nobody.
    """
    chosen = list(nodes)
    slots: list[tuple[Slot, Reason]] = []
    for remaining in range(count, 0, -1):
        candidates = [node for node, ports in offer.free.items() if ports]
        useful = max(1, remaining - 1 if alone else remaining)
        tight = [need for need in needs if need.missing(chosen) >= useful]
        helpful = [
            node
            for node in candidates
            if node not in chosen and all(node not in need.blocked for need in tight)
        ]
        best = min(candidates, key=offer.load)
        if tight and helpful and best not in helpful:
            node, why = min(helpful, key=offer.load), Reason.SLOT_DIFFER
        else:
            node, why = best, _why_best(offer, candidates, best)
        slots.append((offer.take((node, offer.free[node][0])), why))
        chosen.append(node)
    return slots


def _why_best(offer: Offer, candidates: list[str], best: str) -> Reason:
    others = [offer.load(node) for node in candidates if node != best]
    if not others:
        return Reason.SLOT_ONLY
    mine, rival = offer.load(best), min(others)
    if mine[0] != rival[0]:
        return Reason.SLOT_MOST_FREE
    return Reason.SLOT_FEWEST_USED if mine[1] != rival[1] else Reason.SLOT_LOWEST_ID


def interleaved(offer: Offer) -> list[Slot]:
    """Free slots dealt host by host, hosts with more free slots first (design 8.5, seed 001).

    Inside a host its supervisors are dealt the same way. Equal ones go by the lower supervisor id.
    """
    by_host: dict[str, list[list[Slot]]] = {}
    for node, ports in sorted(offer.free.items()):
        by_host.setdefault(offer.hosts[node], []).append([(node, port) for port in ports])
    return _deal([_deal(groups) for groups in by_host.values()])


def _deal(groups: list[list[Slot]]) -> list[Slot]:
    ordered = sorted(groups, key=len, reverse=True)
    longest = len(ordered[0]) if ordered else 0
    return [group[turn] for turn in range(longest) for group in ordered if turn < len(group)]
