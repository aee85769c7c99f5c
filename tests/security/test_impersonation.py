"""No caller acts for another user: Storm's ``doAsUser`` is refused, and each refusal is audited."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from thriftpy2.protocol import TBinaryProtocolFactory
from thriftpy2.rpc import make_client
from thriftpy2.transport import TFramedTransportFactory

from storm_dagster.http.authentication import Authentication
from storm_dagster.model.access_tokens import TOKEN_SCOPES
from storm_dagster.nimbus.thrift.idl import load_idl
from storm_dagster.security.settings import Security
from storm_dagster.testing.waiting import eventually
from storm_rigs.protocols.tokens import TokensOfTest
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread

SECRET = "a-secret-planted-for-tests-4711"
TOKENS = TokensOfTest(SECRET)
REQUESTS: tuple[dict[str, Any], ...] = (
    {"headers": {"doAsUser": "ann"}},
    {"headers": {"DOASUSER": "ann"}},
    {"params": {"doAsUser": "ann"}},
    {"params": {"doAsUser": "x;touch p"}},
    {"params": [("n", str(number)) for number in range(200)] + [("doAsUser", "ann")]},
)
"""Each way to ask for it."""
ALLOW_ALL = {"nimbus.impersonation.acl": {"gateway": {"hosts": ["*"], "groups": ["*"]}}}
"""Conf of an earlier release, in which ``gateway`` acted for all users."""


@pytest.fixture
def audited(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Lines of the audit log."""
    caplog.set_level(logging.INFO, "storm_dagster.audit")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name == "storm_dagster.audit"
    ]


async def _answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("done")


def guarded(security: Security) -> httpx.AsyncClient:
    """A client of a service behind the middleware of all HTTP ports."""
    service = Starlette(routes=[Route("/{path:path}", _answer, methods=["GET", "POST"])])
    app = Authentication(service, security, ALLOW_ALL, lambda name: None, tokens=TOKENS)
    transport = httpx.ASGITransport(app=app, client=("10.1.2.3", 5))
    return httpx.AsyncClient(transport=transport, base_url="http://nimbus")


@pytest.mark.anyio
@pytest.mark.parametrize("request_parts", REQUESTS, ids=lambda request: str(request)[:40])
async def test_no_token_and_no_unknown_client_acts_for_a_user(
    request_parts: dict[str, Any], audited: Callable[[], list[str]]
) -> None:
    async with guarded(Security(SECRET)) as client:
        for scope in TOKEN_SCOPES:
            login = {"Authorization": f"Bearer {TOKENS.make(scope)}"}
            headers = {**login, **request_parts.get("headers", {})}
            answer = await client.get(
                "/metrics", headers=headers, params=request_parts.get("params")
            )
            assert answer.status_code == 403, scope
            assert "doAsUser is refused" in answer.text
        assert (await client.get("/metrics", **request_parts)).status_code == 401
        assert (await client.get("/healthz", **request_parts)).status_code == 403
    assert len(audited()) == len(TOKEN_SCOPES) + 2
    assert all(line.startswith("refused GET") and "10.1.2.3" in line for line in audited())


@pytest.mark.anyio
@pytest.mark.parametrize("request_parts", REQUESTS, ids=lambda request: str(request)[:40])
async def test_no_client_of_an_open_cluster_acts_for_a_user(
    request_parts: dict[str, Any], audited: Callable[[], list[str]]
) -> None:
    async with guarded(Security()) as client:
        answer = await client.post("/v1/topologies/wc/kill", **request_parts)
        assert answer.status_code == 403 and "doAsUser is refused" in answer.text
    (line,) = audited()
    assert line.startswith("refused POST '/v1/topologies/wc/kill' of 10.1.2.3: doAsUser is refused")


@pytest.mark.anyio
async def test_an_empty_name_asks_for_no_user() -> None:
    async with guarded(Security()) as client:
        assert (await client.get("/v1/cluster?doAsUser=")).text == "done"


