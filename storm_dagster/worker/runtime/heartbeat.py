"""Local heartbeat file of a worker, and detection of components that block its loop."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.host.clock import boot_clock
from storm_dagster.host.files import write_atomically
from storm_dagster.host.worker_spec import HeartbeatFile
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.worker.tasks.runner import Runner, Shared
from storm_dagster.worker.tasks.stacks import component_stack

_log = logging.getLogger(__name__)


_BEAT_BYTES = 512
"""Every beat is as long as the others, so that it can be written over the last one."""


@dataclass(eq=False)
class HeartbeatThread:
    """Thread that writes the heartbeat file every ``secs`` seconds, if the loop has advanced
    since.
    """

    path: Path
    secs: float
    passes: Callable[[], int]
    status: Callable[[], str]
    watch: Callable[[], None] = lambda: None
    """Called every ``secs`` seconds, before the beat."""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._count = 0
        self._file: int | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first beat and start the thread."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the file stays."""
        self._stop.set()

    def _run(self) -> None:
        seen = -1
        while not self._stop.wait(self.secs):
            self.watch()
            passes = self.passes()
            if passes != seen:
                seen = passes
                self._beat()

    def _beat(self) -> None:
        self._count += 1
        beat = HeartbeatFile(
            pid=os.getpid(), time_boot=boot_clock(), count=self._count, status=self.status()
        )
        text = beat.model_dump_json().ljust(_BEAT_BYTES)
        try:
            if self._file is None:
                write_atomically(self.path, text)
                self._file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            else:
                # In its place: that also works on a disk that is full.
                os.pwrite(self._file, text.encode(), 0)
        except OSError as error:
            _log.warning("the heartbeat file %s cannot be written: %s", self.path, error)


class BlockedLoop(StormDagsterError):
    """A component does not return, and blocks all tasks on its worker's loop, or its own task in a
    thread.
    """


@dataclass(eq=False)
class Watchdog:
    """Detector of a blocked loop, called by another thread; reports each blockage once."""

    shared: Shared
    passes: Callable[[], int]
    secs: float
    runners: Callable[[], list[Runner]] = list

    def __post_init__(self) -> None:
        self._stuck: dict[tuple[int, float], None] = {}
        """(task, start) of the calls in threads that were reported and last."""
        self._seen: tuple[int, Runner | None] = (-1, None)
        self._since = 0.0
        self._reported = False
        self._loop = threading.get_ident()

    def check(self) -> None:
        """Report the task that has occupied the loop for ``secs`` seconds, and calls in threads
        that last longer than the message timeout.
        """
        now = time.monotonic()
        self._check_threads(now)
        seen = (self.passes(), self.shared.at)
        if seen != self._seen:
            self._seen, self._since, self._reported = seen, now, False
            return
        runner = seen[1]
        if self._reported or runner is None or now - self._since < self.secs:
            return
        self._reported = True
        where = component_stack(sys._current_frames().get(self._loop))
        error = BlockedLoop(
            f"component {runner.component!r} has not returned for {now - self._since:.0f} s, and all other tasks of "
            f"its worker wait for it: set blocking = True on its class (it then has a thread of its own), or make "
            f"process async. It is at:\n{where}"
        )
        self.shared.report(runner.task_id, runner.component, error, "blocked")

    def _check_threads(self, now: float) -> None:
        seen, self._stuck = self._stuck, {}
        for runner in self.runners():
            # Its tuple has timed out by then, so that no honest wait is reported.
            timeout = max(self.secs, float(runner.conf.get("topology.message.timeout.secs") or 30))
            for start, method, where in runner.stuck_calls(now - timeout):
                key = (runner.task_id, start)
                self._stuck[key] = None
                if key not in seen:
                    error = BlockedLoop(
                        f"{method} of component {runner.component!r} has not returned for {now - start:.0f} s, and its "
                        f"task stands still: give its requests a timeout. It is at:\n{where}"
                    )
                    self.shared.report(runner.task_id, runner.component, error, "stuck")
