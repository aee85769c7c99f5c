"""Requests to a running worker: statistics, stacks, a ping.

The worker that runs the topology master returns the statistics of the whole topology.

If the cluster has a secret, the requests and the frames between workers use CurveZMQ. Every worker
of a topology serves with one key, derived from the cluster's secret and the topology's id. Its
public half is never published. A client needs it for the handshake, so that only a process that can
derive the key connects, and a worker of another topology cannot. ZeroMQ encrypts the messages after
the handshake with keys of the session.
"""

import itertools
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from storm_dagster.model.errors import Unavailable, error_from_document
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.records import WorkerSlot
from storm_dagster.model.view import TopologyView
from storm_dagster.model.wire import HistoryQuery, Query, Request, encode_request
from storm_dagster.operations.live.link_connections import check_connection, read_event
from storm_dagster.security.server_identity import TrustedServers, user_id
from storm_dagster.security.settings import Security

if TYPE_CHECKING:
    import zmq

_STARTING_SECS = 0.2
"""Longest wait for the answer of a starting worker, which has few statistics."""
_RETRY_SECS = 0.05
"""Pause before another try to connect."""
_MAX_BYTES = 32 * 1024**2
"""Largest response that is accepted from a worker, because it runs user code."""


def link_key_of(security: Security, topology_id: str) -> str:
    """The key of a topology's workers in hex; ``""`` without a secret.

    Without a secret the links are open, on loopback. The key is derived from the oldest secret that
    counts, so that starting workers reach running ones while the secret is changed.
    """
    if security.secret is None:
        return ""
    return security.derived(f"worker links of {topology_id}", -1).hex()


@dataclass(frozen=True)
class WorkerLinks:
    """Credentials of a client of the cluster for requests to workers."""

    security: Security = field(default_factory=Security)
    """The cluster's secret, from which keys are derived."""
    trusted: TrustedServers = field(default_factory=TrustedServers)
    """Servers that are sent a request without a key."""
    as_user: bool = False
    """``supervisor.run.worker.as.user``: workers run as another user than their supervisor."""

    @staticmethod
    def of(conf: Any) -> "WorkerLinks":
        """By the cluster's conf."""
        as_user = bool(conf.get("supervisor.run.worker.as.user"))
        default_user = conf.get("supervisor.worker.user") if as_user else None
        users = _user_ids(default_user)
        return WorkerLinks(Security.of(conf), TrustedServers.of(conf, users=users), as_user)

    def to(self, topology: TopologyView) -> tuple[str, TrustedServers]:
        """The key of the topology's workers, and the servers that are trusted for it.

        These are also those of its owner, if workers run as their owners.
        """
        trusted = self.trusted
        if self.as_user:
            trusted = replace(trusted, users=trusted.users | _user_ids(topology.base.owner))
        return link_key_of(self.security, topology.id), trusted


def _user_ids(user: str | None) -> frozenset[int]:
    """The id of a user that a conf names; empty without one, or if this host has no such user."""
    uid = user_id(user) if user else None
    return frozenset() if uid is None else frozenset({uid})


# Every Dagster process loads this module, and few of them connect to a worker: ZeroMQ is imported
# when it is needed.


def _secret_half(link_key: str) -> bytes:
    """The key as ZeroMQ's secret key of the workers, in its Z85 form."""
    from zmq.utils import z85

    return z85.encode(bytes.fromhex(link_key))


def secure_server(socket: "zmq.Socket[Any]", link_key: str) -> None:
    """Admit only clients that know the key; call before ``bind``.

    An empty key has no effect.
    """
    if link_key:
        import zmq

        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, _secret_half(link_key))


