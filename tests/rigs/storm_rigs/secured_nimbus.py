"""A nimbus in a thread of the test whose conf the test secures."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx

from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.processes import RunFile
from storm_dagster.nimbus.daemon import run
from storm_dagster.security.settings import Security
from storm_dagster.testing.waiting import eventually


class SecuredNimbus:
    """A nimbus in a thread of the test, with a conf of the test's."""

    def __init__(self, values: dict[str, Any], home: Path, nimbus_id: str) -> None:
        self.conf = load_cluster_conf(
            None, {"nimbus.thrift.port": 0, "nimbus.http.port": 0, **values}
        )
        self.home = home
        self.id = nimbus_id
        self.code: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"test-{nimbus_id}")
        self._thread.start()

    def _run(self) -> None:
        self.code = run(self.conf, self.home, self.id, self._stop)

    @property
    def ports(self) -> dict[str, int]:
        record = RunFile.read(RunFile.path_of(self.home, "nimbus", self.id))
        assert record is not None, f"nimbus {self.id} has not started (code {self.code})"
        return record.ports

    @property
    def url(self) -> str:
        return f"{Security.of(self.conf).scheme}://127.0.0.1:{self.ports['http']}"

    def client(self, security: Security | None = None) -> httpx.Client:
        """A client that proves itself as ``security`` says; by default as the nimbus itself
        would.
        """
        chosen = Security.of(self.conf) if security is None else security
        return httpx.Client(base_url=self.url, timeout=20, **chosen.client_options())

    def await_leading(self) -> SecuredNimbus:
        def leads() -> bool:
            with self.client() as client:
                return client.get("/healthz").json()["leader"]

        eventually(leads, 60, f"leadership of {self.id}", ignore=(AssertionError, httpx.HTTPError))
        return self

    def stop(self) -> int | None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), f"nimbus {self.id} does not end"
        return self.code
