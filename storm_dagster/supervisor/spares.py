"""Spares: processes that have imported a worker's modules and wait for a spec.

Imports are most of a worker's start, and all workers of a host start at once after a submission or
the loss of another host. A spare reads its spec when its supervisor orders it, and ends when the
supervisor ends.
"""

import subprocess
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from storm_dagster.host.clock import boot_clock

_CALM_SECS = 5.0
"""Time after a start in which no spare is started: the new worker needs the processor."""


@dataclass(eq=False)
class Spares:
    """At most ``number`` waiting processes of one supervisor. Thread-safe."""

    number: int
    spawn: Callable[[str], subprocess.Popen[bytes]]
    """Starts a process for that worker id, with a pipe as its standard input."""
    _waiting: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Worker id -> process that waits for the spec of that worker."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _taken_at: float = float("-inf")
    """Boot clock at the last :meth:`take`."""
    _closed: bool = False

    def take(self, fits: bool) -> tuple[str, subprocess.Popen[bytes] | None]:
        """Take a worker id, and its waiting process if there is one.

        Without ``fits``, no spare may run the work: the id is new, and has no process. The caller
        owns the process, and starts or ends it.
        """
        with self._lock:
            self._taken_at = boot_clock()
            while fits and self._waiting:
                worker_id, child = self._waiting.popitem()
                if child.poll() is None:
                    return worker_id, child
                end(child)
        return uuid.uuid4().hex, None

    def refill(self) -> None:
        """Start the missing spares, unless a worker was started a moment ago.

        No effect once closed. Raises the errors of ``spawn``.
        """
        with self._lock:
            self._waiting = {
                worker_id: child
                for worker_id, child in self._waiting.items()
                if child.poll() is None
            }
            while (
                not self._closed
                and len(self._waiting) < self.number
                and boot_clock() - self._taken_at > _CALM_SECS
            ):
                worker_id = uuid.uuid4().hex
                self._waiting[worker_id] = self.spawn(worker_id)

    def close(self) -> None:
        """End all spares."""
        with self._lock:
            self._closed = True
            for child in self._waiting.values():
                end(child)
            self._waiting.clear()


def start(child: subprocess.Popen[bytes]) -> bool:
    """Order a spare to read its spec; false if it is dead."""
    assert child.stdin is not None
    try:
        child.stdin.write(b"\n")
        child.stdin.close()
    except OSError:
        end(child)
        return False
    return True


def end(child: subprocess.Popen[bytes]) -> None:
    """End a spare that was not started."""
    child.kill()
    child.wait()
    with suppress(OSError, AttributeError):
        child.stdin.close()  # type: ignore[union-attr]
