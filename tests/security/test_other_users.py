"""Without a secret, the ports of a cluster serve its own user and root, and nobody else of the
machine.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from storm_dagster.cli.dev.options import DevOptions
from storm_dagster.cli.dev.plan import ClusterPlan
from storm_dagster.cli.dev.ports import choose_ports
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.http.server import HttpService
from storm_dagster.nimbus.thrift.server import ServerLimits, ThriftServer
from storm_dagster.security import peers
from storm_dagster.security.home_key import begin_start
from storm_dagster.security.own_connections import duplicate
from storm_dagster.security.peers import can_identify_peers, owners_only, peer_user
from storm_dagster.security.settings import Security, zookeeper_payload
from storm_dagster.testing.waiting import patience
from storm_dagster.worker.dataplane.transport import Transport

pytestmark = pytest.mark.skipif(
    not can_identify_peers(), reason="the kernel does not name users of connections"
)

_ASK = """
import encodings.idna, os, socket, sys
os.setuid(int(sys.argv[1]))
try:
    link = socket.create_connection((sys.argv[2], int(sys.argv[3])), timeout=20)
    link.sendall(bytes.fromhex(sys.argv[4]))
    print(link.recv(100).hex())
except OSError:
    print("")
"""
_SPEAK = """
import os, sys, time, zmq
from zmq.utils.monitor import recv_monitor_message
link = zmq.Context().socket(zmq.DEALER)
events = link.get_monitor_socket(zmq.EVENT_CONNECTED)
os.setuid(int(sys.argv[1]))
link.setsockopt(zmq.LINGER, 0)
link.setsockopt(zmq.RECONNECT_IVL, 10)
link.connect(f"tcp://127.0.0.1:{sys.argv[2]}")
link.send(b"heard")
tries, until = 0, time.monotonic() + 60
while tries < 2 and (left := until - time.monotonic()) > 0:
    if events.poll(int(left * 1000) + 1):
        recv_monitor_message(events)
        tries += 1
        # Who is refused tries again within milliseconds.
        until = time.monotonic() + float(sys.argv[3])
print(tries, flush=True)
os._exit(0)
"""
_HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_THRIFT = b"\0\0\0\4ping"
Service = Callable[[bool], int]


def asked(port: int, sent: bytes, user: int, host: str = "127.0.0.1") -> bytes:
    command = [sys.executable, "-Sc", _ASK, str(user), host, str(port), sent.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=True)
    return bytes.fromhex(done.stdout.strip())


@pytest.fixture
def http() -> Iterator[Service]:
    services: list[HttpService] = []

    def start(own_user: bool) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("served"))])
        services.append(HttpService(app, listener, own_user_only=own_user))
        services[-1].start()
        return int(listener.getsockname()[1])

    yield start
    for service in services:
        service.stop()


@pytest.fixture
def thrift() -> Iterator[Service]:
    services: list[ThriftServer] = []

    def start(own_user: bool) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        services.append(
            ThriftServer(
                lambda frame, _: b"served", listener, ServerLimits(), own_user_only=own_user
            )
        )
        services[-1].start()
        return int(listener.getsockname()[1])

    yield start
    for service in services:
        service.stop()


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize(("service", "sent"), [("http", _HTTP), ("thrift", _THRIFT)])
def test_another_user_of_the_machine_is_not_served(
    request: pytest.FixtureRequest, service: str, sent: bytes
) -> None:
    start: Service = request.getfixturevalue(service)
    other = pwd.getpwnam("nobody").pw_uid
    port = start(True)
    assert asked(port, sent, other) == b""
    assert b"HTTP/1.1 200" in asked(port, sent, 0) or service == "thrift"
    assert asked(port, sent, 0), "root is served"
    assert asked(start(False), sent, other), "with a secret, whoever has it is"


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_a_worker_ends_connections_of_another_user() -> None:
    transport = Transport("127.0.0.1", 0, "token", 100)
    try:
        for user, served in ((pwd.getpwnam("nobody").pw_uid, False), (0, True)):
            command = [
                sys.executable,
                "-c",
                _SPEAK,
                str(user),
                str(transport.port),
                "1" if served else "30",
            ]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=patience(60), check=True
            )
            assert (int(done.stdout) == 1) is served, f"it connected {done.stdout} times"
    finally:
        transport.close()


def test_a_connection_that_left_before_it_was_looked_at_leaves_no_descriptor(
    tmp_path: Path,
) -> None:
    """Its number is that of a file by then; whoever comes and goes could use up all numbers of a
    worker.
    """
    with (tmp_path / "another").open("w") as another:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            with pytest.raises(OSError):
                duplicate(another.fileno())
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("asked_directly", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_ways_to_ask_say_the_same(
    host: str, asked_directly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked_directly:
        monkeypatch.setattr(peers, "_TABLES", ())
    else:
        monkeypatch.delattr(socket, "AF_NETLINK")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no {host} here")
    with server:
        client = socket.create_connection(server.getsockname()[:2])
        own, peer = server.getsockname(), client.getsockname()
        assert peer_user(own, peer) == os.getuid()
        client.close()
        assert peer_user(own, peer) is None, "a closed one would look as if it were root's"
        assert peer_user(own, (host, 1)) is None


@pytest.mark.parametrize("asked_directly", [True, False])
def test_who_has_left_is_not_taken_for_who_listens_at_its_port(
    asked_directly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It binds a daemon's port before the daemon does, sends a request from there, and resets the
    connection.
    """
    if asked_directly:
        monkeypatch.setattr(peers, "_TABLES", ())
    else:
        monkeypatch.delattr(socket, "AF_NETLINK")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as attacker:
        attacker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        attacker.bind(("127.0.0.1", 0))
        peer = attacker.getsockname()
        with socket.create_server(peer):
            attacker.connect(server.getsockname())
            attacker.sendall(_HTTP)
            attacker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            attacker.close()
            link, _ = server.accept()
            with link:
                assert peer_user(link.getsockname(), peer) is None, "its owner is who listens there"
                assert link.recv(100) == _HTTP, "what it sent is still there"


