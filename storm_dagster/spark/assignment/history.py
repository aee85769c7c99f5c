"""History of a topology: current assignment and requested workers, read for one event. Runs in Spark.

Executors are positions in lists that are ordered by first task id.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pyarrow as pa

from storm_dagster.model.placement_reasons import MASTER_ALONE_FROM, dropped_requests
from storm_dagster.spark.assignment.schema import Row

LOST, KEPT, UNSTOPPED = 0, 1, 2


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
class HeldWorker:
    """A worker of the current assignment."""

    node: str
    host: str
    port: int
    memory: int
    cpu: int
    tasks: set[int]
    state: int = LOST
    holds: list[int] = field(default_factory=list)
    """Executors in it."""


@dataclass
class WorkerRequest:
    """A worker whose executors are given; its slot is to be found."""

    holds: list[int]
    old: bool
    host: str | None
    port: int | None
    node: str | None
    hint: tuple[str, int] | None
    memory: int
    cpu: int


@dataclass
class EventHistory:
    """Effect of an event on one topology."""

    old: list[HeldWorker]
    """By supervisor id and port; other stages refer to them by number."""
    needed: list[int]
    """Executors to place."""
    requested: list[WorkerRequest]
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

    def unassigned(self) -> list[int]:
        """Executors to place that no requested worker holds."""
        held = {position for wanted in self.requested for position in wanted.holds}
        return [position for position in self.needed if position not in held]


def worker_need(about: Row) -> tuple[int, bool]:
    """Number of workers of a topology, and whether its master is alone in one."""
    wanted = min(about["workers"], about["executors"])
    alone = about["single_master"]
    if alone is None:
        alone = wanted >= MASTER_ALONE_FROM
    return max(1, wanted + int(alone)), alone


def read_history(about: Row, executors: Executors, rows: list[Row]) -> EventHistory:
    """Read the states of old workers, what is to be placed, and the requested workers that can be granted."""
    event = about["event"]
    marked: dict[str, set[int]] = {"dead": set(), "unstopped": set()}
    old: list[HeldWorker] = []
    entries: list[Row] = []
    for row in rows:
        if row["kind"] == "old":
            old.append(HeldWorker(row["node"], row["host"], row["port"], row["memory"], row["cpu"], set(row["tasks"])))
        elif row["kind"] == "user":
            entries.append(row)
        elif row["kind"] in marked:
            marked[row["kind"]].update(row["tasks"])
    old.sort(key=lambda worker: (worker.node, worker.port))
    entries.sort(key=lambda row: row["number"])
    _match_executors(executors, old)
    _judge(event, old, marked["dead"], marked["unstopped"])
    at_rest = {position for worker in old if worker.state != LOST for position in worker.holds}
    needed = [position for position in range(len(executors.unit)) if position not in at_rest]
    own = [(worker.node, worker.port) for worker in old if worker.state == LOST] if event != "monitor" else []
    history = EventHistory(old, needed, [], own, 0, len(old) - sum(worker.state == LOST for worker in old), False)
    _grant(about, executors, history, entries)
    return history


def _match_executors(executors: Executors, old: list[HeldWorker]) -> None:
    """Assign each executor to the worker with most of its tasks; the lower slot when equal."""
    at: dict[int, int] = {}
    for number, worker in enumerate(old):
        for task in worker.tasks:
            at.setdefault(task, number)
    for position, tasks in enumerate(executors.tasks()):
        votes = Counter(at[task] for task in tasks if task in at)
        if votes:
            old[max(votes, key=lambda number: (votes[number], -number))].holds.append(position)


def _judge(event: str, old: list[HeldWorker], dead: set[int], beating: set[int]) -> None:
    for worker in old:
        struck = event == "monitor" and not dead.isdisjoint(worker.tasks)
        if event == "new" or struck:
            continue
        if not beating.isdisjoint(worker.tasks):
            worker.state = UNSTOPPED
        elif event == "monitor":
            worker.state = KEPT


def _grant(about: Row, executors: Executors, history: EventHistory, entries: list[Row]) -> None:
    """Grant requested workers, kind by kind, and set the number of slots that are wanted."""
    workers, alone = worker_need(about)
    master = about["master"]
    masters = sum(executors.component[position] == master for position in history.needed)
    least = 2 if alone and masters and len(history.needed) > masters else 1
    room = min(max(workers - history.staying, least), len(history.needed))
    needed = set(history.needed)
    taken: set[int] = set()
    kinds = [("use.userdefine.assignment", _user_requests(about, executors, history, entries))]
    if about["use_old"] and about["event"] != "rebalance":
        kinds.append(("use.old.assignment", _old_requests(executors, history)))
    for key, requested in kinds:
        granted: list[WorkerRequest] = []
        fresh: set[int] = set()
        for wanted in requested:
            wants = set(wanted.holds)
            if wants <= needed and wants.isdisjoint(taken) and wants.isdisjoint(fresh):
                granted.append(wanted)
                fresh |= wants
        everyone = history.requested + granted
        named = any(executors.component[position] == master for wanted in everyone for position in wanted.holds)
        left = room - int(bool(alone and masters and not named))
        if len(everyone) <= left:
            history.requested = everyone
            taken |= fresh
        elif history.requested:
            history.clash = [len(history.requested), len(granted), room]
        else:
            history.warnings.append(dropped_requests(key, len(granted), left))
    unassigned = history.unassigned()
    history.count = min(room, len(history.requested) + len(unassigned))
    history.alone = alone and any(executors.component[position] == master for position in unassigned)


def _user_requests(about: Row, executors: Executors, history: EventHistory, entries: list[Row]) -> list[WorkerRequest]:
    beating = {position for worker in history.old if worker.state == UNSTOPPED for position in worker.holds}
    tasks = executors.tasks() if entries else []
    queues: dict[int, list[int]] = {}
    for position in range(len(executors.unit) - 1, -1, -1):
        if position not in beating:
            queues.setdefault(executors.component[position], []).append(position)
    requested: list[WorkerRequest] = []
    for entry in entries:
        if any(_is_met(entry, worker, executors, tasks) for worker in history.old if worker.state == UNSTOPPED):
            continue
        mine: list[int] = []
        for component, count in zip(entry["components"], entry["counts"], strict=True):
            queue = queues.get(component, [])
            got = 0
            while queue and got < count:
                mine.append(queue.pop())
                got += len(tasks[mine[-1]])
        if mine:
            mine.sort()
            hint = _hint(mine, entry, history)
            memory, cpu = entry["memory"], entry["cpu"]
            requested.append(WorkerRequest(mine, False, entry["host"], entry["port"], None, hint, memory, cpu))
    return requested


def _is_met(entry: Row, worker: HeldWorker, executors: Executors, tasks: list[list[int]]) -> bool:
    counts = Counter[int]()
    for position in worker.holds:
        counts[executors.component[position]] += len(tasks[position])
    asked = {c: n for c, n in zip(entry["components"], entry["counts"], strict=True) if n > 0}
    return (
        entry["host"] in (None, worker.host)
        and entry["port"] in (None, worker.port)
        and entry["memory"] in (0, worker.memory)
        and entry["cpu"] in (0, worker.cpu)
        and counts == asked
    )


def _hint(mine: list[int], entry: Row, history: EventHistory) -> tuple[str, int] | None:
    """The topology's own slot on the requested host that holds most of these executors already."""
    wants = set(mine)
    best, most = None, 0
    for worker in history.old:
        share = len(wants.intersection(worker.holds))
        if (worker.node, worker.port) in history.own and worker.host == entry["host"] and share > most:
            best, most = (worker.node, worker.port), share
    return best


def _old_requests(executors: Executors, history: EventHistory) -> list[WorkerRequest]:
    known = {task for tasks in executors.tasks() for task in tasks}
    return [
        WorkerRequest(worker.holds, True, worker.host, worker.port, worker.node, None, worker.memory, worker.cpu)
        for worker in history.old
        if worker.state == LOST and worker.holds and worker.tasks <= known
    ]
