"""Runner of a spout that is a multilang program."""

import time
from collections import deque
from typing import Any

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.worker.multilang.base import ShellFailure, ShellRunner, stream_of
from storm_dagster.worker.tasks.dead_letters import Verdict
from storm_dagster.worker.tasks.spouts import SpoutBase


class ShellSpoutRunner(ShellRunner, SpoutBase):
    """Runner of a spout that is a program.

    It gets one command at a time; each ends with ``sync``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.commands: deque[dict[str, Any]] = deque()
        """Commands that wait until the program is idle: acks, fails, (de)activations."""
        self.busy = False
        """True while a command is in progress, until its ``sync``."""
        self._sent_at = 0.0
        """Time at which the command in progress was sent."""
        self._last_command = ""
        """Name of the newest command."""
        self._emitted = False
        """True if the program has emitted since the last ``next``."""
        self.sent_active: bool | None = None
        """State that :meth:`run` has sent to the program."""

    def open(self) -> None:
        """Start the program."""
        super().open()
        self.busy = False
        self.emit = self.make_emit()
        self.letters.open()
        self.sent_active = None

    def run(self, now: float) -> bool:
        """Handle the program's messages, and send the next command.

        Only if the program is idle.
        """
        worked = self.process_messages()
        if not self.keep_alive(now):
            return worked
        worked = self.deliver_verdicts(now, self._notify) or worked
        if self.busy:
            if now - self.last_seen > self.timeout and now - self._sent_at > self.timeout:
                self.replace(f"subprocess heartbeat timeout: no sync for {self.timeout:g} s")
            return worked
        if not self.shared.owns():
            return worked
        if self.sent_active is not self.shared.active:
            self.sent_active = self.shared.active
            command = "activate" if self.sent_active else "deactivate"
            self.commands.appendleft({"command": command})
        if self.commands:
            self._send(self.commands.popleft(), now)
            return True
        may_call = self.may_emit() and not self.full()
        if may_call and now >= self.pause_until and now >= self.retry_at():
            self._emitted = False
            self._send({"command": "next"}, now)
            return True
        return worked

    def _send(self, command: dict[str, Any], now: float) -> None:
        assert self.process is not None
        self.busy = True
        self._sent_at = now
        self._last_command = command["command"]
        self.process.send(command)

    def _notify(self, verdict: Verdict, tup_id: Any) -> None:
        """Queue an ack or a fail for the program.

        A tuple that was given up is acked: it must not be replayed.
        """
        command = "fail" if verdict in (False, "lost") else "ack"
        self.commands.append({"command": command, "id": tup_id})

    def idle_secs(self, now: float) -> float | None:
        """Return the seconds until the next ``next`` command."""
        if self.busy or not self.may_emit():
            return None
        return max(0.0, self.pause_until - now, self.retry_at() - now)

    def busy_elsewhere(self) -> bool:
        return self.busy or bool(self.inbound)

    def on_emit(self, message: dict[str, Any]) -> None:
        """Emit, and return the receivers of a non-direct tuple."""
        self._emitted = True
        direct = message.get("task") or None
        if "tuple" not in message:
            raise ShellFailure('an emit has no values: send a list as "tuple"')
        tasks = self.emit(
            message["tuple"],
            message.get("id"),
            stream_of(message),
            direct,
            True,
        )
        self.call_errors.on_success()
        if message.get("need_task_ids", True) and direct is None and self.process is not None:
            self.process.send_task_ids(tasks or [])

    def on_sync(self) -> None:
        """End the command in progress."""
        self.busy = False
        if self._last_command == "next" and not self._emitted:
            self.pause_until = time.monotonic() + 0.001

    def on_other(self, command: str, message: dict[str, Any]) -> None:
        """Reject other commands."""
        raise ShellFailure(f"unknown command {command!r} from a spout")

    def on_refused(self, message: dict[str, Any], error: BaseException) -> None:
        """Fail the tuple of an emit, which the program may then send corrected.

        While all its emits are refused, it gets ``next`` less often.
        """
        self.call_errors.on_error(time.monotonic())
        # After another error its tree is known, and fails by itself.
        was_refused = isinstance(error, StormDagsterError)
        if was_refused and message.get("command") == "emit" and message.get("id") is not None:
            self._notify(False, message["id"])

    def drop_tuples(self) -> None:
        """Drop the command in progress.

        Emitted tuples stay pending: all acks and fails, also queued ones, go to the new program.
        """
        self.busy = False
        self.commands = deque(command for command in self.commands if "id" in command)
