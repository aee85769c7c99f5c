"""Real neighbours for the tests of nimbus: a Dagster webserver with our names, and nimbuses on a fresh root."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from storm_dagster.model.conf import ClusterConf, load_cluster_conf
from storm_dagster.model.run_file import RunFile
from storm_dagster.nimbus.daemon import run as run_nimbus
from storm_dagster.testing.waiting import eventually

DEFINITIONS = """
import dagster as dg

partitions = dg.DynamicPartitionsDefinition(name="storm_topologies")
STAGES = ["topology_conf", "topology_code", "task_info", "assignment", "published_assignment", "active_topology"]


class SubmitConfig(dg.Config):
    handle: str | None = None
    token: str | None = None
    inactive: bool = False
    allow_degraded: bool = False


def stage(name, before):
    deps = [dg.AssetKey(["storm", before])] if before else []

    if before is None:

        @dg.asset(key=["storm", name], partitions_def=partitions)
        def first(context: dg.AssetExecutionContext, config: SubmitConfig):
            if config.handle == "typed-failure":
                raise dg.Failure(
                    description="too few slots",
                    metadata={"error_type": "Unavailable", "message": "topology needs 4 slots, 3 are free"},
                )
            if config.handle == "plain-failure":
                raise ValueError("something broke")
            return dg.MaterializeResult(metadata={"token": config.token or "", "name": context.partition_key})

        return first

    @dg.asset(key=["storm", name], partitions_def=partitions, deps=deps)
    def later():
        return dg.MaterializeResult()

    return later


assets = [stage(name, STAGES[n - 1] if n else None) for n, name in enumerate(STAGES)]


class NameConfig(dg.Config):
    name: str


class KillConfig(dg.Config):
    name: str
    wait_secs: int | None = None


@dg.op
def kill_topology_op(config: KillConfig):
    pass


@dg.op
def activate_topology_op(config: NameConfig):
    pass


@dg.job(executor_def=dg.in_process_executor)
def kill_topology():
    kill_topology_op()


@dg.job(executor_def=dg.in_process_executor)
def activate_topology():
    activate_topology_op()


defs = dg.Definitions(
    assets=assets,
    jobs=[
        dg.define_asset_job(
            "submit_topology", dg.AssetSelection.assets(*assets), partitions_def=partitions, executor_def=dg.in_process_executor
        ),
        kill_topology,
        activate_topology,
    ],
)

# Beside them the real definitions of a cluster with a name, whose ZooKeeper nobody runs.
from storm_dagster import build_storm_defs

prod = {"storm.zookeeper.servers": ["127.0.0.1:9"], "storm.zookeeper.connection.timeout": 200}
stopped = dg.DefaultSensorStatus.STOPPED
defs = dg.Definitions.merge(defs, build_storm_defs(cluster="prod", overrides=prod, default_status=stopped))
"""

DAGSTER_YAML = """
telemetry: {enabled: false}
run_coordinator: {module: dagster._core.run_coordinator, class: DefaultRunCoordinator}
"""


@dataclass(frozen=True)
class DagsterServer:
    """A running webserver."""

    url: str
    """GraphQL URL."""
    pid: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serve_dagster(home: Path) -> Iterator[DagsterServer]:
    """A webserver on the instance of ``home``, with the settings that stand there. No daemon runs."""
    (home / "throwaway_defs.py").write_text(DEFINITIONS)
    workspace = home / "workspace.yaml"
    workspace.write_text(
        f"load_from:\n  - python_file: {{relative_path: {home}/throwaway_defs.py, location_name: storm}}\n"
    )
    port = free_port()
    log = (home / "webserver.log").open("wb")
    command = [
        str(Path(sys.executable).with_name("dagster-webserver")),
        "-w",
        str(workspace),
        "-h",
        "127.0.0.1",
    ]
    process = subprocess.Popen(
        [*command, "-p", str(port)],
        env={**os.environ, "DAGSTER_HOME": str(home), "DAGSTER_DISABLE_TELEMETRY": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    base = f"http://127.0.0.1:{port}"

    def up() -> bool:
        assert process.poll() is None, (home / "webserver.log").read_text()[-3000:]
        return httpx.get(f"{base}/server_info", timeout=2, trust_env=False).status_code == 200

    try:
        eventually(up, timeout=90, what="Dagster's webserver", ignore=(httpx.HTTPError,))
        yield DagsterServer(f"{base}/graphql", process.pid)
    finally:
        # The whole group that this fixture started: webserver and its code server.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        log.close()


@pytest.fixture(scope="session")
def dagster_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterServer]:
    home = tmp_path_factory.mktemp("dagster")
    (home / "dagster.yaml").write_text(DAGSTER_YAML)
    with serve_dagster(home) as server:
        yield server


@pytest.fixture
def stock_dagster(tmp_path: Path) -> Iterator[tuple[Path, DagsterServer]]:
    """A webserver on an instance without ``dagster.yaml``, and its folder: runs stay in the queue."""
    home = tmp_path / "stock-dagster"
    home.mkdir()
    with serve_dagster(home) as server:
        yield home, server


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

    def health(self) -> dict[str, Any]:
        return self.get("/healthz").json()

    def leads(self) -> bool:
        return bool(self.health()["leader"])

    def await_leading(self) -> RunningNimbus:
        eventually(self.leads, timeout=60, what=f"leadership of {self.id}", ignore=(AssertionError, httpx.HTTPError))
        return self

    def await_serving(self) -> RunningNimbus:
        eventually(self.health, timeout=60, what=f"service of {self.id}", ignore=(AssertionError, httpx.HTTPError))
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


@pytest.fixture
def make_nimbuses(tmp_path: Path) -> Iterator[Callable[[dict[str, object]], Nimbuses]]:
    made: list[Nimbuses] = []

    def make(zk_conf: dict[str, object]) -> Nimbuses:
        made.append(Nimbuses(zk_conf, tmp_path / "home"))
        return made[-1]

    yield make
    for nimbuses in made:
        for nimbus in reversed(nimbuses.running):
            nimbus.stop()


@pytest.fixture(scope="module")
def make_lasting_nimbuses(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[dict[str, object]], Nimbuses]]:
    """As ``make_nimbuses``, for all tests of a module."""
    made: list[Nimbuses] = []

    def make(zk_conf: dict[str, object]) -> Nimbuses:
        made.append(Nimbuses(zk_conf, tmp_path_factory.mktemp("nimbuses") / "home"))
        return made[-1]

    yield make
    for nimbuses in made:
        for nimbus in reversed(nimbuses.running):
            nimbus.stop()


@pytest.fixture
def nimbuses(make_nimbuses: Callable[..., Nimbuses], zk_conf: dict[str, object]) -> Nimbuses:
    return make_nimbuses(zk_conf)