def test_where_nobody_knows_the_port_serves(monkeypatch: pytest.MonkeyPatch, http: Service) -> None:
    assert owners_only(Security()) and not owners_only(Security("a-secret-planted-for-tests-4711"))
    monkeypatch.setattr(peers, "peer_user", lambda *_: None)
    can_identify_peers.cache_clear()
    try:
        assert not owners_only(Security())
        assert b"200 OK" in asked(http(owners_only(Security())), _HTTP, os.getuid())
    finally:
        can_identify_peers.cache_clear()


def test_each_start_of_dev_has_a_zookeeper_user_of_its_own(
    tmp_path: Path,
) -> None:
    def start() -> ClusterPlan:
        conf, options = load_cluster_conf(None, {}), DevOptions()
        ports = choose_ports(options, conf, tmp_path)
        plan = ClusterPlan(tmp_path, options, conf, ports, conf_dir=None, overrides={})
        begin_start(tmp_path)
        plan.close_ports()
        return plan

    path = tmp_path / "zookeeper.user"
    first = start()
    (tmp_path / "cluster_id").write_text("c\n")
    users = [path.read_text().splitlines()]
    assert zookeeper_payload(first.conf) == users[0][0]
    first.forget_former_users()
    # The second one dies before all nodes are its own.
    start()
    last = start()
    users.append(path.read_text().splitlines())
    assert len(users[1]) == len(set(users[1])) == 3 and users[1][-1] == users[0][0]
    last.forget_former_users()
    assert path.read_text().splitlines() == users[1][:1]
    assert path.stat().st_mode & 0o777 == 0o600


def test_where_nobody_knows_dev_makes_a_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def plan(**given: str) -> ClusterPlan:
        conf, options = load_cluster_conf(None, given), DevOptions()
        ports = choose_ports(options, conf, tmp_path)
        made = ClusterPlan(tmp_path, options, conf, ports, conf_dir=None, overrides={})
        begin_start(tmp_path)
        made.close_ports()
        return made

    assert Security.of(plan().conf).secret is None and not (tmp_path / "secret").exists()
    monkeypatch.setattr(peers, "peer_user", lambda *_: None)
    can_identify_peers.cache_clear()
    try:
        first = plan()
        made = tmp_path / "secret"
        assert made.stat().st_mode & 0o777 == 0o600
        assert Security.of(first.conf).secret == made.read_text().strip()
        assert f"storm.secret.file={json.dumps(str(made))}" in first.nimbus_daemon(0).argv
        assert first.given_conf()["storm.secret.file"] == str(made), (
            "clients that read HOME know it"
        )
        assert Security.of(plan().conf).secret == Security.of(first.conf).secret, (
            "the next start takes the same"
        )
        own = plan(**{"storm.secret": "a-secret-of-the-users-own-4711"})
        assert Security.of(own.conf).secret == "a-secret-of-the-users-own-4711"
    finally:
        can_identify_peers.cache_clear()
