"""What a worker has started ends with it: in a cgroup, and where none can be made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal

import pytest

from storm_dagster.cli.dev.ending import end_cluster
from storm_dagster.core.slots.model import Work
from storm_dagster.host.cgroups import cgroup_of, may_make_cgroups
from storm_dagster.host.clock import boot_id
from storm_dagster.host.descendants import (
    MARK,
    find_marked,
    kill_descendants,
    process_table,
    seen_descendants,
    user_of,
)
from storm_dagster.host.processes import ProcessEntry, start_ticks
from storm_dagster.model.conf import default_conf
from storm_dagster.supervisor import processes
from storm_dagster.supervisor.launcher import (
    SPEC,
    Launcher,
)
from storm_dagster.supervisor.localizer import LocalCode
from storm_dagster.supervisor.processes import LiveWorker, ProcessWatch, WorkerProcess
from storm_dagster.supervisor.running_workers import find_workers, remove_stale_folders
from storm_dagster.supervisor.worker_cgroups import recorded_cgroup
from storm_dagster.testing.waiting import eventually

_PYTHON = "/usr/bin/python3"
needs_cgroup = pytest.mark.skipif(
    not may_make_cgroups(cgroup_of("self")),
    reason="no cgroup (v2) can be made here: not mounted, read-only, or not this user's",
)
kinds = pytest.mark.parametrize(
    "kind", [pytest.param("cgroup", marks=needs_cgroup), "marks and parents"]
)
Kind = Literal["cgroup", "marks and parents"]
Start = Callable[..., LiveWorker]

# Runs as `python -m storm_dagster.worker SPEC.json`. Its grandchild has a session and parent of its
# own, and ignores what can be ignored. The worker ends at TERM.
_WORKER = f"""\
#!{sys.executable} -S
import os, signal, sys, time
folder = os.path.dirname(sys.argv[-1])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        open(folder + "/pid.new", "w").write(str(os.getpid()))
        os.rename(folder + "/pid.new", folder + "/pid")
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists(folder + "/crash"):
    time.sleep(0.02)
sys.exit(3)
"""
_HIDES = """\
        os.execve("/bin/sleep", ["sleep", "600"], {})"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A HOME that other users can reach, unlike the folders of pytest."""
    top = Path(tempfile.mkdtemp(prefix="storm-leftovers-", dir="/tmp"))
    top.chmod(0o755)
    (top / "home").mkdir()
    yield top / "home"
    rmtree(top, ignore_errors=True)


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    """Starts a worker whose grandchild has left it, and waits for the grandchild."""
    program = home.parent / "worker"
    program.write_text(_WORKER)
    program.chmod(0o755)
    started: list[tuple[LiveWorker, int]] = []

    def begin(kind: Kind, *, program: Path = program, **conf: Any) -> LiveWorker:
        code = home / "stormdist" / "wc-1-1"
        (code / "code").mkdir(parents=True, exist_ok=True)
        (code / "stormconf.ser").write_text(json.dumps({"topology.python": str(program)}))
        launcher = Launcher(home, "s1", "127.0.0.1", {**default_conf(), **conf})
        if kind != "cgroup":
            launcher.cgroups.parents.clear()
        live = launcher.launch(6900, Work("wc-1-1", "wc-1-1"), LocalCode(code, "0" * 64))
        started.append((live, grandchild(live)))
        assert (live.process.cgroup is not None) == (kind == "cgroup")
        return live

    yield begin
    for live, pid in started:
        live.process.end()
        assert live.process.child is not None
        live.process.child.wait()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if live.process.cgroup is not None:
            eventually(live.process.cgroup.close, what="the removal of the cgroup")


def grandchild(live: LiveWorker) -> int:
    """Pid of the worker's grandchild, which has a session and a parent of its own."""
    note = live.heartbeat_path.parent / "pid"
    eventually(note.exists, what="the grandchild")
    pid = int(note.read_text())
    eventually(
        lambda: process_table()[pid].parent not in (live.process.pid, os.getpid()),
        what="the end of its parent",
    )
    assert process_table()[pid].session not in (pid, live.process.pid)
    return pid


