"""The embedded ZooKeeper serves its clients while another user holds connections with garbage."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.security.authority import CertificateFolder
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.embedded import server_answers
from storm_dagster.zk.session import ZkSession
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper, client_context

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(600)]

# It holds so many connections, and opens another one for each that is closed. It reports each
# time when all are open. As root it becomes another user.
_PROGRAM = """
import os, resource, selectors, socket, ssl, sys
port, number, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname = False
context.verify_mode = ssl.CERT_NONE
incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
try:
    context.wrap_bio(incoming, outgoing).do_handshake()
except ssl.SSLWantReadError:
    hello = outgoing.read()
first = {
    "silent": b"",
    "frame": b"\\0\\x0f\\xff\\xff",
    "half a hello": hello[: len(hello) // 2],
    "hello": hello,
    "long record": b"\\x16\\x03\\x01\\x40\\0\\x01\\0\\x3f\\xfc" + bytes(1000),
}[kind]
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
selector = selectors.DefaultSelector()
held = 0
waiting = 0
def close(link):
    selector.unregister(link)
    link.close()
while True:
    while held < number and waiting < 200:
        link = socket.socket()
        link.setblocking(False)
        link.connect_ex(("127.0.0.1", port))
        selector.register(link, selectors.EVENT_WRITE)
        held += 1
        waiting += 1
    if held == number and not waiting:
        print("full", flush=True)
    for key, _ in selector.select(1):
        link = key.fileobj
        try:
            if key.events == selectors.EVENT_WRITE:
                waiting -= 1
                link.send(first)
                selector.modify(link, selectors.EVENT_READ)
            elif not link.recv(65536):
                raise ConnectionResetError
        except OSError:
            close(link)
            held -= 1
"""


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("frame", 500),
        *(
            pytest.param(kind, 5000, marks=pytest.mark.long)
            for kind in ("silent", "frame", "half a hello", "hello", "long record")
        ),
    ],
)
def test_clients_are_served_beside_connections_with_garbage(
    tmp_path: Path, kind: str, number: int
) -> None:
    """Without TLS, 350 frames of four bytes ended it: it reserved a MiB for each."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < number + 500:
        pytest.skip(f"a process may open {limit} files here")
    folder = CertificateFolder.of(tmp_path)
    folder.prepare()
    tls = client_context(folder)
    with EmbeddedZooKeeper(tmp_path / "zk", durable=False, certificates=folder) as server:
        pid = server.pid
        options: dict[str, Any] = {"session_timeout_ms": patience(30_000), "tls": tls}
        session = ZkSession(server.address, root="/", **options)
        state = ZooKeeperClusterState(session)
        state.create_node("/own", b"0")
        attack = subprocess.Popen(
            [sys.executable, "-Sc", _PROGRAM, str(server.port), str(number), kind],
            stdout=subprocess.PIPE,
        )
        output = attack.stdout
        assert output is not None
        try:
            for _ in range(3):
                assert output.readline() == b"full\n"
                for round in range(20):
                    state.set_data("/own", str(round).encode())
                    assert state.get_data("/own") == str(round).encode()
            eventually(
                lambda: server_answers("127.0.0.1", server.port, patience(5), tls),
                60,
                "an answer to a new client",
            )
            assert attack.poll() is None
        finally:
            attack.kill()
            attack.wait()
            output.close()
        assert session.session_id and state.exists("/own"), "the session was never lost"
        session.close()
        assert server.running and server.pid == pid
