"""The simulated ZooKeeper against the real one: the same requests, the same answers, stats and
events.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kazoo import exceptions
from kazoo.client import KazooClient, TransactionRequest
from kazoo.protocol.states import Callback, WatchedEvent, ZnodeStat

from storm_dagster.zk.connection import make_client, multi_read_async
from storm_rigs.protocols.fuzzing import SEARCHING
from storm_simulation.client import SimulatedClient
from storm_simulation.ensemble import Ensemble
from storm_simulation.kernel import Host, Kernel, Process
from storm_simulation.links import Links
from storm_simulation.threads import THREADS

pytestmark = [pytest.mark.zookeeper, pytest.mark.fuzz, pytest.mark.timeout(600)]

_SESSIONS = 3
_NAMES = ("/a", "/a/b", "/a/b/c", "/a/d", "/e", "/e0000000000", "/e0000000001", "/a/b0000000001")
_paths = st.sampled_from(_NAMES)
_versions = st.sampled_from((-1, -1, 0, 1, 2))
_data = st.sampled_from((b"", b"x", b"longer"))
_write = st.one_of(
    st.tuples(
        st.just("create"),
        _paths,
        _data,
        st.booleans(),
        st.sampled_from((False, False, False, True)),
    ),
    st.tuples(st.just("set"), _paths, _data, _versions),
    st.tuples(st.just("delete"), _paths, _versions),
)
_change = _write | st.tuples(st.just("check"), _paths, _versions)
_request = st.one_of(
    _write,
    st.tuples(st.just("multi"), st.lists(_change, min_size=1, max_size=4)),
    # To close a session takes as long as all other steps: about once in a program.
    st.tuples(
        st.sampled_from((*("get", "exists", "children") * 2, "close")), _paths, st.booleans()
    ),
    st.tuples(st.sampled_from(("many", "lists")), st.lists(_paths, min_size=1, max_size=5)),
)
_program = st.lists(st.tuples(st.integers(0, _SESSIONS - 1), _request), min_size=50, max_size=50)


def _add(transaction: Any, root: str, change: tuple[Any, ...]) -> None:
    kind, path, *rest = change
    if kind == "create":
        transaction.create(root + path, rest[0], ephemeral=rest[1], sequence=rest[2])
    elif kind == "set":
        transaction.set_data(root + path, rest[0], rest[1])
    elif kind == "delete":
        transaction.delete(root + path, rest[0])
    else:
        transaction.check(root + path, rest[0])


def _begin(client: Any, root: str, request: tuple[Any, ...], watch: Any) -> Any:
    kind, *rest = request
    if kind == "multi":
        transaction = TransactionRequest(client)
        for change in rest[0]:
            _add(transaction, root, change)
        return transaction.commit_async()
    if kind in ("many", "lists"):
        return multi_read_async(client, [root + path for path in rest[0]], children=kind == "lists")
    path = root + rest[0]
    if kind == "create":
        return client.create_async(path, rest[1], ephemeral=rest[2], sequence=rest[3])
    if kind == "set":
        return client.set_async(path, rest[1], version=rest[2])
    if kind == "delete":
        return client.delete_async(path, version=rest[1])
    asked = {
        "get": client.get_async,
        "exists": client.exists_async,
        "children": client.get_children_async,
    }
    return asked[kind](path, watch=watch if rest[1] else None)


class _Side:
    """One of the two servers: answers in a form that can be compared."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.sessions: dict[int, int] = {}
        """Session id -> its number in the order of appearance."""
        self.events: list[list[tuple[str, str]]] = [[] for _ in range(_SESSIONS)]
        self.zxids: list[int] = []
        self.watchers = [self._watcher(number) for number in range(_SESSIONS)]

    def _watcher(self, number: int) -> Any:
        root, events = self.root, self.events[number]

        def woken(event: WatchedEvent) -> None:
            if event.path is not None and self.watchers[number] is woken:
                events.append((str(event.type), event.path.removeprefix(root)))

        return woken

    def settle(self) -> None:
        """Wait until every event has been delivered."""
        raise NotImplementedError

    def leave(self, number: int) -> None:
        """Hear no more of a session that is about to be closed: how many of its last events kazoo
        still delivers is a matter of its threads.
        """
        self.settle()
        self.watchers[number] = self._watcher(number)

    def shown(self, value: Any) -> Any:
        if isinstance(value, Exception):
            return type(value).__name__
        if isinstance(value, ZnodeStat):
            self.zxids += [value.czxid, value.mzxid, value.pzxid]
            owner = self.sessions.get(value.ephemeralOwner, "?") if value.ephemeralOwner else None
            return (
                value.version,
                value.cversion,
                value.aversion,
                owner,
                value.dataLength,
                value.numChildren,
            )
        if isinstance(value, tuple):
            return tuple(self.shown(each) for each in value)
        if isinstance(value, list):
            # Children come in no order.
            plain = all(isinstance(each, str) and "/" not in each for each in value)
            return [self.shown(each) for each in (sorted(value) if plain else value)]
        return value.removeprefix(self.root) if isinstance(value, str) else value


