"""The port against untrusted clients: whatever they send, memory stays bounded and others are
served.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import trustme

from storm_dagster.http.server import listen
from storm_dagster.nimbus.thrift.idl import decoder, load_idl
from storm_dagster.nimbus.thrift.server import ServerLimits, ThriftServer
from storm_dagster.nimbus.thrift.service import Dispatcher
from storm_dagster.testing.waiting import eventually
from storm_rigs.protocols.thrift_calls import encode_call


class Handler:
    """Stands behind the port in these tests: getNimbusConf and getTopologyConf."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.leave = threading.Event()
        self.pages = SimpleNamespace(conf_text=self._topology_conf)

    def nimbus_conf(self) -> str:
        return "{}"

    def find_by_id(self, topology_id: str) -> str:
        return topology_id

    def _topology_conf(self, topology_id: str) -> str:
        if topology_id.startswith("wait"):
            self.entered.release()
            assert self.leave.wait(30)
        if topology_id == "large":
            return "x" * 3_000_000
        if topology_id == "bug":
            raise ValueError("/secret/path")
        return topology_id


class Port:
    def __init__(self, tls: ssl.SSLContext | None = None, /, **limits: float) -> None:
        self.handler = Handler()
        listener = listen("127.0.0.1", 0, "test")
        self.address = listener.getsockname()
        answer = Dispatcher(self.handler).answer  # type: ignore[arg-type]
        self.server = ThriftServer(answer, listener, ServerLimits(**limits), tls=tls)  # type: ignore[arg-type]
        self.server.start()
        self.sockets: list[socket.socket] = []

    def connect(self) -> socket.socket:
        made = socket.create_connection(self.address, timeout=20)
        self.sockets.append(made)
        return made

    def ask(
        self, name: str = "getNimbusConf", link: socket.socket | None = None, **arguments: object
    ) -> object:
        link = link or self.connect()
        send(link, encode_call(name, 5, **arguments))
        return receive(link, name)

    def pause(self, meanwhile: Callable[[], object]) -> None:
        """The server finds all of what ``meanwhile`` sends at once."""
        go_on = threading.Event()
        assert self.server._loop is not None
        self.server._loop.call_soon_threadsafe(go_on.wait, 20)
        meanwhile()
        go_on.set()

    def close(self) -> None:
        self.handler.leave.set()
        for each in self.sockets:
            each.close()
        self.server.stop()
        assert not self.server.thread.is_alive()


@pytest.fixture
def open_port() -> Iterator[Callable[..., Port]]:
    opened: list[Port] = []

    def make(**limits: float) -> Port:
        opened.append(Port(**limits))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def send(link: socket.socket, frame: bytes) -> None:
    link.sendall(struct.pack("!i", len(frame)) + frame)


def read_exactly(link: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = link.recv(size - len(got))
        if not more:
            raise EOFError
        got += more
    return got


def receive(link: socket.socket, name: str) -> object:
    """The value of an answer, or ``(type, message)`` of an application exception."""
    frame = read_exactly(link, int.from_bytes(read_exactly(link, 4), "big"))
    protocol = decoder(frame)
    said, kind, seqid = protocol.read_message_begin()
    assert (said, seqid) == (name, 5)
    if kind == 3:
        from thriftpy2.thrift import TApplicationException

        error = TApplicationException()
        error.read(protocol)
        return error.type, error.message
    result = getattr(load_idl().Nimbus, f"{name}_result")()
    result.read(protocol)
    return result.success


def is_closed(link: socket.socket) -> bool:
    try:
        return link.recv(1) == b""
    except (ConnectionError, TimeoutError) as error:
        return isinstance(error, ConnectionError)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,
        struct.pack("!i", 2**31 - 1) + b"x",
        struct.pack("!i", -1),
        struct.pack("!i", 0),
        struct.pack("!i", 100_001) + b"x" * 10,
        struct.pack("!i", 50) + b"\xff" * 50,
        struct.pack("!i", 12) + b"\x80\x05\x95\x04\x00\x00\x00c__main",
    ],
    ids=["http", "tls", "2 GiB", "negative", "empty", "too large", "garbage", "pickle"],
)
def test_garbage_closes_its_own_connection_only(open_port: Callable[..., Port], raw: bytes) -> None:
    port = open_port(frame_bytes=100_000)
    good = port.connect()
    assert port.ask(link=good) == "{}"
    bad = port.connect()
    bad.sendall(raw)
    assert is_closed(bad)
    assert port.ask(link=good) == "{}"


