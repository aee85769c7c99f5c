"""The part of kazoo's client that the product uses, on a simulated ensemble: everything above it is
real.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kazoo import exceptions
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import (
    Create,
    Delete,
    Exists,
    GetACL,
    GetChildren,
    GetData,
    SetData,
    Sync,
    Transaction,
)
from kazoo.protocol.states import EventType, KeeperState, WatchedEvent
from kazoo.security import OPEN_ACL_UNSAFE

from storm_dagster.zk.connection import SessionLease
from storm_simulation.ensemble import Ensemble, Server, Session
from storm_simulation.kernel import TIMED_OUT, Kernel, Process, Waiter
from storm_simulation.links import Links
from storm_simulation.threads import SimpleQueue

_CONNECT_SECS = 1.0
_READS_PREEMPTED = 0.2
"""Share of the reads before which a thread may lose the processor; before a write it always may."""
_EVENTS = {
    "CREATED": EventType.CREATED,
    "DELETED": EventType.DELETED,
    "CHANGED": EventType.CHANGED,
    "CHILD": EventType.CHILD,
}
_WRITES = (Create, Delete, SetData, Transaction, Sync)


class Answer:
    """kazoo's asynchronous result."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.done = False
        self._value: Any = None
        self._waiters: list[Waiter] = []

    def settle(self, value: Any) -> None:
        if self.done:
            return
        self.done, self._value = True, value
        for waiter in self._waiters:
            waiter.fire(None)

    set = settle
    set_exception = settle

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self.done:
            waiter = self._kernel.waiter()
            self._waiters.append(waiter)
            if waiter.wait(timeout) is TIMED_OUT:
                raise KazooTimeoutError("timeout")
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Connection:
    """One TCP connection of a client with a server: what is sent arrives in order, or the
    connection ends.
    """

    def __init__(self, client: SimulatedClient, server: Server, session: Session) -> None:
        self.client = client
        self.server = server
        self.session = session
        self.label = client.label
        self.open = True
        self._kernel = client.kernel
        self._stalled = False
        """Something was lost: nothing that was sent later may arrive before it, so nothing does."""
        self._there = 0.0
        self._back = 0.0
        server.connections[self] = None

    def drop(self, expired: bool = False) -> None:
        """The server, or the network, ends it."""
        if not self.open:
            return
        self.forget()
        self._kernel.after(0.0005, self.client.process.deliver, self.client.connection_lost, self)

    def forget(self) -> None:
        self.open = False
        self.server.connections.pop(self, None)
        self.server.watches.forget(self)

    def send(self, request: Any, answer: Answer | None, sent: float) -> None:
        """To the server, with the delays and losses of the link."""
        delay = self.client.delay_to(self.server)
        self._stalled |= delay is None
        if delay is None or self._stalled:
            return
        self._there = max(self._there + 1e-7, self._kernel.now + delay)
        self._kernel.at(self._there, self._arrive, request, answer, sent)

    def _arrive(self, request: Any, answer: Answer | None, sent: float) -> None:
        server, ensemble = self.server, self.client.ensemble
        if not self.open or not server.up:
            return
        if self.session.over:
            self.drop()
            return
        ensemble.hear(self.session, server)
        if isinstance(request, _WRITES):
            if ensemble.leader is None or server.cut:
                return
            value = ensemble.write(server, request, self.session)
        elif request == "close":
            if ensemble.leader is not None and not server.cut:
                self.reply("closed", answer, sent)
                # Who closes is told of nothing any more, not even of its own nodes.
                server.watches.forget(self)
                ensemble.end_session(self.session)
            return
        elif request == "ping":
            value = None
        else:
            value = ensemble.read(server, request, self)
        loss = self.client.links.loses_reply(self.client.process.host.name)
        if loss and isinstance(request, _WRITES) and self.open:
            self.drop()
            return
        self.reply(value, answer, sent)

    def reply(self, value: Any, answer: Answer | None, sent: float) -> None:
        self._return(self.client.answered, self, value, answer, sent)

    def notify(self, kind: str, path: str) -> None:
        self._return(self.client.notified, self, kind, path)

    def _return(self, call: Callable[..., None], *args: Any) -> None:
        delay = self.client.delay_from(self.server)
        self._stalled |= delay is None
        if delay is None or self._stalled or not self.open:
            return
        self._back = max(self._back + 1e-7, self._kernel.now + delay)
        self._kernel.at(self._back, self.client.process.deliver, call, *args)


