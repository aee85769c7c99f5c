"""A nimbus in a thread of the test, with a real ZooKeeper and a real Thrift port, and clients that
are not ours.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from storm_dagster.testing.waiting import eventually
from storm_rigs.thrift_nimbus import Start, ThriftNimbus


def starter(zookeeper_server: str, home: Path, running: list[ThriftNimbus]) -> Start:
    """Starts nimbuses on one fresh root; those are added to ``running``."""
    host, _, port = zookeeper_server.rpartition(":")
    root = {
        "storm.zookeeper.servers": [host],
        "storm.zookeeper.port": int(port),
        "storm.zookeeper.root": f"/t-{uuid.uuid4().hex[:12]}",
        # A session that outlives pauses of a loaded machine: leadership is not what is tested here.
        "storm.zookeeper.session.timeout": 20_000,
    }

    def start(nimbus_id: str = "n1", *, leads: bool = True, **values: object) -> ThriftNimbus:
        conf = {**root, **{key.replace("__", "."): value for key, value in values.items()}}
        nimbus = ThriftNimbus(home, conf, nimbus_id)
        running.append(nimbus)
        ready = nimbus.leads if leads else nimbus.lives
        eventually(ready, timeout=60, what=f"nimbus {nimbus_id}", ignore=(Exception,))
        return nimbus

    return start


@pytest.fixture
def start_nimbus(zookeeper_server: str, tmp_path: Path) -> Iterator[Start]:
    """Starts nimbuses of a cluster of their own; the first one leads."""
    running: list[ThriftNimbus] = []
    yield starter(zookeeper_server, tmp_path / "home", running)
    for nimbus in reversed(running):
        nimbus.stop()


@pytest.fixture(scope="module")
def nimbus(
    zookeeper_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThriftNimbus]:
    """One nimbus, which leads, for all tests of a file."""
    running: list[ThriftNimbus] = []
    try:
        yield starter(zookeeper_server, tmp_path_factory.mktemp("thrift") / "home", running)()
    finally:
        for each in running:
            each.stop()
