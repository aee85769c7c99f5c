"""Runner of a bolt that is a multilang program."""

import itertools
import logging
import time
from typing import Any

from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.values import ATOMIC
from storm_dagster.worker.dataplane.sending import send_to_targets
from storm_dagster.worker.dataplane.tree import LOST, anchor_tree
from storm_dagster.worker.multilang.base import ShellFailure, ShellRunner, stream_of
from storm_dagster.worker.tasks.bolts import count_inputs

_log = logging.getLogger("storm_dagster.component")

_HEARTBEAT_SECS = 1.0
"""Interval of the heartbeat tuples that a program gets, and must respond to."""
_MAX_REFUSED = 10_000
"""Ids of failed tuples that are remembered: the program may name them once more."""
_TICK = "tick-"
"""Prefix of the ids of ticks."""
_CHANGED = (
    "component %r is a program and gets field %s of stream %r of %r changed: JSON has no bytes "
    "(they are base64), tuples and sets (lists), dates and other types "
    "(text)"
)


def _is_altered(value: Any) -> bool:
    """True if a program gets another value, because JSON lacks the type.

    NaN and infinities are refused, and so not altered.
    """
    kind = type(value)
    if kind is list:
        return any(map(_is_altered, value))
    if kind is dict:
        return any(type(key) is not str or _is_altered(part) for key, part in value.items())
    return kind is bytes or kind not in ATOMIC


def _anchors_of(message: dict[str, Any]) -> list[str]:
    """Ids of the tuples to which an emit is anchored; programs send a list, or one id."""
    anchors = message.get("anchors") or []
    if not isinstance(anchors, list):
        anchors = [anchors]
    return [str(tuple_id) for tuple_id in anchors]


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
        """Ids of tuples, ascending: :attr:`_dropped` compares them."""
        self._next_heartbeat = 0.0
        self._last_result_ns = 0
        """Time of the last ack or fail, in nanoseconds."""
        self._measured_ns = 0
        """Sum of the times that :attr:`_measured_tuples` tuples took."""
        self._measured_tuples = 0
        self._has_explained = False
        """True if the last action of the program was to fail a tuple with an error."""
        key = "topology.message.timeout.secs"
        timeouts = [float(self.conf.get(key) or 30)]
        # A spout may have a longer timeout than the topology.
        for _, _, part in self.context.spec.components():
            timeouts.append(float(part.conf.get(key) or 0))
        self._late_ns = int(2e9 * max(timeouts))
        """Time after which a tuple in flight has failed, if it is tracked."""
        self._refused: dict[str, None] = {}
        """Newest ids of tuples that failed with a refused message."""
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
        if not self._measured_tuples:
            return 0.0
        return self.waiting() * self._measured_ns / self._measured_tuples / 1e9

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
            # The smallest turn: see `may_begin`.
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
        """Send a tuple to the program; one that cannot be sent fails, and is reported.

        ``prefix``: of its id; ``_TICK`` for a tick.
        """
        assert self.process is not None
        tuple_id = f"{prefix}{next(self._ids)}"
        if self.component not in self.shared.warned and any(map(_is_altered, tup.values)):
            self._warn_of_altered(tup)
        message = {
            "id": tuple_id,
            "comp": tup.component,
            "stream": tup.stream,
            "task": tup.task,
            "tuple": tup.values,
        }
        try:
            self.process.send(message)
        except self.shared.catches as error:
            refusal = InvalidRequest(
                f"a tuple of stream {tup.stream!r} of {tup.component!r} cannot be sent to a "
                f"program as JSON ({type(error).__name__}: {error}): emit JSON values"
            )
            self.report(refusal, "shell")
            self.fail(tup, self.reason_of(refusal))
        else:
            # A tick is not kept: an ack of it has no effect.
            if prefix != _TICK:
                self.in_flight[tuple_id] = (tup, time.perf_counter_ns())

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
        late_ids: list[str] = []
        for tuple_id, (_, sent_at) in self.in_flight.items():
            if sent_at >= late:
                break
            late_ids.append(tuple_id)
        for tuple_id in late_ids:
            del self.in_flight[tuple_id]
            self._dropped = int(tuple_id)

    def on_emit(self, message: dict[str, Any]) -> None:
        """Emit with the program's anchors.

        The program gets the receivers unless it opts out.
        """
        anchors: list[Tuple] = []
        for tuple_id in _anchors_of(message):
            entry = self.in_flight.get(tuple_id)
            if entry is not None:
                anchors.append(entry[0])
            elif not (tuple_id.startswith(_TICK) or self._was_dropped(tuple_id)):
                raise ShellFailure(
                    f"an emit is anchored to {tuple_id!r}, which is unknown or acked already"
                )
        stream = stream_of(message)
        if "tuple" not in message:
            raise ShellFailure('an emit has no values: send a list as "tuple"')
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
        """Ack or fail a tuple; other commands are logged, as Storm ignores them.

        :class:`ShellFailure` for an id that is not in flight.
        """
        if command not in ("ack", "fail"):
            self.log_unknown(command)
            return
        if "id" not in message:
            raise ShellFailure(f'{command} names no tuple: send its "id"')
        tuple_id = str(message["id"])
        if tuple_id.startswith(_TICK):
            return
        entry = self.in_flight.pop(tuple_id, None)
        if entry is None:
            if self._was_dropped(tuple_id):
                return
            raise ShellFailure(
                f"{command} of {message['id']!r}, which is unknown or finished already"
            )
        tup, sent_at = entry
        stats = self.stats
        now = time.perf_counter_ns()
        # Programs overlap tuples: the time since the last result is the cost of one tuple, also in
        # a batch.
        self._measured_ns += now - max(sent_at, self._last_result_ns)
        self._measured_tuples += 1
        self._last_result_ns = now
        if stats.take_sample():
            stats.time_inputs(now - sent_at, {f"{tup.component}:{tup.stream}": 1})
        if command == "ack":
            self.ack(tup)
        else:
            self.fail(tup, self.reason_of(message.get("msg") or self.last_error))
        self._has_explained = command == "fail" and self.last_error is not None
        self.last_error = None

    def _was_dropped(self, tuple_id: str) -> bool:
        """True if an id is that of a tuple that is late or has failed, and no longer in flight."""
        if tuple_id in self._refused:
            return True
        return tuple_id.isdecimal() and int(tuple_id) <= self._dropped

    def on_refused(self, message: dict[str, Any], error: BaseException) -> None:
        """Fail the anchors of an emit; the program may ack them later, which has no effect."""
        for tuple_id in _anchors_of(message):
            entry = self.in_flight.pop(tuple_id, None)
            if entry is not None:
                self._refused[tuple_id] = None
                self.fail(entry[0], self.reason_of(error))
        while len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

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
