"""Limits of workers: memory, core dumps, files."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.core.slots.model import Work, Worker, desired_slots
from storm_dagster.host.cgroups import Cgroup
from storm_dagster.host.clock import boot_id
from storm_dagster.host.processes import start_ticks
from storm_dagster.model.conf import default_conf
from storm_dagster.model.records import Assignment, WorkerSlot
from storm_dagster.supervisor import launcher
from storm_dagster.supervisor.launcher import Launcher
from storm_dagster.supervisor.limits import MemoryGuard
from storm_dagster.supervisor.localizer import LocalCode
from storm_dagster.supervisor.processes import LiveWorker, WorkerProcess
from storm_dagster.supervisor.worker_cgroups import WorkerCgroup
from storm_dagster.testing.waiting import eventually

MIB = 2**20


def size_of(topology_id: str, memory_bytes: int) -> dict[tuple[str, int], WorkerSlot]:
    """The placement of the topology's worker on port 6900."""
    worker = WorkerSlot(node="s1", host="h", port=6900, tasks="1", memory_bytes=memory_bytes)
    return {(topology_id, worker.port): worker}


SIZE = size_of("wc-1-1", 100 * MIB)
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
        return LiveWorker(
            6900,
            Worker("w1", Work("wc-1-1", "wc-1-1")),
            process,
            tmp_path / "beat",
            tmp_path / "log",
            0.0,
        )

    yield start
    for child in started:
        child.kill()
        child.wait()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "wc-1-1"
    folder.mkdir()
    return folder


def guard(told: list[tuple[str, int, str]], **conf: Any) -> MemoryGuard:
    values = {**default_conf(), "supervisor.worker.memory.enforce": True, **conf}
    return MemoryGuard(values, lambda *error: told.append(error))


def put_into(group: Path, worker: LiveWorker) -> None:
    """Files in the place of the kernel's become the worker's cgroup."""
    worker.process = replace(worker.process, cgroup=WorkerCgroup(Cgroup(group)))


def test_a_worker_over_its_memory_ends_with_both_numbers_named(
    eat: Callable[[int], LiveWorker],
) -> None:
    told: list[tuple[str, int, str]] = []
    watching = guard(told)
    modest = eat(20 * MIB)
    watching.check([modest], 1.0, SIZE)
    assert modest.process.alive() and not told
    greedy = eat(200 * MIB)
    greedy.worker = Worker("w2", greedy.worker.work)
    watching.check([modest, greedy], 2.0, SIZE)
    eventually(lambda: not greedy.process.alive(), what="the end of the worker")
    (error,) = told
    assert error[:2] == ("wc-1-1", 6900)
    assert "used 20" in error[2] and "its placement allows 100.0 MiB" in error[2]
    assert modest.process.alive()


def test_a_worker_that_outlives_its_end_is_reported_once(
    eat: Callable[[int], LiveWorker],
) -> None:
    told: list[tuple[str, int, str]] = []
    watching = guard(told)
    greedy = eat(200 * MIB)
    # A KILL takes effect only when the kernel gives the process up, which may wait for a disk.
    # This one is not reached by it, since its record has another start.
    greedy.process = replace(greedy.process, start_ticks=-1)
    assert greedy.process.child is not None
    for now in (1.0, 2.0, 3.0):
        watching.check([greedy], now, SIZE)
        assert greedy.process.child.poll() is None
        assert [error[:2] for error in told] == [("wc-1-1", 6900)]


