"""A nimbus in a thread of the test, and Thrift clients of its port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import streamparse.thrift
from thriftpy2.protocol import TBinaryProtocolFactory
from thriftpy2.rpc import make_client
from thriftpy2.transport import TFramedTransportFactory

from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.processes import RunFile
from storm_dagster.nimbus.daemon import run as run_nimbus
from storm_dagster.nimbus.thrift.idl import load_idl


class ThriftNimbus:
    """A nimbus and the ways to its port."""

    def __init__(self, home: Path, conf: dict[str, object], nimbus_id: str) -> None:
        self.home = home
        self.id = nimbus_id
        self.conf = conf
        self.stopping = threading.Event()
        merged = load_cluster_conf(None, {"nimbus.thrift.port": 0, "nimbus.http.port": 0, **conf})
        self.thread = threading.Thread(
            target=run_nimbus, args=(merged, home, nimbus_id, self.stopping)
        )
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
        """streamparse's client, made as streamparse makes it; with ``ours`` of our interface, for
        Storm 2.x's methods.
        """
        # Its module is made from a Thrift file when it is imported.
        theirs: Any = streamparse.thrift
        service = load_idl().Nimbus if ours else theirs.Nimbus
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
