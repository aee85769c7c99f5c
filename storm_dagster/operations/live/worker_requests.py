"""Requests to a running worker: statistics (of the whole topology, if it runs the topology master),
stacks, a ping.

When the cluster has a secret, they and what workers send each other go over CurveZMQ. Every worker
of a topology serves with one key, derived from the cluster's secret and the topology's id. Its
public half is published nowhere: a client needs it for the handshake, so that only a process that
can derive the key connects, and a worker of another topology cannot. ZeroMQ encrypts what follows
with keys of the session.
"""

import json
from typing import TYPE_CHECKING, Any

from storm_dagster.model.errors import Unavailable, error_from_document
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.view import TopologyView
from storm_dagster.model.wire import HistoryQuery, Query, Request, encode_request
from storm_dagster.security.settings import Security

if TYPE_CHECKING:
    import zmq

_STARTING_SECS = 0.2
_MOST_BYTES = 32 * 1024**2
"""Largest answer that is taken from a worker, in which code of users runs."""


def link_key_of(security: Security, topology_id: str) -> str:
    """The key of a topology's workers in hex; ``""`` without a secret (links are then open, on
    loopback).

    Derived from the oldest secret that counts: while the secret is changed, workers that start
    reach those that run.
    """
    return (
        ""
        if security.secret is None
        else security.derived(f"worker links of {topology_id}", -1).hex()
    )


# Every Dagster process loads this module, and few of them talk to a worker: ZeroMQ is imported when
# it is needed.


def _secret_half(link_key: str) -> bytes:
    from zmq.utils import z85

    return z85.encode(bytes.fromhex(link_key))


def secure_server(socket: "zmq.Socket[Any]", link_key: str) -> None:
    """Before ``bind``: admit only clients that know the key; does nothing for an empty one."""
    if link_key:
        import zmq

        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, _secret_half(link_key))


def secure_client(socket: "zmq.Socket[Any]", link_key: str) -> None:
    """Before ``connect``: prove knowledge of the key; does nothing for an empty one."""
    if link_key:
        import zmq

        public, secret = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(_secret_half(link_key)))


def ask_worker(
    host: str,
    port: int,
    token: str,
    op: Query,
    timeout: float = 2.0,
    link_key: str = "",
    **more: Any,
) -> dict[str, Any]:
    """The worker's answer. ``token`` is the start token in its ZooKeeper node, ``link_key`` that of
    its topology.

    ``more`` are the fields of :class:`~storm_dagster.model.wire.Request` that go with ``op``.
    Raises :class:`Unavailable` when it does not answer within ``timeout`` seconds.
    """
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
    try:
        secure_client(socket, link_key)
        socket.connect(f"tcp://{host}:{port}")
        socket.send(encode_request(Request(op, token, **more)))
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
    view: TopologyView,
    timeout: float = 2.0,
    link_key: str = "",
    history: HistoryQuery | None = None,
) -> dict[str, Any] | None:
    """Statistics of the whole topology, or ``None`` while its topology master runs nowhere or is
    silent.

    With ``history``, rows of its rings instead (``{"columns", "interval", "rows"}``). ``{"tasks":
    {id: {"status", "component", "node", "port", "uptime_secs", "stats", "windows", "streams",
    "errors", "metrics"}}, "workers": {"node:port": {"pid", "host", "uptime_secs", "version",
    "status", ...}}, "components": {id: {"rate", ...}}, "edges": {id: {input: tuples per second}}}``
    """
    masters = view.tasks.components.get(TOPOLOGY_MASTER) if view.tasks is not None else None
    worker = next(
        (each for each in view.workers if masters and masters.ids and masters.ids[0] in each.ids),
        None,
    )
    node = None if worker is None else view.live_workers.get(worker.slot)
    if worker is None or node is None:
        return None
    # One that is just starting has few statistics: nobody waits long for it.
    patience = timeout if node.status == "running" else min(timeout, _STARTING_SECS)
    op: Query = "stats" if history is None else "history"
    try:
        return ask_worker(
            worker.host, worker.port, node.token, op, patience, link_key, history=history
        )
    except Unavailable:
        return None
