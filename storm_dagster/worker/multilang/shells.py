"""Runners of multilang programs.

A program that dies, hangs or violates the protocol is replaced.
"""

import itertools
import logging
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

from storm_dagster.api.tuples import Tuple
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.errors import InvalidRequest, StormDagsterError
from storm_dagster.model.values import ATOMIC
from storm_dagster.worker.dataplane.sending import send_to_targets
from storm_dagster.worker.dataplane.tree import LOST, anchor_tree
from storm_dagster.worker.multilang.process import LOG_LEVELS, ShellProcess
from storm_dagster.worker.tasks.bolts import count_inputs
from storm_dagster.worker.tasks.dead_letters import Verdict
from storm_dagster.worker.tasks.runner import Runner, metric_value
from storm_dagster.worker.tasks.spouts import SpoutBase

_log = logging.getLogger("storm_dagster.component")

_HEARTBEAT_SECS = 1.0
_FIRST_RESTART_SECS = 0.1
_MAX_RESTART_SECS = 10.0
_STABLE_SECS = 10.0
"""A program that lived longer restarts after the first pause."""
_MAX_INBOUND = 4096
"""Messages of one program that may wait for the loop, and that it handles in one turn."""
_TICK = "tick-"
"""Prefix of the ids of ticks."""
_CHANGED = (
    "component %r is a program and gets field %s of stream %r of %r changed: JSON has no bytes "
    "(they are base64), NaN or infinity (null), tuples and sets (lists), dates and other types "
    "(text)"
)
_starts = itertools.count(1)


def _is_altered(value: Any) -> bool:
    """True if a program gets another value, because JSON lacks the type."""
    kind = type(value)
    if kind is list:
        return any(map(_is_altered, value))
    if kind is dict:
        return any(type(key) is not str or _is_altered(part) for key, part in value.items())
    if kind is float:
        return not math.isfinite(value)
    return kind is bytes or kind not in ATOMIC


class ShellFailure(StormDagsterError):
    """Failure of a shell component's program, which is replaced.

    It died, hung, or violated the protocol.
    """


