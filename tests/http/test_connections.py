"""One peer keeps nobody else out: not with silence, and not with requests that never end."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.http.responses import StreamResponse
from storm_dagster.http.server import MAX_HEAD_BYTES, HttpService, listen
from storm_dagster.supervisor.log_service import LogService
from storm_dagster.testing.waiting import eventually


def test_the_body_of_an_answer_does_not_wait_for_the_client() -> None:
    """Nagle's algorithm, together with delayed acknowledgements, would add 40 ms to every answer
    with a body.
    """
    with (
        listen("127.0.0.1", 0, "test") as listener,
        socket.create_connection(listener.getsockname()),
    ):
        with listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def _echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    routes = [
        Route("/", lambda request: PlainTextResponse("ok")),
        Route("/echo", _echo, methods=["POST"]),
    ]
    service = HttpService(Starlette(routes=routes), listener)
    service.start()
    yield listener.getsockname()[1]
    service.stop()


def head_of(size: int) -> bytes:
    """A request whose head has so many bytes."""
    start = b"GET /?q HTTP/1.1\r\nhost: localhost\r\nx: "
    return start + b"a" * (size - len(start) - 4) + b"\r\n\r\n"


def answer_to(port: int, sent: bytes) -> bytes:
    """First bytes of the answer; empty if the connection is closed without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as link:
        try:
            link.sendall(sent)
            return link.recv(12)
        except ConnectionError:
            return b""


def test_a_head_of_64_kib_is_served_and_a_larger_one_is_not(port: int, tmp_path: Path) -> None:
    """At the service that nimbus, supervisors and Dagster's web page are served by."""
    assert MAX_HEAD_BYTES == 64 * 1024
    conf = load_cluster_conf(None, {"supervisor.http.port": 0})
    supervisor = LogService(conf, tmp_path, "s1")
    supervisor.start(lambda: ())
    try:
        for each in (port, supervisor.port):
            served = answer_to(each, head_of(MAX_HEAD_BYTES))
            assert served.startswith(b"HTTP/1.1 ") and served != b"HTTP/1.1 431"
            for size in (MAX_HEAD_BYTES + 1, 100_000, 200_000):
                assert answer_to(each, head_of(size)) in (b"HTTP/1.1 431", b""), size
            assert answer_to(each, head_of(1_000_000)[:-4]) == b"", "it is never complete"
    finally:
        supervisor.stop()


def test_a_body_and_further_requests_are_no_part_of_a_head(port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        for _ in range(3):
            assert client.post("/echo", content=b"x" * 300_000).text == "300000"
    pipelined = b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 30_000 + b"\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as link:
        link.sendall(3 * pipelined)
        received = b""
        while received.count(b"\r\n\r\nok") < 3:
            chunk = link.recv(65536)
            assert chunk, received
            received += chunk


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n", b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\nx"],
)
def test_others_are_answered_while_one_holds_all_connections(
    port: int, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    held: list[socket.socket] = []
    try:
        for number in range(700):
            connection = socket.create_connection(("127.0.0.1", port), timeout=10)
            held.append(connection)
            if sent:
                try:
                    connection.sendall(sent)
                except OSError:
                    continue
            if number > 500 and number % 20 == 0:
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                    assert client.get("/").text == "ok"
                    assert client.post("/echo", content=b"1234").text == "4"
    finally:
        for connection in held:
            connection.close()
    # Neither fills it the log: who is dropped in the middle of a request is no error of ours.
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_a_peer_that_sends_requests_without_end_is_left(port: int) -> None:
    """A hundred thousand requests behind the first one would be kept while that is answered."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as greedy:
        greedy.settimeout(20)
        with pytest.raises(ConnectionError):
            for _ in range(200):
                greedy.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 1_000)
    assert httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).text == "ok"


def test_a_file_whose_reader_has_left_is_closed(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(4 << 30)

    def read(request: Request) -> StreamResponse:
        return StreamResponse(
            large.open("rb"),
            4 << 30,
            request=request,
            chunk=1 << 16,
            idle_secs=30,
            headers={"Content-Type": "x/y"},
        )

    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    service = HttpService(Starlette(routes=[Route("/", read)]), listener)
    service.start()
    try:
        for _ in range(20):
            with socket.create_connection(listener.getsockname(), timeout=20) as reader:
                reader.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                assert reader.recv(100)

        def closed() -> bool:
            return str(large) not in {file.path for file in psutil.Process().open_files()}

        eventually(closed, 20, "the end of all reads")
    finally:
        service.stop()


def test_connections_that_begin_no_handshake_count(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(tls)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    service = HttpService(
        Starlette(routes=[Route("/", lambda request: PlainTextResponse("ok"))]), listener, tls=tls
    )
    service.start()
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
    held: list[socket.socket] = []
    try:
        for number in range(500):
            held.append(socket.create_connection(listener.getsockname(), timeout=10))
            if number % 50 == 0:
                assert httpx.get(url, verify=trusted, timeout=30, trust_env=False).text == "ok"

        def gone() -> int:
            return sum(select.select([one], [], [], 0)[0] == [one] for one in held)

        eventually(lambda: gone() >= 500 - 192, 20, "the end of handshakes that were not begun")
    finally:
        for one in held:
            one.close()
        service.stop()
