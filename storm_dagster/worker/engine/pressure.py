"""Back pressure: full queues pause the spouts of the whole topology."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from storm_dagster.worker.dataplane.transport import Transport
from storm_dagster.worker.tasks.runner import Runner

_REPEAT_SECS = 1.0
_VALID_SECS = 4.0
"""A request expires unless the peer repeats it: the peer may have died."""
_BACKLOG_SECS = 1.0
"""Queued work of one task, in seconds, that pauses the spouts, long before tuples time out in the queue."""
_FEW_TUPLES = 16


class Pressure:
    """Back pressure of this worker's queues, and that requested by peers."""

    def __init__(self, conf: Mapping[str, Any], transport: Transport | None) -> None:
        self._transport = transport
        self._enabled = conf.get("topology.backpressure.enable") is not False
        self._high = max(2, int(conf.get("topology.executor.queue.size") or 32768) // 2)
        self._own = False
        self._sent = 0.0
        self._peers: dict[tuple[str, int], float] = {}
        """Slot -> expiry of its request."""

    def active(self) -> bool:
        """Whether spouts must pause."""
        return self._own or bool(self._peers)

    def own(self) -> bool:
        """Whether they must because of a queue of this worker."""
        return self._own

    def on_request(self, slot: tuple[str, int], wait: bool) -> None:
        """Start or end the back pressure of a peer."""
        if wait:
            self._peers[slot] = time.monotonic() + _VALID_SECS
        else:
            self._peers.pop(slot, None)

    def expire(self, now: float) -> None:
        """Drop requests that were not repeated."""
        if self._peers:
            self._peers = {slot: until for slot, until in self._peers.items() if until > now}

    def update(self, now: float, runners: Iterable[Runner]) -> bool:
        """Measure the queues, and notify the peers. Whether this worker's own state changed."""
        if not self._enabled:
            return False
        # Hysteresis: between the two marks the state stays.
        share = 0.5 if self._own else 1.0
        mark, secs = self._high * share, _BACKLOG_SECS * share
        full = any(
            (waiting := runner.waiting()) > mark or (waiting > _FEW_TUPLES and runner.backlog_secs() > secs)
            for runner in runners
        )
        transport = self._transport
        pressure = full or (transport is not None and transport.busy())
        changed = pressure != self._own
        self._own = pressure
        if transport is not None and (changed or (pressure and now - self._sent > _REPEAT_SECS)):
            self._sent = now
            for peer in transport.peers.values():
                peer.pressure = pressure
        return changed