def test_a_frame_that_breaks_off_is_forgotten(open_port: Callable[..., Port]) -> None:
    port = open_port()
    for size in (0, 2, 6, 30):
        link = port.connect()
        link.sendall((struct.pack("!i", 1000) + b"x" * 100)[:size])
        link.close()
    eventually(lambda: not port.server.connections, 20, "the connections gone")
    assert port.ask() == "{}"


def test_answers_are_errors_where_something_is_wrong(open_port: Callable[..., Port]) -> None:
    port = open_port()
    link = port.connect()
    assert port.ask("debug", link) == (
        1,
        "debug is not served: tuples are not sampled: set topology.debug with an update of the topology",
    )
    kind, text = port.ask("getTopologyConf", link, id="bug")  # type: ignore[misc]
    assert kind == 6 and "secret" not in text and "see its log" in text
    unknown = b"noSuchMethod"
    send(
        link,
        struct.pack("!HBBi", 0x8001, 0, 1, len(unknown)) + unknown + struct.pack("!i", 5) + b"\0",
    )
    assert receive(link, "noSuchMethod")[0] == 1  # type: ignore[index]
    broken = encode_call("getTopologyConf", 5, id="abcd").replace(b"abcd", b"\xff\xfe\xfd\xfc")
    send(link, broken)
    assert receive(link, "getTopologyConf")[0] == 7  # type: ignore[index]
    assert port.ask("getTopologyConf", link, id="fine") == "fine"


def test_one_way_calls_get_no_answer(open_port: Callable[..., Port]) -> None:
    port = open_port()
    link = port.connect()
    call = bytearray(encode_call("getNimbusConf", 5))
    call[3] = 4
    send(link, bytes(call))
    assert port.ask("getTopologyConf", link, id="next") == "next"


def test_calls_on_one_connection_are_answered_in_order(open_port: Callable[..., Port]) -> None:
    port = open_port(threads=4)
    link = port.connect()
    for number in range(50):
        send(link, encode_call("getTopologyConf", 5, id=str(number)))
    assert [receive(link, "getTopologyConf") for _ in range(50)] == [
        str(number) for number in range(50)
    ]


def test_a_slow_sender_is_dropped_and_an_idle_client_kept(open_port: Callable[..., Port]) -> None:
    port = open_port(frame_secs=0.5, idle_secs=60)
    idle = port.connect()
    assert port.ask(link=idle) == "{}"
    slow = port.connect()
    slow.sendall(struct.pack("!i", 1000) + b"x")
    assert is_closed(slow)
    assert port.ask(link=idle) == "{}"


def test_a_reader_that_takes_nothing_is_dropped(open_port: Callable[..., Port]) -> None:
    port = open_port(answer_secs=0.5)
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.connect(port.address)
    port.sockets.append(link)
    for _ in range(5):
        send(link, encode_call("getTopologyConf", 5, id="large"))
    eventually(lambda: not port.server.connections, 20, "the drop")
    assert port.ask() == "{}"


def test_too_many_connections_drop_the_longest_idle(open_port: Callable[..., Port]) -> None:
    port = open_port(connections=10)
    first = port.connect()
    assert port.ask(link=first) == "{}"
    others = [port.connect() for _ in range(9)]
    for each in others:
        assert port.ask(link=each) == "{}"
    assert port.ask() == "{}"
    assert is_closed(first)
    flood = [port.connect() for _ in range(100)]
    assert port.ask() == "{}"
    assert len(port.server.connections) <= 10
    assert sum(is_closed(each) for each in flood[:50]) == 50


