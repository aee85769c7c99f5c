"""Runs in Spark: what a topology's present assignment and its wishes mean for an event.

Executors are positions in lists that are ordered by first task id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from storm_dagster.model.placement_reasons import dropped_wishes

__all__ = ["KEPT", "LOST", "UNSTOPPED", "Claim", "Executors", "OldWorker", "Past", "read_past", "worker_need"]

LOST, KEPT, UNSTOPPED = 0, 1, 2

Row = dict[str, Any]


class Executors:
    """The executors of one topology, from their rows."""

    def __init__(self, rows: pa.Table) -> None:
        units = rows.column("unit").to_pylist()
        components = rows.column("component").to_pylist()
        order = sorted(range(len(units)), key=units.__getitem__)
        self.unit: list[int] = [units[index] for index in order]
        """First task ids, ascending."""
        self.component: list[int] = [components[index] for index in order]
        self._rows = rows
        self._order = order

    @property
    def columns(self) -> list[str]:
        """Columns of the rows; ``size`` is there when some executor has several tasks."""
        return self._rows.column_names

    def tasks(self) -> list[list[int]]:
        """The tasks of each executor; needed only where an assignment is read."""
        if "size" not in self.columns:
            return [[unit] for unit in self.unit]
        sizes = self._rows.column("size").to_pylist()
        members = self._rows.column("members").to_pylist()
        return [
            members[index] or list(range(unit, unit + sizes[index]))
            for unit, index in zip(self.unit, self._order, strict=True)
        ]


@dataclass
class OldWorker:
    """A worker of the present assignment."""

    node: str
    host: str
    port: int
    memory: int
    cpu: int
    tasks: set[int]
    state: int = LOST
    holds: list[int] = field(default_factory=list)
    """Executors that live in it."""


@dataclass
class Claim:
    """A worker that is wanted exactly so."""

    holds: list[int]
    old: bool
    host: str | None
    port: int | None
    node: str | None
    hint: tuple[str, int] | None
    memory: int
    cpu: int


@dataclass
class Past:
    """An event, read for one topology."""

    old: list[OldWorker]
    """By supervisor id and port; other stages refer to them by number."""
    needed: list[int]
    """Executors to place."""
    claims: list[Claim]
    own: list[tuple[str, int]]
    """Slots that the topology may be given again."""
    count: int
    """Slots wanted."""
    staying: int
    alone: bool
    """The topology master is to be placed, and alone."""
    warnings: list[str] = field(default_factory=list)
    clash: list[int] | None = None
    """(user-defined workers, old workers, room) when these are too many together."""

    def loose(self) -> list[int]:
        """Executors to place that no claim holds."""
        held = {position for claim in self.claims for position in claim.holds}
        return [position for position in self.needed if position not in held]


def worker_need(about: Row) -> tuple[int, bool]:
    """Workers of a topology, and whether its master is alone in one."""
    wanted = min(about["workers"], about["executors"])
    alone = about["single_master"]
    if alone is None:
        alone = wanted >= 10
    return max(1, wanted + int(alone)), alone


def read_past(about: Row, executors: Executors, rows: list[Row]) -> Past:
    """The old workers' states, what is to be placed, and the wishes that can be granted."""
    event = about["event"]
    marked: dict[str, set[int]] = {"dead": set(), "unstopped": set()}
    old: list[OldWorker] = []
    wishes: list[Row] = []
    for row in rows:
        if row["kind"] == "old":
            old.append(
                OldWorker(row["node"], row["host"], row["port"], row["memory"], row["cpu"], set(row["tasks"]))
            )
        elif row["kind"] == "wish":
            wishes.append(row)
        elif row["kind"] in marked:
            marked[row["kind"]].update(row["tasks"])
    old.sort(key=lambda worker: (worker.node, worker.port))
    wishes.sort(key=lambda row: row["seat"])
    _settle(executors, old)
    _judge(event, old, marked["dead"], marked["unstopped"])
    at_rest = {position for worker in old if worker.state != LOST for position in worker.holds}
    needed = [position for position in range(len(executors.unit)) if position not in at_rest]
    own = [(worker.node, worker.port) for worker in old if worker.state == LOST] if event != "monitor" else []
    past = Past(old, needed, [], own, 0, len(old) - sum(worker.state == LOST for worker in old), False)
    _claim(about, executors, past, wishes)
    return past


def _settle(executors: Executors, old: list[OldWorker]) -> None:
    """Each executor lives where most of its tasks are; in the lower slot when equal."""
    at: dict[int, int] = {}
    for number, worker in enumerate(old):
        for task in worker.tasks:
            at.setdefault(task, number)
    for position, tasks in enumerate(executors.tasks()):
        votes: dict[int, int] = {}
        for task in tasks:
            if task in at:
                votes[at[task]] = votes.get(at[task], 0) + 1
        if votes:
            old[max(votes, key=lambda number: (votes[number], -number))].holds.append(position)


