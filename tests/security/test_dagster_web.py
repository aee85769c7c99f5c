"""Dagster's web application as an attacker meets it: pages of other sites, programs without a
secret, other users.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from storm_dagster.model.access_tokens import TokenScope
from storm_dagster.model.errors import InvalidRequest, Misconfigured, Unavailable
from storm_dagster.nimbus.dagster.transport import DagsterAccess, DagsterTransport
from storm_dagster.security.peers import is_own_peer, peer_user
from storm_dagster.security.settings import Security
from storm_dagster.security.signing import signer
from storm_dagster.web import service
from storm_rigs.protocols.fuzz_messages import web_messages
from storm_rigs.protocols.fuzzing import DEADLINE, MOST_GROWTH_MIB, SECS, Listener, fuzz, tcp
from storm_rigs.protocols.tokens import TokensOfTest
from storm_rigs.stage.dagster_webserver import dagster_web

SECRET = "0123456789abcdef" * 2
TOKENS = TokensOfTest(SECRET)
SITE = "http://127.0.0.1:3000"
MUTATION = 'mutation { addDynamicPartition(partitionsDefName: "p", partitionKey: "k", repositorySelector: {}) { __typename } }'
JSON = {"Content-Type": "application/json"}


class Reached:
    """Stands in for Dagster; remembers what came through."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(f"{scope['type']} {scope['path']}")
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def reached() -> Reached:
    return Reached()


def ask(
    reached: Reached, method: str, path: str, conf: dict[str, Any] | None = None, **how: Any
) -> httpx.Response:
    async def one() -> httpx.Response:
        app: Any = service.guard_application(reached, conf or {}, "127.0.0.1", TOKENS)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=SITE) as client:
            return await client.request(method, path, **how)

    return asyncio.run(one())


def shake(reached: Reached, conf: dict[str, Any] | None = None, **headers: str) -> str:
    """The type of the first message that a WebSocket's handshake gets."""
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    raw = [
        (name.lower().encode(), value.encode())
        for name, value in {"Host": "127.0.0.1:3000", **headers}.items()
    ]
    scope = {"type": "websocket", "scheme": "ws", "path": "/graphql", "raw_path": b"/graphql"}
    scope |= {"query_string": b"", "headers": raw, "client": ("127.0.0.1", 1)}
    app: Any = service.guard_application(reached, conf or {}, "127.0.0.1", TOKENS)
    asyncio.run(app(scope, receive, send))
    return sent[0]


