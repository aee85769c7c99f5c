"""Uploads against peers that cancel, stall, lie, babble or come in crowds."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator

import httpx
import psutil
import pytest

from storm_dagster.testing.waiting import eventually
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread

pytestmark = pytest.mark.zookeeper


@pytest.fixture
def nimbus(stage: Stage) -> NimbusThread:
    return stage.nimbus(nimbus__upload__max__bytes=5_000_000).await_leading()


@pytest.fixture
def http(nimbus: NimbusThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=nimbus.url, timeout=20, trust_env=False) as client:
        yield client


def connect(nimbus: NimbusThread) -> socket.socket:
    host, _, port = nimbus.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def held(http: httpx.Client) -> list[str]:
    return [blob["key"] for blob in http.get("/v1/blobs").json()["blobs"]]


def send_all(http: httpx.Client) -> str:
    handle = http.post("/v1/uploads").json()["handle"]
    for part in ("archive", "conf", "topology"):
        assert http.put(f"/v1/uploads/{handle}/{part}", content=b"{}").status_code == 201
    return handle


def test_a_finished_upload_takes_nothing_more(http: httpx.Client) -> None:
    handle = send_all(http)
    assert http.put(f"/v1/uploads/{handle}/conf", content=b"{ }").status_code == 201, (
        "a retry before the end"
    )
    finished = http.post(f"/v1/uploads/{handle}/finish")
    assert finished.status_code == 200
    late = http.put(f"/v1/uploads/{handle}/conf", content=b'{"topology.workers": 9}')
    assert late.status_code == 409 and "finished" in late.json()["error"]["message"]
    assert http.get(f"/v1/uploads/{handle}/conf").content == b"{ }"
    assert http.post(f"/v1/uploads/{handle}/finish").json() == finished.json(), (
        "the end may be repeated"
    )


def test_an_upload_cancelled_on_its_way_leaves_nothing(
    http: httpx.Client, nimbus: NimbusThread
) -> None:
    handle = http.post("/v1/uploads").json()["handle"]
    assert http.put(f"/v1/uploads/{handle}/conf", content=b"{}").status_code == 201
    with connect(nimbus) as link:
        head = f"PUT /v1/uploads/{handle}/archive HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        link.sendall(head.encode() + b"x" * 500)
        inbox = nimbus.folder / "inbox"
        eventually(lambda: list(inbox.iterdir()), what="the first half")
        assert http.delete(f"/v1/uploads/{handle}").status_code == 204
        link.sendall(b"x" * 500)
        assert b"404" in link.recv(200)
    eventually(lambda: not list(inbox.iterdir()), what="an empty inbox")
    assert not [key for key in held(http) if handle in key]
    assert http.put(f"/v1/uploads/{handle}/conf", content=b"{}").status_code == 404


def test_handles_are_nimbus_own_words(http: httpx.Client) -> None:
    for handle in (
        "",
        "x",
        "../../etc",
        "0" * 31,
        "0" * 32,
        "0" * 33,
        "A" * 32,
        "%00" * 16,
        "..%2f" * 6,
    ):
        for method, path in (
            ("PUT", f"/v1/uploads/{handle}/conf"),
            ("POST", f"/v1/uploads/{handle}/finish"),
            ("GET", f"/v1/uploads/{handle}/conf"),
        ):
            assert http.request(method, path, content=b"{}").status_code in (404, 405), (
                method,
                path,
            )
    handle = http.post("/v1/uploads").json()["handle"]
    assert http.put(f"/v1/uploads/{handle}/passwd", content=b"x").status_code == 400
    wrong = {"X-Content-SHA256": hashlib.sha256(b"another").hexdigest()}
    damaged = http.put(f"/v1/uploads/{handle}/conf", content=b"{}", headers=wrong)
    assert damaged.status_code == 400 and "damaged" in damaged.json()["error"]["message"]
    assert http.get(f"/v1/uploads/{handle}/conf").status_code == 404


def test_bodies_that_are_cut_or_too_large(http: httpx.Client, nimbus: NimbusThread) -> None:
    with connect(nimbus) as link:
        link.sendall(
            b"PUT /v1/blobs/cut HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc"
        )
    assert http.put("/v1/blobs/large", content=b"x" * 5_000_001).status_code == 400

    def chunks() -> Iterator[bytes]:
        for _ in range(60):
            yield b"x" * 100_000

    assert http.put("/v1/blobs/endless", content=chunks()).status_code == 400
    eventually(lambda: not list((nimbus.folder / "inbox").iterdir()), what="an empty inbox")
    assert not {"cut", "large", "endless"} & set(held(http))


GARBAGE = [
    b"\x00" * 64,
    os.urandom(4096),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(200),
    b"\x80\x01\x00\x01\x00\x00\x00\x0egetClusterInfo\x00\x00\x00\x00\x00",
    b"\x7f\xff\xff\xff" + b"A" * 100,
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"PUT /v1/blobs/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
]


def test_garbage_and_endless_heads_cost_nothing(http: httpx.Client, nimbus: NimbusThread) -> None:
    http.get("/healthz")
    before = psutil.Process().memory_info().rss
    for sent in GARBAGE:
        with connect(nimbus) as link:
            link.sendall(sent)
            link.shutdown(socket.SHUT_WR)
            while link.recv(65536):
                pass
    with connect(nimbus) as link:
        link.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(OSError):
            for number in range(4000):
                link.sendall(b"X-%d: %s\r\n" % (number, b"a" * 16_000))
    assert http.get("/healthz", headers={"X": "a" * 100_000}).status_code == 431
    assert http.get("/healthz").status_code == 200
    assert psutil.Process().memory_info().rss - before < 30e6
    assert "x" not in held(http)


def test_silent_connections_are_dropped_and_others_are_served(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storm_dagster.http.server._HEAD_SECS", 2.0)
    nimbus = stage.nimbus().await_leading()
    silent = [connect(nimbus) for _ in range(200)]
    drip = connect(nimbus)
    drip.sendall(b"GET /healthz HT")
    try:
        assert nimbus.get("/healthz").status_code == 200

        def dropped() -> bool:
            drip.settimeout(0.5)
            try:
                return drip.recv(10) == b""
            except TimeoutError:
                return False
            except ConnectionResetError:
                return True

        eventually(dropped, timeout=60, what="the end of a connection whose head does not come")
        for link in silent:
            link.settimeout(30)
            try:
                assert link.recv(10) == b""
            except ConnectionResetError:
                pass
    finally:
        for link in (*silent, drip):
            link.close()


def test_slow_readers_hold_up_nobody(http: httpx.Client, stage: Stage) -> None:
    nimbus = stage.nimbus("n7", nimbus__file__copy__expiration__secs=2).await_serving()
    big = os.urandom(4_000_000)
    assert http.put("/v1/blobs/big", content=big).status_code == 201
    slow: list[socket.socket] = []
    host, _, port = str(http.base_url).removeprefix("http://").rstrip("/").rpartition(":")
    for _ in range(50):
        link = socket.socket()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect((host, int(port)))
        link.sendall(b"GET /v1/blobs/big HTTP/1.1\r\nHost: localhost\r\n\r\n")
        slow.append(link)
    try:
        for _ in range(20):
            assert http.get("/healthz").status_code == 200
        assert http.get("/v1/blobs/big").content == big
    finally:
        for link in slow:
            link.close()
    assert nimbus.get("/healthz").status_code == 200


def test_followers_name_the_leader_and_still_answer_reads(
    stage: Stage, nimbus: NimbusThread
) -> None:
    follower = stage.nimbus("n2").await_serving()
    eventually(
        lambda: follower.health()["leader_http"] == nimbus.url,
        what="the follower's view of the leader",
    )
    with httpx.Client(base_url=follower.url, timeout=20, trust_env=False) as http:
        for method, path in (
            ("POST", "/v1/uploads"),
            ("PUT", "/v1/blobs/k"),
            ("POST", "/api/v1/topology/wc/kill/0"),
            ("POST", "/v1/submit"),
        ):
            answer = http.request(method, path, json={"name": "wc"})
            assert answer.status_code == 503 and nimbus.url in answer.text, answer.text
        assert http.get("/api/v1/cluster/summary").status_code == 200
        rows = http.get("/api/v1/nimbus/summary").json()["nimbuses"]
        assert sorted(row["status"] for row in rows) == ["Leader", "Not a Leader"]
    # Pushed to the follower before the write is answered, and readable there, in parts too.
    with httpx.Client(base_url=nimbus.url, timeout=20, trust_env=False) as http:
        written = http.put(
            "/v1/blobs/copied", content=b"0123456789", headers={"X-Storm-Min-Replication": "2"}
        )
        assert written.status_code == 201 and written.json()["copies"] == 2
        part = httpx.get(
            f"{follower.url}/v1/blobs/copied",
            headers={"Range": "bytes=3-5"},
            trust_env=False,
            timeout=20,
        )
        assert (part.status_code, part.content) == (206, b"345")
        epoch = nimbus.health()["epoch"]
        forged = httpx.put(
            f"{follower.url}/v1/replicas/copied",
            content=b"forged",
            headers={
                "X-Storm-Epoch": str(epoch - 1),
                "X-Content-SHA256": hashlib.sha256(b"forged").hexdigest(),
            },
            trust_env=False,
            timeout=20,
        )
        assert forged.status_code == 409
        assert follower.get("/v1/blobs/copied").content == b"0123456789"