def _judge(event: str, old: list[OldWorker], dead: set[int], beating: set[int]) -> None:
    for worker in old:
        struck = event == "monitor" and not dead.isdisjoint(worker.tasks)
        if event == "new" or struck:
            continue
        if not beating.isdisjoint(worker.tasks):
            worker.state = UNSTOPPED
        elif event == "monitor":
            worker.state = KEPT


def _claim(about: Row, executors: Executors, past: Past, wishes: list[Row]) -> None:
    """Grants wishes, kind by kind, and fixes the number of slots that are wanted."""
    wanted, alone = worker_need(about)
    master = about["master"]
    masters = sum(executors.component[position] == master for position in past.needed)
    least = 2 if alone and masters and len(past.needed) > masters else 1
    room = min(max(wanted - past.staying, least), len(past.needed))
    needed = set(past.needed)
    taken: set[int] = set()
    kinds = [("use.userdefine.assignment", _user_claims(about, executors, past, wishes))]
    if about["use_old"] and about["event"] != "rebalance":
        kinds.append(("use.old.assignment", _old_claims(executors, past)))
    for key, claims in kinds:
        granted: list[Claim] = []
        fresh: set[int] = set()
        for claim in claims:
            wants = set(claim.holds)
            if wants <= needed and wants.isdisjoint(taken) and wants.isdisjoint(fresh):
                granted.append(claim)
                fresh |= wants
        everyone = past.claims + granted
        named = any(executors.component[position] == master for claim in everyone for position in claim.holds)
        left = room - int(bool(alone and masters and not named))
        if len(everyone) <= left:
            past.claims = everyone
            taken |= fresh
        elif past.claims:
            past.clash = [len(past.claims), len(granted), room]
        else:
            past.warnings.append(dropped_wishes(key, len(granted), left))
    loose = past.loose()
    past.count = min(room, len(past.claims) + len(loose))
    past.alone = alone and any(executors.component[position] == master for position in loose)


def _user_claims(about: Row, executors: Executors, past: Past, wishes: list[Row]) -> list[Claim]:
    beating = {position for worker in past.old if worker.state == UNSTOPPED for position in worker.holds}
    tasks = executors.tasks() if wishes else []
    queues: dict[int, list[int]] = {}
    for position in range(len(executors.unit) - 1, -1, -1):
        if position not in beating:
            queues.setdefault(executors.component[position], []).append(position)
    claims: list[Claim] = []
    for wish in wishes:
        if any(_is_met(wish, worker, executors, tasks) for worker in past.old if worker.state == UNSTOPPED):
            continue
        mine: list[int] = []
        for component, count in zip(wish["components"], wish["counts"], strict=True):
            queue = queues.get(component, [])
            got = 0
            while queue and got < count:
                mine.append(queue.pop())
                got += len(tasks[mine[-1]])
        if mine:
            mine.sort()
            hint = _hint(mine, wish, past)
            memory, cpu = wish["memory"], wish["cpu"]
            claims.append(Claim(mine, False, wish["host"], wish["port"], None, hint, memory, cpu))
    return claims


def _is_met(wish: Row, worker: OldWorker, executors: Executors, tasks: list[list[int]]) -> bool:
    counts: dict[int, int] = {}
    for position in worker.holds:
        component = executors.component[position]
        counts[component] = counts.get(component, 0) + len(tasks[position])
    wanted = {c: n for c, n in zip(wish["components"], wish["counts"], strict=True) if n > 0}
    return (
        wish["host"] in (None, worker.host)
        and wish["port"] in (None, worker.port)
        and wish["memory"] in (0, worker.memory)
        and wish["cpu"] in (0, worker.cpu)
        and counts == wanted
    )


def _hint(mine: list[int], wish: Row, past: Past) -> tuple[str, int] | None:
    """The slot of its own on the wanted host that holds most of the claim already."""
    wants = set(mine)
    best, most = None, 0
    for worker in past.old:
        share = len(wants.intersection(worker.holds))
        if (worker.node, worker.port) in past.own and worker.host == wish["host"] and share > most:
            best, most = (worker.node, worker.port), share
    return best


def _old_claims(executors: Executors, past: Past) -> list[Claim]:
    known = {task for tasks in executors.tasks() for task in tasks}
    return [
        Claim(worker.holds, True, worker.host, worker.port, worker.node, None, worker.memory, worker.cpu)
        for worker in past.old
        if worker.state == LOST and worker.holds and worker.tasks <= known
    ]
