"""What launcher and warm process say to each other, and what they leave on disk.

One connection is one run. The launcher sends a request (a JSON line); the fork that serves the connection
answers ``{"ready": pid}`` or ``{"refused": reason}``, and waits. Only the launcher's ``go`` starts the run, so
that a launcher that gave up waiting can launch it otherwise: no run is ever started twice.

While a run's process lives, ``HOME/run/dagster-run-<run id>.json`` names it; it removes the file at its end.
A file whose process is gone means that the process was killed.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from storm_dagster.model.clock import boot_id
from storm_dagster.model.run_file import RunFile, run_dir

__all__ = [
    "ANSWER_SECS",
    "GO",
    "RUN_ROLE",
    "SOCKET",
    "WARM_TAG",
    "LineConnection",
    "here",
    "listen",
    "run_record",
    "run_records",
    "same_place",
]

RUN_ROLE = "dagster-run"
"""Role of a run's process in ``HOME/run``."""
SOCKET = "warm-runs.sock"
"""Name of the unix socket, in ``HOME/run``."""
WARM_TAG = ".dagster/storm_warm_run"
"""Run tag, hidden as Dagster's own are: on which machine (and in which container) a run was started warm."""
ANSWER_SECS = 1.0
"""So long a warm process may take to answer; then the run is launched the stock way."""
GO = {"go": True}
_MAX_LINE = 1 << 20


def here() -> str:
    """This machine, its boot and its pid namespace: where a pid of one process means the same to another."""
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
    """Whether a run's :data:`WARM_TAG` means this place; ``before``: this machine, before it was started anew."""
    ours, theirs = here().split(), there.split()
    if ours == theirs:
        return "here"
    return "before" if ours[:2] == theirs[:2] and ours[2:3] != theirs[2:3] else "elsewhere"


def run_record(home: Path, run_id: str) -> RunFile | None:
    """The run's process, as its file says; ``None`` when it ended by itself (or never was)."""
    return RunFile.read(RunFile.path_of(home, RUN_ROLE, run_id))


def run_records(home: Path) -> list[RunFile]:
    """The processes of all runs whose files are there."""
    return [record for record in RunFile.read_all(home) if record.role == RUN_ROLE]


@contextmanager
def _address(home: Path) -> Iterator[str]:
    """The socket's address, short enough for the kernel (107 bytes) however long HOME is."""
    folder = os.open(run_dir(home), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


def listen(home: Path) -> socket.socket:
    """The warm process's socket, open to this user alone; replaces one that a dead process left."""
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
    """One end of a connection: JSON lines, each awaited with a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""

    @staticmethod
    def connect(home: Path, timeout: float = ANSWER_SECS) -> LineConnection:
        """Connect to the warm process of ``home``; ``OSError`` when there is none, or it is another user's."""
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
        """(pid, user id) of the other end; pid 0 when it lives in a pid namespace that cannot be seen from here."""
        raw = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, user, _ = struct.unpack("3i", raw)
        return pid, user

    def send(self, document: dict[str, Any]) -> None:
        """Send one line; ``OSError`` when the other end is gone."""
        self._connection.sendall(json.dumps(document).encode() + b"\n")

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next line; ``None`` when the other end closed. ``TimeoutError``, ``ValueError`` for no JSON object."""
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
            raise ValueError("no JSON object")
        return document

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
