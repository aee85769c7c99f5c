"""Definitions, command line and harness on a system without what only Linux has; daemons of hosts
refuse it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from storm_dagster.testing.waiting import patience
from storm_rigs.stage.daemons import Daemons

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
STEADY = Path(__file__).parents[1] / "cluster" / "topologies" / "steady.py"
PROGRAM = Path(__file__).with_name("other_system.py")


@pytest.fixture(scope="module")
def seen(
    tmp_path_factory: pytest.TempPathFactory, zookeeper_server: str
) -> Iterator[dict[str, Any]]:
    """Observations of the program on a cluster on which a topology runs."""
    folder = tmp_path_factory.mktemp("other")
    conf = {"storm.zookeeper.root": "/other-system"}
    with Daemons(
        folder / "cluster", [zookeeper_server], nimbuses=1, supervisors=1, conf=conf
    ) as daemons:
        daemons.wait_running(daemons.submit(str(STEADY), "steady"))
        home = folder / "laptop"
        home.mkdir()
        own = {key: daemons.conf[key] for key in ("nimbus.seeds", "storm.zookeeper.servers", *conf)}
        (home / "storm.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(home), str(STEADY)],
            capture_output=True, text=True, timeout=patience(300), cwd=folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-6000:]
        yield json.loads(done.stdout.splitlines()[-1])


def test_definitions_load_and_every_sensor_and_schedule_ticks(seen: dict[str, Any]) -> None:
    ticks = {name: text for name, (_, text) in seen["ticks"].items()}
    assert {"heartbeat_sensor", "lifecycle_sensor", "inbox_cleanup_schedule"} <= set(ticks)
    assert [name for name in ticks if "declared" in name], (
        "a declared topology has a sensor of its own"
    )
    # Each saw the cluster: a sensor that cannot reach it skips as well, and says why.
    assert ticks["heartbeat_sensor"].startswith(
        "2 workers of 1 topologies live on 1 supervisors"
    ), ticks
    assert ticks["alert_sensor"] == "0 alerts sent, 0 problems known"
    assert not [
        name for name, text in ticks.items() if "out of reach" in text or "Linux" in text
    ], ticks


def test_the_command_line_lists_topologies(seen: dict[str, Any]) -> None:
    code, document, error = seen["list"]
    assert code == 0, error
    assert [row["name"] for row in document["topologies"]] == ["steady"]


def test_the_harness_runs_a_topology(seen: dict[str, Any]) -> None:
    assert seen["harness"] == 3


@pytest.mark.parametrize("who", ["supervisor", "dev", "worker"])
def test_what_owns_processes_says_that_it_needs_linux(seen: dict[str, Any], who: str) -> None:
    code, said = seen["refusals"][who]
    assert code == 2
    assert said.startswith("InvalidRequest: a ") and "needs Linux" in said and "container" in said


def test_a_process_is_known_exactly_all_the_same(seen: dict[str, Any]) -> None:
    assert seen["identity"] == [True] * 8


def test_make_says_so_before_it_installs_anything(tmp_path: Path) -> None:
    fake = tmp_path / "uname"
    fake.write_text("#!/bin/sh\necho Darwin\n")
    fake.chmod(0o755)
    for target in ("demo", "test"):
        done = subprocess.run(
            ["make", target, f"VENV={tmp_path / 'venv'}"],
            capture_output=True, text=True, timeout=patience(60), cwd=ROOT,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        )  # fmt: skip
        assert done.returncode != 0
        assert "supervisors and workers need Linux, and this is Darwin" in done.stderr
        assert not (tmp_path / "venv").exists()