def test_half_frames_of_many_clients_take_no_more_than_the_limit(
    open_port: Callable[..., Port],
) -> None:
    port = open_port(frame_bytes=1_000_000, held_bytes=3_000_000)
    halves = []
    for _ in range(30):
        link = port.connect()
        link.sendall(struct.pack("!i", 1_000_000) + b"x" * 400_000)
        halves.append(link)
        assert port.server.held_bytes <= 3_000_000 + 64 * 1024

    def quiet() -> bool:
        """All that was sent is read, or its sender dropped."""
        held = [connection.held_bytes for connection in list(port.server.connections)]
        gone = sum(select.select([half], [], [], 0)[0] == [half] for half in halves)
        return len(held) + gone == len(halves) and set(held) == {400_000}

    eventually(quiet, 30, "the end of what was sent", ignore=(RuntimeError,))
    assert port.ask("getTopologyConf", id="x" * 300_000) == "x" * 300_000
    assert is_closed(halves[0])
    assert port.server.held_bytes <= 3_000_000


def test_what_a_dropped_client_had_sent_pushes_out_no_other(open_port: Callable[..., Port]) -> None:
    port = open_port(frame_bytes=1_000_000, held_bytes=3_000_000)

    def held(*counts: int) -> None:
        eventually(
            lambda: (
                sorted(connection.held_bytes for connection in port.server.connections)
                == sorted(counts)
            ),
            30,
            f"{counts} bytes held",
            ignore=(RuntimeError,),
        )

    slowest = port.connect()
    slowest.sendall(struct.pack("!i", 1_000_000) + b"x")
    held(1)
    others = [port.connect() for _ in range(7)]
    for other in others:
        other.sendall(struct.pack("!i", 1_000_000) + b"x" * 425_000)
    held(1, *[425_000] * 7)
    port.pause(lambda: slowest.sendall(b"x" * 300_000))
    assert is_closed(slowest)
    held(*[425_000] * 7)
    assert select.select(others, [], [], 0)[0] == []


def test_large_calls_in_progress_push_out_nobody(open_port: Callable[..., Port]) -> None:
    port = open_port(frame_bytes=1_000_000, held_bytes=3_000_000, threads=20)
    for _ in range(3):
        send(port.connect(), encode_call("getTopologyConf", 5, id="wait" * 200_000))
        assert port.handler.entered.acquire(timeout=20)
    port.server._max_held_bytes = port.server.held_bytes + 10
    assert [port.ask() for _ in range(20)] == ["{}"] * 20


def test_connections_that_begin_no_handshake_count() -> None:
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    port = Port(tls)
    try:
        for number in range(300):
            port.connect()
            if number % 50 == 0:
                link = trusted.wrap_socket(port.connect(), server_hostname="127.0.0.1")
                assert port.ask(link=link) == "{}"
                link.close()

        def gone() -> int:
            return sum(
                each.fileno() >= 0 and select.select([each], [], [], 0)[0] == [each]
                for each in port.sockets
            )

        # Well before the ten seconds that each of them has by itself.
        eventually(lambda: gone() >= 300 - 64, 60, "the end of handshakes that were not begun")
    finally:
        port.close()


def test_calls_that_wait_do_not_hold_up_others(open_port: Callable[..., Port]) -> None:
    port = open_port(threads=3)
    waiting = [port.connect() for _ in range(2)]
    for each in waiting:
        send(each, encode_call("getTopologyConf", 5, id="wait"))
    for _ in waiting:
        assert port.handler.entered.acquire(timeout=20)
    assert port.ask() == "{}"
    before = threading.active_count()
    more = [port.connect() for _ in range(40)]
    for each in more:
        send(each, encode_call("getTopologyConf", 5, id="wait"))
    time.sleep(0.3)
    assert threading.active_count() <= before + 1, (
        "a waiting call may not cost a thread beyond the limit"
    )
    port.handler.leave.set()
    for each in (*waiting, *more):
        assert receive(each, "getTopologyConf") == "wait"


def test_an_answer_comes_in_one_piece_and_is_not_held_back(open_port: Callable[..., Port]) -> None:
    """Its length sent alone would cost every call the 40 ms for which a client's kernel holds back
    its receipt.
    """
    port = open_port()
    link = port.connect()
    for _ in range(5):
        send(link, encode_call("getNimbusConf", 5))
        answer = link.recv(65_536)
        assert len(answer) == 4 + int.from_bytes(answer[:4], "big") > 4
    (connection,) = port.server.connections
    made = connection.writer.get_extra_info("socket")
    assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
