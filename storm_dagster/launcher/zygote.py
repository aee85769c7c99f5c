"""The warm process: it loads everything once, and forks a process for each run.

It has one thread and opens no connection, since a fork inherits neither. Forks read the requests,
so that no client can block it. It can be killed at any time: runs continue, its successor watches
them, and meanwhile the launcher works the stock way.
"""

import contextlib
import functools
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from storm_dagster.host.forks import threads
from storm_dagster.host.processes import RunFile, run_dir
from storm_dagster.host.waiting import poll
from storm_dagster.launcher.child import LoadedCode, report_death, serve_one
from storm_dagster.launcher.compatibility import dagster_internals
from storm_dagster.launcher.preload import Fingerprint, preload
from storm_dagster.launcher.wire import SOCKET, LineConnection, listen, run_record, run_records

log: logging.Logger = logging.getLogger(__name__)

_CHECK_SECS = 2.0
"""Interval of the check for changed files."""
_FAILED_SECS = 60.0
"""Longest time until a failed load is retried, since the files that it depends on are not all
known.
"""
_STABLE_SECS = 1.0
_STABLE_WITHIN_SECS = 30.0
"""A reload waits until files are unchanged for the first time, at most for the second."""
_WATCH_SECS = 0.5
"""Interval of the check of processes that a predecessor forked."""
_AGAIN_SECS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_MOST_REPORTS = 20


@dataclass
class _Death:
    """A killed process of a run, until that is reported."""

    record: RunFile
    how: str
    tries: int = 0
    due: float = 0.0


class _Reload(Exception):
    """Loaded files have changed."""


