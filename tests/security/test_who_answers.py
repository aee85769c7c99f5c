"""Clients of Spark, of workers and of Spark's batches send nothing to a server of another user.

HTTP clients are in ``test_who_answers_http.py``, those of ZooKeeper in
``test_who_answers_zookeeper.py``.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pyarrow
import pytest

from storm_dagster.api.spark.bridge import make_deliver
from storm_dagster.api.spark.session import worker_session
from storm_dagster.cli.dev.readiness import listens
from storm_dagster.defs.resources.spark import open_session
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.slot import Slot
from storm_dagster.operations.live.worker_requests import ask_worker
from storm_dagster.security.peers import can_identify_peers
from storm_dagster.security.server_identity import (
    PlaintextPeer,
    TrustedServers,
    UntrustedServer,
)
from storm_dagster.security.spark_remote import ClusterSpark
from storm_dagster.spark.link import open_channel, probe, untrusted_server
from storm_dagster.spark.planner import ConnectPlanner, FixedSessionIds
from storm_dagster.spark.query_sessions import end_query_session
from storm_dagster.spark.session import ask_keys, ask_version
from storm_dagster.spark.warm_up import WARM_BATCH
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.worker.dataplane.transport import Transport
from storm_rigs.servers.ports import free_port

TOKEN = "a-token-planted-for-tests-4711"
CODE = b"code and tuples of a topology"
pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not can_identify_peers(), reason="only root becomes another user"
)

# Each listens as another user, speaks the protocol of the real server, and keeps what it is sent.
SPARK = """
import grpc
from concurrent.futures import ThreadPoolExecutor
class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        received.append(repr(details.invocation_metadata).encode())
        def take(requests, context):
            for request in requests:
                received.append(request)
                yield b""
        return grpc.stream_stream_rpc_method_handler(take)
os.setuid(user)
server = grpc.server(ThreadPoolExecutor(4), handlers=[Handler()])
port = server.add_insecure_port(f"127.0.0.1:{port}")
server.start()
"""
WORKER = """
import zmq
def take():
    while True:
        sender, *parts = router.recv_multipart()
        received.extend(parts)
        router.send_multipart([sender, b'{"tasks": {"1": "changed"}}'])
os.setuid(user)
router = zmq.Context().socket(zmq.ROUTER)
router.bind(f"tcp://127.0.0.1:{port}" if port else "tcp://127.0.0.1:*")
port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
threading.Thread(target=take, daemon=True).start()
"""
ENDPOINT = """
import socket
def frame(data):
    return len(data).to_bytes(4, "big") + data
def talk(link):
    link.sendall(frame(b"#CHALLENGE#{sha256}" + b"x" * 20))
    received.append(link.recv(65536))
    link.sendall(frame(b"#WELCOME#"))
    received.append(link.recv(65536))
    link.sendall(frame(b"{sha256}" + b"y" * 32))
    while data := link.recv(65536):
        received.append(data)
        link.sendall(frame(b"[]") + frame(b"more") + frame(b"done"))
def take():
    while True:
        link, _ = server.accept()
        threading.Thread(target=talk, args=(link,), daemon=True).start()
