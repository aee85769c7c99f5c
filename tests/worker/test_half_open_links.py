"""Links between workers that lost their connection without either side being told."""

from __future__ import annotations

import pytest

from storm_dagster.model.wire import decode_frame
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.dataplane import transport
from storm_dagster.worker.dataplane.transport import Transport
from storm_rigs.fault_proxy import FaultProxy


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
