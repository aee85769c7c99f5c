"""Local heartbeat file of a worker, and watchdog of its loop."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.host.clock import boot_clock
from storm_dagster.host.files import write_atomically
from storm_dagster.host.worker_spec import HeartbeatFile
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.names import SLOW_CALLS
from storm_dagster.worker.runtime.loop_shares import LoopShares
from storm_dagster.worker.tasks.runner import Runner
from storm_dagster.worker.tasks.shared import RunningTask, Shared
from storm_dagster.worker.tasks.stacks import component_stack

_log = logging.getLogger(__name__)


_BEAT_BYTES = 2048
"""Length of each beat: all are equally long, so that one can be written over another."""


_MAX_FAILURE_CHARS = 250
"""Length of a failure in a beat: JSON may need six bytes for a character."""


@dataclass(eq=False)
class HeartbeatThread:
    """Thread that writes the heartbeat file.

    It writes every ``secs`` seconds, if the loop has advanced since.
    """

    path: Path
    secs: float
    passes: Callable[[], int]
    """Number of passes of the loop so far."""
    status: Callable[[], str]
    """Status of the worker, for the beat."""
    failure: Callable[[], str] = str
    """A task that could not be opened, with its error; empty without one."""
    watch: Callable[[], None] = lambda: None
    """Called every ``secs`` seconds, before the beat."""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._count = 0
        """Beats so far."""
        self._file: int | None = None
        """Descriptor of the file, once it exists."""
        self._is_refused = False
        """True if the disk has refused the last beat."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first beat and start the thread."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the file stays."""
        self._stop.set()

    def _run(self) -> None:
        written_passes = -1
        while not self._stop.wait(self.secs):
            self.watch()
            passes = self.passes()
            if passes != written_passes:
                written_passes = passes
                self._beat()

    def _bounded_failure(self) -> str:
        """The failure, with which a beat has not more than its length."""
        return self.failure().encode("ascii", "replace").decode()[:_MAX_FAILURE_CHARS]

    def _beat(self) -> None:
        """Write the file. After an error, which is logged once, the next beat tries again."""
        self._count += 1
        beat = HeartbeatFile(
            pid=os.getpid(),
            time_boot=boot_clock(),
            count=self._count,
            status=self.status(),
            failure=self._bounded_failure(),
        )
        text = beat.model_dump_json().ljust(_BEAT_BYTES)
        try:
            if self._file is None:
                write_atomically(self.path, text)
                self._file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            else:
                # Written over the last one: that also works on a full disk.
                os.pwrite(self._file, text.encode(), 0)
        except OSError as error:
            if not self._is_refused:
                _log.warning(
                    "the heartbeat file %s cannot be written, without which the supervisor ends "
                    "this worker: %s",
                    self.path,
                    error,
                )
            self._is_refused = True
        else:
            self._is_refused = False


def first_start_failure(runners: Iterable[Runner]) -> str:
    """The failure of the first task that could not be opened; empty without one."""
    for runner in runners:
        if runner.start_failure:
            return runner.start_failure
    return ""


class BlockedLoop(StormDagsterError):
    """A component does not return.

    It blocks all tasks on its worker's loop, or its own task in a thread.
    """


@dataclass(eq=False)
class Watchdog:
    """Detector of a blocked loop; reports each blockage once.

    Another thread calls it.
    """

    shared: Shared
    passes: Callable[[], int]
    """Number of passes of the loop so far."""
    secs: float
    """Time after which a task blocks the loop."""
    runners: Callable[[], list[Runner]] = list
    """All tasks of the worker, for their calls in threads."""

    def __post_init__(self) -> None:
        self._stuck: dict[tuple[int, float], None] = {}
        """(task, start) of the calls in threads that were reported before, or are now."""
        self._progress: tuple[int, RunningTask | None] = (-1, None)
        """(passes, task at which the loop is) at the last check."""
        self._since = 0.0
        """Time of the check that found that progress first."""
        self._reported = False
        """True if that blockage is reported."""
        self._shares = LoopShares()
        self._loop = threading.get_ident()
        """The loop's thread, which creates the watchdog."""

    def check(self) -> None:
        """Report a task that has occupied the loop for ``secs`` seconds.

        Also components whose slow calls take most of the loop, and calls in threads that last
        longer than the message timeout.
        """
        now = time.monotonic()
        self._check_threads(now)
        for task, component, slow in self._shares.check(now, self.runners()):
            self.shared.report(task, component, slow, SLOW_CALLS)
        runner = self.shared.at
        progress = (self.passes(), runner)
        if progress != self._progress:
            self._progress = progress
            self._since = now
            self._reported = False
            return
        if self._reported or runner is None or now - self._since < self.secs:
            return
        self._reported = True
        stack = component_stack(sys._current_frames().get(self._loop))
        error = BlockedLoop(
            f"component {runner.component!r} has not returned for {now - self._since:.0f} s, and "
            "all other tasks of its worker wait for it: set blocking = True on its class (it then "
            f"has its own thread), or make process async. It is at:\n{stack}"
        )
        self.shared.report(runner.task_id, runner.component, error, "blocked")

    def _check_threads(self, now: float) -> None:
        """Report the calls in threads of components that do not return, each once."""
        reported = self._stuck
        self._stuck = {}
        for runner in self.runners():
            # Its tuple has timed out by then, so that no justified wait is reported.
            timeout = max(self.secs, float(runner.conf.get("topology.message.timeout.secs") or 30))
            for start, method, stack in runner.stuck_calls(now - timeout):
                key = (runner.task_id, start)
                self._stuck[key] = None
                if key not in reported:
                    error = BlockedLoop(
                        f"{method} of component {runner.component!r} has not returned for "
                        f"{now - start:.0f} s, and its task does not advance: give its requests a "
                        f"timeout. It is at:\n{stack}"
                    )
                    self.shared.report(runner.task_id, runner.component, error, "stuck")
