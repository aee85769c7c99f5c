"""Statistics of a topology: asked of the worker that runs its topology master, never kept in ZooKeeper."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import zmq

from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.view import TopologyView
from storm_dagster.model.wire import encode_request
from storm_dagster.operations.context import OperationsContext

__all__ = ["TopologyStats", "ask_worker"]

_log = logging.getLogger(__name__)
_ANSWER_SECS = 1.0
_UNANSWERED_SECS = 2.0
"""A worker that did not answer is left alone for this long, so that pages do not wait for it each time."""
_MOST_ANSWER_BYTES = 64 << 20


class TopologyStats:
    """Asks topology masters, each at most once at a time."""

    def __init__(self) -> None:
        self._silent: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def ask(self, ctx: OperationsContext, topology: TopologyView) -> Mapping[str, Any] | None:
        """``{"tasks": ..., "workers": ...}``; ``None`` when the topology master does not run or does not answer."""
        found = _master_of(topology)
        if found is None:
            return None
        host, port, token = found
        with self._lock:
            now = time.monotonic()
            for key in [key for key, until in self._silent.items() if until <= now]:
                del self._silent[key]
            if (topology.id, token) in self._silent:
                return None
        answer = ask_worker(host, port, token, timeout=_ANSWER_SECS)
        if answer is None:
            _log.info("the topology master of %s at %s:%d does not answer", topology.id, host, port)
            with self._lock:
                self._silent[(topology.id, token)] = time.monotonic() + _UNANSWERED_SECS
        return answer


def _master_of(topology: TopologyView) -> tuple[str, int, str] | None:
    """(host, port, start token) of the worker that runs the topology master now."""
    if topology.tasks is None or topology.assignment is None:
        return None
    part = topology.tasks.components.get(TOPOLOGY_MASTER)
    ids = part.ids if part is not None else ()
    for worker in topology.assignment.workers:
        if any(task in worker.ids for task in ids):
            live = topology.live_workers.get(worker.slot)
            return None if live is None else (worker.host, worker.port, live.token)
    return None


def ask_worker(host: str, port: int, token: str, *, timeout: float) -> Mapping[str, Any] | None:
    """The answer of the worker with that start token to a stats request; ``None`` without one in time."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_ANSWER_BYTES)
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
        socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        socket.send(encode_request("stats", token))
        if not socket.poll(int(timeout * 1000)):
            return None
        document = json.loads(socket.recv())
    except (zmq.ZMQError, ValueError) as error:
        _log.debug("asking worker %s:%d failed: %s", host, port, error)
        return None
    finally:
        socket.close()
    if not isinstance(document, dict) or not isinstance(document.get("tasks"), dict):
        return None
    return document
