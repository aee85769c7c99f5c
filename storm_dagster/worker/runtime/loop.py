"""Main loop of a worker: receive frames, run tasks, send frames."""

import hmac
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from storm_dagster.host.futures import fulfill
from storm_dagster.host.waiting import poll
from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.model import wire
from storm_dagster.model.errors import (
    InvalidRequest,
    StormDagsterError,
    Unavailable,
    typed_error_text,
)
from storm_dagster.model.exit_codes import EXIT_STOPPED, EXIT_SUPERSEDED
from storm_dagster.model.log_levels import KeptLevels
from storm_dagster.model.records import TaskBeats
from storm_dagster.worker.dataplane.routes import Placement
from storm_dagster.worker.dataplane.transport import Transport
from storm_dagster.worker.engine.native import NativeEngine
from storm_dagster.worker.engine.system import TopologyMasterTable
from storm_dagster.worker.runtime.lease import WorkerLease
from storm_dagster.worker.runtime.log_levels import LogLevels
from storm_dagster.worker.tasks.spouts import SpoutBase

_log = logging.getLogger(__name__)

_FRAMES = 32
"""Frames received in one pass."""
_PAUSED_SECS = 0.05
"""Interval of the checks while the worker has no lease or no placement."""
_HOLD_SECS = 2.0
"""Time for which frames with an unknown token wait for a refresh of the live workers."""
_MAX_HELD = 1000
_MAX_HELD_BYTES = 4 * 1024 * 1024
"""Limits of these frames, by number and size; further ones are dropped."""
_MAX_LAST_MESSAGES = 1000
"""Messages received before a placement without some workers is applied."""
_DRAIN_SECS = 0.5
"""Longest wait in each step of a graceful stop; see :meth:`Loop._finish`."""


