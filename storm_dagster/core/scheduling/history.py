"""Current assignment and user-defined workers of a topology, for one event."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from storm_dagster.core.scheduling.units import Codes, Executors, Row
from storm_dagster.model.slot import Slot

if TYPE_CHECKING:
    from storm_dagster.model.placement import Event, TopologyToPlace

LOST = 0
"""State of an old worker whose executors are placed."""
KEPT = 1
"""State of an old worker that is alive and stays unchanged."""
UNSTOPPED = 2
"""State of an old worker that beats although its supervisor is gone; it stays unchanged, too."""


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
        """Number of tasks of each executor here: these need not move if it stays."""
        groups = executors.groups
        if groups is None:
            return [1 for _ in positions]
        return [len(self.tasks.intersection(groups[position])) for position in positions]


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
    """Slots that the topology holds or held, and that this event may reuse."""

    @property
    def is_empty(self) -> bool:
        """True if there is neither an assignment nor a user-defined worker."""
        return not (self.old or self.entries)

    @property
    def staying(self) -> int:
        """Number of workers that stay unchanged."""
        return sum(worker.state != LOST for worker in self.old)


def history_rows(topology: "TopologyToPlace", codes: Codes) -> Iterator[Row]:
    """Yield the rows of a topology's history; components are numbers.

    The rows are its assignment, its user-defined workers, its dead and its unstopped tasks.
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


def read_history(event: "Event", executors: Executors, rows: Iterable[Row]) -> EventHistory:
    """Read the effect of the event on each old worker and each executor.

    ``rows`` are those of ``history_rows``.
    """
    # Tasks of the rows of these kinds.
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
    unchanged: set[int] = set()
    for worker in old:
        if worker.state != LOST:
            unchanged.update(worker.holds)
    needed = [position for position in range(len(executors)) if position not in unchanged]
    own: list[Slot] = []
    # A monitor event does not offer the port of a worker that nimbus judges dead: its process
    # may still run.
    if event != "monitor":
        own = [worker.slot for worker in old if worker.state == LOST]
    return EventHistory(old, entries, needed, own)


def _match_executors(executors: Executors, old: list[OldWorker]) -> None:
    """Add each executor to ``holds`` of the old worker with most of its tasks.

    Of workers with equal numbers the lower slot wins. A new executor is in none.
    """
    # Task -> number of its old worker.
    worker_of: dict[int, int] = {}
    for number, worker in enumerate(old):
        for task in worker.tasks:
            worker_of.setdefault(task, number)
    for position, tasks in enumerate(executors.tasks()):
        votes = Counter(worker_of[task] for task in tasks if task in worker_of)
        if votes:
            winner = max(votes, key=lambda number: (votes[number], -number))
            old[winner].holds.append(position)


def _judge(event: "Event", old: list[OldWorker], dead: set[int], unstopped: set[int]) -> None:
    """Set the state of each old worker, which is ``LOST`` by default.

    A ``new`` topology loses all workers of the backup of its assignment. A ``monitor`` event loses
    the workers with a dead task and keeps the others. A ``rebalance`` loses all: their executors
    are placed once more. In both, a worker with an unstopped task is ``UNSTOPPED``, unless it is
    dead.
    """
    for worker in old:
        if event == "new" or (event == "monitor" and not dead.isdisjoint(worker.tasks)):
            continue
        if not unstopped.isdisjoint(worker.tasks):
            worker.state = UNSTOPPED
        elif event == "monitor":
            worker.state = KEPT
