"""The parts of a task and of its worker that state and windows use.

The tasks are above this package. It knows them by these protocols, so that imports point one way.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from storm_dagster.api.context import TopologyContext
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.topology import ComponentSpec
from storm_dagster.worker.dataplane.events import EventDelivery
from storm_dagster.worker.dataplane.routes import Route
from storm_dagster.worker.dataplane.tree import Ledger
from storm_dagster.worker.state.storage import StateStorage

MAX_RETRY_SECS = 60.0
"""Longest pause between two tries of a task to initialize its component, or to emit a window."""


class StateWorker(Protocol):
    """Worker of a task with state.

    ``Shared`` of ``worker/tasks/runner.py``.
    """

    wake: Callable[[], None]
    clock: Callable[[], float]
    ledger: Ledger
    events: EventDelivery
    storage: StateStorage
    acker_tasks: tuple[int, ...]
    spouts_run: bool
    redirect: Callable[[Tuple, int], Any]

    def now_ms(self) -> int:
        """Return milliseconds since 1970.

        They never decrease while the process lives.
        """
        ...


class StateTask(Protocol):
    """Task with state or windows.

    ``Runner`` of ``worker/tasks/runner.py``.
    """

    task_id: int
    component: str
    context: TopologyContext
    conf: Mapping[str, Any]
    part: ComponentSpec
    routes: dict[str, Route]
    is_async: bool
    crashed: bool
    held: bool
    awaits_target: bool
    events_full: bool
    events_wait: bool
    system_wait: Any
    """Wait for a system that the component named (``SystemWait``)."""
    state: Any
    """Driver of the state, once it is open."""
    results: Any
    """Results of the windows, once the state is open."""

    @property
    def shared(self) -> StateWorker:
        """The worker of the task."""
        ...

    def waiting(self) -> int:
        """Number of tuples queued for the task."""
        ...

    def report(self, error: BaseException, activity: str) -> None:
        """Log and record an error."""
        ...

    def metric(self, name: str, value: Any) -> None:
        """Keep the newest value of a metric."""
        ...

    def show_awaited(self, source: str, text: str) -> None:
        """Show what the task waits for by ``source``; any thread that runs the task."""
        ...

    def call_in_loop(self, action: Callable[[], Any]) -> None:
        """Run ``action`` in the loop."""
        ...

    def checked_route(self, values: Any, stream: str) -> Route:
        """Return the route for an emit.

        ``InvalidRequest`` if the values do not fit.
        """
        ...