class Loop:
    """Main loop; :meth:`run` belongs to the main thread."""

    def __init__(
        self,
        spec: WorkerSpec,
        conf: Mapping[str, Any],
        transport: Transport,
        lease: WorkerLease,
        engine: NativeEngine,
    ) -> None:
        self.spec = spec
        self.transport = transport
        self.lease = lease
        self.engine = engine
        self.passes = 0
        """Passes so far. Other threads compare it, to see if the loop advances."""
        self.paused = True
        """True while no task runs: without a lease, or before the first placement."""
        self.exit_code: int | None = None
        """Set to end the loop."""
        self.request_refresh: Callable[[], None] = lambda: None
        """Set by the process: makes ``ClusterSync`` refresh all that it has read."""
        self.unknown_frames = 0
        """Frames dropped because their sender is not a live worker of the topology."""
        self.bad_frames = 0
        """Messages dropped because they cannot be decoded, or have impossible contents."""
        self.log_levels = LogLevels()
        self._actions: deque[Callable[[], Any]] = deque()
        """Calls of other threads for the next pass."""
        self._held_frames: deque[tuple[float, str, bytes]] = deque()
        """(until, unknown token of a frame, the frame, which is not decoded further)."""
        self._held_bytes = 0
        self._report_secs = float(conf.get("task.heartbeat.frequency.secs") or 3)
        self._next_report = 0.0
        self._reported: dict[int, str] = {}
        """Statuses of the tasks in the last report."""
        self._count = 0
        """Number of reports so far."""
        self._started = time.monotonic()
        self._stop_requested = False
        self._code_at_stop = EXIT_STOPPED
        """Exit code of a graceful stop."""
        self._stop_reason = "SIGTERM"
        """Reason of a graceful stop, for the log."""

    # -- from other threads ------------------------------------------------------------------------

    def post(self, action: Callable[[], Any]) -> None:
        """Run ``action`` in the loop's next pass."""
        self._actions.append(action)
        self.transport.wake()

    def call(self, action: Callable[[], Any], timeout: float) -> Any:
        """Run ``action`` in the loop's next pass, and return its result.

        Raises its error, or that of ``Future.result`` after ``timeout`` seconds.
        """
        future: Future[Any] = Future()
        self.post(lambda: fulfill(future, action))
        return future.result(timeout)

    def stop(self) -> None:
        """Stop gracefully (SIGTERM); safe in a signal handler."""
        self._stop_requested = True
        self.transport.wake()

    def retire(self) -> None:
        """Stop gracefully, because another slot has the tasks now; any thread."""
        self._code_at_stop = EXIT_SUPERSEDED
        self._stop_reason = "its tasks have moved"
        self.stop()

    def restore_levels(self, levels: KeptLevels) -> None:
        """Set log levels that were changed before this worker started."""
        self.log_levels.restore(levels, int(time.time() * 1000), time.monotonic())

    def supersede(self, reason: str) -> None:
        """Exit, because another worker owns the slot."""
        self.exit_code = EXIT_SUPERSEDED
        self.transport.wake()

    def statuses(self) -> Mapping[int, str]:
        """Return task id -> status, of the open tasks (a copy)."""
        return self.engine.statuses()

    def beats(self, tasks: frozenset[int]) -> TaskBeats | None:
        """Return heartbeats of ``tasks``; ``None`` unless the topology master runs here."""
        master = self.engine.master
        if master is None or master.status != "running":
            return None
        timeout = float(self.engine.conf.get("nimbus.task.timeout.secs") or 30)
        launch = float(self.engine.conf.get("nimbus.task.launch.secs") or 120)
        return master.table.beats(master.listening.now, timeout, tasks, launch)

    def metric_names(self) -> list[str]:
        """Return the names of the topology's metrics.

        Empty unless the topology master runs here.
        """
        master = self.engine.master
        return [] if master is None else master.table.metric_names()

    def status(self) -> str:
        """Return ``paused``, ``starting`` or ``running``."""
        if self.paused:
            return "paused" if self.lease.pauses else "starting"
        is_running = all(status == "running" for status in self.statuses().values())
        return "running" if is_running else "starting"

    # -- calls of ClusterSync, in the loop's thread ------------------------------------------------

    def close_tasks(self, tasks: frozenset[int]) -> None:
        """Close tasks; their pending tuples fail."""
        self.engine.close_tasks(tasks)

    def place(self, placement: Placement, active: bool) -> None:
        """Apply a placement."""
        previous = self.engine.placement
        if previous is not None and not previous.tokens.keys() <= placement.tokens.keys():
            # Acks that a worker sent before its end save replays.
            for message in self.transport.receive(_MAX_LAST_MESSAGES):
                self._on_message(message)
        self.engine.place(placement)
        self.engine.activate(active)
        if previous is None or previous.version != placement.version:
            self._next_report = 0.0
            _log.info(
                "version %d of the assignment: %d tasks here, %d open",
                placement.version,
                len(placement.own_tasks),
                len(placement.open),
            )

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until stopped or superseded, and return the exit code."""
        # Measured by benchmarks/dataplane.py.
        transport = self.transport
        engine = self.engine
        lease = self.lease
        while self.exit_code is None and not self._stop_requested:
            self.passes += 1
            while self._actions:
                self._actions.popleft()()
            if not lease.valid() or engine.placement is None:
                if not self.paused:
                    self.paused = True
                    _log.warning("the lease ended: paused until ZooKeeper confirms the assignment")
                    self.request_refresh()
                transport.wait(_PAUSED_SECS)
                continue
            if self.paused:
                self.paused = False
                _log.info("running")
            received = transport.receive(_FRAMES)
            for message in received:
                self._on_message(message)
            if self._held_frames:
                self._retry_held_frames()
            now = time.monotonic()
            worked = engine.run(now)
            if now >= self._next_report or engine.statuses() != self._reported:
                self._report(now)
            if not lease.valid():
                # Output of this pass is sent when the lease is renewed, or never.
                continue
            transport.flush(engine.cannot_travel)
            if not worked and not received and not self._actions:
                max_pause = 0.001 if transport.waiting() else 0.1
                pause = min(engine.idle_secs(time.monotonic()), max_pause)
                if pause > 0:
                    transport.wait(pause)
        if self.exit_code is None:
            self.exit_code = self._code_at_stop
            self._finish()
        return self.exit_code

    def _finish(self) -> None:
        """Stop the spouts, drain, close the tasks, and send their last output.

        Draining takes up to half a second. A worker of spouts waits for their acks up to twice as
        long: other workers may be closing as well.
        """
        _log.info("stopping (%s)", self._stop_reason)
        engine = self.engine
        since = time.monotonic()
        engine.activate(False)
        deadline = time.monotonic() + _DRAIN_SECS
        while self.lease.valid() and engine.placement is not None:
            open_trees = engine.open_trees()
            if time.monotonic() >= deadline + (_DRAIN_SECS if open_trees else 0.0):
                break
            received = self.transport.receive(_FRAMES) if open_trees else []
            for message in received:
                self._on_message(message)
            worked = engine.run(time.monotonic())
            self.transport.flush(engine.cannot_travel)
            waits = self.transport.waiting() or engine.shared.events.pending
            if not worked and not received:
                if engine.drained() and not waits and not open_trees:
                    break
                self.transport.wait(0.001)
        engine.close(since)

        def is_sent() -> bool:
            if not self.lease.valid():
                return True
            self.transport.flush(engine.cannot_travel)
            return not self.transport.waiting()

        poll(is_sent, timeout=_DRAIN_SECS, pause=0.001)

    def _on_message(self, message: list[bytes]) -> None:
        """Handle a request (JSON) or a frame, as :meth:`Transport.receive` has it.

        A frame with an unknown token is held back: its sender may have started just now.
        """
        payload = message[-1]
        if payload[:1] == b"{":
            self._on_request(message[:-1], payload)
            return
        token = wire.sender_token(payload)
        placement = self.engine.placement
        if placement is not None and token in placement.tokens:
            self._deliver(payload)
            return
        if not token:
            self.bad_frames += 1
            return
        is_full = self._held_bytes + len(payload) > _MAX_HELD_BYTES
        if len(self._held_frames) >= _MAX_HELD or is_full:
            self.unknown_frames += 1
            return
        if not self._held_frames:
            self.request_refresh()
        self._held_frames.append((time.monotonic() + _HOLD_SECS, token, payload))
        self._held_bytes += len(payload)

    def _deliver(self, raw: bytes) -> None:
        """Decode a frame of a live worker, and apply it. An invalid one is dropped."""
        try:
            if not wire.can_travel(raw):
                raise msgspec.DecodeError("too many containers")
            frame = wire.decode_frame(raw)
        except (ValueError, RecursionError, MemoryError):
            self.bad_frames += 1
            return
        try:
            self.engine.deliver(frame, len(raw))
        except Exception:
            # Well-formed with impossible contents: no worker of this project sends that.
            self.bad_frames += 1
            _log.exception("a frame was dropped: its contents are not valid")

    def _retry_held_frames(self) -> None:
        """Apply the held frames whose sender is known now, and drop old ones."""
        placement = self.engine.placement
        assert placement is not None
        held_frames = self._held_frames
        self._held_frames = deque()
        self._held_bytes = 0
        now = time.monotonic()
        for until, token, raw in held_frames:
            if token in placement.tokens:
                self._deliver(raw)
            elif now < until:
                self._held_frames.append((until, token, raw))
                self._held_bytes += len(raw)
            else:
                self.unknown_frames += 1

    # -- reports and requests ----------------------------------------------------------------------

    def report(self) -> wire.WorkerReport:
        """Create the report to the topology master."""
        spec = self.spec
        placement = self.engine.placement
        return wire.WorkerReport(
            node=spec.node,
            host=spec.host,
            port=spec.port,
            pid=os.getpid(),
            count=self._count,
            uptime_secs=int(time.monotonic() - self._started),
            version=placement.version if placement is not None else -1,
            status=self.status(),
            tasks=self.engine.stats(),
            system={
                "unknown_frames": self.unknown_frames,
                "bad_frames": self.bad_frames,
                "dropped_frames": self.transport.dropped(),
                "misdirected_tuples": self.engine.exchange.misdirected,
                "waiting_tuples": sum(runner.waiting() for runner in self.engine.runners.values()),
                "back_pressure": int(bool(self.engine.pressure.own)),
                "open_trees": self.engine.open_trees(),
                "active": int(self.engine.shared.active),
                "replayed_trees": self.engine.shared.lost_trees,
                "lease_pauses": self.lease.pauses,
                "uptime_ms": int((time.monotonic() - self._started) * 1000),
                "cpu_ms": int(time.process_time() * 1000),
                "memory_bytes": memory_bytes(),
            },
            started_for=f"{Path(spec.code_dir).name}:{spec.restarts}",
        )

    def _report(self, now: float) -> None:
        """Report to the topology master, here or in another worker."""
        engine = self.engine
        placement = engine.placement
        assert placement is not None
        statuses = engine.statuses()
        if statuses != self._reported:
            # ClusterSync writes to ZooKeeper when all tasks run.
            self._reported = statuses
            self.request_refresh()
        self._next_report = now + self._report_secs
        self._count += 1
        self.log_levels.expire(time.monotonic())
        if engine.master is not None:
            # More than two intervals without an own report: this worker was paused or frozen.
            engine.master.listening.tick(now, 2 * self._report_secs + 1)
            engine.master.receive(self.report())
            engine.master.table.history.advance(
                engine.master.listening.now, time.time(), engine.spec.spouts
            )
            return
        for task, component in placement.components.items():
            if component == "__topology_master" and task in placement.slots:
                peer = self.transport.peers.get(placement.slots[task])
                if peer is not None:
                    peer.report = self.report()

    def _on_request(self, envelope: list[bytes], payload: bytes) -> None:
        """Respond to a request, unless it is not valid or has another token."""
        try:
            if len(payload) > wire.MAX_REQUEST_BYTES:
                raise msgspec.DecodeError("too large")
            token = wire.decode_request_token(payload).token
            if not hmac.compare_digest(token.encode(), self.spec.token.encode()):
                # Without a response: the request may be of another user, whose connection is about
                # to be ended.
                self.unknown_frames += 1
                return
            request = wire.decode_request(payload)
        except (ValueError, RecursionError, MemoryError):
            self.bad_frames += 1
            return
        try:
            reply = msgspec.json.encode(self._answer(request))
        except StormDagsterError as error:
            reply = msgspec.json.encode(error.to_document())
        except Exception as error:
            # For any value in a component's state or metrics: the worker survives the request.
            _log.exception("a request for %s failed", request.op)
            failure = InvalidRequest(
                f"the worker cannot answer {request.op}: {typed_error_text(error)}"
            )
            reply = msgspec.json.encode(failure.to_document())
        self.transport.reply(envelope, reply)

    def _answer(self, request: wire.Request) -> Any:
        if request.op == "stats":
            return self._stats_document()
        if request.op == "stacks":
            return {"stacks": thread_stacks()}
        if request.op == "log_levels":
            self.log_levels.apply(request.levels, time.monotonic())
            return {"levels": self.log_levels.document(time.monotonic())}
        if request.state is not None:
            return self._state_page(request.state)
        if request.letters is not None:
            return self._letters_page(request.letters)
        if request.history is not None:
            if self.engine.master is None:
                raise Unavailable(
                    "the topology master does not run in this worker now: "
                    "repeat the request in a moment"
                )
            return self.engine.master.table.history.rows(request.history)
        return {"pid": os.getpid(), "status": self.status()}

    def _letters_page(self, query: wire.DeadLetterQuery) -> dict[str, Any]:
        runner = self.engine.runners.get(query.task)
        if not isinstance(runner, SpoutBase) or runner.status != "running":
            raise Unavailable(
                f"spout task {query.task} is not open in this worker now: "
                "repeat the request in a moment"
            )
        return runner.letters.page(query)

    def _state_page(self, query: wire.StateQuery) -> dict[str, Any]:
        runner = self.engine.runners.get(query.task)
        if runner is None or runner.status != "running":
            raise Unavailable(
                f"task {query.task} is not open in this worker now: repeat the request in a moment"
            )
        if runner.state is None:
            raise InvalidRequest(
                f"component {runner.component!r} has no keyed state: make it a StatefulBolt"
            )
        return runner.state.state.page(query)

    def _stats_document(self) -> dict[str, Any]:
        """Statistics of the topology, or of this worker alone without its master."""
        master = self.engine.master
        conf = self.engine.conf
        now = time.monotonic() if master is None else master.listening.now
        table = TopologyMasterTable(self.spec.topology_id, 0) if master is None else master.table
        table.receive(self.report(), now)
        if master is None:
            return table.document()
        timeout = float(conf.get("topology.message.timeout.secs") or 30)
        return {**table.document(now), "timeout_secs": timeout, "report_secs": self._report_secs}


def memory_bytes() -> int:
    """Return the resident memory of this process; 0 without ``/proc``."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def thread_stacks() -> dict[str, list[str]]:
    """Return the stack of each thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, '?')}-{ident}": traceback.format_stack(frame)
        for ident, frame in sys._current_frames().items()
    }
