"""Workers that are wanted exactly so: ``use.userdefine.assignment`` and ``use.old.assignment``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from storm_dagster.core.scheduling.history import History, OldWorker, Slot
from storm_dagster.core.scheduling.outcome import NoRoom
from storm_dagster.core.scheduling.units import Unit, task_count
from storm_dagster.model.placement import TopologyToPlace, UserWorker
from storm_dagster.model.placement_reasons import Reason, dropped_wishes, too_many_wishes_refusal

__all__ = ["Claim", "claims_of"]


@dataclass(frozen=True)
class Claim:
    """A worker whose executors are given; its slot is to be found."""

    units: tuple[Unit, ...]
    why: Reason
    task_why: Reason
    host: str | None = None
    port: int | None = None
    node: str | None = None
    """Supervisor that is asked before others of the host."""
    hint: Slot | None = None
    """Slot of the topology that would save moves when no port is asked for."""
    memory_bytes: int | None = None
    cpu: int | None = None


def claims_of(
    topology: TopologyToPlace, units: tuple[Unit, ...], history: History, capacity: int, alone: bool
) -> tuple[tuple[Claim, ...], list[str]]:
    """The wishes that can be granted, and warnings about those that cannot.

    All executors of a wish must be to be placed, and nobody took them before. More wishes of one kind than
    there are workers are dropped together, with a warning; user-defined and old workers that are
    too many together raise :class:`NoRoom`. With ``alone`` one of the ``capacity`` workers is for the topology
    master, unless a wish names it.
    """
    warnings: list[str] = []
    needed = {unit.first for unit in history.needed}
    taken: set[int] = set()
    chosen: list[Claim] = []
    wishes = {"use.userdefine.assignment": _user_claims(topology, units, history)}
    if topology.use_old and topology.event != "rebalance":
        wishes["use.old.assignment"] = _old_claims(topology, history)
    for key, claims in wishes.items():
        granted: list[Claim] = []
        mine: set[int] = set()
        for claim in claims:
            firsts = {unit.first for unit in claim.units}
            if firsts <= needed and not firsts & (taken | mine):
                granted.append(claim)
                mine |= firsts
        claimed = any(unit.is_master for claim in (*chosen, *granted) for unit in claim.units)
        room = capacity - 1 if alone and not claimed else capacity
        if len(chosen) + len(granted) <= room:
            chosen.extend(granted)
            taken |= mine
        elif chosen:
            raise NoRoom(too_many_wishes_refusal(topology.name, len(chosen), len(granted), capacity))
        else:
            warnings.append(dropped_wishes(key, len(granted), room))
    return tuple(chosen), warnings


def _user_claims(topology: TopologyToPlace, units: tuple[Unit, ...], history: History) -> list[Claim]:
    beating = {unit.first for worker in history.unstopped for unit in worker.units}
    remaining: dict[str, list[Unit]] = {}
    for unit in units:
        if unit.first not in beating:
            remaining.setdefault(unit.component, []).append(unit)
    claims: list[Claim] = []
    for wish in topology.user_workers:
        if any(_fulfils(worker, wish) for worker in history.unstopped):
            continue
        mine: list[Unit] = []
        for component, count in wish.components.items():
            rest = remaining.get(component, [])
            part: list[Unit] = []
            while rest and task_count(part) < count:
                part.append(rest.pop(0))
            mine.extend(part)
        if mine:
            claims.append(
                Claim(
                    tuple(sorted(mine, key=lambda unit: unit.first)),
                    Reason.SLOT_USER,
                    Reason.USER,
                    wish.host,
                    wish.port,
                    hint=_best_own(mine, wish, history),
                    memory_bytes=wish.memory_bytes,
                    cpu=wish.cpu,
                )
            )
    return claims


def _fulfils(worker: OldWorker, wish: UserWorker) -> bool:
    """Whether a worker that beats on is what the user asked for."""
    counts: Counter[str] = Counter()
    for unit in worker.units:
        counts[unit.component] += len(unit.tasks)
    return (
        (wish.host is None or wish.host == worker.host)
        and (wish.port is None or wish.port == worker.slot[1])
        and (not wish.memory_bytes or wish.memory_bytes == worker.memory_bytes)
        and (not wish.cpu or wish.cpu == worker.cpu)
        and dict(counts) == {component: count for component, count in wish.components.items() if count > 0}
    )


def _best_own(mine: list[Unit], wish: UserWorker, history: History) -> Slot | None:
    """In a rebalance: the old slot on the wanted host that holds most of these executors already."""
    firsts = {unit.first for unit in mine}
    shares = {
        worker.slot: sum(1 for unit in worker.units if unit.first in firsts)
        for worker in history.old
        if worker.slot in history.own and worker.host == wish.host
    }
    best = min(shares, key=lambda slot: (-shares[slot], slot), default=None)
    return best if best is not None and shares[best] > 0 else None


def _old_claims(topology: TopologyToPlace, history: History) -> list[Claim]:
    return [
        Claim(
            worker.units,
            Reason.SLOT_OLD,
            Reason.OLD,
            worker.host,
            worker.slot[1],
            node=worker.slot[0],
            memory_bytes=worker.memory_bytes or None,
            cpu=worker.cpu or None,
        )
        for worker in history.lost
        if worker.units and worker.tasks <= topology.tasks.keys()
    ]
