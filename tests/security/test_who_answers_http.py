"""HTTP clients of the product send nothing to a server of another user, whenever it comes."""

from __future__ import annotations

import ast
import os
import pwd
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import storm_dagster
from storm_dagster.cli.dev import readiness
from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.leader import is_nimbus
from storm_dagster.model.conf import CONF_KEYS, default_conf
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.nimbus.dagster.transport import DagsterAccess, DagsterTransport
from storm_dagster.security import server_identity
from storm_dagster.security.checked_http import UntrustedConnection
from storm_dagster.security.object_stores import check_object_store, plain_endpoint
from storm_dagster.security.peers import can_identify_peers
from storm_dagster.security.server_identity import TrustedServers, UntrustedServer
from storm_dagster.security.settings import Security, public_authorities
from storm_dagster.supervisor.localizer import Localizer
from storm_dagster.testing.waiting import patience

SECRET = "a-secret-planted-for-tests-4711"
CODE = b"code and conf of a topology"
another_user = pytest.mark.skipif(
    os.getuid() != 0 or not can_identify_peers(), reason="only root becomes another user"
)
# It answers as a leading nimbus and as Dagster would, and prints what it was sent.
LISTEN = """
import os, socket, sys, threading
os.setuid(int(sys.argv[1]))
received = []
server = socket.create_server(("127.0.0.1", int(sys.argv[2])))
body = b'{"leader": true, "data": {"x": {}}, "name": "changed"}'
head = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n"
def talk(link):
    while data := link.recv(65536):
        received.append(data)
        link.sendall(head % len(body) + body)
def serve():
    while True:
        link, _ = server.accept()
        threading.Thread(target=talk, args=(link,), daemon=True).start()
threading.Thread(target=serve, daemon=True).start()
print(server.getsockname()[1], flush=True)
sys.stdin.read()
sys.stdout.write(b"".join(received).hex())
sys.stdout.flush()
os._exit(0)
"""