def ended(pid: int) -> bool:
    return start_ticks(pid) is None


@kinds
@pytest.mark.parametrize("end", ["TERM", "KILL", "crash"])
def test_no_child_outlives_its_worker(start: Start, kind: Kind, end: str) -> None:
    exits: list[str] = []
    watch = ProcessWatch(lambda key, status: exits.append(key))
    try:
        live = start(kind)
        pid = grandchild(live)
        watch.add("w", live.process)
        if end == "crash":
            (live.heartbeat_path.parent / "crash").touch()
        else:
            live.process.signal(signal.SIGTERM if end == "TERM" else signal.SIGKILL)
        eventually(lambda: exits == ["w"], what="the report of its death")
        eventually(lambda: ended(pid), what="the end of the grandchild")
        cgroup = live.process.cgroup
        if cgroup is not None:
            eventually(lambda: not cgroup.group.path.exists(), what="the end of the cgroup")
    finally:
        watch.close()


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists(_PYTHON), reason="only root starts other users"
)
@kinds
def test_no_child_of_another_user_outlives_its_worker(home: Path, start: Start, kind: Kind) -> None:
    program = home.parent / "other"
    program.write_text(_WORKER.replace(sys.executable, _PYTHON))
    program.chmod(0o755)
    other = {"supervisor.run.worker.as.user": True, "supervisor.worker.user": "65533"}
    live = start(kind, program=program, **other)
    pid = grandchild(live)
    assert os.stat(f"/proc/{pid}").st_uid == 65533
    live.process.end()
    eventually(lambda: ended(pid), what="the end of the grandchild")


@needs_cgroup
def test_a_child_that_hides_from_the_tree_ends_with_the_cgroup(home: Path, start: Start) -> None:
    """Its environment is empty, and the supervisor has never seen it below the worker."""
    program = home.parent / "hiding"
    program.write_text(_WORKER.replace("        time.sleep(600)", _HIDES))
    program.chmod(0o755)
    live = start("cgroup", program=program)
    pid = grandchild(live)
    eventually(
        lambda: Path(f"/proc/{pid}/environ").read_bytes() == b"", what="the end of its environment"
    )
    assert kill_descendants(live.worker.id, (), 0) == 1, "only the worker has the mark"
    assert not ended(pid)
    live.process.end()
    eventually(lambda: ended(pid), what="the end of the grandchild")


@kinds
def test_a_supervisor_ends_what_a_worker_left_while_it_was_away(
    home: Path, start: Start, kind: Kind
) -> None:
    live = start(kind)
    pid = grandchild(live)
    folder = home / "workers" / live.worker.id
    live.process.signal(signal.SIGKILL)
    assert live.process.child is not None
    live.process.child.wait()
    assert not ended(pid)
    remove_stale_folders(home, "another supervisor", ())
    assert not ended(pid) and folder.exists()
    remove_stale_folders(home, "s1", ())
    eventually(lambda: ended(pid), what="the end of the grandchild")
    assert not folder.exists() and recorded_cgroup(folder) is None


@kinds
def test_the_end_of_a_cluster_ends_what_its_workers_left(
    home: Path, start: Start, kind: Kind
) -> None:
    live = start(kind)
    pid = grandchild(live)

    def reap() -> None:
        assert live.process.child is not None
        live.process.child.poll()

    assert end_cluster(home, reap=reap) == []
    eventually(lambda: ended(pid), what="the end of the grandchild")
    assert recorded_cgroup(home / "workers" / live.worker.id) is None


