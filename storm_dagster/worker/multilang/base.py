"""Base of the runners of multilang programs.

A program that dies or hangs is replaced. A message that cannot be carried out harms only the
tuples that it belongs to.
"""

import itertools
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

from storm_dagster.host.waiting import Backoff
from storm_dagster.model.errors import InvalidRequest, StormDagsterError
from storm_dagster.worker.multilang.messages import BrokenMessage, StrayLine
from storm_dagster.worker.multilang.process import LOG_LEVELS, ShellProcess
from storm_dagster.worker.tasks.plain_values import metric_value
from storm_dagster.worker.tasks.runner import Runner

_log = logging.getLogger("storm_dagster.component")

_FIRST_RESTART_SECS = 0.1
_MAX_RESTART_SECS = 10.0
"""Shortest and longest pause before a program is replaced."""
_EXPLAIN_SECS = 60.0
"""Interval of the remedy in the log, for a program that prints to standard output."""
_STABLE_SECS = 10.0
"""A program that lived longer restarts after the first pause."""
_MAX_UNKNOWN = 100
"""Unknown commands of one program that are logged."""
_MAX_INBOUND = 4096
"""Messages of one program that may wait for the loop, and that it handles in one turn."""
_starts = itertools.count(1)
"""Numbers for the folders of programs, which differ for each start."""


class ShellFailure(StormDagsterError):
    """Failure of a shell component's program.

    It died or hung, and is replaced, or it sent a message that cannot be carried out.
    """


def _level_of(number: Any) -> int:
    """Level of a log message of a program; ``INFO`` for a number that is not one."""
    return LOG_LEVELS.get(number, logging.INFO) if isinstance(number, int) else logging.INFO


def stream_of(message: dict[str, Any]) -> str:
    """The stream of an emit; :class:`ShellFailure` if it is not text."""
    stream = message.get("stream") or "default"
    if not isinstance(stream, str):
        raise ShellFailure(f"the stream of an emit is {stream!r:.50}: make it text")
    return stream


