"""Nimbuses in threads of a test, on one fresh root."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.processes import RunFile
from storm_dagster.model.conf import ClusterConf
from storm_dagster.nimbus.daemon import run as run_nimbus
from storm_dagster.testing.waiting import eventually


class RunningNimbus:
    """A nimbus in a thread of the test: real ZooKeeper, real HTTP."""

    def __init__(self, conf: ClusterConf, home: Path, nimbus_id: str) -> None:
        self.home = home
        self.id = nimbus_id
        self.stop_event = threading.Event()
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(conf,), name=f"test-{nimbus_id}")
        self._thread.start()

    def _run(self, conf: ClusterConf) -> None:
        self.code = run_nimbus(conf, self.home, self.id, self.stop_event)

    @property
    def url(self) -> str:
        record = RunFile.read(RunFile.path_of(self.home, "nimbus", self.id))
        assert record is not None, f"nimbus {self.id} has not started (code {self.code})"
        return f"http://127.0.0.1:{record.ports['http']}"

    @property
    def folder(self) -> Path:
        return self.home / "nimbus" / self.id

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, trust_env=False)

    def post(self, path: str, document: Mapping[str, Any] | None = None) -> httpx.Response:
        return httpx.post(self.url + path, json=dict(document or {}), timeout=180, trust_env=False)

    def health(self) -> dict[str, Any]:
        return self.get("/healthz").json()

    def leads(self) -> bool:
        return bool(self.health()["leader"])

    def await_leading(self) -> RunningNimbus:
        eventually(
            self.leads,
            timeout=60,
            what=f"leadership of {self.id}",
            ignore=(AssertionError, httpx.HTTPError),
        )
        return self

    def await_serving(self) -> RunningNimbus:
        eventually(
            self.health,
            timeout=60,
            what=f"service of {self.id}",
            ignore=(AssertionError, httpx.HTTPError),
        )
        return self

    def stop(self) -> int:
        self.stop_event.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), f"nimbus {self.id} does not end"
        assert self.code is not None
        return self.code


class Nimbuses:
    """Starts nimbuses on one fresh root; all are stopped after the test."""

    def __init__(self, zk_conf: dict[str, object], home: Path) -> None:
        self.zk_conf = zk_conf
        self.home = home
        self.running: list[RunningNimbus] = []

    def start(self, nimbus_id: str = "n1", **values: object) -> RunningNimbus:
        overrides = {
            **self.zk_conf,
            "nimbus.thrift.port": 0,
            "nimbus.http.port": 0,
            **{key.replace("__", "."): value for key, value in values.items()},
        }
        nimbus = RunningNimbus(load_cluster_conf(None, overrides), self.home, nimbus_id)
        self.running.append(nimbus)
        return nimbus
