"""State that all tasks of a worker share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from storm_dagster.api.tuples import Tuple
from storm_dagster.worker.dataplane.events import EventDelivery
from storm_dagster.worker.dataplane.tree import Ledger
from storm_dagster.worker.state.storage import StateStorage


class RunningTask(Protocol):
    """Task that occupies the loop."""

    task_id: int
    component: str


@dataclass(eq=False, kw_only=True)
class Shared:
    """State shared by the tasks of a worker.

    Used only by the loop, unless noted.
    """

    conf: Mapping[str, Any]
    owns: Callable[[], bool]
    """True if the worker's lease is valid now; cheap, any thread."""
    wake: Callable[[], None]
    """Wake the loop; any thread."""
    report: Callable[[int, str, BaseException, str], None]
    """(task, component, error, context text): log and record an error; any thread."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds; tests may use another clock. Any thread."""
    epoch: float | None = None
    """Zero of the clock, in seconds since 1970; ``None``: by the system's time."""

    def __post_init__(self) -> None:
        self._epoch = time.time() - self.clock() if self.epoch is None else self.epoch
        self.ledger = Ledger()
        self.events = EventDelivery(self)
        """The tasks' reports to Dagster."""
        self.spouts_run = False
        """True if spouts may emit: active, all workers ready. Read by any thread."""
        self.active = False
        """True if the topology is active."""
        self.acker_tasks: tuple[int, ...] = ()
        """Ascending; the acker of a root is that at ``root % len(acker_tasks)``."""
        self.next_home: Callable[[], int] | None = None
        """Index in ``acker_tasks`` of an acker in this worker, which spouts here prefer. Calls
        return all of them in turn.
        """
        self.closing = False
        """True once the worker closes all its tasks."""
        self.lost_trees = 0
        """Trees of the spouts here that failed because a task or worker with parts of them ended.
        """
        self.sliced = True
        """True if a pass limits the time of each task. The test harness sets ``False``, so that the
        order of tuples does not depend on the machine's speed.
        """
        self.scratch: Path | None = None
        """Folder for files of running programs. ``None``: the current one, which only this worker
        uses.
        """
        self.catches: tuple[type[BaseException], ...] = (BaseException,)
        """Errors that a user's method may raise without ending the process. A worker survives all
        of them, since no exception is raised in it from outside. The test harness passes on a
        keyboard interrupt and the outcome of a test.
        """
        self.at: RunningTask | None = None
        """The task that occupies the loop; read by the watchdog."""
        self.warned: set[str] = set()
        """Shell components whose changed values were logged."""
        self.storage = StateStorage(self.report)
        self.redirect: Callable[[Tuple, int], Any] = lambda tup, task: self.ledger.fail(tup)
        """(tuple, task): send the tuple of a task to another task of its component."""

    def now_ms(self) -> int:
        """Return milliseconds since 1970.

        They never decrease while the process lives.
        """
        return round((self._epoch + self.clock()) * 1000)
