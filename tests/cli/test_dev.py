"""A signal ends ``dev`` and all of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.processes import processes_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
# An address where nothing listens: then dev starts no Spark of its own, which these tests do not
# need.
NO_SPARK = "sc://127.0.0.1:9"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(tmp_path: Path, number: int) -> None:
    """Also for a ``dev &`` of a script, to whose children the shell gives an ignored SIGINT."""
    home = tmp_path / "home"
    pid_file = tmp_path / "pid"
    out = tmp_path / "out"
    options = f"--json --ports auto --home {home} -c spark.remote={NO_SPARK} --supervisors 1"
    script = f"{sys.executable} -m storm_dagster dev {options} > {out} 2> {tmp_path / 'err'} & echo $! > {pid_file}; wait"
    shell = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    try:
        eventually(
            lambda: out.exists() and out.read_text().rstrip().endswith("}"),
            200,
            "the cluster",
            interval=0.2,
        )
        assert json.loads(out.read_text())["supervisors"][0]["id"] == "s1"
        assert len(processes_of(home)) >= 5
        os.kill(int(pid_file.read_text()), number)
        shell.wait(patience(60))
        assert processes_of(home) == []
        assert not (home / "cluster.json").exists()
        remembered = json.loads((home / "dev.json").read_text())
        assert remembered["conf"]["spark.remote"] == NO_SPARK and remembered["ports"]["zookeeper"]
        assert (home / "dev.json").stat().st_mode & 0o777 == 0o600
        assert not (home / "ports.json").exists()
    finally:
        if shell.poll() is None:
            shell.terminate()
            shell.wait()
        run_cli("stop", home=home)