@pytest.mark.zookeeper
def test_no_user_and_no_daemon_acts_for_a_user(
    stage: Stage,
    certificate: Callable[..., dict[str, str]],
    audited: Callable[[], list[str]],
) -> None:
    users = {"nimbus.admins": ["daemon", "boss"], "nimbus.users": ["ann"]}
    keys = {**certificate(), **users, **ALLOW_ALL, "storm.secret": SECRET}
    nimbus = stage.nimbus(conf=keys).await_leading()
    signed = Security.of(nimbus.conf)
    callers = {
        name: Security.of(nimbus.conf.with_values(certificate(name), "test"))
        for name in ("boss", "ann", "gateway", "daemon")
    }
    for user, security in {"'storm'": signed, **callers}.items():
        for name in ("ann", "boss", "gateway", "daemon"):
            for place in ("headers", "params"):
                request: dict[str, Any] = {place: {"doAsUser": name}}
                with nimbus.client(security) as client:
                    answer = client.get("/v1/topologies", **request)
                assert answer.status_code == 403, (user, name, place)
                assert "doAsUser is refused" in answer.text and repr(name) in answer.text
    refusals = [line for line in audited() if "doAsUser is refused" in line]
    assert len(refusals) == 5 * 4 * 2
    assert not [line for line in audited() if "acts for" in line]


@contextmanager
def calling(nimbus: NimbusThread, keys: dict[str, str]) -> Iterator[Any]:
    client = make_client(
        load_idl().Nimbus,
        host="127.0.0.1",
        port=nimbus.ports["thrift"],
        proto_factory=TBinaryProtocolFactory(),
        trans_factory=TFramedTransportFactory(),
        timeout=20_000,
        ssl_context=Security.of(keys).client_context(),
    )
    try:
        yield client
    finally:
        client.close()


@pytest.mark.zookeeper
def test_thrift_knows_no_principal_but_that_of_the_certificate(
    stage: Stage,
    certificate: Callable[..., dict[str, str]],
    audited: Callable[[], list[str]],
) -> None:
    """SASL, in which a client of Storm names the user to act for, is refused before the name."""
    daemon = certificate("daemon")
    users = {"nimbus.admins": ["daemon"], "nimbus.users": ["ann"]}
    nimbus = stage.nimbus(conf={**daemon, **users, **ALLOW_ALL}).await_leading()
    port = nimbus.ports["thrift"]
    for user in ("gateway", "ann", "daemon"):
        context = Security.of(certificate(user)).client_context()
        assert context is not None
        with (
            socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as link,
        ):
            mechanism = b"PLAIN"
            link.sendall(b"\x01" + len(mechanism).to_bytes(4, "big") + mechanism)
            try:
                assert link.recv(4096) == b""
            except ConnectionError:
                pass
        handshakes = [line for line in audited() if "refused a SASL handshake of" in line]
        assert f"of {user}: " in handshakes[-1] and "doAsUser" in handshakes[-1]
    refusal = load_idl().AuthorizationException
    with (
        calling(nimbus, certificate("gateway")) as gateway,
        pytest.raises(refusal, match="gateway"),
    ):
        gateway.getClusterInfo()
    assert any("getClusterInfo of gateway" in line for line in audited())


@pytest.mark.zookeeper
def test_sasl_is_refused_in_an_open_cluster_too(
    stage: Stage, audited: Callable[[], list[str]]
) -> None:
    nimbus = stage.nimbus(nimbus__thrift__max_buffer_size=64 << 20).await_leading()
    with socket.create_connection(("127.0.0.1", nimbus.ports["thrift"]), timeout=20) as link:
        link.sendall(b"\x01\0\0\0\x05PLAIN")
        try:
            assert link.recv(4096) == b""
        except ConnectionError:
            pass
    eventually(
        lambda: any("refused a SASL handshake of 127.0.0.1" in line for line in audited()),
        what="the line of the audit log",
    )
