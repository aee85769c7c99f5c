"""Protocol between launcher and warm process, and their files.

One connection is one run. The launcher sends a request (a JSON line); the fork that serves the
connection responds with ``{"ready": pid}`` or ``{"refused": reason}``, and waits. Only the
launcher's ``go`` starts the run, so that a launcher that timed out can launch it the stock way: no
run is started twice.

While a run's process lives, ``HOME/run/dagster-run-<run id>.json`` names it; the process removes
the file when it exits. A file without its process means that the process was killed.

``FORK`` and ``LAUNCHER`` are the two sides as tables of states. A fork that gives up closes the
connection for ``go`` first and then looks whether one had come: so a ``go`` that could be sent is
obeyed by any fork that lives, however long it was held, and one that could not be sent is not. Only
a fork's death is left, which the launcher sees at once or the warm process reports.
"""

import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from storm_dagster.host.clock import boot_id
from storm_dagster.host.processes import RunFile, run_dir

RUN_ROLE = "dagster-run"
"""Role of a run's process in ``HOME/run``."""
SOCKET = "warm-runs.sock"
"""Name of the unix socket, in ``HOME/run``."""
WARM_TAG = ".dagster/storm_warm_run"
"""Hidden run tag: the machine (and container) on which a run was started warm."""
ANSWER_SECS = 1.0
"""Response time of a warm process after which the run is launched the stock way."""
GO = {"go": True}
_MAX_LINE = 1 << 20


Event = Literal["request", "ready", "go", "started", "sent", "silence", "end"]
"""A message that came; ``sent``: the own message could be sent; silence for too long; the other
side is gone.
"""
ForkState = Literal["begun", "waiting", "leaving", "runs", "gone"]
LauncherState = Literal["asking", "going", "said", "launched", "stock"]

FORK: Mapping[tuple[ForkState, Event], ForkState] = {
    ("begun", "request"): "waiting",
    ("waiting", "go"): "runs",
    ("waiting", "silence"): "leaving",
    ("waiting", "end"): "leaving",
    # In this state no further message can come.
    ("leaving", "go"): "runs",
}
"""In ``waiting`` it has sent ``ready``. Whatever is not here: ``gone``, without running."""

LAUNCHER: Mapping[tuple[LauncherState, Event], LauncherState] = {
    ("asking", "ready"): "going",
    ("going", "sent"): "said",
    # It is held, and runs when it goes on.
    ("said", "silence"): "launched",
    ("said", "started"): "launched",
}
"""In ``going`` it sends ``go``; in ``said`` it could be sent. Whatever is not here: ``stock``."""


def next_fork(state: ForkState, event: Event) -> ForkState:
    """The fork's next state."""
    return FORK.get((state, event), "gone")


def next_launcher(state: LauncherState, event: Event) -> LauncherState:
    """The launcher's next state."""
    return LAUNCHER.get((state, event), "stock")


def here() -> str:
    """Id of this machine, its boot and its pid namespace, in which a pid is unambiguous."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        machine = "-"
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = "-"
    return f"{socket.gethostname()} {machine or '-'} {boot_id()} {namespace}"


def same_place(there: str) -> Literal["here", "elsewhere", "before"]:
    """Compare a run's :data:`WARM_TAG` with this place; ``before``: this machine, before a
    reboot.
    """
    ours, theirs = here().split(), there.split()
    if ours == theirs:
        return "here"
    return "before" if ours[:2] == theirs[:2] and ours[2:3] != theirs[2:3] else "elsewhere"


def run_record(home: Path, run_id: str) -> RunFile | None:
    """Record of a run's process; ``None`` if it exited by itself or never started."""
    return RunFile.read(RunFile.path_of(home, RUN_ROLE, run_id))


def run_records(home: Path) -> list[RunFile]:
    """Records of all runs' processes."""
    return [record for record in RunFile.read_all(home) if record.role == RUN_ROLE]


@contextmanager
def _address(home: Path) -> Iterator[str]:
    """Address of the socket, within the kernel's 107 bytes for any length of HOME."""
    folder = os.open(run_dir(home), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


def listen(home: Path) -> socket.socket:
    """Create the warm process's socket, for this user only; replaces that of a dead process."""
    run_dir(home).mkdir(parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        (run_dir(home) / SOCKET).unlink(missing_ok=True)
        with _address(home) as address:
            listener.bind(address)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


class LineConnection:
    """Connection that transfers JSON lines, with timeouts."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""

    @staticmethod
    def connect(home: Path, timeout: float = ANSWER_SECS) -> "LineConnection":
        """Connect to the warm process of ``home``; ``OSError`` if there is none, or it is another
        user's.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            with _address(home) as address:
                connection.connect(address)
            peer = LineConnection(connection)
            pid, user = peer.credentials()
            if user != os.geteuid():
                raise PermissionError(f"{run_dir(home) / SOCKET} is served by user {user}")
            if pid == 0:
                raise PermissionError(f"{run_dir(home) / SOCKET} is served from another container")
        except BaseException:
            connection.close()
            raise
        return peer

    def credentials(self) -> tuple[int, int]:
        """(pid, user id) of the other end; pid 0 if its pid namespace is not visible from here."""
        raw = self._connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        pid, user, _ = struct.unpack("3i", raw)
        return pid, user

    def send(self, document: dict[str, Any]) -> None:
        """Send a line; ``OSError`` if the other end is gone."""
        self._connection.sendall(json.dumps(document).encode() + b"\n")

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """Receive a line; ``None`` at the end. ``TimeoutError``; ``ValueError`` if it is not a JSON
        object.
        """
        self._connection.settimeout(timeout)
        while b"\n" not in self._rest:
            part = self._connection.recv(1 << 16)
            if not part:
                return None
            self._rest += part
            if len(self._rest) > _MAX_LINE:
                raise ValueError("a line of more than 1 MiB")
        line, _, self._rest = self._rest.partition(b"\n")
        document = json.loads(line)
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
        return document

    def await_message(self, name: Literal["go", "started"], timeout: float) -> Event:
        """Wait for the message ``name``: that, or ``silence``, or ``end`` for anything else."""
        try:
            return name if name in (self.receive(timeout) or {}) else "end"
        except TimeoutError:
            return "silence"
        except (OSError, ValueError):
            return "end"

    def refuse_more(self) -> None:
        """From now on the other end cannot send; what it had sent can still be received."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
