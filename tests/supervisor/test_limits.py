"""Limits of workers: memory, core dumps, files."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.core.slots.model import Work, Worker
from storm_dagster.model.clock import boot_id
from storm_dagster.model.conf import default_conf
from storm_dagster.model.processes import start_ticks
from storm_dagster.supervisor.launcher import Launcher
from storm_dagster.supervisor.limits import MemoryGuard
from storm_dagster.supervisor.localizer import LocalCode
from storm_dagster.supervisor.processes import LiveWorker, WorkerProcess
from storm_dagster.testing.waiting import eventually

MIB = 2**20
_EATS = "import sys, time; held = bytearray(b'x' * int(sys.argv[1])); print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def eat(tmp_path: Path) -> Iterator[Callable[[int], LiveWorker]]:
    """Starts a process that holds so many bytes, as a worker of ``wc-1-1`` in slot 6900."""
    started: list[subprocess.Popen[bytes]] = []

    def start(count: int) -> LiveWorker:
        command = [sys.executable, "-S", "-c", _EATS, str(count)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        started.append(child)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        process = WorkerProcess(child.pid, start_ticks(child.pid) or -1, boot_id(), child)
        return LiveWorker(6900, Worker("w1", Work("wc-1-1", "wc-1-1")), process, tmp_path / "beat", tmp_path / "log")

    yield start
    for child in started:
        child.kill()
        child.wait()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "wc-1-1"
    folder.mkdir()
    (folder / "stormconf.ser").write_text(json.dumps({"worker.memory.size": 100 * MIB}))
    return folder


def guard(code: Path, told: list[tuple[str, int, str]], cgroups: Path, **conf: Any) -> MemoryGuard:
    values = {**default_conf(), "supervisor.worker.memory.enforce": True, **conf}
    return MemoryGuard(values, lambda code_dir: code.parent / code_dir, lambda *error: told.append(error), cgroups)


def test_a_worker_over_its_memory_is_ended_and_the_error_names_both_numbers(
    eat: Callable[[int], LiveWorker], code: Path, tmp_path: Path
) -> None:
    told: list[tuple[str, int, str]] = []
    watching = guard(code, told, tmp_path / "no" / "cgroups")
    modest = eat(20 * MIB)
    watching.check([modest], 1.0)
    assert modest.process.alive() and not told
    greedy = eat(200 * MIB)
    greedy.worker = Worker("w2", greedy.worker.work)
    watching.check([modest, greedy], 2.0)
    eventually(lambda: not greedy.process.alive(), what="the end of the worker")
    (error,) = told
    assert error[:2] == ("wc-1-1", 6900)
    assert "used 20" in error[2] and "worker.memory.size allows 100.0 MiB" in error[2]
    assert modest.process.alive()


def test_the_memory_is_a_label_unless_it_is_enforced(
    eat: Callable[[int], LiveWorker], code: Path, tmp_path: Path
) -> None:
    told: list[tuple[str, int, str]] = []
    greedy = eat(200 * MIB)
    guard(code, told, tmp_path, **{"supervisor.worker.memory.enforce": False}).check([greedy], 1.0)
    assert default_conf()["supervisor.worker.memory.enforce"] is False
    assert greedy.process.alive() and not told


def test_a_cgroup_holds_the_worker_where_one_can_be_made(
    eat: Callable[[int], LiveWorker], code: Path, tmp_path: Path
) -> None:
    """With files in the place of the kernel's."""
    top = tmp_path / "cgroup"
    group = top / "storm_dagster" / "w1"
    group.mkdir(parents=True)
    (top / "cgroup.controllers").write_text("cpu memory pids")
    names = ["memory.max", "memory.oom.group", "cgroup.procs"]
    for file in (
        top / "cgroup.subtree_control",
        group.parent / "cgroup.subtree_control",
        *(group / name for name in names),
    ):
        file.touch()
    told: list[tuple[str, int, str]] = []
    watching = guard(code, told, group.parent)
    worker = eat(20 * MIB)
    watching.check([worker], 1.0)
    assert [(group / name).read_text() for name in names] == [str(100 * MIB), "1", str(worker.process.pid)]
    (group / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    (group / "memory.peak").write_text(str(100 * MIB))
    watching.check([], 2.0)
    assert "used 100.0 MiB of memory, worker.memory.size allows 100.0 MiB" in told[0][2]


def test_a_worker_leaves_no_core_dump_and_opens_no_more_files_than_it_may(tmp_path: Path, code: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    (code / "stormconf.ser").write_text(json.dumps({"topology.python": str(python)}))
    conf = {**default_conf(), "supervisor.worker.max.files": 200}
    launched = Launcher(tmp_path, "s1", "127.0.0.1", conf).launch(
        6900, Work("wc-1-1", "wc-1-1"), LocalCode(code, "0" * 64)
    )
    try:
        assert resource.prlimit(launched.process.pid, resource.RLIMIT_CORE) == (0, 0)
        assert resource.prlimit(launched.process.pid, resource.RLIMIT_NOFILE) == (200, 200)
    finally:
        launched.process.end()
        assert launched.process.child is not None
        launched.process.child.wait()