class Zygote:
    """One warm process; :meth:`serve` blocks."""

    def __init__(self, served: LoadedCode, began_ns: int) -> None:
        """``began_ns``: when loading began, epoch nanoseconds."""
        self._loaded = served
        self._began_ns = began_ns
        self._home = served.home
        self._stop = False
        self._adopted: list[RunFile] = []
        self._deaths: list[_Death] = []
        self._reporting: dict[int, _Death] = {}
        self._fingerprint = Fingerprint(served.modules, served.read)
        self._listener: socket.socket | None = None
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> Callable[[], int] | None:
        """Serve until SIGTERM, then return ``None``. In a fork, return the fork's task."""
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        self._take_over()
        self._check_files()
        names = ", ".join(self._loaded.modules)
        if threads() == 1:
            self._listener = listen(self._home)
            log.info("warm: runs of %s start here", names)
        else:
            log.warning(
                "loading %s started threads, which a fork cannot keep: runs start the stock way",
                names,
            )
        checked = time.monotonic()
        while not self._stop:
            self._reap()
            self._watch()
            if (task := self._report()) is not None:
                return task
            now = time.monotonic()
            if now - checked >= _CHECK_SECS:
                checked = now
                self._check_files()
            pause = _WATCH_SECS if self._adopted or self._deaths else _CHECK_SECS
            ready, _, _ = select.select(
                [self._woken, *filter(None, [self._listener])], [], [], pause
            )
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            if self._listener in ready and not self._stop:
                self._check_files()
                if (task := self._accept()) is not None:
                    return task
        self._close()
        return None

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop = True

    def _close(self) -> None:
        if self._listener is not None:
            # Removed before it is closed, so that no client waits for it.
            (run_dir(self._home) / SOCKET).unlink(missing_ok=True)
            self._listener.close()
            self._listener = None

    def _check_files(self) -> None:
        """Restart in the same process if loaded files have changed: a run must have the current
        code.
        """
        changed = self._fingerprint.changed() or self._fingerprint.written_since(self._began_ns)
        if changed is None:
            return
        log.info("%s has changed: reloading", changed)
        self._close()
        # Wait for the end of the writes.
        until = time.monotonic() + _STABLE_WITHIN_SECS
        while not self._stop and time.monotonic() < until:
            before = Fingerprint(self._loaded.modules, self._loaded.read)
            time.sleep(_STABLE_SECS)
            if before.changed() is None:
                break
        if not self._stop:
            raise _Reload

    # -- forking -----------------------------------------------------------------------------------
    def _fork(self) -> int:
        """Fork, and close this process's descriptors in the fork."""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            if self._listener is not None:
                self._listener.close()
            os.close(self._woken)
            signal.set_wakeup_fd(-1)
            os.close(self._wake)
        return pid

    def _accept(self) -> Callable[[], int] | None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return None
        peer = LineConnection(connection)
        if peer.credentials()[1] == os.geteuid():
            try:
                if self._fork() == 0:
                    return functools.partial(serve_one, peer, self._loaded)
            except OSError as error:
                # No memory, too many processes: closing makes the launcher use the stock way at
                # once.
                log.warning("no process can be forked: %s", error)
        peer.close()
        return None

    # -- the runs' processes -----------------------------------------------------------------------
    def _take_over(self) -> None:
        """Watch the processes forked by a predecessor, which was killed or has reloaded."""
        for record in run_records(self._home):
            if record.alive():
                self._adopted.append(record)
            else:
                self._deaths.append(_Death(record, "was killed while nobody watched it"))

    def _reap(self) -> None:
        """Reap the forks that have exited."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if (reported := self._reporting.pop(pid, None)) is not None:
                if code != 0:
                    self._postpone(reported)
                continue
            self._adopted = [record for record in self._adopted if record.pid != pid]
            for record in run_records(self._home):
                # A fork that exits gracefully removes its record.
                if record.pid == pid and not record.alive():
                    self._deaths.append(_Death(record, _describe_exit(code)))

    def _watch(self) -> None:
        for record in [record for record in self._adopted if not record.alive()]:
            self._adopted.remove(record)
            if run_record(self._home, record.id) == record:
                self._deaths.append(_Death(record, "was killed"))

    def _postpone(self, death: _Death) -> None:
        death.tries += 1
        if death.tries >= _MOST_REPORTS:
            log.error(
                "the end of run %s could not be reported: run monitoring will find it",
                death.record.id,
            )
            return
        death.due = time.monotonic() + _AGAIN_SECS[min(death.tries, len(_AGAIN_SECS)) - 1]
        self._deaths.append(death)

    def _report(self) -> Callable[[], int] | None:
        now = time.monotonic()
        for death in [death for death in self._deaths if death.due <= now]:
            self._deaths.remove(death)
            log.warning(
                "the process of run %s (pid %d) %s", death.record.id, death.record.pid, death.how
            )
            try:
                pid = self._fork()
            except OSError:
                self._postpone(death)
                continue
            if pid == 0:
                return functools.partial(report_death, death.record, self._home, death.how)
            self._reporting[pid] = death
        return None


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit status {code} before the run was over"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def run(home: Path, modules: Sequence[str], umask: int) -> int:
    """Run the warm process of ``home`` until SIGTERM, for runs of these modules with ``umask``.
    Returns the exit code.

    A code location that cannot be loaded is retried when its files change. ``DAGSTER_HOME`` names
    the Dagster of the runs.
    """
    if dagster_internals() is None:
        return 2
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    began_ns, before = time.time_ns(), Fingerprint(modules)
    try:
        loaded = LoadedCode(home, modules, *preload(modules, umask))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        log.error(
            "%s cannot be loaded (%s): runs start the stock way until its files change",
            ", ".join(modules),
            why,
        )
        # Not by exiting: the supervising process restarts it with growing delays.
        poll(before.changed, timeout=_FAILED_SECS, pause=_CHECK_SECS)
        _restart(umask)
    try:
        task = Zygote(loaded, began_ns).serve()
    except _Reload:
        _restart(umask)
    return task() if task is not None else 0


def _restart(umask: int) -> NoReturn:
    """Exec this program again in the same process, which keeps its pid and its children."""
    os.umask(umask)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)
