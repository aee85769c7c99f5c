"""Another user of the machine at every TCP port of a local cluster without a secret."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.wire import Request, encode_request
from storm_dagster.security.authority import CertificateFolder
from storm_dagster.security.peers import can_identify_peers
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.protocols.thrift_calls import encode_call
from storm_rigs.servers.zookeeper_intruder import ZooKeeperIntruder

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user"),
    pytest.mark.skipif(
        not can_identify_peers(), reason="the kernel does not name users of connections"
    ),
]
ROOT = Path(__file__).parents[2]
NAME = "watched"

# What it needs is loaded before it becomes another user, who may not read all of it. Each function
# returns what it was served, which must be nothing, and how that ended.
_PROGRAM = """
import encodings.idna, json, os, socket, ssl, struct, sys
import grpc, grpc._channel, zmq

calls, other = json.load(sys.stdin)
if other:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)

def bytes_of(port, sent):
    got = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as link:
            link.sendall(bytes.fromhex(sent))
            # A small answer may come in pieces.
            while len(got) < 100 and (piece := link.recv(100)):
                got += piece
                link.settimeout(2)
        return got.decode("latin-1"), "closed"
    except OSError as error:
        return got.decode("latin-1"), repr(error)

def worker(port, request):
    context = zmq.Context()
    link = context.socket(zmq.DEALER)
    link.setsockopt(zmq.LINGER, 0)
    link.connect(f"tcp://127.0.0.1:{port}")
    link.send(request.encode())
    answer = link.recv().decode() if link.poll(1_000 if other else 20_000) else ""
    context.destroy()
    return answer, "no answer"

def zookeeper(port, _):
    # Each way to begin without a certificate: a word, and a word and a session over TLS.
    session = struct.pack("!iiqiqi16s", 44, 0, 0, 10_000, 0, 16, b"")
    got, how = bytes_of(port, b"srvr".hex())
    for sent in (b"srvr", session):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as link:
                with context.wrap_socket(link) as link:
                    link.sendall(sent)
                    got += link.recv(100).decode("latin-1")
        except OSError as error:
            how += repr(error)
    # The answer to what is not TLS is an alert of TLS.
    return ("" if got.startswith(chr(0x15) + chr(3)) else got), how

def spark(port, _):
    for _ in range(5):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/spark.connect.SparkConnectService/Config", bytes, bytes)
            try:
                return call(b"", timeout=30).hex() or "an empty answer", "served"
            except grpc.RpcError as error:
                code, how = error.code(), f"{error.code()}: {error.details()}"
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return "", how
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            break
    return how, how

print(json.dumps([globals()[name](port, given) for name, port, given in calls]))
"""
_HTTP = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".hex()


def attempts(calls: list[tuple[str, int, str]], other: bool) -> list[tuple[str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps([calls, other]),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(got, how) for got, how in json.loads(done.stdout)]


def listening(cluster: LocalCluster) -> set[tuple[str, str, int]]:
    """(role, id, port) of each TCP socket at which a process of the cluster, or a child of one,
    listens.
    """
    found: dict[int, tuple[str, str, int]] = {}
    for record in cluster.processes():
        # One that ends meanwhile listens nowhere.
        with contextlib.suppress(psutil.NoSuchProcess):
            daemon = psutil.Process(record.pid)
            for process in (daemon, *daemon.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    for link in process.net_connections("tcp"):
                        # A worker is a child of its supervisor, and has a record, too.
                        if link.status == psutil.CONN_LISTEN and (
                            process is daemon or link.laddr.port not in found
                        ):
                            found[link.laddr.port] = (record.role, record.id, link.laddr.port)
    return set(found.values())


@pytest.mark.timeout(900)
@pytest.mark.long
def test_no_port_of_it_serves_another_user(shared_cluster: LocalCluster) -> None:
    cluster = shared_cluster
    cluster.cli("submit", str(ROOT / "examples" / "wordcount.py"), "--name", NAME)
    cluster.wait_running(NAME)
    call = encode_call("getNimbusConf", 5)
    thrift = (struct.pack("!i", len(call)) + call).hex()
    connect = cluster.endpoints.spark
    assert connect is not None
    before, ports = cluster.show(NAME), listening(cluster)
    calls: list[tuple[str, int, str]] = []
    for role, _, port in sorted(ports):
        if role == "zookeeper":
            calls.append(("zookeeper", port, ""))
        elif role == "worker":
            calls.append(("worker", port, encode_request(Request("ping", "guessed")).decode()))
        elif connect.remote.endswith(f":{port}"):
            calls.append(("spark", port, ""))
        else:
            calls += [("bytes_of", port, _HTTP), ("bytes_of", port, thrift)]
    made = {name for name, _, _ in calls}
    assert made == {"zookeeper", "worker", "spark", "bytes_of"}
    assert {role for role, _, _ in ports} >= {"nimbus", "supervisor", "dagster-webserver"}
    answers = list(zip(calls, attempts(calls, True), strict=True))
    stayed = {port: f"{role} {id}" for role, id, port in ports & listening(cluster)}
    told = [
        f"{stayed.get(port, 'gone')}, port {port}, {name}: {got!r} ({how})"
        for (name, port, _), (got, how) in answers
    ]
    # Of a port that closed meanwhile neither a refusal nor an error is known. Each kind of port is
    # among those that stayed.
    assert {name for (name, port, _), _ in answers if port in stayed} == made, told
    unsure = ("zookeeper", "spark")
    assert not [
        got
        for (name, port, _), (got, _) in answers
        if got and (port in stayed or name not in unsure)
    ], told
    # The same calls of the daemons' user are understood, so it is the user that decides.
    served = [got for got, _ in attempts([made for made in calls if made[0] == "bytes_of"], False)]
    assert sum("HTTP/1.1 " in got for got in served) >= 5 and any(
        "getNimbusConf" in got for got in served
    ), served
    after = cluster.show(NAME)
    assert after["id"] == before["id"] and after["status"] == "ACTIVE"
    pids = [
        {(worker["node"], worker["port"]): worker["pid"] for worker in each["workers"]}
        for each in (before, after)
    ]
    assert pids[0] == pids[1], after


@pytest.mark.timeout(900)
@pytest.mark.long
def test_who_takes_zookeepers_port_from_a_running_cluster_is_shown_no_password(
    shared_cluster: LocalCluster, tmp_path: Path
) -> None:
    """It takes the port when the server dies, before ``dev`` starts it again."""
    cluster = shared_cluster
    password = (cluster.home / "zookeeper.user").read_text(encoding="ascii").partition(":")[2]
    port = int(cluster.endpoints.zookeeper.rpartition(":")[2])
    other = tmp_path / "other"
    other.mkdir()
    folder = CertificateFolder.of(other)
    folder.prepare()
    with ZooKeeperIntruder(port, folder.server_file) as intruder:
        cluster.kill("zookeeper")
        intruder.port()
        intruder.await_calls(5)
        sent = intruder.received()
    assert password.strip().encode() not in sent and b"storm:" not in sent
    eventually(lambda: [cluster.topologies()], 120, "an answer", ignore=(StormDagsterError,))
