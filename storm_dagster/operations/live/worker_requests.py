"""Requests to a running worker: statistics (of the whole topology, if it runs the topology master), stacks, a ping."""

from __future__ import annotations

import json
from typing import Any

import zmq

from storm_dagster.model.errors import Unavailable, error_from_document
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.view import TopologyView
from storm_dagster.model.wire import (
    HistoryQuestion,
    LetterQuestion,
    LevelChange,
    Question,
    Request,
    StateQuestion,
    encode_request,
)
from storm_dagster.operations.live.worker_curve import secure_client

_STARTING_SECS = 0.2
_MOST_BYTES = 32 * 1024**2
"""Largest answer that is taken from a worker, in which code of users runs."""


def ask_worker(
    host: str,
    port: int,
    token: str,
    op: Question,
    timeout: float = 2.0,
    link_key: str = "",
    *,
    levels: dict[str, LevelChange] | None = None,
    state: StateQuestion | None = None,
    letters: LetterQuestion | None = None,
    history: HistoryQuestion | None = None,
) -> dict[str, Any]:
    """The worker's answer. ``token`` is the start token in its ZooKeeper node, ``link_key`` that of its topology.

    ``levels`` go with ``log_levels``: changes of loggers by name; ``state`` with ``state``, ``letters`` with
    ``dead_letters``, ``history`` with ``history``.
    Raises :class:`Unavailable` when it does not answer within ``timeout`` seconds.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
    try:
        secure_client(socket, link_key)
        socket.connect(f"tcp://{host}:{port}")
        socket.send(encode_request(Request(op, token, levels or {}, state, letters, history)))
        if not socket.poll(int(timeout * 1000)):
            raise Unavailable(
                f"the worker at {host}:{port} did not answer {op!r} within {timeout:g} s: it is starting, paused or hung"
            )
        document = json.loads(socket.recv())
        if not isinstance(document, dict):
            raise ValueError("no map")
    except (zmq.ZMQError, ValueError, RecursionError) as error:
        raise Unavailable(f"the worker at {host}:{port} gave no usable answer: {error}") from None
    finally:
        socket.close()
        context.term()
    if "error" in document:
        raise error_from_document(document)
    return document


def ask_topology_master(
    view: TopologyView, timeout: float = 2.0, link_key: str = "", history: HistoryQuestion | None = None
) -> dict[str, Any] | None:
    """Statistics of the whole topology, or ``None`` while its topology master runs nowhere or is silent.

    With ``history``, rows of its rings instead (``{"columns", "interval", "rows"}``).
    ``{"tasks": {id: {"status", "component", "node", "port", "uptime_secs", "stats", "windows", "streams",
    "errors", "metrics"}}, "workers": {"node:port": {"pid", "host", "uptime_secs", "version", "status", ...}},
    "components": {id: {"rate", ...}}, "edges": {id: {input: tuples per second}}}``
    """
    if view.tasks is None or view.assignment is None:
        return None
    part = view.tasks.components.get(TOPOLOGY_MASTER)
    if part is None or not part.ids:
        return None
    for worker in view.assignment.workers:
        if part.ids[0] in worker.ids:
            node = view.live_workers.get(worker.slot)
            if node is None:
                return None
            # One that is just starting has few statistics: nobody waits long for it.
            patience = timeout if node.status == "running" else min(timeout, _STARTING_SECS)
            try:
                op: Question = "stats" if history is None else "history"
                return ask_worker(worker.host, worker.port, node.token, op, patience, link_key, history=history)
            except Unavailable:
                return None
    return None
