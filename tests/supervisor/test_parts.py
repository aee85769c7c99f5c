"""The supervisor's smaller parts: claims, local state, exact processes, environments, logs."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storm_dagster.core.slots.model import Work, Worker, check_ports, desired_slots
from storm_dagster.host.clock import boot_id
from storm_dagster.host.files import hold_folder
from storm_dagster.host.processes import RunFile, start_ticks
from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.model.records import Assignment, WorkerSlot
from storm_dagster.supervisor import housekeeping
from storm_dagster.supervisor.daemon import Supervisor
from storm_dagster.supervisor.health import check_once
from storm_dagster.supervisor.housekeeping import MAX_COPIED, remove_old_logs, rotate
from storm_dagster.supervisor.launcher import log_path, worker_command, worker_environment
from storm_dagster.supervisor.local_state import KnownWorker, LocalState, LocalStateFile, WantedSlot
from storm_dagster.supervisor.processes import (
    LiveWorker,
    ProcessWatch,
    WorkerProcess,
)
from storm_dagster.testing.waiting import eventually


def assignment(topology_id: str, *slots: tuple[str, int], code: str | None = None) -> Assignment:
    return Assignment(
        topology_id=topology_id,
        code_dir=code or topology_id,
        node_host={node: "h" for node, _ in slots},
        workers=tuple(
            WorkerSlot(node=node, host="h", port=port, tasks="1") for node, port in slots
        ),
        task_start_secs={},
        timestamp_ms=1,
    )


def test_claims_are_those_of_this_supervisor() -> None:
    found = desired_slots(
        {
            "a-1-1": assignment("a-1-1", ("s1", 6900), ("s2", 6900), code="a-1-1-v2"),
            "b-2-2": assignment("b-2-2", ("s1", 6901), ("s1", 6901)),
            "c-3-3": assignment("c-3-3", ("s1", 6902)),
            "d-4-4": assignment("d-4-4", ("s1", 6902)),
        },
        "s1",
    )
    assert found.work == {6900: Work("a-1-1", "a-1-1-v2"), 6901: Work("b-2-2", "b-2-2")}
    assert found.contested == {6902: ("c-3-3", "d-4-4")}
    assert desired_slots({}, "s1").work == {}


@pytest.mark.parametrize(
    ("ports", "says"),
    [
        ((6900, 6901), None),
        ((), "empty"),
        ((1, 1), "1 twice"),
        ((0,), "1 to 65535"),
        ((70000,), "70000"),
    ],
)
def test_ports_that_are_missing_repeated_or_out_of_range_are_named(
    ports: tuple[int, ...], says: str | None
) -> None:
    found = check_ports(ports)
    assert found is None if says is None else found is not None and says in found


STATE = LocalState(
    supervisor_id="s1",
    workers=(
        KnownWorker(
            port=1,
            worker_id="w",
            topology_id="t-1-1",
            code_dir="t-1-1",
            pid=5,
            start_ticks=6,
            boot_id="b",
        ),
    ),
    wanted=(WantedSlot(port=1, topology_id="t-1-1", code_dir="t-1-1", ran=True),),
)


def test_local_state_is_written_when_it_changed_and_read_back(tmp_path: Path) -> None:
    file = LocalStateFile(tmp_path)
    assert file.read() is None
    assert file.write(STATE)
    assert not file.write(STATE)
    assert LocalStateFile(tmp_path).read() == STATE
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize(
    "raw",
    [
        *(
            b"",
            b"{}",
            b"[]",
            b"null",
            b"\x80\x04}q.",
            b'{"v": 1, "sha256": "x", "state": {}}',
            b"[" * 100_000,
        ),
        json.dumps({"v": 2, "sha256": "", "state": {}}).encode(),
    ],
)
def test_a_broken_state_is_quarantined(tmp_path: Path, raw: bytes) -> None:
    file = LocalStateFile(tmp_path)
    (tmp_path / "state.json").write_bytes(raw)
    assert file.read() is None
    assert (tmp_path / "state.json.broken.1").read_bytes() == raw
    assert file.read() is None
    assert file.write(STATE)


def test_any_cut_or_flipped_byte_of_a_state_is_noticed(tmp_path: Path) -> None:
    LocalStateFile(tmp_path).write(STATE)
    whole = (tmp_path / "state.json").read_bytes()
    for at in range(0, len(whole), 7):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            (tmp_path / "state.json").write_bytes(damaged)
            found = LocalStateFile(tmp_path).read()
            # JSON has blanks and letter cases that mean nothing; what is believed is what was
            # written.
            assert found is None or found == STATE
    broken = sorted(path.name for path in tmp_path.glob("state.json.broken.*"))
    assert 1 <= len(broken) <= 5


def test_the_cluster_is_remembered_beside_a_broken_state(tmp_path: Path) -> None:
    file = LocalStateFile(tmp_path)
    assert file.read_cluster_id() is None
    file.write_cluster_id("c-1")
    file.write(STATE)
    (tmp_path / "state.json").write_bytes(b"broken")
    again = LocalStateFile(tmp_path)
    assert again.read() is None
    assert again.read_cluster_id() == "c-1"


def sleeper(**options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen[bytes](["sleep", "600"], start_new_session=True, **options)


def as_worker(process: subprocess.Popen[bytes], child: bool = True) -> WorkerProcess:
    ticks = start_ticks(process.pid)
    assert ticks is not None
    return WorkerProcess(process.pid, ticks, boot_id(), process if child else None)


def test_a_death_is_reported_once_with_its_status() -> None:
    seen: list[tuple[str, int | None]] = []
    told = threading.Event()

    def tell(key: str, status: int | None) -> None:
        seen.append((key, status))
        told.set()

    watch = ProcessWatch(tell)
    try:
        children = {name: sleeper() for name in ("a", "b")}
        for name, process in children.items():
            watch.add(name, as_worker(process))
        os.kill(children["a"].pid, signal.SIGKILL)
        assert told.wait(20)
        assert seen == [("a", -9)]
        assert start_ticks(children["b"].pid) is not None
        children["b"].kill()
        eventually(lambda: len(seen) == 2, what="the second death")
    finally:
        watch.close()


def test_the_death_of_a_process_that_is_no_child_is_reported_too() -> None:
    seen: list[tuple[str, int | None]] = []
    watch = ProcessWatch(lambda key, status: seen.append((key, status)))
    # Its parent ends at once: it belongs to init then, as a former supervisor's worker does.
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=2).pid)"
    pid = int(
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
    )
    ticks = start_ticks(pid)
    assert ticks is not None
    try:
        watch.add("w", WorkerProcess(pid, ticks, boot_id()))
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: seen == [("w", None)], what="the news of its death")
    finally:
        watch.close()


def test_a_process_that_is_dead_already_is_reported() -> None:
    seen: list[str] = []
    watch = ProcessWatch(lambda key, status: seen.append(key))
    try:
        process = sleeper()
        worker = as_worker(process)
        process.kill()
        process.wait()
        watch.add("w", worker)
        eventually(lambda: seen == ["w"], what="the news")
    finally:
        watch.close()


def test_a_reused_pid_is_never_signalled() -> None:
    process = sleeper()
    try:
        worker = as_worker(process)
        for other in (
            WorkerProcess(worker.pid, worker.start_ticks - 1, worker.boot_id),
            WorkerProcess(worker.pid, worker.start_ticks, "another boot"),
        ):
            assert not other.alive()
            assert not other.signal(signal.SIGKILL)
            other.end()
        assert worker.alive()
    finally:
        process.kill()
        process.wait()


def test_the_command_is_a_list_and_the_environment_has_the_archive_first(tmp_path: Path) -> None:
    assert worker_command({}, Path("/x/SPEC.json")) == [
        sys.executable,
        "-m",
        "storm_dagster.worker",
        "/x/SPEC.json",
    ]
    assert (
        worker_command({"topology.python": "/a b/python; rm"}, Path("/x"))[0] == "/a b/python; rm"
    )
    root = tmp_path / "code"
    environment = worker_environment(
        {"HOME": "/h", "PYTHONPATH": "/base"},
        {"topology.environment": {"N": 3, "PYTHONPATH": "/mine:/also"}},
        root,
        tmp_path,
    )
    first, *others, last = environment["PYTHONPATH"].split(":")
    assert (first, others) == (str(root), ["/mine", "/also"])
    assert (Path(last) / "storm_dagster").is_dir()
    assert (environment["HOME"], environment["N"]) == ("/h", "3")
    ours = {
        "AWS_SECRET_ACCESS_KEY": "k",
        "AWS_REGION": "r",
        "DAGSTER_POSTGRES_PASSWORD": "p",
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    assert worker_environment(ours, {}, root, tmp_path).keys() & ours.keys() == {"LC_ALL", "TZ"}
    allowed = worker_environment(ours, {}, root, tmp_path, ["AWS_*"]).keys() & ours.keys()
    assert allowed == {"AWS_SECRET_ACCESS_KEY", "AWS_REGION", "LC_ALL", "TZ"}
    with pytest.raises(InvalidTopology, match=r"topology\.environment"):
        worker_environment({}, {"topology.environment": {"A=B": "x"}}, root, tmp_path)


def test_log_paths_are_predictable(tmp_path: Path) -> None:
    assert log_path(tmp_path, "wc-1-1", 6900) == tmp_path / "logs/workers/wc-1-1/6900/worker.log"


def test_a_log_is_rotated_under_its_writers_hands(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    assert not rotate(log, 10, 2)
    with log.open("ab", buffering=0) as writer:
        for number in range(4):
            writer.write(b"%d" % number * 20)
            assert rotate(log, 10, 2)
        writer.write(b"end")
    assert log.read_bytes() == b"end"  # without a hole before it
    assert (tmp_path / "worker.log.1").read_bytes() == b"3" * 20
    assert (tmp_path / "worker.log.2").read_bytes() == b"2" * 20
    assert sorted(os.listdir(tmp_path)) == ["worker.log", "worker.log.1", "worker.log.2"]
    assert not rotate(log, 10, 2)


def test_the_copy_of_a_sparse_log_takes_the_room_of_its_content(tmp_path: Path) -> None:
    """A worker sets the size of its log as it likes."""
    log = tmp_path / "worker.log"
    with log.open("wb") as writer:
        writer.write(b"begin")
        writer.truncate(2**40)
        writer.seek(2**40)
        writer.write(b"end")
    max_bytes = 2**20
    assert rotate(log, max_bytes, 1)
    copy = tmp_path / "worker.log.1"
    size = copy.stat().st_size
    assert size == MAX_COPIED * max_bytes
    assert copy.stat().st_blocks * 512 < max_bytes
    assert copy.read_bytes() == b"\0" * (size - 3) + b"end"
    assert log.stat().st_size == 0


def test_the_end_of_a_log_that_grew_too_large_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_bytes(b"old" * 1000 + b"new" * 10)
    assert rotate(log, 30, 1)
    content = (tmp_path / "worker.log.1").read_bytes()
    assert content.endswith(b"new" * 10)
    assert len(content) == MAX_COPIED * 30


def test_rotation_never_writes_through_a_planted_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    log = tmp_path / "worker.log"
    log.write_bytes(b"x" * 100)
    (tmp_path / "worker.log.1").symlink_to(victim)
    rotate(log, 10, 1)
    assert victim.read_text() == "mine"
    log.unlink()
    log.symlink_to(victim)
    with pytest.raises(OSError):
        rotate(log, 1, 1)
    assert victim.read_text() == "mine"


def test_a_rotation_without_room_loses_no_backup_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "worker.log"
    for name, text in (("worker.log", "new" * 9), ("worker.log.1", "one"), ("worker.log.2", "two")):
        (tmp_path / name).write_text(text)

    def full(source: int, sink: int, start: int, end: int) -> None:
        os.write(sink, b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(housekeeping, "copy_data", full)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            rotate(log, 10, 3)
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == {"worker.log": "new" * 9, "worker.log.2": "one", "worker.log.3": "two"}


def test_logs_that_are_a_week_old_are_removed(tmp_path: Path) -> None:
    for name in ("old-1-1/6900", "old-1-1/6901", "new-2-2/6900"):
        folder = tmp_path / "logs/workers" / name
        folder.mkdir(parents=True)
        (folder / "worker.log").write_text("x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "logs/workers/old-1-1/link").symlink_to(outside)
    for path in [*(tmp_path / "logs/workers/old-1-1").rglob("*")]:
        os.utime(path, (1, 1), follow_symlinks=False)
    removed = remove_old_logs(tmp_path, now_secs=(tmp_path / "outside").stat().st_mtime)
    assert sorted(path.name for path in removed) == ["6900", "6901", "link"]
    assert os.listdir(tmp_path / "logs/workers") == ["new-2-2"]
    assert outside.is_dir()


def test_the_oldest_logs_are_removed_when_there_are_too_many(tmp_path: Path) -> None:
    """Those of live workers stay, whatever their age."""
    folders: list[Path] = []
    for age, name in enumerate(("a-1-1/6900", "a-1-1/6901", "b-2-2/6900", "c-3-3/6900")):
        folders.append(tmp_path / "logs/workers" / name)
        folders[-1].mkdir(parents=True)
        (folders[-1] / "worker.log").write_bytes(b"x" * 100_000)
        for path in (folders[-1] / "worker.log", folders[-1]):
            os.utime(path, (1000 + age, 1000 + age))
    assert remove_old_logs(tmp_path, 1010, max_bytes=1_000_000) == []
    assert remove_old_logs(tmp_path, 1010, used={folders[0]}, max_bytes=300_000) == folders[1:3]
    assert sorted(path.name for path in (tmp_path / "logs/workers").iterdir()) == ["a-1-1", "c-3-3"]


def test_only_a_dead_workers_own_run_file_is_removed(tmp_path: Path) -> None:
    run = RunFile.write(tmp_path, "worker", "s1-6900", {"data": 6900})
    path = RunFile.path_of(tmp_path, "worker", "s1-6900")
    run.model_copy(update={"start_ticks": run.start_ticks + 1}).remove(tmp_path)
    assert path.exists()
    RunFile(role="worker", id="s1-6900", pid=run.pid, start_ticks=run.start_ticks).remove(tmp_path)
    assert not path.exists()


def test_a_disk_that_became_read_only_is_noticed_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a disk refuses to remove files too, also those that are not there."""
    run = RunFile.write(tmp_path, "worker", "s1-6900", {"data": 6900})
    process = WorkerProcess(run.pid, run.start_ticks, boot_id())
    live = LiveWorker(
        6900,
        Worker("w", Work("wc-1-1", "wc-1-1")),
        process,
        tmp_path / "beat",
        tmp_path / "log",
        0.0,
    )
    keeper = SimpleNamespace(save_again=lambda: None, do=lambda action: action())
    supervisor: Any = SimpleNamespace(
        id="s1",
        _folder=tmp_path,
        _home=tmp_path,
        _disk_problem="",
        _wake=threading.Event(),
        _housekeeper=keeper,
    )

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        for name in ("write_bytes", "unlink"):
            patch.setattr(Path, name, read_only)
        Supervisor._probe(supervisor)
        Supervisor._clean(supervisor, live, True)
    assert supervisor._disk_problem and supervisor._wake.is_set()
    Supervisor._probe(supervisor)
    assert not supervisor._disk_problem