class Intruder:
    """A process of another user that listens on loopback and keeps what it is sent."""

    def __init__(self, port: int = 0) -> None:
        user = str(pwd.getpwnam("nobody").pw_uid)
        self._child = subprocess.Popen(
            [sys.executable, "-Sc", LISTEN, user, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        self.port = int(self._child.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def received(self) -> bytes:
        """All that it was sent; it ends."""
        if self._child.returncode is not None:
            return b""
        text, _ = self._child.communicate(timeout=patience(20))
        return bytes.fromhex(text)


@pytest.fixture
def intruder() -> Iterator[Callable[..., Intruder]]:
    made: list[Intruder] = []

    def make(*arguments: Any) -> Intruder:
        made.append(Intruder(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.received()


def call_nimbus(url: str, security: Security, _: Path) -> None:
    with NimbusClient([url], security=security, patience=0.0) as nimbus:
        nimbus.post("/v1/topologies/wc/kill", {"wait_secs": 1})


def store_blob(url: str, security: Security, _: Path) -> None:
    with NimbusBlobClient(url, deadline_secs=0.5, security=security) as blobs:
        blobs.put("wc-1-1-stormjar.jar", CODE)


def ask_dagster(url: str, security: Security, _: Path) -> None:
    access = DagsterAccess(f"{url}/graphql", {"Dagster-Cloud-Api-Token": "planted"})
    transport = DagsterTransport(lambda: access, security=security)
    try:
        transport.report("report_asset_materialization/", {"asset_key": "a"})
    finally:
        transport.close()


def ask_dagster_of_the_cluster(url: str, security: Security, _: Path) -> None:
    transport = DagsterTransport(lambda: DagsterAccess(f"{url}/graphql"), security=security)
    try:
        transport.post(f"{url}/graphql", {"query": "{x}"})
    finally:
        transport.close()


def fetch_code(url: str, security: Security, folder: Path) -> None:
    conf = {**default_conf(), "storm.secret": security.secret}
    conf["supervisor.blobstore.download.max_retries"] = 1
    localizer = Localizer(folder, lambda: [url], conf, threading.Event())
    localizer.prepare()
    try:
        localizer.fetch("wc-1-1700000000")
    finally:
        localizer.close()


CALLS = (call_nimbus, store_blob, ask_dagster, ask_dagster_of_the_cluster, fetch_code)


@another_user
@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("call", CALLS)
def test_who_listens_before_the_server_starts_is_sent_nothing(
    call: Callable[..., None],
    secret: str | None,
    tmp_path: Path,
    intruder: Callable[..., Intruder],
) -> None:
    other = intruder()
    with pytest.raises(StormDagsterError) as refused:
        call(other.url, Security(secret), tmp_path)
    message = refused.value.message
    assert isinstance(refused.value, Unavailable)
    assert other.url in message and "nobody" in message and "storm.security.peer.users" in message
    assert other.received() == b""


@another_user
def test_probes_send_nothing_and_believe_nothing(intruder: Callable[..., Intruder]) -> None:
    other = intruder()
    security = Security(SECRET)
    assert readiness.leader_url([other.url], security) is None
    assert readiness.get_json(other.url, security) is None
    assert readiness.supervisor_ids(other.url, security) == set()
    problem = readiness.code_location_error(other.url, security)
    assert problem is not None and "nobody" in problem[1]
    with httpx.Client(**security.client_options()) as http:
        # It counts as one that is there, so that the call that follows says why it is not used.
        assert is_nimbus(http, other.url, 5.0)
    assert other.received() == b""


def serve_once(server: socket.socket) -> None:
    """Answer one request of one connection, and leave the port."""
    link, _ = server.accept()
    server.close()
    with link:
        link.recv(65536)
        link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


@another_user
def test_who_takes_the_port_of_a_server_that_ended_is_sent_nothing(
    intruder: Callable[..., Intruder],
) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    thread = threading.Thread(target=serve_once, args=(server,))
    thread.start()
    with httpx.Client(timeout=patience(20), **Security(SECRET).client_options()) as http:
        url = f"http://127.0.0.1:{port}/v1/x"
        assert http.post(url, json={"first": 1}).json() == {}
        thread.join()
        other = intruder(port)
        with pytest.raises(UntrustedConnection, match="nobody"):
            http.post(url, json={"second": 2})
        assert other.received() == b""


@another_user
def test_the_next_seed_is_tried_and_the_reason_is_shown_at_the_end(
    intruder: Callable[..., Intruder],
) -> None:
    other = intruder()
    server = socket.create_server(("127.0.0.1", 0))

    def lead() -> None:
        for body in (b'{"leader": true}', b'{"name": "ours"}'):
            link, _ = server.accept()
            with link:
                link.recv(65536)
                head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                link.sendall(head % len(body) + body)

    thread = threading.Thread(target=lead)
    thread.start()
    with server, NimbusClient([other.url, f"http://127.0.0.1:{server.getsockname()[1]}"]) as nimbus:
        assert nimbus.get("/v1/cluster") == {"name": "ours"}
        thread.join()
    with (
        NimbusClient([other.url, "http://127.0.0.1:1"], patience=0.0) as nimbus,
        pytest.raises(
            Unavailable, match=r"nobody.*ConnectError.*follow the remedy in that message"
        ),
    ):
        nimbus.get("/v1/cluster")
    assert other.received() == b""


@another_user
def test_a_user_that_the_conf_names_is_trusted(intruder: Callable[..., Intruder]) -> None:
    other = intruder()
    security = Security.of({"storm.security.peer.users": ["nobody"]})
    with httpx.Client(timeout=patience(20), **security.client_options()) as http:
        assert http.get(other.url).json()["name"] == "changed"
    assert other.received().startswith(b"GET / HTTP/1.1")


def test_where_the_kernel_names_no_owner_a_secret_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_identity, "server_user", lambda *_: None)
    monkeypatch.setattr(server_identity, "can_identify_peers", lambda: False)
    server = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    with (
        httpx.Client(**Security().client_options()) as http,
        pytest.raises(UntrustedConnection, match=r"does not say which user.*storm\.secret\.file"),
    ):
        http.get(url)
    link, _ = server.accept()
    with link:
        assert link.recv(100) == b""
    thread = threading.Thread(target=serve_once, args=(server,))
    thread.start()
    with httpx.Client(timeout=patience(20), **Security(SECRET).client_options()) as http:
        assert http.get(url).json() == {}
    thread.join()


def test_a_secret_needs_tls_or_a_named_network_off_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_identity, "is_of_this_machine", lambda *_: False)
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    url = f"http://localhost:{port}"
    refused = Security.of({"storm.secret": SECRET})
    with (
        httpx.Client(**refused.client_options()) as http,
        pytest.raises(
            UntrustedConnection, match=rf"storm\.security\.plaintext\.peers: \['localhost:{port}'\]"
        ),
    ):
        http.get(url)
    link, _ = server.accept()
    with link:
        assert link.recv(100) == b""
    thread = threading.Thread(target=serve_once, args=(server,))
    thread.start()
    named = {"storm.secret": SECRET, "storm.security.plaintext.peers": [f"localhost:{port}"]}
    with httpx.Client(timeout=patience(20), **Security.of(named).client_options()) as http:
        assert http.get(url).json() == {}
    thread.join()


def test_a_topology_names_no_server_that_gets_a_credential_of_the_cluster() -> None:
    """A URL of a topology's conf brings its own credential; any other address is the cluster's."""
    names_a_server = re.compile(r"url|remote|seeds|servers|endpoint|headers|peer|host\b|blobstore")
    of_topologies = {
        key
        for key, conf_key in CONF_KEYS.items()
        if names_a_server.search(key) and conf_key.setter != "cluster"
    }
    assert of_topologies == {"topology.spark.remote"}
    limited = {"storm.security.peer.users", "storm.security.plaintext.peers", "nimbus.seeds"}
    assert all(CONF_KEYS[key].setter == "cluster" for key in limited)


def test_a_worker_sends_its_events_by_the_conf_of_the_cluster_alone() -> None:
    """The conf of its topology may say whom to trust as it likes."""
    tree = ast.parse((PACKAGE / "worker/dataplane/events.py").read_text(encoding="utf-8"))
    read = {
        ast.unparse(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Security.of"
    }
    assert read == {"self.spec.conf"}


def test_a_worker_without_the_secret_knows_that_there_is_one() -> None:
    conf = {"storm.security.daemon.user": 4711, "storm.security.needs.proof": True}
    servers = TrustedServers.of(conf)
    assert servers.needs_proof and 4711 in servers.users
    assert Security.of(conf).servers == servers


@another_user
def test_an_object_store_of_another_user_is_sent_nothing(
    intruder: Callable[..., Intruder], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = intruder()
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", other.url)
    pytest.importorskip("s3fs")
    with pytest.raises(UntrustedServer, match=rf"{other.url}.*nobody"):
        check_object_store("s3://bucket/storm", TrustedServers())
    assert other.received() == b""
    check_object_store("memory://blobs", TrustedServers())
    with pytest.raises(Unavailable, match="does not answer"):
        check_object_store("s3://bucket/storm", TrustedServers())
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:1")
    check_object_store("s3://bucket/storm", TrustedServers())


@pytest.mark.parametrize(
    ("settings", "variables", "endpoint"),
    [
        ({}, {}, None),
        ({"endpoint_url": "http://s3:9000"}, {}, "http://s3:9000"),
        ({"client_kwargs": {"endpoint_url": "HTTP://s3:9000"}}, {}, "HTTP://s3:9000"),
        ({"endpoint_url": "https://s3:9000"}, {}, None),
        ({}, {"AWS_ENDPOINT_URL": "http://any:1"}, "http://any:1"),
        ({}, {"AWS_ENDPOINT_URL": "http://any:1", "AWS_ENDPOINT_URL_S3": "https://s3:1"}, None),
        ({}, {"AWS_ENDPOINT_URL": "https://any:1", "AWS_ENDPOINT_URL_S3": "http://s3:1"}, "http://s3:1"),
        ({}, {"AWS_ENDPOINT_URL": "http://any:1", "AWS_ENDPOINT_URL_S3": ""}, "http://any:1"),
        # The settings of the URL have precedence over the environment.
        ({"endpoint_url": "https://s3:9000"}, {"AWS_ENDPOINT_URL": "http://any:1"}, None),
        ({"endpoint_url": "http://s3:9000"}, {"AWS_ENDPOINT_URL": "https://any:1"}, "http://s3:9000"),
    ],
)  # fmt: skip
def test_the_server_of_an_object_store_that_is_called_in_clear_is_known(
    settings: dict[str, Any],
    variables: dict[str, str],
    endpoint: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("s3fs")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file_system = fsspec.filesystem("s3", skip_instance_cache=True, **settings)
    assert plain_endpoint(file_system) == endpoint
    # The variables are those of S3 alone.
    assert plain_endpoint(fsspec.filesystem("memory")) is None


def test_a_server_of_the_web_proves_its_name_by_a_public_authority() -> None:
    context = public_authorities()
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
    assert context.get_ca_certs()


# -- every client ------------------------------------------------------------------------------

PACKAGE = Path(storm_dagster.__file__).parent
UNCHECKED = {"get", "post", "put", "delete", "head", "request", "stream", "AsyncClient"}
OTHER_CLIENTS = {"urllib.request", "http.client", "requests", "aiohttp", "urllib3"}


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


def unchecked(tree: ast.Module) -> list[int]:
    """Lines that make an HTTP client which does not know whom it sends to."""
    lines: list[int] = []
    for node in ast.walk(tree):
        if imported(node) & OTHER_CLIENTS:
            lines.append(node.lineno)  # type: ignore[attr-defined]
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        function = node.func
        if not isinstance(function.value, ast.Name) or function.value.id != "httpx":
            continue
        options = {keyword.arg for keyword in node.keywords}
        is_client = function.attr == "Client"
        if function.attr in UNCHECKED or (is_client and not options & {"transport", None}):
            lines.append(node.lineno)
    return lines


def test_every_http_client_of_the_product_takes_the_checked_transport() -> None:
    found: dict[str, list[int]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        # Reading the code of all modules takes long.
        if "httpx" not in text and not any(name in text for name in OTHER_CLIENTS):
            continue
        lines = unchecked(ast.parse(text))
        if lines:
            found[str(file.relative_to(PACKAGE))] = lines
    assert not found, "use Security.client_options or Security.transport"
    bad = "import httpx, requests\nhttpx.get('')\nhttpx.Client(timeout=1)\nhttpx.Client(**options)"
    assert unchecked(ast.parse(bad)) == [1, 2, 3]
