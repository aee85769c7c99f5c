"""The parts of a task and of its worker that state and windows use.

The tasks are above this package. It knows them by these protocols, so that imports point one way.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from storm_dagster.api.context import TopologyContext
from storm_dagster.api.outages import SystemUnavailable
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


class WindowWait(Protocol):
    """Wait of a task for systems, as far as windows use it.

    ``SystemWait`` of ``worker/tasks/system_wait.py``.
    """

    def begin(self, error: SystemUnavailable, call: Literal["window"]) -> None:
        """Begin a pause of this call, and report the outage if it is new."""
        ...

    def end(self, call: Literal["window"]) -> None:
        """Note that the call returned."""
        ...

    def pause_secs(self) -> float | None:
        """Seconds until the next call; ``None`` while the task does not wait."""
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
    # The modules of these two import this one.
    state: Any
    """``StateDriver`` of the task, once its state is open."""
    results: Any
    """``ResultTracker`` of the windows, once the state is open."""

    @property
    def shared(self) -> StateWorker:
        """The worker of the task."""
        ...

    @property
    def system_wait(self) -> WindowWait:
        """Wait for systems that the component named as unavailable."""
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
        """Show the systems that the task waits for, by ``source``; any thread of the task."""
        ...

    def call_in_loop(self, action: Callable[[], Any]) -> None:
        """Run ``action`` in the loop."""
        ...

    def checked_route(self, values: Any, stream: str) -> Route:
        """Return the route for an emit.

        ``InvalidRequest`` if the values do not fit.
        """
        ...
