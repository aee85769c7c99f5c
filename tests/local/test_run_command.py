"""``storm-dagster run``: a topology in one process, as a user of the command sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.host.waiting import poll
from storm_dagster.local.code import load_code, make_importable, prepare_topology
from storm_dagster.local.tail import sinks
from storm_dagster.local.topology_run import RunLimits, TopologyRun
from storm_dagster.model.conf import default_conf
from storm_dagster.testing.waiting import patience

HERE = Path(__file__).parent
TOPOLOGIES = str(HERE / "topologies.py")
WITHOUT_LINUX = """
import os, select, socket, sys

for name in [name for name in dir(select) if name.lower().startswith("epoll")]:
    delattr(select, name)
if hasattr(socket, "AF_NETLINK"):
    del socket.AF_NETLINK


def refuse_proc(event, args):
    if event == "open" and isinstance(args[0], str | bytes):
        if os.fsdecode(args[0]).startswith("/proc"):
            raise FileNotFoundError(2, "no /proc on this system", args[0])


sys.addaudithook(refuse_proc)
from storm_dagster.cli import main

main()
"""
"""The command line on a system that has neither /proc nor epoll nor AF_NETLINK."""


def command(target: str, *options: str) -> list[str]:
    name = target if ".py" in target else f"{TOPOLOGIES}:{target}"
    return [sys.executable, "-m", "storm_dagster", "run", name, *options]


def run(target: str, *options: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(target, *options), capture_output=True, text=True, timeout=120, **settings
    )


def last_report(output: str) -> dict[str, Any]:
    return json.loads(output.splitlines()[-1])


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["component"]: row for row in report["components"]}


def test_a_table_shows_what_flowed_and_the_last_tuples() -> None:
    done = run("Sums", "--until-idle", "1")
    assert done.returncode == 0, done.stderr
    assert "numbers" in done.stdout and "emitted/s" in done.stdout
    # The sum of 0, 2, 4, ... 398.
    assert "total: 39800" in done.stdout
    assert "(idle for 1 s): 200 tuples of spouts, 0 failed, 0 errors" in done.stdout
    assert "topology.workers" in done.stdout, "it says what a cluster would do otherwise"


def test_json_is_one_document_in_each_line() -> None:
    done = run("Sums", "--until-idle", "1", "--json", "--show", "double")
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert (
        len(reports) >= 1 and [report["end"] is None for report in reports[:-1]].count(False) == 0
    )
    report = reports[-1]
    assert report["end"] == "idle for 1 s" and report["topology"] == "Sums"
    assert rows(report)["numbers"]["acked"] == 200
    assert rows(report)["total"]["executed"] == 200
    assert rows(report)["double"]["tasks"] == 2
    assert len(report["last"]["double"]) == 5 and "total" not in report["last"]


def test_blocking_components_and_state_work(tmp_path: Path) -> None:
    for times in (1, 2):
        done = run("Blocking", "--until-idle", "1", "--json", "--state-dir", str(tmp_path))
        assert done.returncode == 0, done.stderr
        last = last_report(done.stdout)["last"]["total"]
        assert last[-1]["values"] == [times * 39800], "the second run continues the sum"


def test_without_a_state_folder_nothing_is_left(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    assert run("Blocking", "--until-idle", "1", env=env).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_errors_and_reports_to_dagster_are_printed() -> None:
    done = run("Fails", "--until-idle", "1", "--json")
    report = last_report(done.stdout)
    assert done.returncode == 1, "a task reported an error"
    assert "thirteen" in done.stderr and "topologies.py" in done.stderr
    assert "Dagster: materialization of lake/hour, partition 2026-01-01" in done.stderr
    assert report["events"] == 1 and report["errors"] == 2
    assert rows(report)["picky"]["errors"] == 2
    assert rows(report)["numbers"]["acked"] == 200 and rows(report)["numbers"]["failed"] == 2


def test_a_component_that_cannot_start_is_named_and_the_run_ends() -> None:
    done = run("NeverStarts", "--until-idle", "1", "--json")
    assert done.returncode == 1 and "the source is not there" in done.stderr
    assert rows(last_report(done.stdout))["numbers"]["running"] == 0


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("nowhere.py", (), "file nowhere.py does not exist"),
        ("Nothing", (), "has no attribute 'Nothing'"),
        ("Sums", ("--conf", "topology.wokers=2"), "did you mean 'topology.workers'"),
        ("Sums", ("--show", "dubble"), "--show 'dubble' is no component of the topology"),
        ("Sums", ("--conf", "a.key=${env:NOT_THERE}"), "NOT_THERE"),
        ("Sums", ("--state-dir", "/dev/null/x"), "--state-dir"),
    ],
)
def test_bad_input_is_one_line(target: str, options: tuple[str, ...], said: str) -> None:
    done = run(target, *options, "--seconds", "1")
    assert done.returncode == 2
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr and not done.stdout


def start(target: str, *options: str, folder: Path) -> subprocess.Popen[str]:
    """Start a run, and return when it has shown something."""
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command(target, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "a cluster restarts" in line:
            return process
    raise AssertionError("the run ended before it began")


def test_ctrl_c_ends_the_run_with_its_table(tmp_path: Path) -> None:
    process = start("Endless", folder=tmp_path)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=patience(60))[0]
    assert process.returncode == 0 and "Endless ended after" in output and "(Ctrl-C)" in output
    assert list(tmp_path.iterdir()) == []


def test_a_second_ctrl_c_does_not_wait_for_a_component(tmp_path: Path) -> None:
    process = start("NeverYields", folder=tmp_path)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=patience(8))
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_spout_that_never_returns_is_named_and_left(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = run("NeverYields", "--seconds", "1", env=env)
    assert done.returncode == 1
    assert "component 'numbers' has not returned" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert list(tmp_path.iterdir()) == []


def test_it_needs_nothing_of_linux(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LINUX, "run", f"{TOPOLOGIES}:Sums", "--until-idle", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "total: 39800" in done.stdout


def test_no_java_is_named_before_spark_starts(tmp_path: Path) -> None:
    (tmp_path / "sparky.py").write_text(
        "from storm_dagster.api import SparkSpout, TopologyBuilder\n"
        "def source(spark):\n    return None\n"
        "builder = TopologyBuilder('sparky')\n"
        "builder.set_spout('rows', SparkSpout, outputs=['n'],"
        " args={'source': 'sparky:source', 'checkpoint': '/tmp/none'})\n"
    )
    env = {**os.environ, "PATH": tempfile.gettempdir(), "JAVA_HOME": ""}
    done = run(str(tmp_path / "sparky.py"), "--seconds", "1", env=env)
    assert done.returncode == 2 and "component 'rows' runs on Spark" in done.stderr
    assert "topology.spark.remote" in done.stderr and len(done.stderr.splitlines()) == 1


def test_memory_of_a_run_does_not_grow(tmp_path: Path) -> None:
    """Neither tuples nor reports are kept: what is shown is bounded."""
    code = load_code(f"{TOPOLOGIES}:Endless", [], folder=tmp_path)
    topology = prepare_topology(default_conf(), code, {})
    make_importable(code.root)
    endless = TopologyRun(
        name="endless",
        spec=topology.spec,
        conf=topology.conf,
        archive=code.root,
        state_dir=tmp_path / "state",
        scratch=tmp_path,
        shown=sinks(topology.spec),
        report_secs=0.02,
    )
    sizes: list[int] = []

    def measure() -> None:
        while len(sizes) < 10:
            passes = endless.passes
            assert poll(lambda at=passes: endless.passes > at + 300, timeout=patience(60))
            sizes.append(tracemalloc.get_traced_memory()[0])
        endless.stop("measured")

    tracemalloc.start()
    try:
        thread = threading.Thread(target=measure)
        thread.start()
        report = endless.run(RunLimits(secs=60))
        thread.join()
    finally:
        tracemalloc.stop()
    assert report.end == "measured"
    assert sizes[-1] < sizes[3] + 200_000, sizes