@kinds
def test_a_supervisor_ends_nothing_of_a_worker_that_it_adopts(
    home: Path, start: Start, kind: Kind
) -> None:
    # The worker is recognized by its command line, so that the interpreter is a real one.
    started = start(kind)
    command = Path(f"/proc/{started.process.pid}/cmdline").read_bytes()
    assert b"storm_dagster.worker" in command
    pid = grandchild(started)
    (adopted,) = find_workers(home, "s1", default_conf())
    remove_stale_folders(home, "s1", [adopted.worker.id])
    assert adopted.worker == started.worker and adopted.process.alive() and not ended(pid)
    if kind == "cgroup":
        assert adopted.process.cgroup is not None and started.process.cgroup is not None
        assert adopted.process.cgroup.group == started.process.cgroup.group
    adopted.process.end()
    eventually(lambda: ended(pid), what="the end of the grandchild")
    if adopted.process.cgroup is not None:
        eventually(adopted.process.cgroup.close, what="the end of the cgroup")


@needs_cgroup
def test_an_adopted_worker_of_an_older_release_gets_a_cgroup(home: Path, start: Start) -> None:
    started = start("marks and parents")
    (adopted,) = find_workers(home, "s1", default_conf())
    cgroup = adopted.process.cgroup
    assert cgroup is not None and cgroup.group.holds(started.process.pid)
    (again,) = find_workers(home, "s1", default_conf())
    assert again.process.cgroup is not None and again.process.cgroup.group == cgroup.group
    adopted.process.end()
    assert started.process.child is not None
    started.process.child.wait()
    eventually(cgroup.close, what="the end of the cgroup")


def test_a_child_without_the_mark_ends_if_it_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment is empty, and its session and parent are its own when the worker ends."""
    monkeypatch.setattr(processes, "_LOOK_SECS", 0.02)
    program = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    os.execve({sys.executable!r}, ["python", "-S", "-c", '''
import os, time
while not os.path.exists("{tmp_path}/go"):
    time.sleep(0.02)
if os.fork() == 0:
    open("{tmp_path}/pid.new", "w").write(str(os.getpid()))
    os.rename("{tmp_path}/pid.new", "{tmp_path}/pid")
    time.sleep(600)
time.sleep(0.5)
'''], {{}})
os.wait()
time.sleep(600)
"""
    child = subprocess.Popen([sys.executable, "-S", "-c", program], start_new_session=True)
    worker = WorkerProcess(child.pid, start_ticks(child.pid) or -1, boot_id(), child, "w1")
    watch = ProcessWatch(lambda key, status: None)
    try:
        watch.add("w", worker)
        eventually(lambda: len(watch.seen("w")) == 1, what="the child in the tree")
        (tmp_path / "go").touch()
        eventually((tmp_path / "pid").exists, what="the grandchild")
        pid = int((tmp_path / "pid").read_text())
        eventually(
            lambda: {each for each, _ in watch.seen("w")} == {pid}, what="the end of its parent"
        )
        worker.signal(signal.SIGKILL)
        eventually(lambda: ended(pid), what="the end of the grandchild")
    finally:
        watch.close()
        child.kill()
        child.wait()


def test_a_session_ends_with_the_worker_that_leads_it() -> None:
    command = ["/bin/sh", "-c", "sleep 600 & sleep 600 & wait"]
    process = subprocess.Popen(command, start_new_session=True)
    worker = WorkerProcess(process.pid, start_ticks(process.pid) or -1, boot_id(), process)

    def members() -> list[ProcessEntry]:
        table = process_table().values()
        return [each for each in table if each.session == process.pid != each.pid]

    eventually(lambda: len(members()) == 2, what="its children")
    process.kill()
    process.wait()
    assert processes.end_descendants(worker) == 2
    eventually(lambda: not members(), what="their end")