def secure_client(socket: "zmq.Socket[Any]", link_key: str) -> None:
    """Prove knowledge of the key; call before ``connect``.

    An empty key has no effect.
    """
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
    trusted: TrustedServers | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Send a request to a worker and return its response.

    ``token`` is the start token in the worker's ZooKeeper node, ``link_key`` the key of its
    topology. Without a key only a ``trusted`` server is sent the request. ``more`` are the fields
    of :class:`~storm_dagster.model.wire.Request` that belong to ``op``. Raises :class:`Unavailable`
    if it does not respond within ``timeout`` seconds, or with something else than a map; the error
    of a response that is one.
    """
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    deadline = time.monotonic() + timeout
    address = f"{host}:{port}"
    request = encode_request(Request(op, token, **more))
    socket: zmq.Socket[bytes] | None = None
    try:
        if link_key:
            socket = _dealer(context)
            secure_client(socket, link_key)
            socket.connect(f"tcp://{address}")
        else:
            socket = _checked_dealer(context, address, trusted or TrustedServers(), deadline)
        answer = None if socket is None else _exchange(socket, request, deadline)
        if answer is None:
            raise Unavailable(
                f"the worker at {address} did not answer {op!r} within {timeout:g} s: "
                "it is starting, paused or hung"
            )
        document = json.loads(answer)
        if not isinstance(document, dict):
            raise ValueError("no map")
    except (zmq.ZMQError, ValueError, RecursionError) as error:
        raise Unavailable(f"the worker at {address} gave no usable answer: {error}") from None
    finally:
        if socket is not None:
            socket.close()
        context.term()
    if "error" in document:
        raise error_from_document(document)
    return document


def _dealer(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """Socket for one request."""
    import zmq

    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
    return socket


def _exchange(socket: "zmq.Socket[bytes]", request: bytes, deadline: float) -> bytes | None:
    """Send a request and return the answer; ``None`` without one at the ``deadline``."""
    socket.send(request)
    return socket.recv() if socket.poll(_millis_until(deadline)) else None


def _checked_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]",
    address: str,
    trusted: TrustedServers,
    deadline: float,
) -> "zmq.Socket[bytes] | None":
    """Socket that is connected to the worker at ``host:port``, which is trusted.

    It does not connect again. ``None`` if no connection is made before the ``deadline``. Raises
    :class:`UntrustedServer`.
    """
    import zmq

    for number in itertools.count():
        socket = _dealer(context)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        place = f"inproc://request-{number}"
        socket.monitor(place, zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED)
        monitor = context.socket(zmq.PAIR)
        is_checked = False
        try:
            monitor.connect(place)
            socket.connect(f"tcp://{address}")
            if not monitor.poll(_millis_until(deadline)):
                return None
            event = read_event(monitor)
            if event.number == zmq.EVENT_CONNECTED:
                # A connection that has ended is made once more.
                with suppress(OSError):
                    check_connection(event.descriptor, address, trusted)
                    is_checked = True
                    return socket
        finally:
            # First: otherwise ZeroMQ's thread waits permanently for a reader of the event.
            socket.disable_monitor()
            monitor.close(0)
            if not is_checked:
                socket.close()
        if time.monotonic() + _RETRY_SECS >= deadline:
            return None
        time.sleep(_RETRY_SECS)
    return None


def _millis_until(deadline: float) -> int:
    """Milliseconds until a time of the monotonic clock; 0 if it is over."""
    return max(0, round((deadline - time.monotonic()) * 1000))


def ask_topology_master(
    view: TopologyView,
    timeout: float = 2.0,
    link_key: str = "",
    history: HistoryQuery | None = None,
    trusted: TrustedServers | None = None,
) -> dict[str, Any] | None:
    """Statistics of the whole topology.

    ``None`` while its topology master runs nowhere or does not respond. With ``history`` the result
    are rows of its rings (``{"columns", "interval", "rows"}``). Otherwise the shape is ``{"tasks":
    {id: {"status", "component", "node", "port", "uptime_secs", "stats", "windows", "streams",
    "errors", "metrics"}}, "workers": {"node:port": {"pid", "host", "uptime_secs", "version",
    "status", ...}}, "components": {id: {"rate", ...}}, "edges": {id: {input: tuples per second}}}``
    """
    worker = _worker_of_topology_master(view)
    if worker is None:
        return None
    node = view.live_workers.get(worker.slot)
    if node is None:
        return None
    wait_secs = timeout if node.status == "running" else min(timeout, _STARTING_SECS)
    op: Query = "stats" if history is None else "history"
    try:
        return ask_worker(
            worker.host, worker.port, node.token, op, wait_secs, link_key, trusted, history=history
        )
    except Unavailable:
        return None


def _worker_of_topology_master(view: TopologyView) -> WorkerSlot | None:
    """The worker that the assignment gives the topology master; ``None`` without one."""
    if view.tasks is None:
        return None
    master = view.tasks.components.get(TOPOLOGY_MASTER)
    if master is None or not master.ids:
        return None
    for worker in view.workers:
        if master.ids[0] in worker.ids:
            return worker
    return None
