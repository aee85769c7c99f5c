"""A nimbus in a thread of the test, with a real ZooKeeper and a real Thrift port, and clients that are not ours."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import streamparse.thrift
from thriftpy2.protocol import TBinaryProtocolFactory
from thriftpy2.rpc import make_client
from thriftpy2.transport import TFramedTransportFactory

from storm_dagster.model.conf import load_cluster_conf
from storm_dagster.model.run_file import RunFile
from storm_dagster.nimbus.daemon import run as run_nimbus
from storm_dagster.nimbus.thrift.idl import load_idl
from storm_dagster.testing.waiting import eventually


class ThriftNimbus:
    """A nimbus and the ways to its port."""

    def __init__(self, home: Path, conf: dict[str, object], nimbus_id: str) -> None:
        self.home = home
        self.id = nimbus_id
        self.stopping = threading.Event()
        merged = load_cluster_conf(None, {"nimbus.thrift.port": 0, "nimbus.http.port": 0, **conf})
        self.thread = threading.Thread(target=run_nimbus, args=(merged, home, nimbus_id, self.stopping))
        self.thread.start()
        self._clients: list[Any] = []

    @property
    def port(self) -> int:
        record = RunFile.read(RunFile.path_of(self.home, "nimbus", self.id))
        assert record is not None, "nimbus has not started"
        return record.ports["thrift"]

    @property
    def inbox(self) -> Path:
        return self.home / "nimbus" / self.id / "inbox"

    def client(self, *, ours: bool = False) -> Any:
        """streamparse's client, made as streamparse makes it; with ``ours`` of our interface, for Storm 2.x's methods."""
        service = load_idl().Nimbus if ours else streamparse.thrift.Nimbus
        made = make_client(
            service,
            host="127.0.0.1",
            port=self.port,
            proto_factory=TBinaryProtocolFactory(),
            trans_factory=TFramedTransportFactory(),
            timeout=20_000,
        )
        self._clients.append(made)
        return made

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def lives(self) -> bool:
        """A new client is served."""
        with closing(self.client()) as client:
            return bool(client.getNimbusConf())

    def leads(self) -> bool:
        with closing(self.client()) as client:
            summary = client.getLeader()
            return summary.isLeader and summary.port == self.port

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self.stopping.set()
        self.thread.join(30)
        assert not self.thread.is_alive()


Start = Callable[..., ThriftNimbus]


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
def nimbus(zookeeper_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThriftNimbus]:
    """One nimbus, which leads, for all tests of a file."""
    running: list[ThriftNimbus] = []
    try:
        yield starter(zookeeper_server, tmp_path_factory.mktemp("thrift") / "home", running)()
    finally:
        for each in running:
            each.stop()