def test_an_id_is_one_that_can_name_a_folder(tmp_path: Path) -> None:
    hold_folder(tmp_path, "supervisor", "host-1.local").close()
    for wrong in ("", "../x", "a/b", "id", ".hidden", "x" * 101, "a b", "."):
        with pytest.raises(InvalidRequest):
            hold_folder(tmp_path, "supervisor", wrong)


def script(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text("#!/bin/sh\n" + text)
    (folder / name).chmod(0o755)


def test_what_a_hung_script_left_in_another_session_is_not_waited_for(tmp_path: Path) -> None:
    script(tmp_path, "a", "setsid sleep 30 & echo $! > pid; sleep 600")
    ended = threading.Event()
    said: list[str | None] = []
    thread = threading.Thread(target=lambda: (said.append(check_once(tmp_path, 3.0)), ended.set()))
    thread.start()
    try:
        assert ended.wait(25), "it waits for what keeps the script's output open"
        assert said == ["health script a: did not end within 3 s"]
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        thread.join(60)


def test_a_health_script_that_fails_hangs_or_says_error_is_named(tmp_path: Path) -> None:
    script(tmp_path, "a", "echo fine")
    (tmp_path / "notes.txt").write_text("no script")
    assert check_once(tmp_path, 10) is None
    script(tmp_path, "b", "echo hello; echo 'ERROR disk is full'")
    assert check_once(tmp_path, 10) == "health script b: ERROR disk is full"
    script(tmp_path, "b", "exit 3")
    assert check_once(tmp_path, 10) == "health script b: ended with code 3"
    script(tmp_path, "b", "sleep 600 & sleep 600")
    assert check_once(tmp_path, 0.3) == "health script b: did not end within 0.3 s"
    (tmp_path / "b").write_text("#!/nowhere\n")
    assert "cannot be started" in (check_once(tmp_path, 1) or "")
