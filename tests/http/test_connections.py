"""One peer keeps nobody else out: not with silence, and not with requests that never end."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from storm_dagster.http.server import HttpService


async def _echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    routes = [Route("/", lambda request: PlainTextResponse("ok")), Route("/echo", _echo, methods=["POST"])]
    service = HttpService(Starlette(routes=routes), listener)
    service.start()
    yield listener.getsockname()[1]
    service.stop()


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n", b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\nx"]
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
