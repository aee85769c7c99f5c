"""Bolts with windows or state, and the opening of both."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any

from storm_dagster.core.dataplane.keyed_state import Partitioning
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, Unavailable
from storm_dagster.worker.state.host import StateTask

if TYPE_CHECKING:
    from storm_dagster.api.bolts import StatefulBolt
    from storm_dagster.api.windows import WindowedBolt
    from storm_dagster.worker.state.log import StateLog
    from storm_dagster.worker.state.windows import WindowDriver


@dataclass(eq=False)
class StateOpening:
    """State and windows of one task.

    They are opened in a thread unless ``inline``, so that the loop continues.
    """

    bolt: StatefulBolt | WindowedBolt
    runner: StateTask
    windows: WindowDriver | None
    inline: InitVar[bool]

    def __post_init__(self, inline: bool) -> None:
        self.log: Future[StateLog] = Future()
        """The open log, or the error of the opening."""
        self._abandoned = False
        """Set by :meth:`abandon`. Any thread."""
        self.thread = threading.Thread(
            target=self._open, name=f"state-{self.runner.task_id}", daemon=True
        )
        if inline:
            self._open()
        else:
            self.thread.start()

    def _open(self) -> None:
        try:
            self.log.set_result(self._open_log())
        except BaseException as error:
            runner = self.runner
            if isinstance(error, Unavailable):
                error = Unavailable(f"task {runner.task_id} ({runner.component}): {error.message}")
            self.log.set_exception(error)
        if self._abandoned:
            # `abandon` was called before the log was open, and left it to this thread.
            self.abandon()
        self.runner.shared.wake()

    def _open_log(self) -> StateLog:
        # Imported in the thread: it takes 10 ms, and the loop continues.
        from storm_dagster.worker.state.driver import grouped_by_fields

        context = self.runner.context
        if context._state_dir is None:
            raise InvalidRequest("this task has no state folder: set topology.state.dir")
        scope = getattr(self.bolt, "state_scope", None)
        if scope is None:
            by_key = grouped_by_fields(self.runner) is not None
        else:
            by_key = scope == "key"
        return self.runner.shared.storage.open_log(
            context,
            Partitioning(len(context.component_tasks(context.component)), by_key),
            getattr(self.bolt, "merge_states", lambda key, values: values[0]),
            # `context` also checks that a thread is not detached.
            lambda: context.may_write() and not self._abandoned,
            self.windows.read if self.windows is not None else lambda contents: None,
        )

    def attach(self) -> None:
        """Attach the drivers to the bolt, and set ``runner.state``.

        Called when its emit works, before ``initialize``, and after the opening has ended: else it
        waits. Raises the error of the opening; if a driver raises, the log is closed.
        """
        from storm_dagster.worker.state.driver import StateDriver

        log = self.log.result()
        try:
            state = StateDriver(self.bolt, self.runner, log, self.windows)
            if self.windows is not None:
                self.windows.attach(state)
        except BaseException:
            log.close()
            raise
        self.runner.state = state

    def abandon(self) -> None:
        """Close the state, or close it once it is open."""
        self._abandoned = True
        if self.log.done() and self.log.exception() is None:
            self.log.result().close()


def acks_itself(bolt: Any) -> bool:
    """True if the bolt or its state driver acks instead of the runner.

    The bolt gathers tuples, or its acks are deferred to checkpoints.
    """
    return bool(getattr(bolt, "_gathers", False)) or hasattr(type(bolt), "process_again")


def open_state(bolt: Any, runner: StateTask, *, inline: bool = False) -> StateOpening | None:
    """Begin to open the state of a windowed or stateful bolt.

    It is opened in another thread; with ``inline`` in this one, before this returns. ``None`` for
    any other bolt, and for one with ``exactly_once = False``. Raises if its conf is not valid.
    """
    windows = None
    if hasattr(type(bolt), "process_window"):
        from storm_dagster.worker.state.windows import WindowDriver

        windows = WindowDriver(bolt, runner)
        bolt._driver = windows
    elif not hasattr(type(bolt), "process_again") or not getattr(bolt, "exactly_once", True):
        return None
    if runner.is_async:
        raise InvalidTopology(
            f"bolt {runner.component!r} has state and an async process: changes of the state "
            "could not be attributed to one tuple; make process a plain method"
        )
    return StateOpening(bolt, runner, windows, inline)