def test_each_worker_has_the_size_that_it_is_placed_with(
    eat: Callable[[int], LiveWorker], tmp_path: Path
) -> None:
    told: list[tuple[str, int, str]] = []
    workers = {port: eat(60 * MIB) for port in (6900, 6901, 6902)}
    for port, worker in workers.items():
        worker.port, worker.worker = port, Worker(f"w{port}", worker.worker.work)
    groups = tmp_path / "cgroup"
    (groups / "w6900").mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("memory")
    for file in (
        "cgroup.subtree_control",
        "cgroup/cgroup.subtree_control",
        "cgroup/w6900/memory.max",
    ):
        (tmp_path / file).touch()
    for file in ("memory.oom.group", "cgroup.kill", "cgroup.procs"):
        (groups / "w6900" / file).touch()
    put_into(groups / "w6900", workers[6900])

    def place(**memory: int) -> dict[tuple[str, int], WorkerSlot]:
        slots = [
            WorkerSlot(
                node="s1",
                host="h",
                port=port,
                tasks="1",
                memory_bytes=memory.get(f"w{port}", 100 * MIB),
            )
            for port in workers
        ]
        assignment = Assignment.model_construct(code_dir="wc-1-1", workers=tuple(slots), restarts=0)
        return dict(desired_slots({"wc-1-1": assignment}, "s1").workers)

    watching = guard(told)
    # The largest size of the topology, which only the worker of the topology master has, is not
    # everybody's.
    watching.check([*workers.values()], 1.0, place(w6900=120 * MIB, w6901=40 * MIB))
    eventually(lambda: not workers[6901].process.alive(), what="the end of the worker")
    assert [(error[1], "allows 40.0 MiB" in error[2]) for error in told] == [(6901, True)]
    assert (groups / "w6900" / "memory.max").read_text() == str(120 * MIB)
    # It went to another worker, whose process continues.
    watching.check([workers[6900], workers[6902]], 2.0, size_of("other-1-1", 10 * MIB))
    assert workers[6900].process.alive()
    watching.check([workers[6900], workers[6902]], 3.0, place(w6900=50 * MIB, w6902=120 * MIB))
    assert workers[6900].process.alive(), "a smaller size is that of the next start"
    assert workers[6902].process.alive() and [error[1] for error in told] == [6901]


def test_the_memory_is_a_label_unless_it_is_enforced(
    eat: Callable[[int], LiveWorker],
) -> None:
    told: list[tuple[str, int, str]] = []
    greedy = eat(200 * MIB)
    guard(told, **{"supervisor.worker.memory.enforce": False}).check([greedy], 1.0, SIZE)
    assert default_conf()["supervisor.worker.memory.enforce"] is False
    assert greedy.process.alive() and not told


def test_a_cgroup_holds_the_worker_where_one_can_be_made(
    eat: Callable[[int], LiveWorker], tmp_path: Path
) -> None:
    """With files in the place of the kernel's."""
    top = tmp_path / "cgroup"
    group = top / "storm_dagster" / "w1"
    group.mkdir(parents=True)
    (top / "cgroup.controllers").write_text("cpu memory pids")
    names = ["memory.max", "memory.oom.group"]
    for file in (
        top / "cgroup.subtree_control",
        group.parent / "cgroup.subtree_control",
        *(group / name for name in names),
    ):
        file.touch()
    told: list[tuple[str, int, str]] = []
    watching = guard(told)
    worker = eat(20 * MIB)
    put_into(group, worker)
    watching.check([worker], 1.0, SIZE)
    assert [(group / name).read_text() for name in names] == [str(100 * MIB), "1"]
    (group / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    (group / "memory.peak").write_text(str(100 * MIB))
    watching.check([], 2.0, {})
    assert "used 100.0 MiB of memory, its placement allows 100.0 MiB" in told[0][2]


def test_a_worker_leaves_no_core_dump_and_has_a_file_limit(tmp_path: Path, code: Path) -> None:
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


def test_a_worker_starts_despite_a_disk_that_was_briefly_full(
    tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its log's rotation nor its run file: a process that nobody knows would hold the
    slot's port.
    """
    (code / "stormconf.ser").write_text(json.dumps({"topology.python": sys.executable}))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(launcher, "rotate", full)
    monkeypatch.setattr(launcher.RunFile, "write", full)
    launched = Launcher(tmp_path, "s1", "127.0.0.1", default_conf()).launch(
        6900, Work("wc-1-1", "wc-1-1"), LocalCode(code, "0" * 64)
    )
    launched.process.end()
    assert launched.process.child is not None
    launched.process.child.wait()
