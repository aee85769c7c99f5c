"""Each successful change is one line of the audit log; what others uploaded is not read by its
hash.
"""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from storm_dagster.http.authentication import Authentication, may_do_all
from storm_dagster.model.errors import KeyNotFound
from storm_dagster.nimbus.http.blob_routes import BlobRoutes
from storm_dagster.nimbus.thrift.idl import load_idl
from storm_dagster.nimbus.thrift.service import Dispatcher, ThriftPeer
from storm_dagster.security.settings import Security
from storm_rigs.protocols.tokens import TokensOfTest, bearer

SECRET = "a-secret-planted-for-tests-4711"
TOKENS = TokensOfTest(SECRET)


async def _answer(request: Request) -> Response:
    return PlainTextResponse(
        str(may_do_all(request.scope, {})), 404 if "missing" in request.url.path else 200
    )


def client_of(security: Security, conf: dict[str, Any] | None = None) -> httpx.AsyncClient:
    app = Starlette(
        routes=[Route("/{path:path}", _answer, methods=["GET", "POST", "PUT", "DELETE"])]
    )
    guarded = Authentication(app, security, conf or {}, lambda name: None, tokens=TOKENS)
    transport = httpx.ASGITransport(app=guarded, client=("10.1.2.3", 5))
    return httpx.AsyncClient(transport=transport, base_url="http://nimbus")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "storm_dagster.audit")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name == "storm_dagster.audit"
    ]


@pytest.mark.anyio
async def test_a_change_over_http_is_one_line(lines: Any) -> None:
    operate = bearer(TOKENS.make("operate"))
    async with client_of(Security(SECRET)) as client:
        await client.get("/v1/topologies/wc", headers=operate)
        await client.post("/v1/topologies/missing/kill", headers=operate)
        assert lines() == []
        answer = await client.post("/v1/topologies/wc/kill?secret=x", headers=operate)
        assert answer.status_code == 200 and answer.text == "False"
        (line,) = lines()
        assert line.startswith("user 'token ") and line.endswith(
            "' at 10.1.2.3: POST '/v1/topologies/wc/kill': 200"
        )


@pytest.mark.anyio
async def test_a_change_with_the_token_of_a_user_names_both(lines: Any) -> None:
    boss = bearer(TOKENS.make("admin", "boss"))
    security = Security(SECRET)
    async with client_of(security, {"nimbus.admins": ["boss"]}) as client:
        assert (await client.post("/v1/blacklist", headers=boss)).status_code == 200
    (line,) = lines()
    assert re.fullmatch(
        r"user 'boss' \(token [0-9a-f]{16}\) at 10\.1\.2\.3: POST '/v1/blacklist': 200", line
    )


@pytest.mark.anyio
async def test_a_change_in_a_cluster_that_asks_nobody_is_one_line(lines: Any) -> None:
    async with client_of(Security()) as client:
        assert (await client.delete("/v1/blobs/x")).text == "True"
        await client.post("/v1/topologies/wc/events")
    assert lines() == ["anyone at 10.1.2.3: DELETE '/v1/blobs/x': 200"]


def test_a_change_over_thrift_is_one_line(lines: Any) -> None:
    from thriftpy2.protocol import TBinaryProtocol
    from thriftpy2.thrift import TMessageType
    from thriftpy2.transport import TMemoryBuffer

    service = load_idl().Nimbus

    def call(method: str, **arguments: Any) -> None:
        buffer = TMemoryBuffer()
        protocol = TBinaryProtocol(buffer)
        protocol.write_message_begin(method, TMessageType.CALL, 1)
        getattr(service, f"{method}_args")(**arguments).write(protocol)
        protocol.write_message_end()
        dispatcher.answer(buffer.getvalue(), ThriftPeer("10.1.2.3", "alice"))

    handler: Any = SimpleNamespace(kill_topology=lambda name: None, nimbus_conf=lambda: "{}")
    dispatcher = Dispatcher(handler)
    call("getNimbusConf")
    call("killTopology", name="wc")
    assert lines() == ["user 'alice' at 10.1.2.3: killTopology 'wc': done"]


@pytest.mark.anyio
async def test_a_limited_caller_copies_no_archive_by_its_hash() -> None:
    copied: list[str] = []
    blobs = SimpleNamespace(
        put_content=lambda key, sha256, terms: copied.append(key) or ("meta", 1)
    )
    conf: Any = SimpleNamespace(values={"nimbus.admins": ["ann"]})
    endpoints = BlobRoutes.__new__(BlobRoutes)
    endpoints._nimbus = SimpleNamespace(blobs=blobs, conf=conf)  # type: ignore[assignment]

    async def put(name: str | None) -> None:
        from storm_dagster.core.authorization import Caller

        state = {} if name is None else {"storm.caller": Caller(name)}
        scope = {
            "type": "http",
            "query_string": b"sha256=" + b"a" * 64,
            "headers": [],
            "state": state,
        }
        await endpoints._store(Request(scope), f"of {name}", SimpleNamespace(), 1)  # type: ignore[arg-type]

    await put(None)
    await put("ann")
    with pytest.raises(KeyNotFound, match="send its bytes"):
        await put("mallory")
    assert copied == ["of None", "of ann"]
