"""The conf of a worker's process: what the supervisor starts it with, and what it reads itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.core.slots.model import Work
from storm_dagster.core.submission.conf import normalize_conf, total_conf
from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.model.conf import default_conf
from storm_dagster.model.conf_layers import SUBMITTED_KEYS
from storm_dagster.model.topology import decode_topology
from storm_dagster.supervisor.launcher import SPEC, Launcher
from storm_dagster.supervisor.localizer import LocalCode
from storm_dagster.testing.waiting import patience
from storm_dagster.worker.runtime.process import _load
from storm_rigs.stage.records import WORD_COUNT


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A program in the place of the interpreter, which writes down its environment."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nenv > environment\n")
    program.chmod(0o755)
    return program


def start(home: Path, cluster: dict[str, Any], stored: dict[str, Any]) -> tuple[WorkerSpec, str]:
    """Start a worker and wait for its end; its spec and its environment."""
    code = home / "code"
    code.mkdir()
    (code / "stormconf.ser").write_text(json.dumps(stored))
    (code / "stormcode.ser").write_text(json.dumps(WORD_COUNT))
    launcher = Launcher(home, "s1", "127.0.0.1", cluster)
    launched = launcher.launch(6900, Work("a-1-1", "a-1-1"), LocalCode(code, "0" * 64))
    assert launched.process.child is not None and launched.process.child.wait(patience(30)) == 0
    (folder,) = (home / "workers").iterdir()
    return WorkerSpec.read(folder / SPEC), (folder / "environment").read_text()


@pytest.mark.parametrize(
    ("submitted", "color"),
    [({}, "red"), ({"topology.environment": {"COLOR": "blue"}}, "blue")],
    ids=["of the cluster", "of the topology"],
)
def test_supervisor_and_worker_see_the_conf_that_the_submission_saw(
    tmp_path: Path, python: Path, submitted: dict[str, Any], color: str
) -> None:
    cluster = {
        **default_conf(),
        "topology.python": str(python),
        "topology.environment": {"COLOR": "red"},
        "topology.max.spout.pending": 7,
        "topology.debug": True,
        "storm.zookeeper.root": "/ours",
    }
    submitted = {
        **submitted,
        "topology.max.spout.pending": None,
        "storm.zookeeper.root": "/forged",
        "storm.security.peer.users": ["nobody"],
        "storm.security.daemon.user": 4711,
        "my.key": None,
    }
    stored = normalize_conf(cluster, submitted, decode_topology(json.dumps(WORD_COUNT)), "a-1-1")
    accepted = total_conf(cluster, stored)
    spec, environment = start(tmp_path, cluster, stored)
    assert f"COLOR={color}\n" in environment
    conf, _ = _load(spec)
    # The supervisor tells its workers who it is, and nobody else trusts more servers for them.
    accepted["storm.security.daemon.user"] = os.getuid()
    assert {key: conf[key] for key in accepted} == accepted
    assert conf["storm.security.peer.users"] == []
    assert conf["topology.max.spout.pending"] is None and conf["topology.debug"] is True
    assert conf["storm.zookeeper.root"] == "/ours"


def test_a_worker_reads_the_stored_conf_of_the_release_before(tmp_path: Path, python: Path) -> None:
    stored = {
        SUBMITTED_KEYS: ["my.key", "${env:NO_SUCH_VARIABLE}"],
        "my.key": "a",
        "topology.debug": None,
        "storm.zookeeper.servers": ["forged"],
    }
    cluster = {**default_conf(), "topology.python": str(python)}
    spec, _ = start(tmp_path, cluster, stored)
    conf, _ = _load(spec)
    assert SUBMITTED_KEYS not in conf
    assert (conf["my.key"], conf["topology.debug"]) == ("a", False)
    assert conf["storm.zookeeper.servers"] == default_conf()["storm.zookeeper.servers"]
