"""A nimbus in a thread of the test: real ZooKeeper, real HTTP, real Thrift."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import streamparse.thrift
from thriftpy2.protocol import TBinaryProtocolFactory
from thriftpy2.rpc import make_client
from thriftpy2.transport import TFramedTransportFactory

from storm_dagster.host.processes import RunFile
from storm_dagster.model.conf import ClusterConf
from storm_dagster.nimbus.daemon import run as run_nimbus
from storm_dagster.nimbus.thrift.idl import load_idl
from storm_dagster.security.settings import Security
from storm_dagster.testing.waiting import eventually, patience

_START_SECS = 60.0


class NimbusThread:
    """One nimbus, with its files in ``home``, and the clients of its ports."""

    def __init__(self, conf: ClusterConf, home: Path, nimbus_id: str) -> None:
        self.conf = conf
        self.home = home
        self.id = nimbus_id
        self.stop_event = threading.Event()
        self.code: int | None = None
        """Its exit code, once it has ended."""
        self._thrift_clients: list[Any] = []
        self._thread = threading.Thread(target=self._run, name=f"test-{nimbus_id}")
        self._thread.start()

    def _run(self) -> None:
        self.code = run_nimbus(self.conf, self.home, self.id, self.stop_event)

    @property
    def folder(self) -> Path:
        """Where its blobs and its inbox are."""
        return self.home / "nimbus" / self.id

    @property
    def ports(self) -> dict[str, int]:
        """Ports by protocol, ``http`` and ``thrift``; ``AssertionError`` until it has started."""
        record = RunFile.read(RunFile.path_of(self.home, "nimbus", self.id))
        assert record is not None, f"nimbus {self.id} has not started (code {self.code})"
        return record.ports

    # -- HTTP --------------------------------------------------------------------------------------
    @property
    def url(self) -> str:
        """Base URL."""
        return f"{Security.of(self.conf).scheme}://127.0.0.1:{self.ports['http']}"

    def client(self, security: Security | None = None, timeout: float = 20.0) -> httpx.Client:
        """A client that proves itself as ``security`` says; by default as the nimbus itself
        would.
        """
        chosen = Security.of(self.conf) if security is None else security
        return httpx.Client(base_url=self.url, timeout=patience(timeout), **chosen.client_options())

    def get(self, path: str) -> httpx.Response:
        """The response to a GET."""
        with self.client() as client:
            return client.get(path)

    def post(self, path: str, document: Mapping[str, Any] | None = None) -> httpx.Response:
        """The response to a POST of a JSON document."""
        with self.client(timeout=180.0) as client:
            return client.post(path, json=dict(document or {}))

    def health(self) -> dict[str, Any]:
        """``/healthz``."""
        return self.get("/healthz").json()

    def leads(self) -> bool:
        """True if it reports itself as the leader."""
        return bool(self.health()["leader"])

    def await_leading(self) -> NimbusThread:
        """Wait until it leads; the nimbus."""
        eventually(
            self.leads,
            timeout=_START_SECS,
            what=f"leadership of {self.id}",
            ignore=(AssertionError, httpx.HTTPError),
        )
        return self

    def await_serving(self) -> NimbusThread:
        """Wait until it serves, as the leader or as a follower; the nimbus."""
        eventually(
            self.health,
            timeout=_START_SECS,
            what=f"service of {self.id}",
            ignore=(AssertionError, httpx.HTTPError),
        )
        return self

    # -- Thrift ------------------------------------------------------------------------------------
    @property
    def port(self) -> int:
        """Thrift's port."""
        return self.ports["thrift"]

    @property
    def inbox(self) -> Path:
        """Folder of uploads over Thrift."""
        return self.folder / "inbox"

    def thrift_client(self, *, ours: bool = False) -> Any:
        """streamparse's client, made as streamparse makes it; with ``ours`` of our interface, for
        Storm 2.x's methods. It is closed with the nimbus.
        """
        # Its module is made from a Thrift file when it is imported.
        theirs: Any = streamparse.thrift
        service = load_idl().Nimbus if ours else theirs.Nimbus
        client = make_client(
            service,
            host="127.0.0.1",
            port=self.port,
            proto_factory=TBinaryProtocolFactory(),
            trans_factory=TFramedTransportFactory(),
            timeout=patience(20_000),
        )
        self._thrift_clients.append(client)
        return client

    def connect(self) -> socket.socket:
        """A bare connection to Thrift's port."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=patience(20))

    def await_thrift(self, *, leading: bool = True) -> NimbusThread:
        """Wait until it serves Thrift clients, and names itself as the leader if ``leading``."""

        def ready() -> bool:
            with closing(self.thrift_client()) as client:
                if not leading:
                    return bool(client.getNimbusConf())
                summary = client.getLeader()
                return summary.isLeader and summary.port == self.port

        eventually(ready, _START_SECS, f"Thrift of nimbus {self.id}", ignore=(Exception,))
        return self

    def stop(self) -> int:
        """End it and its Thrift clients; its exit code. Stopping twice does nothing."""
        for client in self._thrift_clients:
            client.close()
        self.stop_event.set()
        self._thread.join(patience(30))
        assert not self._thread.is_alive(), f"nimbus {self.id} does not end"
        assert self.code is not None, f"nimbus {self.id} ended with an exception"
        return self.code
