"""Requested workers: ``use.userdefine.assignment`` and ``use.old.assignment``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from storm_dagster.core.scheduling.history import History, OldWorker, Slot
from storm_dagster.core.scheduling.outcome import NoRoom
from storm_dagster.core.scheduling.units import Unit, task_count
from storm_dagster.model.placement import TopologyToPlace, UserWorker
from storm_dagster.model.placement_reasons import Reason, dropped_requests, too_many_requests_refusal


@dataclass(frozen=True)
class RequestedWorker:
    """A worker whose executors are given; its slot is to be found."""

    units: tuple[Unit, ...]
    why: Reason
    task_why: Reason
    host: str | None = None
    port: int | None = None
    node: str | None = None
    """Supervisor that is tried before others of the host."""
    hint: Slot | None = None
    """Slot of the topology that would save moves when no port is asked for."""
    memory_bytes: int | None = None
    cpu: int | None = None


def requested_workers(
    topology: TopologyToPlace, units: tuple[Unit, ...], history: History, capacity: int, alone: bool
) -> tuple[tuple[RequestedWorker, ...], list[str]]:
    """Requested workers that can be granted, and warnings about those that cannot.

    All executors of a requested worker must be to be placed, and in no other one. More requested workers of one
    kind than there are workers are dropped together, with a warning; user-defined and old workers that are
    too many together raise :class:`NoRoom`. With ``alone`` one of the ``capacity`` workers is for the topology
    master, unless a requested worker holds it.
    """
    warnings: list[str] = []
    needed = {unit.first for unit in history.needed}
    taken: set[int] = set()
    chosen: list[RequestedWorker] = []
    kinds = {"use.userdefine.assignment": _user_defined(topology, units, history)}
    if topology.use_old and topology.event != "rebalance":
        kinds["use.old.assignment"] = _old_workers(topology, history)
    for key, requested in kinds.items():
        granted: list[RequestedWorker] = []
        mine: set[int] = set()
        for request in requested:
            firsts = {unit.first for unit in request.units}
            if firsts <= needed and not firsts & (taken | mine):
                granted.append(request)
                mine |= firsts
        held = any(unit.is_master for request in (*chosen, *granted) for unit in request.units)
        room = capacity - 1 if alone and not held else capacity
        if len(chosen) + len(granted) <= room:
            chosen.extend(granted)
            taken |= mine
        elif chosen:
            raise NoRoom(too_many_requests_refusal(topology.name, len(chosen), len(granted), capacity))
        else:
            warnings.append(dropped_requests(key, len(granted), room))
    return tuple(chosen), warnings


def _user_defined(topology: TopologyToPlace, units: tuple[Unit, ...], history: History) -> list[RequestedWorker]:
    beating = {unit.first for worker in history.unstopped for unit in worker.units}
    remaining: dict[str, list[Unit]] = {}
    for unit in units:
        if unit.first not in beating:
            remaining.setdefault(unit.component, []).append(unit)
    requested: list[RequestedWorker] = []
    for wanted in topology.user_workers:
        if any(_matches(worker, wanted) for worker in history.unstopped):
            continue
        mine: list[Unit] = []
        for component, count in wanted.components.items():
            rest = remaining.get(component, [])
            part: list[Unit] = []
            while rest and task_count(part) < count:
                part.append(rest.pop(0))
            mine.extend(part)
        if mine:
            requested.append(
                RequestedWorker(
                    tuple(sorted(mine, key=lambda unit: unit.first)),
                    Reason.SLOT_USER,
                    Reason.USER,
                    wanted.host,
                    wanted.port,
                    hint=_best_own(mine, wanted, history),
                    memory_bytes=wanted.memory_bytes,
                    cpu=wanted.cpu,
                )
            )
    return requested


def _matches(worker: OldWorker, wanted: UserWorker) -> bool:
    """Whether a worker that still runs is what the user asked for."""
    counts: Counter[str] = Counter()
    for unit in worker.units:
        counts[unit.component] += len(unit.tasks)
    return (
        (wanted.host is None or wanted.host == worker.host)
        and (wanted.port is None or wanted.port == worker.slot[1])
        and (not wanted.memory_bytes or wanted.memory_bytes == worker.memory_bytes)
        and (not wanted.cpu or wanted.cpu == worker.cpu)
        and dict(counts) == {component: count for component, count in wanted.components.items() if count > 0}
    )


def _best_own(mine: list[Unit], wanted: UserWorker, history: History) -> Slot | None:
    """In a rebalance: the old slot on the requested host that holds most of these executors already."""
    firsts = {unit.first for unit in mine}
    shares = {
        worker.slot: sum(1 for unit in worker.units if unit.first in firsts)
        for worker in history.old
        if worker.slot in history.own and worker.host == wanted.host
    }
    best = min(shares, key=lambda slot: (-shares[slot], slot), default=None)
    return best if best is not None and shares[best] > 0 else None


def _old_workers(topology: TopologyToPlace, history: History) -> list[RequestedWorker]:
    return [
        RequestedWorker(
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