class ShellRunner(Runner):
    """Base of shell bolts and shell spouts.

    Used only by the loop, except :meth:`_on_output`.
    """

    process: ShellProcess | None = None
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
        self.last_seen = 0.0
        self.last_start = 0.0
        self._restart_at = 0.0
        self._restart_pauses = Backoff(_FIRST_RESTART_SECS, _MAX_RESTART_SECS)

    def open(self) -> None:
        """Start the program."""
        assert self.part.object.shell is not None
        archive = self.context.archive
        resources = archive / "resources" if archive is not None else Path.cwd()
        scratch = self.shared.scratch or Path.cwd()
        pid_dir = (scratch / f"shell-{self.task_id}-{next(_starts)}").absolute()
        conf = {key: value for key, value in self.conf.items() if value is not None}
        first = {"conf": conf, "pidDir": str(pid_dir), "context": dict(self.context)}
        name = f"{self.component}-{self.task_id}"
        command = self.part.object.shell
        self.process = ShellProcess(
            command, resources, pid_dir, first, self._on_output, name, self.shared.wake
        )
        self.last_seen = self.last_start = time.monotonic()

    def _on_output(self, process: ShellProcess, message: Any) -> None:
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
                continue
            worked = True
            self.last_seen = time.monotonic()
            if isinstance(message, str):
                self.replace(message)
                continue
            try:
                self.on_message(message)
            except self.shared.catches as error:
                self.replace(f"protocol: {type(error).__name__}: {error}")
        return worked

    def on_message(self, message: Any) -> None:
        """Handle one message; the program is replaced if this raises."""
        if not isinstance(message, dict):
            raise ShellFailure(f"{message!r:.100} is not a command")
        command = message.get("command")
        if command == "log":
            level = LOG_LEVELS.get(message.get("level", 2), logging.INFO)
            _log.log(level, "%s-%d: %s", self.component, self.task_id, message.get("msg"))
        elif command == "error":
            self.last_error = message.get("msg")
            self.report(ShellFailure(str(self.last_error)), "error command")
        elif command == "metrics":
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

    def drop_tuples(self) -> None:
        """Fail or drop the program's tuples."""

    def replace(self, reason: str) -> None:
        """Kill the program; a new one starts after a pause.

        The pause is longer each time that a program dies soon.
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


class ShellBoltRunner(ShellRunner):
    """Runner of a bolt that is a program."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.max_unwritten = int(self.conf.get("topology.shellbolt.max.pending") or 100)
        """Messages that may wait to be written. There is no limit of the tuples that the program
        has read, since it may gather them.
        """
        self.in_flight: dict[str, tuple[Tuple, int]] = {}
        """Id -> (tuple, time sent) of tuples that the program has neither acked nor failed."""
        self._ids = itertools.count(1)
        self._next_heartbeat = 0.0
        self._finished = 0
        self._cost_ns = 0
        self._costs = 0
        self._has_explained = False
        """True if the last action of the program was to fail a tuple with an error."""
        key = "topology.message.timeout.secs"
        timeouts = [float(self.conf.get(key) or 30)]
        # A spout may have a longer timeout than the topology.
        for _, _, part in self.context.spec.components():
            timeouts.append(float(part.conf.get(key) or 0))
        self._late_ns = int(2e9 * max(timeouts))
        """Time after which a tuple in flight has failed, if it is tracked."""
        self._dropped = 0
        """Ids up to this one are no longer in flight, also if the program names them."""

    def waiting(self) -> int:
        """Return the number of tuples that the program has not read.

        Tuples in the program cause no back pressure.
        """
        return len(self.queue) + (self.process.unwritten() if self.process is not None else 0)

    def backlog_secs(self) -> float:
        """Return the estimated seconds to process the queue.

        They come from the rate of results. The latency of a batch is the time that it waits.
        """
        return self.waiting() * self._cost_ns / self._costs / 1e9 if self._costs else 0.0

    def has_pending_acks(self) -> bool:
        return bool(self.in_flight)

    def busy_elsewhere(self) -> bool:
        return (
            bool(self.in_flight)
            or bool(self.inbound)
            or (self.process is None and bool(self.queue))
        )

    def run(self, now: float) -> bool:
        """Handle the program's messages, and send it tuples."""
        worked = self.process_messages()
        if not self.keep_alive(now):
            return worked
        assert self.process is not None
        queue = self.queue
        room = self.process.room(self.max_unwritten) if queue or self.ticks else 0
        if self.ticks and room > 0:
            self.ticks = 0
            self._send_tuple(self.tick_tuple(), _TICK)
            room -= 1
        if self.held:
            room = min(room, 1)
        if queue and room > 0 and self.may_begin() and self.shared.owns():
            batch = queue[:room]
            del queue[:room]
            for tup in batch:
                self._send_tuple(tup)
            count_inputs(self, batch)
            return True
        return worked

    def _send_tuple(self, tup: Tuple, prefix: str = "") -> None:
        assert self.process is not None
        name = f"{prefix}{next(self._ids)}"
        if self.component not in self.shared.warned and any(map(_is_altered, tup.values)):
            self._warn_of_altered(tup)
        message = {
            "id": name,
            "comp": tup.component,
            "stream": tup.stream,
            "task": tup.task,
            "tuple": tup.values,
        }
        try:
            self.process.send(message)
        except self.shared.catches as error:
            refusal = InvalidRequest(
                f"a tuple of stream {tup.stream!r} of {tup.component!r} cannot be sent to a program "
                f"as JSON ({type(error).__name__}: {error}): emit JSON values"
            )
            self.report(refusal, "shell")
            self.fail(tup, self.reason_of(refusal))
        else:
            # A tick is not kept: an ack of it has no effect.
            if prefix != _TICK:
                self.in_flight[name] = (tup, time.perf_counter_ns())

    def _warn_of_altered(self, tup: Tuple) -> None:
        """Log the fields that the program gets changed, once per component."""
        self.shared.warned.add(self.component)
        names = self.context.source_fields(tup.component, tup.stream)
        altered = [
            name for name, value in zip(names, tup.values, strict=False) if _is_altered(value)
        ]
        fields = ", ".join(map(repr, altered))
        _log.warning(_CHANGED, self.component, fields, tup.stream, tup.component)

    def on_clock(self, now: float) -> None:
        """Send heartbeats, and replace a silent program.

        It is silent if it has sent no message for the subprocess timeout.
        """
        super().on_clock(now)
        if self.process is None or self.status != "running" or now < self._next_heartbeat:
            return
        self._next_heartbeat = now + _HEARTBEAT_SECS
        self._drop_late_tuples()
        if now - self.last_seen > self.timeout:
            self.replace(f"subprocess heartbeat timeout: silent for {self.timeout:g} s")
            return
        self.process.send(
            {
                "id": str(next(self._ids)),
                "comp": None,
                "stream": "__heartbeat",
                "task": -1,
                "tuple": [],
            }
        )

    def _drop_late_tuples(self) -> None:
        """Drop tuples that the program never acks.

        Tracked ones have failed long ago.
        """
        late = time.perf_counter_ns() - self._late_ns
        names: list[str] = []
        for name, (_, sent_at) in self.in_flight.items():
            if sent_at >= late:
                break
            names.append(name)
        for name in names:
            del self.in_flight[name]
            self._dropped = int(name)

    def on_emit(self, message: dict[str, Any]) -> None:
        """Emit with the program's anchors.

        The program gets the receivers unless it opts out.
        """
        names = message.get("anchors") or []
        if isinstance(names, str):
            names = [names]
        anchors: list[Tuple] = []
        for name in names:
            entry = self.in_flight.get(str(name))
            if entry is not None:
                anchors.append(entry[0])
            elif not (str(name).startswith(_TICK) or self._was_dropped(name)):
                raise ShellFailure(
                    f"an emit is anchored to {name!r}, which is unknown or acked already"
                )
        stream = message.get("stream") or "default"
        values = message["tuple"]
        direct = message.get("task") or None
        route = self.checked_route(values, stream)
        route.emitted += 1
        tree = anchor_tree(anchors) if anchors else None
        links = send_to_targets(
            route, values, tree, self.shared.ledger, self.component, self.task_id, direct
        )
        if message.get("need_task_ids", True) and direct is None and self.process is not None:
            self.process.send_task_ids([link.task for link in links])

    def on_other(self, command: str, message: dict[str, Any]) -> None:
        """Ack or fail a tuple; other commands are ignored."""
        if command not in ("ack", "fail"):
            return
        name = str(message["id"])
        if name.startswith(_TICK):
            return
        entry = self.in_flight.pop(name, None)
        if entry is None:
            if self._was_dropped(name):
                return
            raise ShellFailure(
                f"{command} of {message['id']!r}, which is unknown or finished already"
            )
        tup, sent_at = entry
        stats = self.stats
        now = time.perf_counter_ns()
        # Programs overlap tuples: the time since the last result is the cost of one tuple, also in
        # a batch.
        self._cost_ns += now - max(sent_at, self._finished)
        self._costs += 1
        self._finished = now
        if stats.take_sample():
            stats.time_inputs(now - sent_at, {f"{tup.component}:{tup.stream}": 1})
        if command == "ack":
            self.ack(tup)
        else:
            self.fail(tup, self.reason_of(message.get("msg") or self.last_error))
        self._has_explained = command == "fail" and self.last_error is not None
        self.last_error = None

    def _was_dropped(self, name: Any) -> bool:
        return str(name).isdecimal() and int(name) <= self._dropped

    def drop_tuples(self, *, closing: bool = False) -> None:
        """Fail the program's tuples.

        One of them may have ended the program, unless the task is ``closing``, or the last action
        of the program was to fail a tuple with an error, as pystorm does before it exits.
        """
        reason = LOST
        if not closing and not self._has_explained:
            reason = self.reason_of("its program was replaced")
        self._has_explained = False
        in_flight = self.in_flight
        self.in_flight = {}
        for tup, _ in in_flight.values():
            self.fail(tup, reason)

    def close(self, *, retire: bool = False) -> None:
        """Fail the program's tuples, and kill it."""
        self.drop_tuples(closing=True)
        super().close(retire=retire)


