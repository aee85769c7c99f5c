"""Spares of a cluster's supervisors: what a worker that was one sees, and when they end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from storm_dagster.host.worker_spec import SPARE
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.long,
    pytest.mark.timeout(300),
]

TOPOLOGY = """
import difflib, json, os, sys
from pathlib import Path
from storm_dagster.api import Spout, Topology

class Witness(Spout):
    outputs = ["nothing"]

    def initialize(self, conf, context):
        seen = {
            "pid": os.getpid(), "session": os.getsid(0), "folder": os.getcwd(), "argv": sys.argv[1:], "path": sys.path,
            "environment": {name: value for name, value in os.environ.items()},
            "files": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],
            "difflib": difflib.__file__,
        }
        file = Path(conf["test.file"])
        file.with_suffix(".new").write_text(json.dumps(seen))
        file.with_suffix(".new").rename(file)

    def next_tuple(self):
        pass

class Sees(Topology):
    witness = Witness.spec()
"""


def _spares(cluster: LocalCluster, *supervisors: int) -> set[int]:
    """Pids of what waits, of those supervisor processes."""

    def waits(line: list[str]) -> bool:
        return (
            line[-1:] == [SPARE] and str(cluster.home) in line[-2] and not Path(line[-2]).exists()
        )

    return {
        process.pid
        for process in psutil.process_iter(["ppid", "cmdline"])
        if process.info["ppid"] in supervisors and waits(process.info["cmdline"] or [])
    }


def _supervisors(cluster: LocalCluster) -> list[int]:
    return [record.pid for record in cluster.processes("supervisor")]


def _all_wait(cluster: LocalCluster) -> bool:
    number = cluster.conf["supervisor.worker.spares"]
    return all(len(_spares(cluster, pid)) == number for pid in _supervisors(cluster))


def _seen(cluster: LocalCluster, folder: Path, name: str, *conf: str) -> dict[str, Any]:
    """What a worker of the topology in that folder sees; ids of this start are left out."""
    file = folder / f"{name}.json"
    options = [
        part
        for each in (f"test.file={file}", "topology.acker.executors=0", *conf)
        for part in ("--conf", each)
    ]
    cluster.cli("submit", "topology.py:Sees", "--name", name, *options, cwd=folder)
    try:
        seen = json.loads(eventually(lambda: file.exists() and file.read_text(), 60, "the worker"))
        document = cluster.wait_running(name)
        (worker,) = document["workers"]
        assert worker["pid"] == seen["pid"] == seen["session"]
        text = json.dumps(seen | {"pid": 0, "session": 0}).replace(document["id"], "TOPOLOGY")
        for word, value in (
            ("WORKER", Path(seen["folder"]).name),
            ("PORT", worker["port"]),
            ("NODE", worker["node"]),
        ):
            text = text.replace(str(value), word)
        return json.loads(text) | {"pid": seen["pid"]}
    finally:
        cluster.cli("kill", name, "-w", "0")


def test_a_worker_that_was_a_spare_sees_what_any_other_sees(
    shared_cluster: LocalCluster, tmp_path: Path
) -> None:
    (tmp_path / "topology.py").write_text(TOPOLOGY)
    eventually(lambda: _all_wait(shared_cluster), 120, "spares")
    waiting = _spares(shared_cluster, *_supervisors(shared_cluster))
    spare = _seen(shared_cluster, tmp_path, "sees")
    assert spare.pop("pid") in waiting
    # What has an environment of its own is started anew.
    other = _seen(shared_cluster, tmp_path, "sees", 'topology.environment={"OF_ITS_OWN":"1"}')
    assert other.pop("pid") not in waiting
    assert other["environment"].pop("OF_ITS_OWN") == "1"
    assert spare == other


def test_modules_of_an_archive_go_before_those_that_a_spare_has_imported(
    shared_cluster: LocalCluster, tmp_path: Path
) -> None:
    (tmp_path / "topology.py").write_text(TOPOLOGY)
    (tmp_path / "difflib.py").write_text("get_close_matches = list\n")
    eventually(lambda: _all_wait(shared_cluster), 120, "spares")
    waiting = _spares(shared_cluster, *_supervisors(shared_cluster))
    seen = _seen(shared_cluster, tmp_path, "shadows")
    assert seen["pid"] in waiting
    assert seen["difflib"].endswith("/code/difflib.py")


def test_spares_end_with_their_supervisor_and_workers_start_without_them(
    shared_cluster: LocalCluster, tmp_path: Path
) -> None:
    (tmp_path / "topology.py").write_text(TOPOLOGY)
    eventually(lambda: _all_wait(shared_cluster), 120, "spares")
    for supervisor, number in zip(
        _supervisors(shared_cluster), (signal.SIGKILL, signal.SIGTERM), strict=False
    ):
        waiting = _spares(shared_cluster, supervisor)
        os.kill(supervisor, number)
        eventually(
            lambda pids=waiting: not any(map(psutil.pid_exists, pids)), 30, "the end of its spares"
        )
    for pid in _spares(shared_cluster, *_supervisors(shared_cluster)):
        os.kill(pid, signal.SIGKILL)
    assert _seen(shared_cluster, tmp_path, "without")["argv"]
    eventually(lambda: _all_wait(shared_cluster), 120, "spares again")
