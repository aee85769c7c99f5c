"""A certificate authority and a secret for the tests of a secured cluster."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from storm_dagster.model.conf import load_cluster_conf
from storm_dagster.model.run_file import RunFile
from storm_dagster.model.security import Security
from storm_dagster.nimbus.daemon import run
from storm_dagster.testing.waiting import eventually


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certificate(tmp_path: Path, authority: trustme.CA) -> Callable[..., dict[str, str]]:
    """Makes the ``storm.tls.*`` keys of a user; of another authority with ``by``, with other dates with ``dates``."""
    made = 0

    def make(user: str = "daemon", *, by: trustme.CA | None = None, **dates: object) -> dict[str, str]:
        nonlocal made
        made += 1
        issued = (by or authority).issue_cert("127.0.0.1", "localhost", common_name=user, **dates)
        folder = tmp_path / f"tls-{made}"
        folder.mkdir()
        (folder / "ca.pem").write_bytes(authority.cert_pem.bytes())
        (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key = folder / "key.pem"
        os.close(os.open(key, os.O_CREAT | os.O_WRONLY, 0o600))
        key.write_bytes(issued.private_key_pem.bytes())
        return {
            "storm.tls.cert": str(folder / "cert.pem"),
            "storm.tls.key": str(key),
            "storm.tls.ca": str(folder / "ca.pem"),
        }

    return make


class SecuredNimbus:
    """A nimbus in a thread of the test, with a conf of the test's."""

    def __init__(self, values: dict[str, Any], home: Path, nimbus_id: str) -> None:
        self.conf = load_cluster_conf(None, {"nimbus.thrift.port": 0, "nimbus.http.port": 0, **values})
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
        """A client that proves itself as ``security`` says; by default as the nimbus itself would."""
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


@pytest.fixture
def start_nimbus(tmp_path: Path, zk_conf: dict[str, object]) -> Iterator[Callable[..., SecuredNimbus]]:
    running: list[SecuredNimbus] = []

    def start(nimbus_id: str = "n1", **values: Any) -> SecuredNimbus:
        merged = {**zk_conf, **values.pop("keys", {}), **{k.replace("__", "."): v for k, v in values.items()}}
        running.append(SecuredNimbus(merged, tmp_path / "home", nimbus_id))
        return running[-1]

    yield start
    for nimbus in reversed(running):
        nimbus.stop()