CROSS = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
ATTACKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "image": (
        "GET",
        "/graphql",
        {"params": {"query": MUTATION}, "headers": {**CROSS, "Accept": "image/*"}},
    ),
    "image of an old browser": ("GET", "/graphql", {"params": {"query": MUTATION}}),
    "slash": ("GET", "/graphql/", {"params": {"query": MUTATION}}),
    "encoded path": ("GET", "/%67raphql", {"params": {"query": MUTATION}}),
    "head": ("HEAD", "/graphql", {"params": {"query": MUTATION}}),
    "link": (
        "GET",
        "/graphql",
        {
            "params": {"query": MUTATION},
            "headers": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
        },
    ),
    "form": ("POST", "/graphql", {"data": {"query": MUTATION}}),
    "text": (
        "POST",
        "/graphql",
        {"content": json.dumps({"query": MUTATION}), "headers": {"Content-Type": "text/plain"}},
    ),
    "smuggled type": (
        "POST",
        "/graphql",
        {
            "content": json.dumps({"query": MUTATION}),
            "headers": {"Content-Type": "text/plain; application/json"},
        },
    ),
    "address of a post": (
        "POST",
        "/graphql",
        {
            "content": b"",
            "params": {"query": MUTATION},
            "headers": {"Content-Type": "Application/JSON"},
        },
    ),
    "no type": ("POST", "/graphql", {"content": b"", "params": {"query": MUTATION}}),
    "report": ("POST", "/report_asset_materialization/a", {"data": {"asset_key": "a"}}),
    "origin": (
        "POST",
        "/graphql",
        {"json": {"query": MUTATION}, "headers": {"Origin": "https://evil.example"}},
    ),
    "null origin": (
        "POST",
        "/graphql",
        {"json": {"query": MUTATION}, "headers": {"Origin": "null"}},
    ),
    "other port": (
        "POST",
        "/graphql",
        {"json": {"query": MUTATION}, "headers": {"Origin": "http://127.0.0.1:8000"}},
    ),
    "rebinding": (
        "POST",
        "/graphql",
        {
            "json": {"query": MUTATION},
            "headers": {"Host": "evil.example:3000", "Origin": "http://evil.example:3000"},
        },
    ),
    "fetch": ("POST", "/graphql", {"json": {"query": MUTATION}, "headers": CROSS}),
    "same site": (
        "POST",
        "/graphql",
        {"json": {"query": MUTATION}, "headers": {"Sec-Fetch-Site": "same-site"}},
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_pages_of_other_sites_change_nothing(reached: Reached, attack: str) -> None:
    method, path, how = ATTACKS[attack]
    assert ask(reached, method, path, **how).status_code == 400
    assert reached.seen == []


def test_the_page_itself_and_programs_are_served(reached: Reached) -> None:
    own = {"Origin": SITE, "Sec-Fetch-Site": "same-origin"}
    assert (
        ask(reached, "POST", "/graphql", json={"query": "{version}"}, headers=own).status_code
        == 200
    )
    # As Dagster's page asks.
    assert (
        ask(reached, "POST", "/graphql?op=Version", json={"query": "{version}"}).status_code == 200
    )
    page = ask(
        reached,
        "GET",
        "/runs?q=x",
        headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    )
    assert page.status_code == 200
    assert page.headers["x-frame-options"] == "DENY"
    # Its own policy for scripts decides.
    assert "content-security-policy" not in page.headers
    assert len(reached.seen) == 3


def test_only_our_own_page_opens_a_websocket(reached: Reached) -> None:
    refused: tuple[dict[str, Any], ...] = (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:8000"},
        {"Host": "evil.example:3000", "Origin": "http://evil.example:3000"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "websocket"},
    )
    for headers in refused:
        assert shake(reached, **headers) == "websocket.close"
    assert reached.seen == []
    assert shake(reached, Origin=SITE) == "websocket.accept"
    assert shake(reached) == "websocket.accept"


def test_with_a_secret_only_administrators_are_served(reached: Reached) -> None:
    conf = {"storm.secret": SECRET}
    nobody = ask(reached, "POST", "/graphql", conf, json={"query": MUTATION})
    # A browser asks for a password then.
    assert nobody.status_code == 401 and nobody.headers["www-authenticate"].startswith("Basic ")
    assert shake(reached, conf) == "websocket.close"
    tokens: tuple[TokenScope, ...] = ("metrics", "read", "operate")
    for scope in tokens:
        shown = {"Authorization": f"Bearer {TOKENS.make(scope)}"}
        assert (
            ask(
                reached, "POST", "/graphql", conf, json={"query": MUTATION}, headers=shown
            ).status_code
            == 403
        )
        assert shake(reached, conf, **shown) == "websocket.close"
        # What nimbus serves to these, or to everybody, is something else here.
        for path in ("/", "/hosts", "/topologies/x", "/metrics"):
            assert ask(reached, "GET", path, conf, headers=shown).status_code == 403
    for method, path in (
        ("GET", "/healthz"),
        ("GET", "/static/pages.css"),
        ("POST", "/v1/topologies/x/events"),
    ):
        assert ask(reached, method, path, conf, json={}).status_code == 401
    assert reached.seen == []
    token = TOKENS.make("admin")
    assert ask(reached, "GET", "/", conf, auth=("me", token)).status_code == 200
    login = {"Authorization": "Basic " + base64.b64encode(f"me:{token}".encode()).decode()}
    assert shake(reached, conf, Origin=SITE, **login) == "websocket.accept"
    assert shake(reached, conf, Origin="https://evil.example", **login) == "websocket.close"
    signed: Any = signer(SECRET, tls=False)
    assert (
        ask(reached, "POST", "/graphql", conf, json={"query": MUTATION}, auth=signed).status_code
        == 200
    )


def test_beyond_loopback_it_needs_a_secret(tmp_path: Path) -> None:
    conf = {"storm.local.hostname": "localhost", "storm.bind.external": True}
    with pytest.raises(InvalidRequest, match=r"Dagster's web application .* storm\.secret\.file"):
        service.serve(conf, [tmp_path / "workspace.yaml"], "0.0.0.0", 1, threading.Event())


@pytest.mark.parametrize(
    "module",
    [
        "dagster_webserver.webserver",
        "dagster._core.workspace.load_target",
        "dagster._core.workspace.context",
    ],
)
def test_another_dagster_has_no_ui_rather_than_an_open_one(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "listen", lambda *_: pytest.fail("a server was started"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        Unavailable,
        match=r"The UI does not start, because the stock dagster-webserver accepts every client",
    ):
        service.serve(
            {"storm.local.hostname": "localhost"}, [tmp_path / "w.yaml"], None, 1, threading.Event()
        )


def test_a_web_application_of_another_shape_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    (tmp_path / "w.yaml").write_text("load_from: []\n")
    stock: Any = importlib.import_module("dagster_webserver.webserver")
    for broken in (lambda *_: None, type("Other", (), {"__init__": lambda self, *_, **__: None})):
        monkeypatch.setattr(stock, "DagsterWebserver", broken)
        with (
            pytest.raises(Unavailable, match="does not fit"),
            service.dagster_application([tmp_path / "w.yaml"]),
        ):
            pytest.fail("it was served")


# -- the real one ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """URL and pid of Dagster's own application without a code location, and without a secret."""
    with dagster_web(tmp_path_factory.mktemp("open"), {}) as process:
        yield process


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The same with a secret."""
    folder = tmp_path_factory.mktemp("closed")
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o600)
    with dagster_web(folder, {"storm.secret.file": str(folder / "secret")}) as process:
        yield process


@pytest.fixture
def site(served: tuple[str, int]) -> str:
    return served[0]


@pytest.fixture
def closed_site(closed: tuple[str, int]) -> str:
    return closed[0]


@pytest.mark.dagster
def test_dagster_itself_is_behind_the_guard(site: str) -> None:
    with httpx.Client(base_url=site, timeout=60, trust_env=False) as client:
        assert client.post("/graphql", json={"query": "{version}"}).json()["data"]["version"]
        page = client.get("/")
        assert page.status_code == 200 and "nonce-" in page.headers["content-security-policy"]
        for method, path, how in ATTACKS.values():
            assert client.request(method, path, **how).status_code == 400


@pytest.mark.dagster
@pytest.mark.long
def test_subscriptions_work_for_our_own_page_alone(site: str, closed_site: str) -> None:
    address, kind = site.replace("http", "ws") + "/graphql", ["graphql-ws"]
    with connect(address, origin=site, subprotocols=kind) as link:  # type: ignore[arg-type]
        link.send(json.dumps({"type": "connection_init"}))
        assert json.loads(link.recv(10)) == {"type": "connection_ack"}
        # Longer than a silent connection of HTTP lives.
        with pytest.raises(TimeoutError):
            link.recv(16)
        link.send(json.dumps({"type": "connection_init"}))
        assert json.loads(link.recv(10)) == {"type": "connection_ack"}
    for place, origin in (
        (address, "https://evil.example"),
        (closed_site.replace("http", "ws") + "/graphql", closed_site),
    ):
        with (
            pytest.raises(InvalidStatus) as refused,
            connect(place, origin=origin, subprotocols=kind),  # type: ignore[arg-type]
        ):
            pass
        assert refused.value.response.status_code == 403


@pytest.mark.dagster
def test_nimbus_is_let_in_by_its_signature(closed_site: str) -> None:
    access = DagsterAccess(f"{closed_site}/graphql")
    query = {"query": "{ runsOrError(limit: 1) { __typename } }"}
    for security, refused in (
        (Security(SECRET), False),
        (Security(), True),
        (Security("f" * 32), True),
    ):
        transport = DagsterTransport(lambda: access, timeout=20.0, security=security)
        try:
            if refused:
                with pytest.raises(Misconfigured, match="401"):
                    transport.post(access.url, query)
            else:
                assert (
                    transport.post(access.url, query)["data"]["runsOrError"]["__typename"] == "Runs"
                )
        finally:
            transport.close()


@pytest.mark.dagster
@pytest.mark.fuzz
@pytest.mark.timeout(2 * SECS + 300)
def test_garbage_keeps_nobody_out(served: tuple[str, int], closed: tuple[str, int]) -> None:
    """As ``test_fuzzed_listeners.py`` does with the other listeners."""
    # Only who is let in can make it hold a body.
    for (url, pid), security, largest in (
        (closed, Security(SECRET), 8 << 20),
        (served, Security(), 100_000),
    ):
        with httpx.Client(base_url=url, timeout=DEADLINE, **security.client_options()) as client:

            def ask(client: httpx.Client = client) -> None:
                answer = client.post(
                    "/graphql", json={"query": "{ version }"}, headers={"Connection": "close"}
                )
                assert answer.status_code == 200 and answer.json()["data"]["version"], answer.text[
                    :500
                ]

            connect = tcp(int(url.rpartition(":")[2]))
            fuzz(Listener("Dagster's web application", pid, connect, web_messages(largest), ask))


@pytest.mark.dagster
def test_a_body_is_bounded(served: tuple[str, int]) -> None:
    url, pid = served
    process, port = psutil.Process(pid), int(url.rpartition(":")[2])
    idle = process.memory_info().rss
    head = b"POST /graphql HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for length in (b"Content-Length: 99999999999", b"Transfer-Encoding: chunked\r\n\r\n10000000"):
        with tcp(port)() as link:
            answer = b""
            link.sendall(head + length + b"\r\n\r\n")
            with suppress(TimeoutError):
                answer = link.recv(4096)
            with suppress(OSError):
                for _ in range(256):
                    link.sendall(b"a" * (1 << 20))
        assert process.memory_info().rss - idle < MOST_GROWTH_MIB << 20
        assert b" 400 " in answer.partition(b"\r\n")[0], answer


@pytest.mark.dagster
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_of_the_machine_gets_nothing(site: str) -> None:
    program = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); link = socket.create_connection(('127.0.0.1', "
        f"{site.rpartition(':')[2]}));"
        "link.sendall(b'GET /server_info HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n'); print(link.recv(100))"
    )
    for prefix, answered in (("", False), ("os.setgid = os.setuid = lambda _: None; ", True)):
        told = program.replace("import os, socket, sys; ", f"import os, socket, sys; {prefix}")
        done = subprocess.run(
            [sys.executable, "-c", told], capture_output=True, text=True, check=False
        )
        assert ("200 OK" in done.stdout) is answered, done


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_the_user_of_a_peer_is_known_until_it_closes(
    family: socket.AddressFamily, host: str
) -> None:
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with listener:
        client = socket.create_connection(listener.getsockname()[:2])
        accepted, peer = listener.accept()
        with accepted:
            own = accepted.getsockname()
            assert peer_user(own, peer) == os.geteuid() and is_own_peer(own, peer)
            client.shutdown(socket.SHUT_WR)
            assert peer_user(own, peer) == os.geteuid()
            # Nobody's any more: the table says 0 for it, which is root.
            client.close()
            assert peer_user(own, peer) is None and not is_own_peer(own, peer)
    assert not is_own_peer(None, None)


def test_an_ipv6_socket_for_ipv4_is_known_too() -> None:
    try:
        client = socket.socket(socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with client, socket.create_server(("127.0.0.1", 0)) as listener:
        try:
            client.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        except OSError:
            pytest.skip("this machine has no IPv6")
        accepted, peer = listener.accept()
        with accepted:
            assert peer_user(accepted.getsockname(), peer) == os.geteuid()