os.setuid(user)
server = socket.create_server(("127.0.0.1", port))
port = server.getsockname()[1]
threading.Thread(target=take, daemon=True).start()
"""
BEGIN = """
import os, sys, threading
user, port, received = int(sys.argv[1]), int(sys.argv[2]), []
"""
END = """
print(port, flush=True)
sys.stdin.read()
sys.stdout.write(b"|".join(received).hex())
sys.stdout.flush()
os._exit(0)
"""


class Intruder:
    """A process of another user that serves at a port of loopback."""

    def __init__(self, program: str, port: int = 0) -> None:
        user = str(pwd.getpwnam("nobody").pw_uid)
        self._child = subprocess.Popen(
            [sys.executable, "-c", BEGIN + program + END, user, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        self.port = int(self._child.stdout.readline())
        self.remote = f"sc://127.0.0.1:{self.port}"

    def received(self) -> bytes:
        """All that it was sent; it ends."""
        if self._child.returncode is not None:
            return b""
        text, _ = self._child.communicate(timeout=patience(20))
        return bytes.fromhex(text)


Listen = Callable[..., Intruder]


@pytest.fixture
def intruder() -> Iterator[Listen]:
    made: list[Intruder] = []

    def listen(program: str, port: int = 0) -> Intruder:
        made.append(Intruder(program, port))
        return made[-1]

    yield listen
    for one in made:
        one.received()


# -- Spark Connect ---------------------------------------------------------------------------------


def place(remote: str) -> None:
    ConnectPlanner(remote, FixedSessionIds(str(uuid.uuid4())), token=TOKEN)(WARM_BATCH)


def open_of_a_worker(remote: str) -> None:
    worker_session({"topology.spark.remote": remote}, cluster=ClusterSpark((remote,)))


def ask_of_doctor(remote: str) -> None:
    ask_version(remote, None, TOKEN, patience(20))


def ask_of_a_submission(remote: str) -> None:
    ask_keys(f"{remote}/;authorization=Bearer%20{TOKEN}", {"spark.a": "b"}, patience(20))


def end_queries(remote: str) -> None:
    end_query_session(remote, "a-1-1", [remote], TOKEN)


def open_in_dagster(remote: str) -> None:
    keys = {"spark.remote": f"{remote}/;authorization=Bearer%20{TOKEN}", "spark.a": "b"}
    open_session(keys, TrustedServers())


CLIENTS_OF_SPARK = (
    place,
    open_of_a_worker,
    ask_of_doctor,
    ask_of_a_submission,
    end_queries,
    open_in_dagster,
)


@pytest.mark.spark
@pytest.mark.timeout(240)
@pytest.mark.parametrize("call", CLIENTS_OF_SPARK)
def test_spark_of_another_user_is_sent_nothing(
    call: Callable[[str], None],
    intruder: Listen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STORM_DAGSTER_HOME", str(tmp_path))
    (tmp_path / "spark.token").write_text(f"{TOKEN}\n", encoding="ascii")
    (tmp_path / "spark.token").chmod(0o600)
    other = intruder(SPARK)
    with pytest.raises(Exception, match="is sent nothing, because") as refused:
        call(other.remote)
    said = refused.value
    assert isinstance(said, StormDagsterError) or untrusted_server(said) is not None
    assert TOKEN not in str(said)
    assert other.received() == b""


class Served(grpc.GenericRpcHandler):
    """A server of this user at a port, which counts its calls."""

    def __init__(self, port: int = 0) -> None:
        self.calls = 0
        self._server = grpc.server(ThreadPoolExecutor(2), handlers=[self])
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def service(self, handler_call_details: Any) -> Any:
        """Answer any call."""
        self.calls += 1
        return grpc.unary_stream_rpc_method_handler(lambda request, context: iter((b"answer",)))

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.mark.timeout(120)
def test_a_channel_asks_again_when_it_connects_again(intruder: Listen) -> None:
    """The session of a placement or of a worker lives for days, and gRPC connects by itself."""
    served = Served()
    port = served.port
    url = f"sc://127.0.0.1:{port}/;authorization=Bearer%20{TOKEN}"
    builder = open_channel(url)
    channel = builder.toChannel()
    method: Any = channel.unary_stream("/spark.connect.SparkConnectService/ExecutePlan")

    def answers() -> bool:
        try:
            answer = list(method(CODE, metadata=tuple(builder.metadata()), timeout=5))
            return answer == [b"answer"]
        except grpc.RpcError as error:
            refusals.append(str(error))
            return False

    refusals: list[str] = []
    assert answers()
    served.stop()
    other = intruder(SPARK, port)
    eventually(
        lambda: not answers() and "belongs to user nobody" in refusals[-1],
        patience(30),
        "the refusal of the server of another user",
    )
    assert not answers()
    assert other.received() == b"", "neither heads nor code left"
    again = Served(port)
    try:
        eventually(answers, patience(30), "an answer of the real server")
        assert again.calls
    finally:
        channel.close()
        again.stop()


def test_spark_on_another_machine_needs_tls_or_a_named_network() -> None:
    far = TrustedServers(needs_proof=True)
    named = TrustedServers(needs_proof=True, plaintext_peers=(PlaintextPeer.parse("192.0.2.0/24"),))
    own, peer = ("198.51.100.7", 40000), ("192.0.2.9", 15002)
    with pytest.raises(UntrustedServer, match=r"storm\.security\.plaintext\.peers"):
        far.check(own, peer, server="Spark at sc://spark1:15002", name="spark1")
    named.check(own, peer, server="Spark at sc://spark1:15002", name="spark1")


def test_spark_behind_tls_is_not_asked_for_its_user(intruder: Listen) -> None:
    """Its certificate proves who it is; this one has none, and gets no more than a handshake."""
    other = intruder(SPARK)
    url = f"{other.remote}/;use_ssl=true;authorization=Bearer%20{TOKEN}"
    probe(url)
    channel = open_channel(url).toChannel()
    method: Any = channel.unary_unary("/spark.connect.SparkConnectService/Config")
    with pytest.raises(grpc.RpcError):
        method(CODE, timeout=2)
    channel.close()
    assert other.received() == b""


def test_a_port_of_another_user_is_no_daemon_of_ours(intruder: Listen) -> None:
    """``dev`` waits for its own daemon, and tells nobody of the port before it serves."""
    other = intruder(ENDPOINT)
    assert not listens(other.port)
    assert other.received() == b""


# -- workers ---------------------------------------------------------------------------------------

PEER = Slot("s", 1)


def ignore(*_: Any) -> None:
    """A tuple that cannot be encoded: there is none here."""


def send(sender: Transport) -> None:
    """Send one frame with the start token, as a pass of the loop does."""
    sender.peers[PEER].by_task["acks"] = {7: [1, 2]}
    sender.flush(ignore)


@pytest.mark.timeout(180)
def test_a_worker_sends_no_frame_to_another_users_port(intruder: Listen) -> None:
    port = free_port()
    sender = Transport("127.0.0.1", 0, TOKEN, 100)
    try:
        for _ in range(2):
            # Before the worker starts, and after it was killed.
            other = intruder(WORKER, port)
            sender.set_peers({PEER: f"127.0.0.1:{port}"}, [PEER])
            for _ in range(20):
                send(sender)
                sender.wait(0.05)
            assert not sender.peers[PEER].link.may_send
            assert other.received() == b""
            receiver = Transport("127.0.0.1", port, "receiver", 100)
            try:
                await_frames(sender, receiver)
            finally:
                receiver.close()
    finally:
        sender.close()


def await_frames(sender: Transport, receiver: Transport) -> None:
    """Send until frames reach the receiver, which must have the token in them."""

    def arrive() -> bool:
        send(sender)
        sender.wait(0.05)
        messages = receiver.receive(100)
        assert all(TOKEN.encode() in message[-1] for message in messages)
        return bool(messages)

    eventually(arrive, patience(30), "frames of the peer")


@pytest.mark.timeout(120)
def test_a_request_to_a_worker_goes_to_no_other_user(intruder: Listen) -> None:
    other = intruder(WORKER)
    with pytest.raises(Unavailable, match="belongs to user nobody"):
        ask_worker("127.0.0.1", other.port, TOKEN, "stats", patience(5))
    assert other.received() == b""
    # The users whom the conf names, and the topology's own, are asked.
    other = intruder(WORKER)
    nobody = pwd.getpwnam("nobody").pw_uid
    trusted = TrustedServers(users=frozenset({0, nobody}))
    answer = ask_worker("127.0.0.1", other.port, TOKEN, "stats", patience(20), trusted=trusted)
    assert answer == {"tasks": {"1": "changed"}}
    assert TOKEN.encode() in other.received()


@pytest.mark.timeout(120)
def test_spark_sends_rows_to_who_knows_the_secret_of_the_endpoint(intruder: Listen) -> None:
    """The function runs beside Spark's server, which cannot ask for users of another host."""
    other = intruder(ENDPOINT)
    rows = pyarrow.table({"row": [CODE.decode()]})
    deliver = make_deliver(
        "127.0.0.1", other.port, b"s" * 32, ("row",), 100, tables=lambda *_: [("default", rows)]
    )
    with pytest.raises(Exception, match="digest"):
        deliver(None, 1)
    received = other.received()
    assert received and CODE not in received and b"batch" not in received
