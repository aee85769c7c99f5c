"""A worker whose cluster does not change asks ZooKeeper for nothing: the pings of its session are
all.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

import pytest

from storm_dagster.model import paths
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.worker_processes import WorkerRig

pytestmark = pytest.mark.zookeeper


def connection(address: str, session_id: int) -> dict[str, str]:
    """What the server says of the connection of a session (``cons``): requests so far, and the last
    one.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as link:
        link.sendall(b"cons")
        text = b"".join(iter(lambda: link.recv(65536), b"")).decode()
    line = next(line for line in text.splitlines() if f"sid=0x{session_id:x}," in line)
    return dict(re.findall(r"(\w+)=([^,)]*)", line))


def test_a_ping_is_a_workers_only_periodic_request(
    make_rig: Callable[..., WorkerRig], zookeeper_server: str
) -> None:
    rig = make_rig({"rig.lines": 10, "task.refresh.poll.secs": 600})
    one, two = ("s1", free_port()), ("s2", free_port())
    # The first also runs the topology master, whose report is the one thing that is written again
    # and again.
    rig.assign({one: "1,3,5-7", two: "2,4"})
    rig.start(*one)
    rig.start(*two)
    eventually(rig.running, timeout=90, what="both workers run")
    state = rig.cluster.state
    assert isinstance(state, ZooKeeperClusterState)
    stat = state._stat(paths.worker(rig.topology_id, *two))
    assert stat is not None

    def asked() -> dict[str, str]:
        return connection(zookeeper_server, stat.ephemeralOwner)

    seen = [0]

    def five_pings() -> bool:
        """Five requests one after the other, of which none that was seen is anything but a ping."""
        found = asked()
        if found["lop"] != "PING" or not seen[0]:
            seen[0] = int(found["recved"])
        return int(found["recved"]) >= seen[0] + 5

    eventually(five_pings, timeout=120, what="nothing but pings")