class _Socket:
    def __init__(self, client: SimulatedClient) -> None:
        self._client = client

    def shutdown(self, _: int) -> None:
        self._client.cut()


class LeaseView:
    """Stands for :class:`storm_dagster.zk.connection.LeaseConnection`."""

    def __init__(self, client: SimulatedClient) -> None:
        self.lease = SessionLease()
        self.tls_errors: list[str] = []
        self.untrusted: list[str] = []
        self._socket = _Socket(client)

    def forget_lease(self) -> None:
        self.lease = SessionLease()


class _Handler:
    """kazoo's handler: callbacks of watches run one after the other in a thread of their own."""

    def __init__(self, client: SimulatedClient) -> None:
        self._client = client
        self.callbacks: SimpleQueue = SimpleQueue()

    def async_result(self) -> Answer:
        return Answer(self._client.kernel)

    def dispatch_callback(self, callback: Any) -> None:
        self.callbacks.put(callback)

    def run(self) -> None:
        while True:
            callback = self.callbacks.get()
            if callback is None:
                return
            try:
                callback.func(*callback.args)
            except Exception as error:
                self._client.kernel.crashes.append(f"watch callback: {error!r}")


class _Logger:
    def log(self, *_: object) -> None:
        pass


class SimulatedClient:
    """A client in the process that makes it."""

    chroot = ""
    default_acl = None
    logger = _Logger()

    def __init__(self, ensemble: Ensemble, links: Links, process: Process, timeout: float) -> None:
        self.ensemble = ensemble
        self.links = links
        self.process = process
        self.kernel = ensemble.kernel
        self.label = process.name
        self.asked_timeout = timeout
        self.handler = _Handler(self)
        self.lease_view = LeaseView(self)
        self.session: Session | None = None
        self.connection: Connection | None = None
        self.state = "CLOSED"
        self._listeners: list[Callable[[str], None]] = []
        self._pending: deque[Answer] = deque()
        self._queued: deque[tuple[Any, Answer]] = deque()
        self._data: dict[str, dict[Any, None]] = {}
        self._child: dict[str, dict[Any, None]] = {}
        self.silent = False
        """Nothing comes through, in either direction."""
        self._stopped = False
        self._heard = 0.0
        self._wait = 0.05
        self._tries = 0
        process.at_end.append(self._process_died)

    def delay_to(self, server: Server) -> float | None:
        return None if self.silent else self.links.delay(self.process.host.name, server.name)

    def delay_from(self, server: Server) -> float | None:
        return None if self.silent else self.links.delay(server.name, self.process.host.name)

    # -- as kazoo ----------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self.state == "CONNECTED"

    @property
    def client_id(self) -> tuple[int, bytes] | None:
        return None if self.session is None else (self.session.id, b"")

    def add_listener(self, listener: Callable[[str], None]) -> None:
        self._listeners.append(listener)

    def start_async(self) -> None:
        self.process.spawn(self.handler.run, "zk-handler")
        self.state = "CONNECTING"
        self._try_soon(0.0)

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        connection = self.connection
        if connection is not None and connection.open:
            closed = Answer(self.kernel)
            connection.send("close", closed, self.kernel.boot(self.process))
            try:
                closed.get(timeout=10.0)
            except (KazooTimeoutError, exceptions.KazooException):
                pass
        if self.connection is not None:
            self.connection.forget()
            self.connection = None
        self._change("CLOSED")
        self.handler.callbacks.put(None)

    def close(self) -> None:
        pass

    def create_async(
        self,
        path: str,
        value: bytes = b"",
        acl: Any = None,
        ephemeral: bool = False,
        sequence: bool = False,
    ) -> Answer:
        return self._begin(Create(path, value, OPEN_ACL_UNSAFE, ephemeral * 1 + sequence * 2))

    def delete_async(self, path: str, version: int = -1) -> Answer:
        return self._begin(Delete(path, version))

    def set_async(self, path: str, value: bytes, version: int = -1) -> Answer:
        return self._begin(SetData(path, value, version))

    def get_async(self, path: str, watch: Any = None) -> Answer:
        return self._begin(GetData(path, watch))

    def exists_async(self, path: str, watch: Any = None) -> Answer:
        return self._begin(Exists(path, watch))

    def get_children_async(self, path: str, watch: Any = None) -> Answer:
        return self._begin(GetChildren(path, watch))

    def get_acls_async(self, path: str) -> Answer:
        return self._begin(GetACL(path))

    def sync_async(self, path: str) -> Answer:
        return self._begin(Sync(path))

    def _begin(self, request: Any) -> Answer:
        answer = Answer(self.kernel)
        self._call(request, answer)
        return answer

    def _call(self, request: Any, answer: Answer) -> None:
        if isinstance(request, _WRITES) or self.kernel.rng.random() < _READS_PREEMPTED:
            self.kernel.preempt()
        if self._stopped or self.state == "CLOSED":
            answer.settle(exceptions.ConnectionClosedError("closed"))
        elif self.state == "EXPIRED":
            answer.settle(exceptions.SessionExpiredError())
        elif self.connection is None or not self.connected:
            self._queued.append((request, answer))
        else:
            self._send(request, answer)

    def _send(self, request: Any, answer: Answer) -> None:
        assert self.connection is not None
        self._pending.append(answer)
        answer.request = request  # type: ignore[attr-defined]
        self.connection.send(request, answer, self.kernel.boot(self.process))

    # -- what comes back ---------------------------------------------------------------------------

    def answered(
        self, connection: Connection, value: Any, answer: Answer | None, sent: float
    ) -> None:
        if connection is not self.connection and value != "closed":
            return
        self._heard = self.kernel.now
        lease = self.lease_view.lease
        if lease.session_id and sent > lease.answered_boot:
            self.lease_view.lease = SessionLease(
                lease.session_id, sent, lease.negotiated_ms, lease.connected_boot
            )
        if answer is None:
            return
        if self._pending and self._pending[0] is answer:
            self._pending.popleft()
        elif answer in self._pending:
            self._pending.remove(answer)
        request = getattr(answer, "request", None)
        watcher = getattr(request, "watcher", None)
        if watcher is not None and not isinstance(value, Exception):
            table = self._child if isinstance(request, GetChildren) else self._data
            table.setdefault(request.path, {})[watcher] = None  # type: ignore[union-attr]
        answer.settle(value)

    def notified(self, connection: Connection, kind: str, path: str) -> None:
        if connection is not self.connection:
            return
        self._heard = self.kernel.now
        event = WatchedEvent(_EVENTS[kind], KeeperState.CONNECTED, path)
        watchers: list[Any] = []
        if kind != "CHILD":
            watchers += self._data.pop(path, {})
        if kind in ("CHILD", "DELETED"):
            watchers += self._child.pop(path, {})
        for watcher in watchers:
            self.handler.dispatch_callback(_Callback(watcher, (event,)))

    def cut(self) -> None:
        """End the connection without a word to the server."""
        if self.connection is not None:
            self.connection.drop()

    def connection_lost(self, connection: Connection) -> None:
        if connection is not self.connection or self._stopped:
            return
        connection.forget()
        self.connection = None
        self._lose(exceptions.ConnectionLoss)
        self._change("SUSPENDED")
        self._try_soon(0.05 + 0.4 * self.kernel.rng.random() * 0.1)

    def _lose(self, error: type[Exception]) -> None:
        pending, self._pending = self._pending, deque()
        queued, self._queued = self._queued, deque()
        for answer in (*pending, *(each for _, each in queued)):
            answer.settle(error())
        watchers = [
            each for table in (self._data, self._child) for of in table.values() for each in of
        ]
        self._data, self._child = {}, {}
        event = WatchedEvent(EventType.NONE, KeeperState.CONNECTING, None)
        for watcher in dict.fromkeys(watchers):
            self.handler.dispatch_callback(_Callback(watcher, (event,)))

    def _change(self, state: str) -> None:
        """CONNECTED, SUSPENDED, EXPIRED or CLOSED, as kazoo tells its listeners."""
        before, self.state = self.state, {"SUSPENDED": "CONNECTING"}.get(state, state)
        told = "LOST" if state in ("EXPIRED", "CLOSED") else state
        if before in ("CLOSED", "EXPIRED") and state == "SUSPENDED":
            return
        if state == "CLOSED":
            self._lose(exceptions.ConnectionClosedError)
        for listener in self._listeners:
            listener(told)

    # -- connecting --------------------------------------------------------------------------------

    def _try_soon(self, secs: float) -> None:
        self.kernel.after(secs, self.process.deliver, self._try)

    def _try(self) -> None:
        if self._stopped or self.connection is not None:
            return
        server = self.kernel.rng.choice(self.ensemble.servers)
        there, back = self.delay_to(server), self.delay_from(server)
        serves = (
            server.up and server.serving and (self.ensemble.leader is not None) and not server.cut
        )
        if there is None or back is None or not serves:
            silent = there is None or back is None
            self._wait = min(2 * self._wait, 1.0)
            self._try_soon(
                (_CONNECT_SECS if silent else 0.001) + self._wait + 0.4 * self.kernel.rng.random()
            )
            return
        sent = self.kernel.boot(self.process)
        self.kernel.after(there, self._arrive, server, sent)

    def _arrive(self, server: Server, sent: float) -> None:
        ensemble, process = self.ensemble, self.process
        if process.dead:
            return
        if not server.up or server.cut or ensemble.leader is None:
            process.deliver(self._try_soon, 0.1)
            return
        expired = False
        if self.session is None:
            self.session = ensemble.open_session(self.label, self.asked_timeout)
        elif self.session.over:
            expired = True
        else:
            ensemble.hear(self.session, server)
            for other in ensemble.servers:
                # A session moves with its newest connection.
                for connection in [
                    each for each in other.connections if each.session is self.session
                ]:
                    connection.forget()
        if server.tree.zxid < ensemble.tree.zxid:
            # A client never goes back in time: a server behind what it saw would refuse it.
            ensemble.copy(server)
        connection = None if expired else Connection(self, server, self.session)
        delay = self.delay_from(server)
        if delay is not None:
            self.kernel.after(delay, process.deliver, self._connected, connection, sent)
        else:
            if connection is not None:
                connection.forget()
            self.kernel.after(_CONNECT_SECS, process.deliver, self._try)

    def _connected(self, connection: Connection | None, sent: float) -> None:
        if self._stopped or self.connection is not None:
            if connection is not None:
                connection.forget()
            return
        self._wait = 0.05
        if connection is None:
            self.session = None
            self._lose(exceptions.SessionExpiredError)
            self._change("EXPIRED")
            self._try_soon(0.001)
            return
        if not connection.open:
            self._try_soon(0.05)
            return
        self.connection = connection
        session = connection.session
        self.lease_view.lease = SessionLease(session.id, sent, int(session.timeout * 1000), sent)
        self._heard = self.kernel.now
        self.state = "CONNECTED"
        for listener in self._listeners:
            listener("CONNECTED")
        while self._queued and self.connection is connection:
            self._send(*self._queued.popleft())
        self._ping(connection)

    def _ping(self, connection: Connection) -> None:
        if connection is not self.connection or self._stopped:
            return
        timeout = connection.session.timeout
        if self.kernel.now - self._heard > 2 * timeout / 3:
            connection.forget()
            self.connection_lost(connection)
            return
        connection.send("ping", None, self.kernel.boot(self.process))
        self.kernel.after(
            timeout / 3 * self.kernel.rng.uniform(0.8, 0.95),
            self.process.deliver,
            self._ping,
            connection,
        )

    def _process_died(self) -> None:
        if self.connection is not None:
            # The system closes its sockets: the server drops the connection, the session lives
            # until its timeout.
            self.connection.forget()


class _Callback:
    def __init__(self, func: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.func = func
        self.args = args
        self.type = "watch"
