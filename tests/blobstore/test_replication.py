"""Copies to other nimbuses: how many a client asks for; one that hangs holds up nobody else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import pytest

from storm_dagster.blobstore import BlobMeta
from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.nimbus.blobs import replication
from storm_dagster.nimbus.blobs.replication import NimbusPeer, Replicator
from storm_rigs.servers.blob_server import serve_blobs

META = BlobMeta("wc-1-1-stormjar.jar", 3, "0" * 64)


class _Follower(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def follower() -> Iterator[NimbusPeer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Follower) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield NimbusPeer("good:6627", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


@contextmanager
def frozen() -> Iterator[NimbusPeer]:
    """A peer whose kernel takes connections and requests, and that never answers: as after
    SIGSTOP.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        yield NimbusPeer("frozen:6627", f"http://127.0.0.1:{listener.getsockname()[1]}")


@contextmanager
def no_content(_: str) -> Iterator[BytesIO]:
    yield BytesIO(b"abc")


def test_a_frozen_follower_stalls_no_put(monkeypatch: pytest.MonkeyPatch) -> None:
    # It never answers within this test: every put that waits for it would wait as long as the test
    # may.
    monkeypatch.setattr(replication, "_OFFER_SECS", 600.0)
    with follower() as good, frozen() as bad:
        replicator = Replicator(
            lambda: [bad, good], no_content, wait_secs=600.0, read_timeout_secs=600.0
        )
        before = threading.active_count()
        for _ in range(100):
            assert replicator.push(META, epoch=1, minimum=2, allow_degraded=False) >= 2
        assert replicator._waiting["frozen:6627"] <= 64, "what waits for it is bounded"
        assert threading.active_count() - before <= 32
        replicator.close()


def test_a_follower_that_wakes_takes_copies_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "_OFFER_SECS", 0.05)
    with frozen() as bad, follower() as good:
        peers = [NimbusPeer("one:6627", bad.http)]
        replicator = Replicator(lambda: peers, no_content, wait_secs=30.0)
        assert replicator.push(META, epoch=1, minimum=1, allow_degraded=False) == 1
        peers[:] = [NimbusPeer("one:6627", good.http)]
        assert replicator.push(META, epoch=1, minimum=2, allow_degraded=False) == 2
        replicator.close()


def test_a_client_that_accepts_fewer_copies_says_how_many() -> None:
    with serve_blobs() as server, NimbusBlobClient(server.url, min_replication=3) as client:
        client.put("k", b"x")
        client.accepting_fewer().put("k", b"x")
        client.accepting_fewer(minimum=1).put("k", b"x")
        client.put("k", b"x")
        assert server.copies == ["3", "3", "1", "3"]
