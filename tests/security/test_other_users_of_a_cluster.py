"""Another user of the machine at every TCP port of a local cluster without a secret."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from storm_dagster.model.peers import can_tell_users
from storm_dagster.model.wire import Request, encode_request
from storm_dagster.testing.cluster import LocalCluster
from storm_rigs.thrift_calls import encode_call

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user"),
    pytest.mark.skipif(not can_tell_users(), reason="the kernel does not name users of connections"),
]
ROOT = Path(__file__).parents[2]
NAME = "watched"

# What it needs is loaded before it becomes another user, who may not read all of it. Each function says what it got.
_PROGRAM = """
import encodings.idna, json, os, socket, sys
import grpc, zmq
from kazoo.client import KazooClient
from kazoo.exceptions import KazooException

calls, other = json.load(sys.stdin)
if other:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)

def bytes_of(port, sent):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as link:
        try:
            link.sendall(bytes.fromhex(sent))
            return link.recv(100).decode("latin-1")
        except OSError:
            return ""

def worker(port, request):
    context = zmq.Context()
    link = context.socket(zmq.DEALER)
    link.setsockopt(zmq.LINGER, 0)
    link.connect(f"tcp://127.0.0.1:{port}")
    link.send(request.encode())
    answer = link.recv().decode() if link.poll(1_000 if other else 20_000) else ""
    context.destroy()
    return answer

def zookeeper(port, root):
    client = KazooClient(f"127.0.0.1:{port}")
    client.start(20)
    done = []
    for name, attempt in {
        "read": lambda: client.get(f"{root}/cluster_id"),
        "list": lambda: client.get_children(f"{root}/topology"),
        "change": lambda: client.set(f"{root}/epoch", b""),
        "create": lambda: client.create(f"{root}/topology/forged", b""),
        "create beside": lambda: client.create("/forged", b""),
        "delete": lambda: client.delete(f"{root}/cluster_id"),
    }.items():
        try:
            attempt()
            done.append(name)
        except KazooException:
            pass
    client.stop()
    client.close()
    return " ".join(done)

def spark(port, _):
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    call = channel.unary_unary("/spark.connect.SparkConnectService/Config", bytes, bytes)
    try:
        call(b"", timeout=20)
        return "served"
    except grpc.RpcError as error:
        # Ports of Spark's driver speak no gRPC, and authenticate by a secret of their own.
        refused = error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE)
        return "" if refused else f"{error.code()}: {error.details()}"

print(json.dumps([globals()[name](port, given) for name, port, given in calls]))
"""
_HTTP = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".hex()


def attempts(calls: list[tuple[str, int, str]], other: bool) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps([calls, other]),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def listening(cluster: LocalCluster) -> Iterator[tuple[str, str, int]]:
    """(role, id, port) of each TCP socket at which a process of the cluster listens."""
    for record in cluster.processes():
        for link in psutil.Process(record.pid).net_connections("tcp"):
            if link.status == psutil.CONN_LISTEN:
                yield record.role, record.id, link.laddr.port


def test_no_port_of_it_serves_another_user(shared_cluster: LocalCluster) -> None:
    cluster = shared_cluster
    cluster.cli("submit", str(ROOT / "examples" / "wordcount.py"), "--name", NAME)
    cluster.wait_running(NAME)
    call = encode_call("getNimbusConf", 5)
    thrift = (struct.pack("!i", len(call)) + call).hex()
    known: dict[int, str] = {}
    calls: list[tuple[str, int, str]] = []
    for role, id, port in sorted(listening(cluster)):
        known[port] = f"{role} {id}"
        if role == "zookeeper":
            calls.append(("zookeeper", port, str(cluster.conf["storm.zookeeper.root"])))
        elif role == "worker":
            calls.append(("worker", port, encode_request(Request("ping", "guessed")).decode()))
        elif role == "spark":
            calls.append(("spark", port, ""))
        else:
            calls += [("bytes_of", port, _HTTP), ("bytes_of", port, thrift)]
    assert {name.split()[0] for name in known.values()} >= {
        *("zookeeper", "nimbus", "supervisor", "worker", "spark", "dagster-webserver")
    }
    before = cluster.show(NAME)
    got = {(known[port], name): answer for (name, port, _), answer in zip(calls, attempts(calls, True), strict=True)}
    assert not any(got.values()), got
    # The same calls of the daemons' user are understood, so it is the user that decides.
    served = attempts([made for made in calls if made[0] == "bytes_of"], False)
    assert sum("HTTP/1.1 " in answer for answer in served) >= 5 and any("getNimbusConf" in answer for answer in served)
    after = cluster.show(NAME)
    assert after["id"] == before["id"] and after["status"] == "ACTIVE"
    assert [worker["pid"] for worker in after["workers"]] == [worker["pid"] for worker in before["workers"]]
