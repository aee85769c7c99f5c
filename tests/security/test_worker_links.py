"""Links between workers of a cluster with a secret: who does not know the topology's key says
nothing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import zmq

from storm_dagster.model.errors import Unavailable
from storm_dagster.model.slot import Slot
from storm_dagster.model.wire import Frame, decode_frame, decode_request, encode_frame
from storm_dagster.operations.live.worker_requests import ask_worker, link_key_of
from storm_dagster.security.settings import Security
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.dataplane.transport import Transport

SECURITY = Security("a-secret-planted-for-tests-4711")
KEY = link_key_of(SECURITY, "wc-1-1")
OTHER = link_key_of(SECURITY, "other-2-1")


@pytest.fixture
def transports() -> Iterator[Callable[[str], Transport]]:
    made: list[Transport] = []

    def make(key: str) -> Transport:
        made.append(Transport("127.0.0.1", 0, f"token-{len(made)}", 100, key))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


def linked(sender: Transport, receiver: Transport) -> None:
    sender.set_peers({Slot("s", 1): f"127.0.0.1:{receiver.port}"}, [Slot("s", 1)])
    sender.peers[Slot("s", 1)].pressure = True


def arrived(sender: Transport, receiver: Transport) -> list[bytes]:
    sender.flush(lambda *_: None)
    return [message[-1] for message in receiver.receive(10)]


def test_keys_differ_by_topology_and_need_a_secret() -> None:
    assert KEY != OTHER and len(KEY) == 64 and link_key_of(Security(), "wc-1-1") == ""


def test_workers_of_one_topology_understand_each_other(
    transports: Callable[[str], Transport],
) -> None:
    sender, receiver = transports(KEY), transports(KEY)
    linked(sender, receiver)
    frames = eventually(lambda: arrived(sender, receiver), 20, "a frame over CURVE")
    assert decode_frame(frames[0]) == Frame("token-0", pressure=True)


@pytest.mark.parametrize("key", ["", KEY])
def test_the_protocol_before_3_0_is_refused(
    transports: Callable[[str], Transport], key: str
) -> None:
    """ZeroMQ loses memory with each connection that speaks it."""
    receiver, friend = transports(key), transports(key)
    identity, message = bytes([2, 0]) + b"x", bytes([6, 0]) + b"hello"
    with (
        socket.create_connection(("127.0.0.1", receiver.port), timeout=20) as link,
        suppress(ConnectionError),
    ):
        link.sendall(identity + message)
        while link.recv(1000):
            pass  # Our own greeting.
    assert receiver.receive(10) == []
    linked(friend, receiver)
    assert eventually(lambda: arrived(friend, receiver), 20, "a frame")


@pytest.mark.parametrize("key", ["", OTHER])
def test_an_outsider_is_refused(transports: Callable[[str], Transport], key: str) -> None:
    outsider, friend, receiver = transports(key), transports(KEY), transports(KEY)
    linked(outsider, receiver)
    linked(friend, receiver)
    received: list[bytes] = []

    def friend_received() -> bool:
        outsider.flush(lambda *_: None)
        received.extend(arrived(friend, receiver))
        return bool(received)

    eventually(friend_received, 20, "the friend's frame")
    # The friend came through both later and slower than the outsider had time to.
    for _ in range(20):
        outsider.flush(lambda *_: None)
        receiver.wait(0.02)
        received.extend(message[-1] for message in receiver.receive(10))
    assert {decode_frame(raw).token for raw in received} == {"token-1"}
    assert outsider.peers[Slot("s", 1)].backlog, "what it wanted to say never left"


def test_questions_to_a_worker_need_its_key(transports: Callable[[str], Transport]) -> None:
    worker = transports(KEY)
    stop = threading.Event()

    def answer() -> None:
        while not stop.is_set():
            worker.wait(0.05)
            for *envelope, payload in worker.receive(10):
                assert decode_request(payload).op == "ping"
                worker.reply(envelope, b'{"pong": 1}')

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        assert ask_worker("127.0.0.1", worker.port, "t", "ping", 10, KEY) == {"pong": 1}
        for key in ("", OTHER):
            with pytest.raises(Unavailable):
                ask_worker("127.0.0.1", worker.port, "t", "ping", 0.5, key)
    finally:
        stop.set()
        worker.wake()
        thread.join(10)


def test_nothing_legible_travels(transports: Callable[[str], Transport]) -> None:
    """A listener on the wire sees neither the token nor the values."""
    sender = transports(KEY)
    receiver = transports(KEY)
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as tap:
        tap.settimeout(20)
        sender.set_peers({Slot("s", 1): f"127.0.0.1:{tap.getsockname()[1]}"}, [Slot("s", 1)])
        sender.peers[Slot("s", 1)].backlog.append(
            encode_frame(Frame("plain-token", [(1, 2, "s", [(0, 0, [["v"]])])]))
        )
        link, _ = tap.accept()
        with link, socket.create_connection(("127.0.0.1", receiver.port)) as onward:
            stop = threading.Event()

            def pump(source: socket.socket, sink: socket.socket) -> None:
                source.settimeout(0.2)
                while not stop.is_set():
                    try:
                        chunk = source.recv(65536)
                    except TimeoutError:
                        continue
                    except OSError:
                        return
                    if not chunk:
                        return
                    seen.extend(chunk)
                    sink.sendall(chunk)

            pumps = [
                threading.Thread(target=pump, args=pair)
                for pair in ((link, onward), (onward, link))
            ]
            for each in pumps:
                each.start()
            try:
                frames = eventually(
                    lambda: arrived(sender, receiver), 20, "the frame through the tap"
                )
            finally:
                stop.set()
                for each in pumps:
                    each.join(10)
    assert decode_frame(frames[0]).token == "plain-token"
    assert len(seen) > 100 and b"plain-token" not in seen
    assert zmq.has("curve")