class _Real(_Side):
    def __init__(self, root: str, clients: list[KazooClient], address: str) -> None:
        super().__init__(root)
        self._clients, self._address = clients, address
        clients[0].create(root, b"")
        for client in clients:
            self._known(client)

    def _known(self, client: KazooClient) -> None:
        number = client.client_id
        assert number is not None and number[0] is not None
        self.sessions.setdefault(number[0], len(self.sessions))

    def ask(self, number: int, request: tuple[Any, ...]) -> Any:
        if request[0] == "close":
            self.leave(number)
            self._clients[number].stop()
            self._clients[number].close()
            self._clients[number] = _connect(self._address)
            self._known(self._clients[number])
            return None
        try:
            return self.shown(
                _begin(self._clients[number], self.root, request, self.watchers[number]).get(
                    timeout=20
                )
            )
        except exceptions.KazooException as error:
            return type(error).__name__

    def settle(self) -> None:
        for client in self._clients:
            client.sync("/")
            client.exists("/")
            done = threading.Event()
            client.handler.dispatch_callback(Callback("watch", done.set, ()))
            assert done.wait(20)


class _Simulated(_Side):
    def __init__(self, servers: int) -> None:
        super().__init__("/root")
        self._kernel = THREADS.kernel = Kernel(1)
        self._ensemble = Ensemble(self._kernel, servers, tick=1.0)
        self._links = Links(self._kernel)
        self._clients = [self._connect() for _ in range(_SESSIONS)]
        self._answer(lambda: self._clients[0].create_async("/root", b""), 0)

    def _connect(self) -> SimulatedClient:
        client = SimulatedClient(
            self._ensemble, self._links, Process(self._kernel, "client", Host("c")), 4.0
        )
        client.start_async()
        while not client.connected:
            self._kernel.run(self._kernel.now + 0.01)
        assert client.session is not None
        self.sessions.setdefault(client.session.id, len(self.sessions))
        return client

    def _answer(self, begin: Any, number: int) -> Any:
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(begin().get(timeout=20))
            except exceptions.KazooException as error:
                answers.append(error)

        self._clients[number].process.spawn(ask)
        while not answers:
            self._kernel.run(self._kernel.now + 0.002)
        return answers[0]

    def ask(self, number: int, request: tuple[Any, ...]) -> Any:
        if request[0] == "close":
            self.leave(number)
            stopped: list[bool] = []
            client = self._clients[number]
            client.process.spawn(lambda: stopped.append(client.stop() is None))
            while not stopped:
                self._kernel.run(self._kernel.now + 0.002)
            self._clients[number] = self._connect()
            return None
        return self.shown(
            self._answer(
                lambda: _begin(self._clients[number], self.root, request, self.watchers[number]),
                number,
            )
        )

    def settle(self) -> None:
        self._kernel.run(self._kernel.now + 0.1)

    def close(self) -> None:
        left = [fiber for client in self._clients for fiber in client.process.fibers]
        self._kernel.close()
        for fiber in left:
            self._kernel.end(fiber)


def _connect(address: str) -> KazooClient:
    client, _ = make_client(address, 20_000)
    client.start(timeout=20)
    return client


@pytest.fixture(scope="module")
def clients(zookeeper_server: str) -> Iterator[list[KazooClient]]:
    """Sessions with the real server, for all examples."""
    opened = [_connect(zookeeper_server) for _ in range(_SESSIONS)]
    yield opened
    for client in opened:
        client.stop()
        client.close()


def _ranks(zxids: list[int]) -> list[int]:
    order = {zxid: rank for rank, zxid in enumerate(sorted(set(zxids)))}
    return [order[zxid] for zxid in zxids]


@pytest.mark.parametrize("servers", [1, 3])
def test_both_answer_alike(zookeeper_server: str, clients: list[KazooClient], servers: int) -> None:
    # 200 in all, and 2,000 in `make simulate`.
    @settings(max_examples=settings().max_examples if SEARCHING else 100)
    @given(_program)
    def alike(program: list[tuple[int, tuple[Any, ...]]]) -> None:
        real = _Real(f"/d-{uuid.uuid4().hex[:12]}", clients, zookeeper_server)
        simulated = _Simulated(servers)
        try:
            for number, request in program:
                assert simulated.ask(number, request) == real.ask(number, request), request
            real.settle()
            simulated.settle()
            assert simulated.events == real.events
            assert _ranks(simulated.zxids) == _ranks(real.zxids)
        finally:
            simulated.close()
            clients[0].delete(real.root, recursive=True)

    alike()
