"""Links between workers that lost their connection without either side being told."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import zmq

from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.model.slot import Slot
from storm_dagster.model.wire import decode_frame
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.dataplane import transport
from storm_dagster.worker.dataplane.transport import Transport
from storm_dagster.worker.runtime.process import _bind
from storm_rigs.servers.fault_proxy import FaultProxy

_RECEIVER = """
import sys, time
from storm_dagster.worker.dataplane import transport

transport._PING_MILLIS, transport._SILENT_MILLIS = 100, 300
receiver = transport.Transport("127.0.0.1", 0, "receiver", 100)
print(receiver.port, flush=True)
sys.stdin.readline()
time.sleep(2)  # Of ZeroMQ's own timers.
held = len(receiver.receive(10_000))
print(held, flush=True)
receiver.close()
"""
_SENDER = """
import sys, zmq

link = zmq.Context().socket(zmq.DEALER)
link.connect(f"tcp://127.0.0.1:{sys.argv[1]}")
while link.poll(500, zmq.POLLOUT):
    link.send(b"x" * 1000)
print("full", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("key", ["", "ab" * 32])
def test_a_forgotten_link_is_made_again(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """A firewall drops the packets of the connection; new ones pass. Nothing ends, and only silence
    tells.
    """
    monkeypatch.setattr(transport, "_PING_MILLIS", 100)
    monkeypatch.setattr(transport, "_SILENT_MILLIS", 300)
    receiver = Transport("127.0.0.1", 0, "receiver", 100, key)
    sender = Transport("127.0.0.1", 0, "sender", 100, key, blocked_secs=0)
    slot = Slot("s", 1)

    def arrives() -> bool:
        sender.peers[slot].pressure = True
        sender.flush(lambda *_: None)
        return any(
            decode_frame(message[-1]).token == "sender" for message in receiver.receive(1000)
        )

    try:
        with FaultProxy("127.0.0.1", receiver.port) as link:
            sender.set_peers({slot: link.address}, [slot])
            eventually(arrives, timeout=60, what="a frame arrives")
            link.forget()
            receiver.receive(1000)
            eventually(arrives, timeout=60, what="a frame arrives over a new connection")
    finally:
        sender.close()
        receiver.close()


def test_a_sender_that_ends_while_its_frames_wait_ends_nobody() -> None:
    """Such as a worker that is killed, or whoever floods a busy one: ZeroMQ takes its next timer of
    that link amiss.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", _RECEIVER], stderr=subprocess.PIPE, **pipes
    ) as receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        with subprocess.Popen([sys.executable, "-c", _SENDER, port], **pipes) as sender:
            assert sender.stdout is not None
            assert sender.stdout.readline() == "full\n"
            sender.kill()
        held, error = receiver.communicate("\n", timeout=60)
    assert receiver.returncode == 0 and int(held) > 0, error


def test_a_worker_whose_loop_is_blocked_loses_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ reads no pings where too many frames wait, however healthy the link is."""
    monkeypatch.setattr(transport, "_PING_MILLIS", 20)
    monkeypatch.setattr(transport, "_SILENT_MILLIS", 60)
    receiver, sender = (
        Transport("127.0.0.1", 0, "receiver", 100),
        Transport("127.0.0.1", 0, "sender", 100),
    )
    slot = Slot("s", 1)
    sent = received = 0
    try:
        sender.set_peers({slot: f"127.0.0.1:{receiver.port}"}, [slot])
        peer = sender.peers[slot]

        def blocked() -> bool:
            nonlocal sent
            peer.loads, peer.reasons = [(sent, 0.0)], [(0, 0, "x" * 100_000, "")]
            sender.flush(lambda *_: None)
            sent += 1
            return len(peer.backlog) > 3

        eventually(blocked, timeout=20, what="its queues are full", interval=0.001)
        time.sleep(0.4)  # Of ZeroMQ's own timers.

        def arrives() -> bool:
            nonlocal received
            sender.flush(lambda *_: None)
            for message in receiver.receive(1000):
                assert decode_frame(message[-1]).loads == [(received, 0.0)]
                received += 1
            return received == sent

        eventually(arrives, timeout=20, what="every frame arrives, in order", interval=0.001)
    finally:
        sender.close()
        receiver.close()


@pytest.mark.parametrize("secs", [30, 100_000])
def test_a_link_is_cut_later_than_a_worker_is_replaced(secs: int) -> None:
    spec = WorkerSpec.model_construct(host="127.0.0.1", port=0, token="token")
    sender = _bind(spec, {"supervisor.worker.timeout.secs": secs})
    try:
        sender.set_peers({Slot("s", 1): f"127.0.0.1:{sender.port}"}, [])
        socket = sender.peers[Slot("s", 1)].link.socket
        assert int(socket.getsockopt(zmq.HEARTBEAT_TIMEOUT)) >= min(secs + 5, 3600) * 1000
    finally:
        sender.close()