class ShellSpoutRunner(ShellRunner, SpoutBase):
    """Runner of a spout that is a program.

    It gets one command at a time; each ends with ``sync``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.commands: deque[dict[str, Any]] = deque()
        self.busy = False
        """True while a command is in progress, until its ``sync``."""
        self._sent_at = 0.0
        self._last = ""
        self._emitted = False
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
        if self.may_emit() and not self.full() and now >= self.pause_until:
            self._emitted = False
            self._send({"command": "next"}, now)
            return True
        return worked

    def _send(self, command: dict[str, Any], now: float) -> None:
        assert self.process is not None
        self.busy = True
        self._sent_at = now
        self._last = command["command"]
        self.process.send(command)

    def _notify(self, verdict: Verdict, tup_id: Any) -> None:
        command = "fail" if verdict in (False, "lost") else "ack"
        self.commands.append({"command": command, "id": tup_id})

    def idle_secs(self, now: float) -> float | None:
        """Return the seconds until the next ``next`` command."""
        if self.busy or not self.may_emit():
            return None
        return max(0.0, self.pause_until - now)

    def busy_elsewhere(self) -> bool:
        return self.busy or bool(self.inbound)

    def on_emit(self, message: dict[str, Any]) -> None:
        """Emit, and return the receivers of a non-direct tuple."""
        self._emitted = True
        direct = message.get("task") or None
        try:
            tasks = self.emit(
                message["tuple"],
                message.get("id"),
                message.get("stream") or "default",
                direct,
                True,
            )
        except InvalidRequest as error:
            raise ShellFailure(error.message) from None
        if message.get("need_task_ids", True) and direct is None and self.process is not None:
            self.process.send_task_ids(tasks or [])

    def on_sync(self) -> None:
        """End the command in progress."""
        self.busy = False
        if self._last == "next" and not self._emitted:
            self.pause_until = time.monotonic() + 0.001

    def on_other(self, command: str, message: dict[str, Any]) -> None:
        """Reject other commands."""
        raise ShellFailure(f"unknown command {command!r} from a spout")

    def drop_tuples(self) -> None:
        """Drop the command in progress.

        Emitted tuples stay pending: all acks and fails go to the new program.
        """
        self.busy = False
        self.commands = deque(command for command in self.commands if "id" in command)
