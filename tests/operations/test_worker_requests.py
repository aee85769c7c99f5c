"""A worker runs code of users: whatever it answers, the asker gets a map or a typed error."""

from __future__ import annotations

import threading

import pytest
import zmq

from storm_dagster.model.errors import Unavailable
from storm_dagster.operations.live.worker_requests import ask_worker

_ANSWERS = [
    b"[1]",
    b"1",
    b"null",
    b"",
    b"\xff",
    b"[" * 200_000,
    b'"' + b"x" * (33 * 1024**2) + b'"',
    b"{",
    b"NaN",
]


@pytest.mark.parametrize("answer", _ANSWERS, ids=[repr(answer[:8]) for answer in _ANSWERS])
def test_an_answer_that_is_none(answer: bytes) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def respond() -> None:
        if router.poll(20_000):
            sender, *_ = router.recv_multipart()
            router.send_multipart([sender, answer])

    thread = threading.Thread(target=respond)
    thread.start()
    try:
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
            ask_worker("127.0.0.1", port, "token", "stats", timeout=3.0)
    finally:
        thread.join(30)
        router.close()
        context.term()
