"""Every daemon and every worker starts on a HOME that is full or read-only: it serves what it can,
and says in one line what it cannot.
"""

from __future__ import annotations

import json
import os
import re
import socket as sockets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from storm_dagster.api import TopologyBuilder
from storm_dagster.host.processes import RunFile
from storm_dagster.model import paths
from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.child import await_child, start_child, stop_child

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper]

Fault = Literal["full", "read-only"]
FAULTS: tuple[Any, ...] = ("full", pytest.param("read-only", marks=pytest.mark.long))
COMPONENTS = """
import os
from pathlib import Path

from storm_dagster.api import Bolt, Spout


class Numbers(Spout):
    outputs = ["number"]

    def initialize(self, conf, context):
        self.number = 0

    def next_tuple(self):
        if self.number < 100:
            self.number += 1
            self.emit([self.number])


class Echo(Bolt):
    def process(self, tup):
        with Path(os.environ["RIG_FOLDER"], "echoed").open("a") as stream:
            stream.write(f"{tup.values[0]} ")


class Kept(Bolt):
    def process(self, tup):
        self.context.state.save({"number": tup.values[0]})
"""
REFUSED = re.compile(
    r"No space left on device|Read-only file system|disk is full|unable to open database"
)


class Disk:
    """A HOME of its own file system, which can be filled and made read-only."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def refuse(self, fault: Fault) -> None:
        if fault == "read-only":
            subprocess.check_call(["mount", "-o", "remount,ro", self.home])
            return
        with suppress(OSError), (self.home / "filler").open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))

    def accept(self) -> None:
        subprocess.check_call(["mount", "-o", "remount,rw", self.home])
        (self.home / "filler").unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A file system of 16 MiB; only root may mount one."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    options = "size=16m,mode=700"
    if os.geteuid() or subprocess.call(["mount", "-t", "tmpfs", "-o", options, "tmpfs", home]):
        pytest.skip("no file system can be mounted here")
    try:
        yield Disk(home)
    finally:
        subprocess.check_call(["umount", "-l", home])


class Daemon:
    """A daemon process in a HOME, whose standard error is in another file system."""

    def __init__(self, log: Path, role: str, home: Path, *words: str, **env: str) -> None:
        self.log = log
        log.write_text("")
        argv = [sys.executable, "-m", "storm_dagster", "daemon", role, "--home", str(home), *words]
        self.process = start_child(argv, log, env={"STORM_DAGSTER_HOME": str(home), **env})

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        stop_child(self.process)

    def serves(self, condition: Callable[[], object], what: str) -> None:
        await_child(self.process, self.log, condition, 120, what, ignore=(httpx.HTTPError, OSError))

    def refusals(self) -> list[str]:
        """Lines about the disk; no error has more than one, so that no traceback is there."""
        text = self.log.read_text(encoding="utf-8")
        assert "Traceback" not in text, text
        return [line for line in text.splitlines() if REFUSED.search(line)]


@pytest.fixture
def conf(disk: Disk, zk_conf: dict[str, object]) -> dict[str, object]:
    values = {
        **zk_conf,
        "storm.local.hostname": "127.0.0.1",
        "nimbus.http.port": free_port(),
        "nimbus.thrift.port": 0,
        "supervisor.http.port": 0,
        "supervisor.slots.ports": [free_port(), free_port()],
        "nimbus.monitor.backstop.secs": 1,
    }
    (disk.home / "storm.yaml").write_text(json.dumps(values), encoding="utf-8")
    return values


@pytest.mark.parametrize("fault", FAULTS)
def test_a_nimbus_leads_and_serves(
    disk: Disk, conf: dict[str, object], tmp_path: Path, fault: Fault
) -> None:
    url = f"http://127.0.0.1:{conf['nimbus.http.port']}"

    def leads() -> bool:
        return httpx.get(f"{url}/healthz", timeout=2, trust_env=False).json()["leader"]

    log = tmp_path / "nimbus.log"
    with Daemon(log, "nimbus", disk.home) as first:
        first.serves(leads, "the first start")
        blob = httpx.put(f"{url}/v1/blobs/kept", content=b"content", timeout=60, trust_env=False)
        assert blob.status_code < 300
    disk.refuse(fault)
    with Daemon(log, "nimbus", disk.home) as nimbus:
        nimbus.serves(leads, "the leader")
        lines = nimbus.refusals()
        assert any("the read cache in" in line for line in lines), log.read_text()
        if fault == "read-only":
            assert any("`status` and `stop` do not see this nimbus" in line for line in lines)
        assert httpx.get(f"{url}/v1/blobs/kept", trust_env=False).content == b"content"
        paused = httpx.post(
            f"{url}/v1/healing/pause", json={"secs": 1}, timeout=60, trust_env=False
        )
        assert paused.status_code == 200, "it writes the cluster's state"
        refused = httpx.put(f"{url}/v1/blobs/new", content=b"x", timeout=60, trust_env=False)
        assert refused.status_code == 503 and REFUSED.search(refused.text), log.read_text()
    disk.accept()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_supervisor_withdraws_its_slots_and_says_why(
    disk: Disk, conf: dict[str, object], tmp_path: Path, fault: Fault
) -> None:
    cluster = StormClusterState.open(conf, create_root=True)
    cluster.state.mkdirs(paths.SUPERVISORS)

    def info() -> Any:
        records = [*cluster.load_view().supervisors.values()]
        return records[0] if records else None

    try:
        log = tmp_path / "supervisor.log"
        with Daemon(log, "supervisor", disk.home) as first:
            first.serves(lambda: info() and len(info().ports) == 2, "the first start")
        disk.refuse(fault)
        with Daemon(log, "supervisor", disk.home) as supervisor:
            supervisor.serves(lambda: info() and info().withdrawn, "the withdrawal")
            assert info().ports == ()
            assert f"{disk.home} cannot be written (" in info().withdrawn
            assert REFUSED.search(info().withdrawn)
            assert supervisor.refusals()
            disk.accept()
            eventually(lambda: len(info().ports) == 2 and not info().withdrawn, timeout=60)
    finally:
        cluster.disconnect()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_runs_the_tasks_that_need_no_disk(disk: Disk, stage: Stage, fault: Fault) -> None:
    builder = TopologyBuilder("wc")
    builder.set_spout("numbers", "rig_code:Numbers", outputs=["number"])
    builder.set_bolt("echo", "rig_code:Echo", inputs="numbers")
    builder.set_bolt("kept", "rig_code:Kept", inputs="numbers")
    tasks = {"numbers": "1", "echo": "2", "kept": "3", "__acker": "8", "__topology_master": "9"}
    rig = stage.workers(builder, tasks, code=COMPONENTS)
    rig.disk = disk.home
    slot = ("s1", free_port())
    rig.assign({slot: "1-3,8-9"})
    disk.refuse(fault)
    rig.start(*slot)
    echoed = rig.folder / "echoed"
    eventually(lambda: len(echoed.read_text()) > 20, 90, "tuples", ignore=(OSError,))

    def errors() -> list[str]:
        path = paths.task_errors(rig.topology_id, "kept")
        nodes = rig.cluster.state.find_children(path) or ()
        return [str(rig.cluster.state.get_data(f"{path}/{node}")) for node in nodes]

    eventually(lambda: any(REFUSED.search(text) for text in errors()), 60, "the error of the state")
    lines = [line for line in rig.log(*slot).splitlines() if REFUSED.search(line)]
    for lacking in ("do not see this worker", "the log ", "the heartbeat file "):
        assert len([line for line in lines if lacking in line]) == 1, rig.log(*slot)
    disk.accept()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_the_web_application_serves(
    disk: Disk, conf: dict[str, object], tmp_path: Path, fault: Fault
) -> None:
    instance = tmp_path / "instance"
    instance.mkdir()
    (instance / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    workspace = instance / "workspace.yaml"
    workspace.write_text("load_from: []\n")
    (disk.home / "logs").mkdir()
    disk.refuse(fault)
    port = str(free_port())
    words = ("--port", port, "--workspace", str(workspace))
    with Daemon(tmp_path / "web.log", "web", disk.home, *words, DAGSTER_HOME=str(instance)) as web:
        url = f"http://127.0.0.1:{port}/server_info"
        web.serves(
            lambda: httpx.get(url, timeout=2, trust_env=False).status_code in (200, 401), "its page"
        )
        assert web.refusals()
    disk.accept()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_the_code_server_serves(
    disk: Disk, conf: dict[str, object], tmp_path: Path, fault: Fault
) -> None:
    disk.refuse(fault)
    socket = tmp_path / "code.sock"
    words = ("--socket", str(socket))
    with Daemon(tmp_path / "code.log", "code", disk.home, *words) as code:
        check = [sys.executable, "-m", "dagster", "api", "grpc-health-check", "-s", str(socket)]
        code.serves(
            lambda: socket.exists() and subprocess.call(check, stderr=subprocess.DEVNULL) == 0,
            "its socket",
        )
        assert "Traceback" not in code.log.read_text(encoding="utf-8")
    disk.accept()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_spark_serves_from_a_temporary_folder(
    disk: Disk, conf: dict[str, object], tmp_path: Path, fault: Fault
) -> None:
    port = free_port()
    values = {**conf, "spark.connect.port": port, "spark.driver.memory": "512m"}
    (disk.home / "storm.yaml").write_text(json.dumps(values), encoding="utf-8")
    secret = disk.home / "spark"
    secret.mkdir()
    run_first = tmp_path / "first.log"
    with Daemon(run_first, "spark", disk.home, TMPDIR=str(tmp_path)) as first:
        first.serves(lambda: answers(port), "the first start")
    disk.refuse(fault)
    log = tmp_path / "spark.log"
    with Daemon(log, "spark", disk.home, TMPDIR=str(tmp_path)) as spark:
        spark.serves(lambda: answers(port), "Spark")
        text = log.read_text(encoding="utf-8")
        assert f"{disk.home / 'spark'} cannot be written" in text and "Spark uses" in text
    disk.accept()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["full", "read-only"])
@pytest.mark.parametrize("role", ["zookeeper", "dev"])
def test_where_nothing_can_be_served_one_line_says_so(
    disk: Disk, conf: dict[str, object], fault: Fault, role: str
) -> None:
    """ZooKeeper acknowledges nothing that is not on its disk, and ``dev`` starts one."""
    (disk.home / "storm.yaml").unlink()
    disk.refuse(fault)
    words = ("dev",) if role == "dev" else ("daemon", "zookeeper", "--port", str(free_port()))
    done = run_cli(*words, "--home", str(disk.home), home=disk.home)
    assert done.code in (2, 4), done.err
    assert "Traceback" not in done.err
    error = re.compile(r"(Unavailable|InvalidRequest): .* cannot be written")
    assert len([line for line in done.err.splitlines() if error.match(line)]) == 1, done.err
    disk.accept()
    assert not [record for record in RunFile.read_all(disk.home) if record.alive()]


def answers(port: int) -> bool:
    with sockets.create_connection(("127.0.0.1", port), timeout=2):
        return True