def _start_sleep(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process with this environment, and wait until the kernel shows it.

    ``Popen`` returns a moment earlier, when the new program begins to replace the old one.
    """
    process = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
    shown = Path(f"/proc/{process.pid}/environ")
    eventually(lambda: shown.read_bytes() != b"", what="its environment")
    return process


def test_a_process_of_another_origin_is_never_ended() -> None:
    environment = {MARK: "another worker", "OTHER": f"{MARK}=w1", "TAIL": f"\n{MARK}=w1"}
    other = _start_sleep(environment)
    try:
        ticks = start_ticks(other.pid)
        assert ticks is not None
        # A pid that was seen, and is another process's by now; and one that leads a session.
        assert kill_descendants("w1", {(other.pid, ticks - 1)}) == 0
        reused = WorkerProcess(other.pid, ticks - 1, boot_id(), None, "w1")
        assert processes.end_descendants(reused) == 0
        former_boot = WorkerProcess(other.pid, ticks, "another boot", None, "another worker")
        assert processes.end_descendants(former_boot) == 0
        assert other.poll() is None
        assert kill_descendants("another worker") == 1
    finally:
        other.kill()
        other.wait()


def test_of_a_large_environment_only_the_begin_is_read() -> None:
    """A process maps its environment where it likes, and as large as it likes."""
    large = {f"VARIABLE_{number}": "x" * 100_000 for number in range(12)}
    first = _start_sleep({MARK: "w1", **large})
    last = _start_sleep({**large, MARK: "w1"})
    try:
        found = {pid for pid, _ in find_marked(process_table().values(), "w1")}
        assert found == {first.pid}
        user = user_of(first.pid)
        assert user == os.getuid()
        assert find_marked(process_table().values(), "w1", user)
        assert not find_marked(process_table().values(), "w1", os.getuid() + 1), "another user's"
    finally:
        for process in (first, last):
            process.kill()
            process.wait()


def test_a_process_that_took_a_copy_of_the_mark_ends_without_its_session() -> None:
    """As a shell that somebody started with a worker's environment, to look into it."""
    command = ["/bin/sh", "-c", f"sleep 600 & {MARK}=w1 sleep 600 & wait"]
    shell = subprocess.Popen(command, start_new_session=True)
    try:
        eventually(lambda: marks_of(shell.pid) == 1, what="both children")
        assert kill_descendants("w1") == 1
        assert shell.poll() is None and marks_of(shell.pid) == 0
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def marks_of(session: int) -> int:
    """Number of processes of that session with the mark of ``w1``."""
    number = 0
    for entry in process_table().values():
        if entry.session == session:
            with suppress(OSError):
                environment = Path(f"/proc/{entry.pid}/environ").read_bytes()
                number += f"{MARK}=w1".encode() in environment.split(b"\0")
    return number


def test_descendants_are_those_of_the_tree_and_of_their_sessions() -> None:
    entries = [
        ProcessEntry(10, 100, 1, 10),  # The worker.
        ProcessEntry(11, 110, 10, 10),  # Its child,
        ProcessEntry(12, 120, 11, 12),  # whose child leads a session,
        ProcessEntry(13, 130, 1, 12),  # with a member that has lost its parent.
        ProcessEntry(14, 140, 1, 77),  # A session whose leader is gone.
        ProcessEntry(20, 90, 10, 20),  # Older than its parent: the pid was reused.
        ProcessEntry(30, 300, 1, 30),  # Another process.
    ]
    table = {entry.pid: entry for entry in entries}
    tree = {(11, 110), (12, 120), (13, 130)}
    assert seen_descendants(table, (10, 100), ()) == tree
    assert seen_descendants(table, (10, 100), {(14, 140)}) == {*tree, (14, 140)}
    assert seen_descendants(table, (10, 99), ()) == set()
    assert seen_descendants(table, (10, 99), {(30, 299)}) == set()


def test_a_record_names_only_the_cgroup_of_its_own_worker(tmp_path: Path) -> None:
    folder = tmp_path / "w1"
    folder.mkdir()
    top = cgroup_of("self") or Path("/sys/fs/cgroup")
    for path in (top, top / "storm_dagster" / "w2", f"{top}/storm_dagster/w1/../../w1", tmp_path):
        (folder / "cgroup").write_text(str(path))
        assert recorded_cgroup(folder) is None
    (folder / "cgroup").write_bytes(b"\xff\0")
    assert recorded_cgroup(folder) is None
    assert SPEC != "cgroup"
