"""Ending a cluster: exactly its processes, workers first, and none survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storm_dagster.cli.dev.daemon import Daemon, DaemonSpec
from storm_dagster.cli.dev.ending import end_cluster, family
from storm_dagster.client.command import CLUSTER_MARK
from storm_dagster.host.processes import RunFile, start_ticks
from storm_dagster.testing.waiting import eventually

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts Python code as a process of the cluster in ``tmp_path``."""
    started: list[subprocess.Popen[bytes]] = []

    def go(
        code: str, role: str | None = None, name: str = "0", mark: str = ""
    ) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-c", "import signal, os, sys, time, subprocess\n" + code],
            env={**os.environ, "STORM_DAGSTER_HOME": str(tmp_path), CLUSTER_MARK: mark},
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        started.append(child)
        if role is not None:
            RunFile.write(tmp_path, role, name, pid=child.pid)
        # Its first line says that its handlers stand.
        assert child.stdout is not None and child.stdout.readline()
        return child

    yield go
    for child in started:
        if child.poll() is None:
            child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


SLEEP = "print('up', flush=True)\ntime.sleep(600)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP


def gone(child: subprocess.Popen[bytes]) -> bool:
    return start_ticks(child.pid) is None


def test_all_are_ended_and_files_removed(tmp_path: Path, start: Start) -> None:
    children = [
        start(SLEEP, "nimbus", "n1"),
        start(SLEEP, "worker", "s1-6900"),
        start(STUBBORN, "spark"),
    ]
    assert end_cluster(tmp_path, grace=1.0) == []
    assert all(gone(child) for child in children)
    assert list((tmp_path / "run").iterdir()) == []


def test_workers_end_before_a_supervisor_can_react(tmp_path: Path, start: Start) -> None:
    log = tmp_path / "order"
    note = f"\ndef end(*_):\n    open({str(log)!r}, 'a').write(NAME + '\\n')\n    sys.exit(0)\nsignal.signal(signal.SIGTERM, end)\n"
    start("NAME = 'supervisor'" + note + SLEEP, "supervisor", "s1")
    start("NAME = 'worker'" + note + SLEEP, "worker", "s1-6900")
    start("NAME = 'zookeeper'" + note + SLEEP, "zookeeper")
    assert end_cluster(tmp_path, grace=60.0) == []
    assert log.read_text().split() == ["worker", "supervisor", "zookeeper"]


def test_descendants_go_too_whatever_session_they_took(tmp_path: Path, start: Start) -> None:
    code = (
        "print('up', flush=True)\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tmp_path / 'forked')!r}, 'w').close()\n"
        "time.sleep(600)"
    )
    leader = start(code, "dagster-code", mark="m-1")
    RunFile.write(tmp_path, "dev", "m-1", pid=leader.pid)
    eventually((tmp_path / "forked").exists, what="the descendants")
    records = RunFile.read_all(tmp_path)
    assert len(family(tmp_path, records)) == 3
    # Even when the leader was killed from outside, its descendants are found.
    leader.kill()
    leader.wait()
    assert len(family(tmp_path, records)) == 2
    assert end_cluster(tmp_path, grace=1.0) == []
    assert family(tmp_path, records) == []


def test_other_processes_are_left_alone(tmp_path: Path, start: Start) -> None:
    other = start(SLEEP)
    reused = RunFile.write(tmp_path, "nimbus", "n1", pid=other.pid)
    record = reused.model_copy(update={"start_ticks": reused.start_ticks - 1})
    RunFile.path_of(tmp_path, "nimbus", "n1").write_text(record.model_dump_json(), encoding="utf-8")
    (tmp_path / "run" / "garbage-0.json").write_text("{", encoding="utf-8")
    assert end_cluster(tmp_path, grace=0.5) == []
    assert not gone(other)


def test_a_frozen_process_is_ended(tmp_path: Path, start: Start) -> None:
    child = start(SLEEP, "nimbus", "n1")
    os.kill(child.pid, signal.SIGSTOP)
    assert end_cluster(tmp_path, grace=1.0) == []
    assert gone(child)


def test_a_dead_daemon_is_started_again_and_its_leftovers_end(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open(sys.argv[1], 'a').write(f'{os.getpid()} {child.pid}\\n')\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "starts"
    spec = DaemonSpec("nimbus", "n1", (sys.executable, "-c", code, str(log)), {"http": 1})
    daemon = Daemon(spec, tmp_path, {**os.environ, "STORM_DAGSTER_HOME": str(tmp_path)})
    daemon.start()

    def starts(count: int) -> list[list[int]]:
        lines = log.read_text().splitlines() if log.exists() else []
        return (
            [[int(part) for part in line.split()] for line in lines] if len(lines) >= count else []
        )

    try:
        (first, child), *_ = eventually(lambda: starts(1), what="the first start")
        os.kill(first, signal.SIGKILL)

        def restarted() -> bool:
            daemon.watch()
            return len(starts(2)) == 2

        eventually(restarted, what="the second start")
        assert start_ticks(child) is None
        assert daemon.pid == starts(2)[1][0] and daemon.deaths == 1
        record = RunFile.read(RunFile.path_of(tmp_path, "nimbus", "n1"))
        assert record is not None and record.pid == daemon.pid
    finally:
        assert end_cluster(tmp_path, grace=1.0, reap=daemon.reap) == []
    assert daemon.pid is None
