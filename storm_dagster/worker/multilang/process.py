"""Storm's multilang protocol: one program, its pipes, its messages.

Each message is JSON, a newline, ``end``, a newline. Reading and writing have separate threads, so
that a program that neither reads nor writes does not block the worker.
"""

import contextlib
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import IO, Any

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.json_values import encode_converted
from storm_dagster.worker.multilang.messages import read_output

_log = logging.getLogger("storm_dagster.component")

LOG_LEVELS = {0: 5, 1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
"""Level numbers of the protocol; the default is INFO."""

# A process group, to be killed as a whole, in the worker's session, where the supervisor finds it
# if the worker was killed. Python 3.10 would have to run code between fork and exec for that.
_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {}
_PIPES: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)


def _program(name: str) -> str:
    """Return the path of a program.

    A program that is not on PATH may be beside the worker's interpreter, in a virtual environment
    that is not activated (``streamparse_run``).
    """
    if "/" in name or shutil.which(name) is not None:
        return name
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else name


@dataclass(eq=False)
class ShellProcess:
    """One run of a program.

    The reader's thread calls ``on_output`` with each item of :func:`read_output`, and at the end
    with its reason, a string.
    """

    command: Sequence[str]
    folder: Path
    """Working folder of the program, if it exists."""
    pid_dir: Path
    """Folder, which is created, for the file that the program names by its process id."""
    handshake: InitVar[Mapping[str, Any]]
    """The first message to the program."""
    on_output: "Callable[[ShellProcess, Any], None]"
    name: str
    """Name of the task, for threads and log lines."""
    on_written: Callable[[], None] = lambda: None
    """Called once all is written, if :meth:`room` found no room before."""

    def __post_init__(self, handshake: Mapping[str, Any]) -> None:
        command = self.command
        folder = self.folder
        self._full = False
        """True if :attr:`on_written` must be called."""
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Encoded messages; ``None`` ends the writer."""
        self._task_ids: deque[bytes] = deque()
        """Responses to emits, which are sent before any queued tuple."""
        self.pid_dir.mkdir(parents=True, exist_ok=True)
        try:
            argv = [_program(command[0]), *command[1:]]
            self.process = subprocess.Popen(
                argv, cwd=folder if folder.is_dir() else None, **_PIPES, **_GROUP
            )
        except OSError as error:
            self._remove_pid_dir()
            raise InvalidRequest(
                f"shell component: {command[0]!r} cannot be started: {error}"
            ) from None
        self.reported_pid: int | None = None
        """Process id in the program's first message: it may be that of a child of the program."""
        self.send(handshake)
        self._start_thread("in", self._read, self.process.stdout)
        self._start_thread("out", self._write, self.process.stdin)
        self._start_thread("log", self._log_errors, self.process.stderr)

    def _start_thread(self, role: str, target: Callable[[Any], None], pipe: Any) -> None:
        name = f"{self.name}-{role}"
        threading.Thread(target=target, args=(pipe,), name=name, daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message for the program; any thread.

        Raises :class:`NoJsonForm` for NaN, infinities and half of a surrogate pair in it.
        """
        self._outgoing.put(encode_converted(message, str) + b"\nend\n")

    def unwritten(self) -> int:
        """Return the number of messages that wait to be written."""
        return self._outgoing.qsize()

    def room(self, max_unwritten: int) -> int:
        """Return the number of messages that may be sent; none if it is not positive.

        After them, ``max_unwritten`` messages wait to be written. Without room, ``on_written`` is
        called once there is room.
        """
        room = max_unwritten - self.unwritten()
        if room > 0:
            return room
        # Checked twice: the writer may have finished before it could see the flag.
        self._full = True
        return max_unwritten - self.unwritten()

    def send_task_ids(self, tasks: list[int]) -> None:
        """Queue the response to an emit; any thread."""
        self._task_ids.append(encode_converted(tasks, str) + b"\nend\n")
        # Wakes the writer.
        self._outgoing.put(b"")

    def end(self) -> None:
        """Kill the program and its process group."""
        self._outgoing.put(None)
        # The group of a program that has ended, too: it may have left children, which hold its
        # pipes. After `wait`, its number may belong to another process.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if _GROUP:
                    os.killpg(self.process.pid, signal.SIGKILL)
                else:
                    self.process.kill()
        self.process.wait()
        try:
            (self.pid_dir / str(self.reported_pid or self.process.pid)).unlink(missing_ok=True)
        except OSError as error:
            _log.debug("%s: %s", self.name, error)
        self._remove_pid_dir()

    def _remove_pid_dir(self) -> None:
        # The folder stays if the program has left other files there.
        with contextlib.suppress(OSError):
            self.pid_dir.rmdir()

    def _read(self, stream: IO[bytes]) -> None:
        """Pass the program's messages on until its output ends; the body of a thread."""
        reason = "its output ended"
        try:
            for message in read_output(stream):
                if isinstance(message, dict) and "pid" in message and self.reported_pid is None:
                    self.reported_pid = int(message["pid"])
                    continue
                self.on_output(self, message)
        except EOFError as error:
            code = self.process.poll()
            reason = f"{error} (exit code {code})" if code is not None else str(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        self.on_output(self, reason)

    def _write(self, stream: IO[bytes]) -> None:
        """Write the queued messages until :meth:`end`; the body of a thread."""
        try:
            while (raw := self._outgoing.get()) is not None:
                while self._task_ids:
                    stream.write(self._task_ids.popleft())
                stream.write(raw)
                if self._outgoing.empty():
                    stream.flush()
                    if self._full:
                        self._full = False
                        self.on_written()
        except OSError as error:
            # The reader notices the end of the program, too, and reports it.
            _log.debug("%s: writing: %s", self.name, error)
        finally:
            with contextlib.suppress(OSError):
                stream.close()

    def _log_errors(self, stream: IO[bytes]) -> None:
        for line in iter(lambda: stream.readline(65536), b""):
            _log.info("%s: %s", self.name, line.decode("utf-8", "replace").rstrip())
