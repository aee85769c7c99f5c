"""History of a topology: current assignment and user-defined workers, read for one event."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from storm_dagster.core.scheduling.units import Codes, Executors, Row
from storm_dagster.model.slot import Slot

if TYPE_CHECKING:
    from storm_dagster.model.placement import TopologyToPlace

LOST, KEPT, UNSTOPPED = 0, 1, 2
"""States of an old worker: its executors are placed; it is alive and left alone; it beats although
its supervisor is gone, and is left alone too.
"""


@dataclass
class OldWorker:
    """A worker of the current assignment."""

    node: str
    host: str
    port: int
    memory: int
    cpu: int
    tasks: set[int]
    """Its tasks as the assignment lists them."""
    state: int = LOST
    holds: list[int] = field(default_factory=list)
    """Executors in it now."""

    @property
    def slot(self) -> Slot:
        """Its supervisor and port."""
        return Slot(self.node, self.port)

    def weights(self, positions: Iterable[int], executors: Executors) -> list[int]:
        """Number of tasks of each executor here: so many need not move when it stays."""
        groups = executors.groups
        return [
            1 if groups is None else len(self.tasks.intersection(groups[position]))
            for position in positions
        ]


@dataclass
class EventHistory:
    """Effect of an event on one topology."""

    old: list[OldWorker]
    """By supervisor id and port; slots refer to them by number."""
    entries: list[Row]
    """User-defined workers, in order."""
    needed: list[int]
    """Executors to place."""
    own: list[Slot]
    """Slots that the topology holds, or held, and may be given again in this event."""

    @property
    def is_empty(self) -> bool:
        """Whether the topology has neither an assignment nor user-defined workers."""
        return not (self.old or self.entries)

    @property
    def staying(self) -> int:
        """Number of workers that stay as they are."""
        return sum(worker.state != LOST for worker in self.old)


def history_rows(topology: "TopologyToPlace", codes: Codes) -> Iterator[Row]:
    """Rows of a topology's assignment, user-defined workers, dead and unstopped tasks; components
    as numbers.
    """
    for worker in topology.old:
        yield {
            "kind": "old",
            "node": worker.node,
            "host": worker.host,
            "port": worker.port,
            "memory": worker.memory_bytes,
            "cpu": worker.cpu,
            "tasks": worker.ids,
        }
    for number, entry in enumerate(topology.user_workers):
        yield {
            "kind": "user",
            "number": number,
            "host": entry.host,
            "port": entry.port,
            "memory": entry.memory_bytes or 0,
            "cpu": entry.cpu or 0,
            "components": [codes.setdefault(name, len(codes)) for name in entry.components],
            "counts": list(entry.components.values()),
        }
    for kind, tasks in (("dead", topology.dead), ("unstopped", topology.unstopped)):
        if tasks:
            yield {"kind": kind, "tasks": tasks}


def read_history(event: str, executors: Executors, rows: Iterable[Row]) -> EventHistory:
    """Read the effect of the event on each old worker and each executor, from the rows of
    ``history_rows``.
    """
    marked: dict[str, set[int]] = {"dead": set(), "unstopped": set()}
    old: list[OldWorker] = []
    entries: list[Row] = []
    for row in rows:
        if row["kind"] == "old":
            old.append(
                OldWorker(
                    row["node"],
                    row["host"],
                    row["port"],
                    row["memory"],
                    row["cpu"],
                    set(row["tasks"]),
                )
            )
        elif row["kind"] == "user":
            entries.append(row)
        elif row["kind"] in marked:
            marked[row["kind"]].update(row["tasks"])
    old.sort(key=lambda worker: worker.slot)
    entries.sort(key=lambda row: row["number"])
    if old:
        _match_executors(executors, old)
        _judge(event, old, marked["dead"], marked["unstopped"])
    at_rest = {position for worker in old if worker.state != LOST for position in worker.holds}
    needed = [position for position in range(len(executors)) if position not in at_rest]
    # Judged dead by nimbus: the port of that worker is not offered in this round, for its process
    # may not have ended.
    own = [worker.slot for worker in old if worker.state == LOST] if event != "monitor" else []
    return EventHistory(old, entries, needed, own)


def _match_executors(executors: Executors, old: list[OldWorker]) -> None:
    """Assign each executor to the worker with most of its tasks; the lower slot when equal."""
    at: dict[int, int] = {}
    for number, worker in enumerate(old):
        for task in worker.tasks:
            at.setdefault(task, number)
    for position, tasks in enumerate(executors.tasks()):
        if votes := Counter(at[task] for task in tasks if task in at):
            old[max(votes, key=lambda number: (votes[number], -number))].holds.append(position)


def _judge(event: str, old: list[OldWorker], dead: set[int], beating: set[int]) -> None:
    for worker in old:
        if event == "new" or (event == "monitor" and not dead.isdisjoint(worker.tasks)):
            continue
        if not beating.isdisjoint(worker.tasks):
            worker.state = UNSTOPPED
        elif event == "monitor":
            worker.state = KEPT