class ShellRunner(Runner):
    """Base of shell bolts and shell spouts.

    Used only by the loop, except :meth:`_on_output`.
    """

    process: ShellProcess | None = None
    """The running program; ``None`` while none runs."""
    last_error: Any = None
    """Text of an ``error`` command since the last result: adapters send one before they fail a
    tuple.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.inbound: deque[tuple[ShellProcess, Any]] = deque()
        """Messages of the program, or the reason of its end as a string."""
        timeout = self.conf.get("topology.subprocess.timeout.secs")
        timeout = timeout or self.conf.get("supervisor.worker.timeout.secs")
        self.timeout = float(timeout or 30)
        """Silence of a program after which it is replaced."""
        self.last_seen = 0.0
        """Time of the program's last message, or of its start."""
        self.last_start = 0.0
        """Time of the program's start."""
        self._explain_at = 0.0
        """Time of the next log line with the remedy against printed lines."""
        self._unknown_commands: set[str] = set()
        """Commands of the program that are logged as unknown."""
        self._restart_at = 0.0
        """Time before which no program is started."""
        self._restart_pauses = Backoff(_FIRST_RESTART_SECS, _MAX_RESTART_SECS)

    def open(self) -> None:
        """Start the program."""
        assert self.part.object.shell is not None
        archive = self.context.archive
        resources = archive / "resources" if archive is not None else Path.cwd()
        scratch = self.shared.scratch or Path.cwd()
        pid_dir = (scratch / f"shell-{self.task_id}-{next(_starts)}").absolute()
        conf = {key: value for key, value in self.conf.items() if value is not None}
        handshake = {"conf": conf, "pidDir": str(pid_dir), "context": dict(self.context)}
        name = f"{self.component}-{self.task_id}"
        command = self.part.object.shell
        self.process = ShellProcess(
            command, resources, pid_dir, handshake, self._on_output, name, self.shared.wake
        )
        self.last_seen = self.last_start = time.monotonic()

    def _on_output(self, process: ShellProcess, message: Any) -> None:
        """Queue a message of the program, or the reason of its end (a string)."""
        # In the reader's thread: a program that emits faster than the loop can follow waits in its
        # pipe.
        while len(self.inbound) >= _MAX_INBOUND and process is self.process:
            time.sleep(0.001)
        self.inbound.append((process, message))
        self.shared.wake()

    def process_messages(self) -> bool:
        """Handle the program's messages, and return True if there were any."""
        worked = False
        for _ in range(min(len(self.inbound), _MAX_INBOUND)):
            process, message = self.inbound[0]
            emits = isinstance(message, dict) and message.get("command") == "emit"
            if emits and process is self.process and not self.may_begin():
                self.last_seen = time.monotonic()  # It is not silent: its targets are full.
                break
            self.inbound.popleft()
            if process is not self.process:
                # Of a program that was replaced.
                continue
            worked = True
            self.last_seen = time.monotonic()
            if isinstance(message, str):
                self.replace(message)
                continue
            if isinstance(message, StrayLine):
                self._log_stray_line(message.text)
            elif isinstance(message, BrokenMessage):
                self._refuse(message.document or {}, ShellFailure(message.reason))
            else:
                self._handle(message)
        return worked

    def _handle(self, message: Any) -> None:
        """Carry out a message; one that cannot be is refused, and the program continues."""
        try:
            if not isinstance(message, dict):
                raise ShellFailure(f"{message!r:.100} is not a command")
            self.on_message(message)
        except self.shared.catches as error:
            self._refuse(message if isinstance(message, dict) else {}, error)

    def _refuse(self, message: dict[str, Any], error: BaseException) -> None:
        """Report a message that cannot be carried out, and fail the tuples that it belongs to."""
        command = str(message.get("command") or "message")
        self.report(error, f"{command:.50} of the program")
        self.on_refused(message, error)
        wants_tasks = message.get("need_task_ids", True) and not message.get("task")
        if command == "emit" and wants_tasks and self.process is not None:
            # It waits for an answer.
            self.process.send_task_ids([])

    def _log_stray_line(self, text: str) -> None:
        """Log a line that the program printed, at intervals with the remedy."""
        now = time.monotonic()
        remedy = ""
        if now >= self._explain_at:
            self._explain_at = now + _EXPLAIN_SECS
            remedy = (
                " (standard output is the pipe of the protocol: print to standard error, or use "
                "the log of the component)"
            )
        _log.warning("%s-%d printed: %s%s", self.component, self.task_id, text, remedy)

    def log_unknown(self, command: str) -> None:
        """Log a command that is not one of the protocol, once for each name."""
        name = f"{command:.50}"
        if name in self._unknown_commands or len(self._unknown_commands) >= _MAX_UNKNOWN:
            return
        self._unknown_commands.add(name)
        _log.warning(
            "%s-%d sent the unknown command %r, which is ignored: send emit, ack, fail, log, "
            "error, metrics or sync",
            self.component,
            self.task_id,
            name,
        )

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle one message. Raises if it cannot be carried out."""
        command = message.get("command")
        if command == "log":
            level = _level_of(message.get("level"))
            _log.log(level, "%s-%d: %s", self.component, self.task_id, message.get("msg"))
        elif command == "error":
            self.last_error = message.get("msg")
            self.report(ShellFailure(str(self.last_error)), "error command")
        elif command == "metrics":
            if "name" not in message:
                raise ShellFailure('metrics names no metric: send its "name"')
            try:
                self.metric(*metric_value(message["name"], message.get("params")))
            except InvalidRequest as error:
                self.report(error, "metrics command")
        elif command == "emit":
            self.on_emit(message)
        elif command == "sync":
            self.on_sync()
        else:
            self.on_other(str(command), message)

    def on_emit(self, message: dict[str, Any]) -> None:
        """Emit a tuple for the program."""

    def on_sync(self) -> None:
        """Handle the end of a command."""

    def on_other(self, command: str, message: dict[str, Any]) -> None:
        """Handle a command of one kind of component."""

    def on_refused(self, message: dict[str, Any], error: BaseException) -> None:
        """Fail the tuples that a message belongs to, which cannot be carried out."""

    def drop_tuples(self) -> None:
        """Fail or drop the program's tuples."""

    def replace(self, reason: str) -> None:
        """Kill the program; a new one starts after a pause.

        The pause is longer each time that a program dies soon. The reason is reported, and
        :meth:`drop_tuples` is called. Without effect if no program runs.
        """
        process = self.process
        self.process = None
        if process is None:
            return
        now = time.monotonic()
        lived = now - self.last_start
        process.end()
        self.report(
            ShellFailure(f"shell component {self.component!r} is replaced: {reason}"), "shell"
        )
        self.drop_tuples()
        if lived > _STABLE_SECS:
            self._restart_pauses.reset()
        self._restart_at = now + self._restart_pauses.next_pause()

    def restart(self) -> None:
        self.crashed = False
        self.replace("the task crashed")

    def keep_alive(self, now: float) -> bool:
        """Restart the program when that is due, and return True if it runs."""
        if self.process is not None:
            return True
        if now >= self._restart_at:
            try:
                self.open()
                return True
            except self.shared.catches as error:
                self.report(error, "shell")
                self._restart_at = now + 5.0
        return False

    def close(self, *, retire: bool = False) -> None:
        """Kill the program."""
        process = self.process
        self.process = None
        if process is not None:
            process.end()
        self.context.close()
