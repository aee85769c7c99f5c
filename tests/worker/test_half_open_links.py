"""Links between workers that lost their connection without either side being told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from storm_dagster.model.wire import decode_frame
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.dataplane import transport
from storm_dagster.worker.dataplane.transport import Transport
from storm_rigs.fault_proxy import FaultProxy

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
    """A firewall drops the packets of the connection; new ones pass. Nothing ends, and only silence tells."""
    monkeypatch.setattr(transport, "_PING_MILLIS", 100)
    monkeypatch.setattr(transport, "_SILENT_MILLIS", 300)
    receiver = Transport("127.0.0.1", 0, "receiver", 100, key)
    sender = Transport("127.0.0.1", 0, "sender", 100, key)
    slot = ("s", 1)

    def arrives() -> bool:
        sender.peers[slot].pressure = True
        sender.flush(lambda *_: None)
        return any(decode_frame(message[-1]).token == "sender" for message in receiver.receive(1000))

    try:
        with FaultProxy("127.0.0.1", receiver.port) as link:
            sender.set_peers({slot: link.address}, [slot])
            eventually(arrives, timeout=10, what="a frame arrives")
            link.forget()
            receiver.receive(1000)
            eventually(arrives, timeout=10, what="a frame arrives over a new connection")
    finally:
        sender.close()
        receiver.close()


def test_a_sender_that_ends_while_its_frames_wait_ends_nobody() -> None:
    """Such as a worker that is killed, or whoever floods a busy one: ZeroMQ takes its next timer of that link amiss."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _RECEIVER], stderr=subprocess.PIPE, **pipes) as receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        with subprocess.Popen([sys.executable, "-c", _SENDER, port], **pipes) as sender:
            assert sender.stdout is not None
            assert sender.stdout.readline() == "full\n"
            sender.kill()
        held, error = receiver.communicate("\n", timeout=60)
    assert receiver.returncode == 0 and int(held) > 0, error
