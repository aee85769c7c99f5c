"""A whole supervisor as a real process, against a real ZooKeeper and real (stand-in) worker
processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from storm_dagster.host.capacity import Capacity
from storm_dagster.host.processes import RunFile
from storm_dagster.host.worker_spec import HeartbeatFile
from storm_dagster.model import paths
from storm_dagster.model.conf import default_conf
from storm_dagster.model.records import EpochRecord, encode_record
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.worker.runtime.heartbeat import HeartbeatThread
from storm_rigs.operations.storm_client import as_storm
from storm_rigs.servers.blob_server import BlobServer, zip_bytes
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.supervisor_processes import SupervisorRig, alive_now

pytestmark = pytest.mark.zookeeper


@pytest.fixture
def rig(stage: Stage, blob_server: BlobServer, stand_in: str) -> SupervisorRig:
    stage.conf |= {
        "nimbus.seeds": [blob_server.url.removeprefix("http://")],
        "supervisor.http.port": 0,
        "supervisor.heartbeat.frequency.secs": 1,
        "supervisor.monitor.frequency.secs": 0.5,
        "supervisor.worker.shutdown.sleep.secs": 0.5,
    }
    return stage.supervisors(blob_server, stand_in)


def test_a_worker_is_started_with_everything_it_needs(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    rig.supervisor()
    eventually(lambda: 6900 in rig.running(), what="the worker's start")
    (start,) = rig.starts()
    code = rig.home / "supervisor/s1/stormdist/wc-1-1"
    assert (start["topology_id"], start["node"], start["host"], start["port"]) == (
        "wc-1-1",
        "s1",
        "127.0.0.1",
        6900,
    )
    assert start["code_dir"] == str(code)
    assert start["path"].split(":")[0] == str(code / "code")
    assert (code / "code/wc.py").is_file()
    assert start["word"] == "storm"
    assert start["cwd"] == str(rig.home / "workers" / start["worker_id"])
    assert start["argv"][1:] == [
        "-m",
        "storm_dagster.worker",
        f"{start['cwd']}/SPEC.json",
    ] or start["argv"][-1].endswith("SPEC.json")
    assert start["conf"]["storm.zookeeper.root"] == rig.conf["storm.zookeeper.root"]
    assert os.stat(f"{start['cwd']}/SPEC.json").st_mode & 0o077 == 0
    assert os.getsid(start["pid"]) == start["pid"]
    log = rig.home / "logs/workers/wc-1-1/6900/worker.log"
    assert log.read_text() == f"stand-in 6900 {start['pid']}\n"
    run = RunFile.read(RunFile.path_of(rig.home, "worker", "s1-6900"))
    assert run is not None and run.pid == start["pid"] and run.ports == {"data": 6900}
    info = eventually(rig.info, what="the supervisor's heartbeat")
    assert (info.host, info.ports, info.restarting) == ("127.0.0.1", (6900, 6901), ())
    size = Capacity.of(default_conf())
    assert (info.cpu, info.cpu_source) == (size.cpu, size.cpu_source)
    assert (info.memory_mb, info.memory_source) == (size.memory_mb, size.memory_source)
    assert info.http is not None
    assert httpx.get(f"{info.http}/healthz", timeout=20, trust_env=False).json()["id"] == "s1"


def test_heartbeats_rise_while_nothing_else_is_written(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    rig.supervisor()
    first = eventually(rig.info, what="a heartbeat")
    eventually(
        lambda: (info := rig.info()) is not None and info.count >= first.count + 2,
        what="two more heartbeats",
    )
    assert len(rig.starts()) == 1
    assert (rig.home / "run/supervisor-s1.json").exists()


def test_a_killed_assignment_ends_the_worker_and_its_leftovers(rig: SupervisorRig) -> None:
    rig.code("wc-1-1", "child")
    rig.code("other-2-2")
    rig.assign("wc-1-1", 6900)
    rig.assign("other-2-2", 6901)
    rig.supervisor()
    eventually(lambda: len(rig.running()) == 2, what="both workers")
    child = int(
        eventually(
            lambda: (rig.home / "child").exists() and (rig.home / "child").read_text(), what="child"
        )
    )
    other = rig.running()[6901]
    as_storm(rig.cluster).remove_storm("wc-1-1")
    eventually(lambda: 6900 not in rig.running(), what="the worker's end")
    eventually(lambda: not alive_now(child), what="the end of what it had started")
    eventually(
        lambda: not (rig.home / "run/worker-s1-6900.json").exists(), what="its run file's removal"
    )
    eventually(lambda: len(os.listdir(rig.home / "workers")) == 1, what="its folder's removal")
    eventually(
        lambda: os.listdir(rig.home / "supervisor/s1/stormdist") == ["other-2-2"],
        what="the removal of its code",
    )
    assert rig.running() == {6901: other}
    assert len(rig.starts()) == 2


def test_a_worker_that_prints_without_end_leaves_little(rig: SupervisorRig) -> None:
    max_bytes = 100_000
    rig.conf["worker.log.max.bytes"] = max_bytes
    rig.code("wc-1-1", "flood")
    rig.assign("wc-1-1", 6900)
    rig.supervisor()
    eventually(lambda: 6900 in rig.running(), what="the worker")
    folder = rig.home / "logs/workers/wc-1-1/6900"

    def are_small() -> bool:
        sizes = [path.stat().st_size for path in folder.glob("worker.log*")]
        return len(sizes) > 1 and max(sizes) <= 2 * max_bytes

    eventually(are_small, what="the rotation of 30 MB")
    newest = [path for path in sorted(folder.iterdir()) if path.stat().st_size]
    assert newest[0].read_text().endswith("the last word\n")


def test_a_stubborn_worker_is_killed(rig: SupervisorRig) -> None:
    rig.code("wc-1-1", "stubborn")
    rig.assign("wc-1-1", 6900)
    rig.supervisor()
    eventually(lambda: 6900 in rig.running(), what="the worker")
    as_storm(rig.cluster).remove_storm("wc-1-1")
    eventually(lambda: not rig.running(), what="the worker's end")


def test_a_crashed_worker_is_restarted_and_its_port_listed_meanwhile(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    rig.supervisor()
    pid = eventually(lambda: rig.running().get(6900), what="the worker")
    eventually(lambda: "waiting-for-start -> running" in rig.log(), what="its first beat")
    # From now on it never beats again: the slot stays in restart, where it can be seen.
    conf = rig.home / "supervisor/s1/stormdist/wc-1-1/stormconf.ser"
    conf.write_text(conf.read_text().replace('"STAND_IN": ""', '"STAND_IN": "silent"'))
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(rig.starts()) == 2, what="the restart")
    eventually(
        lambda: (info := rig.info()) is not None and info.restarting == (6900,),
        what="the port's listing",
    )
    conf.write_text(conf.read_text().replace('"STAND_IN": "silent"', '"STAND_IN": ""'))
    os.kill(rig.starts()[-1]["pid"], signal.SIGKILL)
    eventually(lambda: 6900 in rig.running(), what="the worker again")
    eventually(
        lambda: (info := rig.info()) is not None and info.restarting == (),
        what="the end of the listing",
    )
    assert rig.blobs.gets("wc-1-1-stormjar.jar") == 1  # no crash fetches code again
    errors = eventually(lambda: as_storm(rig.cluster).errors("wc-1-1"), what="the report")
    assert {error.error for error in errors} == {"its worker was ended by signal 9"}


def test_a_worker_that_always_crashes_backs_off_without_disturbing_others(
    rig: SupervisorRig,
) -> None:
    rig.code("bad-1-1", "crash")
    # Not the archive of the other, which is fetched once for both.
    rig.blobs.blobs["bad-1-1-stormjar.jar"] = zip_bytes({"bad.py": b"x = 1\n"})
    rig.code("good-2-2")
    rig.assign("bad-1-1", 6900)
    rig.assign("good-2-2", 6901)
    first = rig.supervisor()
    eventually(lambda: len(rig.starts("bad-1-1")) >= 4, 60, "four starts (0, 1, 2 s apart)")
    assert len(rig.starts("good-2-2")) == 1
    assert rig.blobs.gets("bad-1-1-stormjar.jar") == 1

    def crashes() -> int:
        state = json.loads((rig.home / "supervisor/s1/localstate/state.json").read_text())["state"]
        return next(slot["crashes"] for slot in state["wanted"] if slot["port"] == 6900)

    eventually(lambda: crashes() >= 4, 60, "the crashes on disk", ignore=(OSError, StopIteration))
    # The back-off goes on where it was when the supervisor is started again.
    first.kill()
    first.wait(timeout=patience(60))
    before = crashes()
    rig.supervisor()
    eventually(
        lambda: crashes() == before + 1, 120, "the next crash", ignore=(OSError, StopIteration)
    )
    assert (
        before >= 4
        and len(rig.starts("bad-1-1")) == before + 1
        and len(rig.starts("good-2-2")) == 1
    )


def test_a_superseded_worker_is_no_crash(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    rig.supervisor()
    eventually(lambda: 6900 in rig.running(), what="the worker")
    (rig.home / "supersede").touch()
    eventually(lambda: not rig.running(), what="its exit")
    (rig.home / "supersede").unlink()
    eventually(
        lambda: 6900 in rig.running(),
        what="its successor, since the assignment still names the slot",
    )
    assert as_storm(rig.cluster).errors("wc-1-1") == []


def test_hung_and_silent_workers_are_replaced(rig: SupervisorRig) -> None:
    rig.code("hung-1-1", "hang")
    rig.code("mute-2-2", "silent")
    rig.assign("hung-1-1", 6900)
    rig.assign("mute-2-2", 6901)
    rig.supervisor(supervisor__worker__timeout__secs=1, supervisor__worker__start__timeout__secs=1)
    eventually(
        lambda: len(rig.starts("hung-1-1")) >= 2 and len(rig.starts("mute-2-2")) >= 2,
        what="both replaced",
    )
    first = {start["topology_id"]: start["pid"] for start in reversed(rig.starts())}
    assert not any(alive_now(pid) for pid in first.values())


def test_workers_outlive_a_killed_supervisor_and_its_successor_adopts_them(
    rig: SupervisorRig,
) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900, 6901)
    first = rig.supervisor()
    eventually(lambda: len(rig.running()) == 2, what="both workers")
    eventually(lambda: rig.info(), what="a heartbeat")
    before = rig.running()
    first.kill()
    first.wait(timeout=patience(60))
    assert rig.running() == before
    os.kill(before[6901], signal.SIGKILL)  # dies unseen
    rig.supervisor()
    eventually(
        lambda: rig.running().get(6901) not in (None, before[6901]),
        what="a successor of the one that died unseen",
    )
    assert rig.running()[6900] == before[6900]
    assert len(rig.starts()) == 3
    os.kill(before[6900], signal.SIGKILL)  # no child of this supervisor, yet its death is seen
    eventually(
        lambda: rig.running().get(6900) not in (None, before[6900]),
        what="the restart of an adopted worker",
    )
    # its heartbeat node belongs to the new session: it does not vanish with the old one
    eventually(lambda: rig.cluster.state.exists(paths.supervisor("s1")), what="the heartbeat")


@pytest.mark.parametrize(
    "damage",
    [
        "garbage",
        "removed",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("truncated", "altered")),
    ],
)
def test_a_damaged_local_state_is_quarantined_and_rebuilt(rig: SupervisorRig, damage: str) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    first = rig.supervisor()
    eventually(lambda: rig.running(), what="the worker")
    state = rig.home / "supervisor/s1/localstate/state.json"
    eventually(lambda: state.exists() and b'"pid"' in state.read_bytes(), what="the state file")
    before = rig.running()
    first.kill()
    first.wait(timeout=patience(60))
    raw = state.read_bytes()
    if damage == "removed":
        state.unlink()
    else:
        state.write_bytes(
            {
                "garbage": b"\\x80garbage",
                "truncated": raw[:20],
                "altered": raw.replace(b"6900", b"6901"),
            }[damage]
        )
    rig.supervisor()
    eventually(lambda: rig.info(), what="a heartbeat")
    eventually(lambda: "runs already" in rig.log(), what="the adoption")
    assert rig.running() == before and len(rig.starts()) == 1
    assert (state.with_name("state.json.broken.1").exists()) == (damage != "removed")


def test_a_damaged_conf_of_the_code_is_fetched_again(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    rig.supervisor()
    pid = eventually(lambda: rig.running().get(6900), what="the worker")
    # As a power failure leaves what was just written.
    (rig.home / "supervisor/s1/stormdist/wc-1-1/stormconf.ser").write_bytes(b"")
    os.kill(pid, signal.SIGKILL)
    eventually(
        lambda: rig.running().get(6900) not in (None, pid), what="another worker", timeout=60
    )
    assert rig.blobs.gets("wc-1-1-stormconf.ser") == 2


def test_a_stopped_supervisor_leaves_its_workers(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    process = rig.supervisor()
    before = eventually(lambda: rig.running(), what="the worker")
    eventually(lambda: rig.info(), what="a heartbeat")
    process.terminate()
    assert process.wait(timeout=patience(20)) == 0
    assert rig.running() == before
    assert not rig.cluster.state.exists(paths.supervisor("s1"))
    assert not (rig.home / "run/supervisor-s1.json").exists()


def test_two_topologies_in_one_slot_are_refused_and_what_runs_stays(rig: SupervisorRig) -> None:
    rig.code("one-1-1")
    rig.code("two-2-2")
    rig.assign("one-1-1", 6900)
    rig.supervisor()
    before = eventually(lambda: rig.running(), what="the worker")
    rig.assign("two-2-2", 6900, 6901)
    eventually(lambda: 6901 in rig.running(), what="the slot that is not contested")
    eventually(
        lambda: "slot 6900 is claimed by one-1-1 and two-2-2 at once" in rig.log(),
        what="the complaint",
    )
    assert rig.running()[6900] == before[6900]
    as_storm(rig.cluster).remove_storm("one-1-1")
    eventually(lambda: [s["port"] for s in rig.starts("two-2-2")] == [6901, 6900], what="its turn")
    eventually(lambda: not alive_now(before[6900]), what="the first one's end")


def test_only_code_changes_touch_a_process_tasks_do_not(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900, tasks="1-2")
    rig.supervisor()
    before = eventually(lambda: rig.running(), what="the worker")
    rig.assign("wc-1-1", 6900, tasks="1-5")
    rig.assign("wc-1-1", 6900, 6901, tasks="1-3")
    eventually(lambda: 6901 in rig.running(), what="the added slot")
    assert rig.running()[6900] == before[6900]
    # New code that cannot be had leaves the old running; once it is there, it replaces it.
    rig.assign("wc-1-1", 6900, 6901, code="wc-1-2")
    eventually(
        lambda: rig.blobs.gets("wc-1-2-stormjar.jar") >= 3, what="tries to fetch the new code"
    )
    assert rig.running()[6900] == before[6900]
    rig.code("wc-1-2", word="new")
    eventually(
        lambda: sum("wc-1-2" in s["code_dir"] for s in rig.starts()) == 2, what="the new code"
    )
    assert rig.starts()[-1]["topology_id"] == "wc-1-1"
    eventually(lambda: set(rig.running()) == {6900, 6901}, what="both slots")
    eventually(lambda: not alive_now(before[6900]), what="the old one's end")


def test_a_restart_replaces_each_worker_once_despite_an_absent_supervisor(
    rig: SupervisorRig,
) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900, 6901)
    first = rig.supervisor()
    before = eventually(lambda: len(rig.running()) == 2 and rig.running(), what="both workers")

    def replaced(former: dict[int, int]) -> dict[int, int] | None:
        now = rig.running()
        return (
            now
            if now.keys() == former.keys() and not set(now.values()) & set(former.values())
            else None
        )

    rig.assign("wc-1-1", 6900, 6901, restarts=1)
    before = eventually(lambda: replaced(before), what="new processes in both slots")
    first.kill()
    first.wait(timeout=patience(60))
    rig.assign("wc-1-1", 6900, 6901, restarts=2)
    second = rig.supervisor()
    before = eventually(lambda: replaced(before), what="new processes again")
    second.kill()
    second.wait(timeout=patience(60))
    rig.supervisor()
    os.kill(before[6901], signal.SIGKILL)
    after = eventually(
        lambda: rig.running().get(6901) not in (None, before[6901]) and rig.running(),
        what="the last one",
    )
    assert after[6900] == before[6900] and len(rig.starts()) == 7


def test_an_unsafe_archive_fails_its_slot_only(rig: SupervisorRig) -> None:
    rig.code("evil-1-1")
    rig.blobs.blobs["evil-1-1-stormjar.jar"] = zip_bytes({"../evil": b"x"})
    rig.code("good-2-2")
    rig.assign("evil-1-1", 6900)
    rig.assign("good-2-2", 6901)
    rig.supervisor()
    eventually(lambda: 6901 in rig.running(), what="the good one")
    (error,) = eventually(lambda: as_storm(rig.cluster).errors("evil-1-1"), what="the report")
    assert "'../evil' points outside" in error.error
    assert (error.port, error.task, error.host) == (6900, 1, "127.0.0.1")
    assert rig.starts("evil-1-1") == []


def test_a_python_that_does_not_exist_is_reported(rig: SupervisorRig) -> None:
    rig.code("wc-1-1", **{"topology.python": "/nowhere/python"})
    rig.assign("wc-1-1", 6900)
    rig.supervisor()
    (error,) = eventually(lambda: as_storm(rig.cluster).errors("wc-1-1"), what="the report")
    assert "/nowhere/python cannot be started" in error.error
    assert "set topology.python" in error.error


def test_absence_of_the_root_is_no_order(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    first = rig.supervisor()
    before = eventually(lambda: rig.running(), what="the worker")
    rig.cluster.state.delete_node(paths.CLUSTER_ID)
    eventually(lambda: "holds no cluster" in rig.log(), what="the refusal")
    rig.cluster.state.delete_node(paths.ASSIGNMENTS)
    rig.cluster.state.delete_node(paths.SUPERVISORS)
    rig.cluster.state.mkdirs(paths.ASSIGNMENTS)
    count = rig.log().count("holds no cluster")
    os.kill(before[6900], signal.SIGKILL)  # the slots go on meanwhile
    after = eventually(lambda: (now := rig.running()) != before and now, what="the restart")
    rig.cluster.state.create_node(paths.CLUSTER_ID, b"another")
    eventually(lambda: "belongs to cluster another" in rig.log(), what="the other refusal")
    assert not rig.cluster.state.exists(paths.supervisor("s1"))
    assert rig.running() == after
    assert rig.log().count("holds no cluster") == count
    # a restarted supervisor remembers its cluster as well
    first.kill()
    first.wait(timeout=patience(60))
    said = rig.log().count("belongs to cluster another")
    rig.supervisor()
    eventually(
        lambda: rig.log().count("belongs to cluster another") > said,
        what="the refusal after a restart",
    )
    assert rig.running() == after


def test_a_wiped_tree_kills_nothing(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    rig.supervisor()
    before = eventually(lambda: rig.running(), what="the worker")
    eventually(lambda: rig.info(), what="a heartbeat")
    for path in (paths.ASSIGNMENTS, paths.SUPERVISORS, paths.TOPOLOGY, paths.CLUSTER_ID):
        rig.cluster.state.delete_node(path)
    eventually(lambda: "holds no cluster" in rig.log(), what="the refusal")
    assert rig.running() == before


def test_nimbuses_are_found_in_zookeeper(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.cluster.state.set_data(
        paths.EPOCH, encode_record(EpochRecord(leader="127.0.0.1:1", http="http://127.0.0.1:1"))
    )
    rig.cluster.state.create_node(
        f"{paths.NIMBUS_SLAVE_DETAIL}/127.0.0.1:6627", json.dumps({"http": rig.blobs.url}).encode()
    )
    rig.assign("wc-1-1", 6900)
    rig.conf["nimbus.seeds"] = []
    rig.supervisor()
    eventually(lambda: rig.running(), what="the worker")


def test_a_supervisor_id_in_use_and_bad_ports_are_refused(
    rig: SupervisorRig,
) -> None:
    rig.supervisor()
    eventually(lambda: rig.info(), what="a heartbeat")
    assert rig.supervisor().wait(timeout=patience(30)) != 0
    assert "another supervisor 's1' runs in" in rig.log()
    assert rig.supervisor("s2", (6900, 6900)).wait(timeout=patience(30)) != 0
    assert "names 6900 twice" in rig.log("s2")


@pytest.fixture
def copied(rig: SupervisorRig, tmp_path: Path) -> Iterator[Callable[[], SupervisorRig]]:
    """Makes a :func:`copy_of` the HOME, whose supervisors and workers end with the test."""
    twins: list[SupervisorRig] = []

    def copy() -> SupervisorRig:
        twins.append(copy_of(rig, tmp_path))
        return twins[-1]

    yield copy
    for twin in twins:
        twin.stop()


def copy_of(rig: SupervisorRig, tmp_path: Path) -> SupervisorRig:
    """Another HOME with what is in this one, but for what tests read."""
    twin = SupervisorRig(
        tmp_path / "copy", rig.conf, rig.cluster, rig.blobs, rig.python, rig.started
    )
    # What is being written meanwhile is renamed or deleted under the feet of the copy.
    shutil.copytree(rig.home, twin.home, ignore=shutil.ignore_patterns("*.tmp", "probe"))
    (twin.home / "starts").unlink()
    (twin.home / "supervisor-s1.log").unlink()
    shutil.rmtree(twin.home / "workers")
    return twin


def test_a_supervisor_with_a_copied_home_ends_no_original_worker(
    rig: SupervisorRig, copied: Callable[[], SupervisorRig]
) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    rig.supervisor()
    running = eventually(rig.running, what="the worker")
    local = rig.home / "supervisor/s1/localstate/state.json"
    eventually(
        lambda: b'"pid"' in local.read_bytes(),
        what="the worker in the state on disk",
        ignore=(OSError,),
    )
    twin = copied()
    # It sees no heartbeat of that worker.
    twin.supervisor(supervisor__worker__timeout__secs=1)
    eventually(
        lambda: "a supervisor with id 's1' lives already" in twin.log(),
        what="the refusal",
        timeout=60,
    )
    count = eventually(rig.info, what="its record").count
    eventually(
        lambda: (now := rig.info()) is not None and now.count > count + 5,
        what="more heartbeats",
        timeout=60,
    )
    assert twin.starts() == [] and len(rig.starts()) == 1 and rig.running() == running


def test_a_supervisor_id_used_elsewhere_is_refused_until_it_ends(
    rig: SupervisorRig, copied: Callable[[], SupervisorRig]
) -> None:
    """A copied HOME, or the same ``--id`` on another host: whoever is there first keeps the id and
    its workers.
    """
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    first = rig.supervisor()
    eventually(lambda: 6900 in rig.running(), what="the worker")
    before = eventually(rig.info, what="the first one's record")
    twin = copied()
    twin.supervisor()
    eventually(
        lambda: "a supervisor with id 's1' lives already" in twin.log(),
        what="the refusal",
        timeout=60,
    )
    count = before.count
    eventually(
        lambda: (now := rig.info()) is not None and now.count > count + 1,
        what="more heartbeats",
        timeout=60,
    )
    now = rig.info()
    assert now is not None and (now.place, now.started) == (before.place, before.started)
    assert twin.starts() == [] and len(rig.starts()) == 1
    first.kill()
    eventually(
        lambda: (info := twin.info()) is not None and info.place != before.place,
        what="the other one",
        timeout=60,
    )
    eventually(lambda: "the cluster can be read again" in twin.log(), what="the end of the refusal")


def test_supervisors_share_a_home_without_touching_each_others_workers(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    first = rig.supervisor("s1")
    before = eventually(lambda: rig.running(), what="the worker")
    rig.supervisor("s2", (6910,))
    eventually(lambda: rig.info("s2"), what="the second supervisor")
    first.kill()
    first.wait(timeout=patience(60))
    eventually(lambda: rig.info("s1") is None, what="the loss of the first")
    assert rig.running() == before


def test_workers_outlive_a_suspension_of_the_supervisor(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    process = rig.supervisor(supervisor__worker__timeout__secs=patience(2))
    before = eventually(lambda: rig.running(), what="the worker")
    eventually(lambda: "-> running" in rig.log(), what="its first beat")
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: rig.info() is None, what="the loss of its session")
    process.send_signal(signal.SIGCONT)
    eventually(lambda: rig.info(), what="its return")
    assert rig.running() == before and len(rig.starts()) == 1


def test_an_unhealthy_host_ends_its_workers_and_offers_no_slot(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    scripts = rig.home / "health"
    scripts.mkdir()
    script = scripts / "disk"
    script.write_text(f"#!/bin/sh\n[ ! -e {rig.home}/unfit ] || echo ERROR disk\n")
    script.chmod(0o755)
    (rig.home / "unfit").touch()
    process = rig.supervisor(supervisor__health__check__dir=str(scripts))
    eventually(
        lambda: (info := rig.info()) is not None and info.ports == (), what="no slot on offer"
    )
    eventually(lambda: not rig.running(), what="no worker")
    process.terminate()
    process.wait(timeout=patience(20))
    (rig.home / "unfit").unlink()
    rig.supervisor(supervisor__health__check__dir=str(scripts))
    eventually(
        lambda: (info := rig.info()) is not None and info.ports == (6900, 6901),
        what="its slots again",
    )
    eventually(lambda: rig.running(), what="its worker")


@pytest.mark.long
def test_a_full_disk_ends_no_worker_and_withdraws_the_free_slots(
    small_disk: Path, rig: SupervisorRig
) -> None:
    """Who runs goes on and keeps its slot, until there is room again."""
    rig.home = small_disk
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    rig.supervisor(supervisor__worker__timeout__secs=patience(5))
    eventually(lambda: 6900 in rig.running(), what="the worker")
    pid = rig.running()[6900]
    beat = HeartbeatThread(
        small_disk / "beat.json", 0.05, lambda: time.monotonic_ns(), lambda: "running"
    )
    beat.start()
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(512))
    eventually(
        lambda: (info := rig.info()) is not None and info.ports == (6900,),
        what="the withdrawal",
        timeout=60,
    )
    before = HeartbeatFile.read(small_disk / "beat.json")
    assert before is not None

    def beats_go_on() -> bool:
        now = HeartbeatFile.read(small_disk / "beat.json")
        return now is not None and now.count > before.count + 100

    eventually(beats_go_on, what="beats of a real worker's thread", timeout=60)
    beat.stop()
    assert rig.running() == {6900: pid}
    filler.unlink()
    eventually(
        lambda: (info := rig.info()) is not None and info.ports == (6900, 6901),
        what="all slots",
        timeout=60,
    )
    assert rig.running() == {6900: pid} and len(rig.starts()) == 1
    rig.started[0].kill()
    os.kill(pid, signal.SIGKILL)


def test_a_damaged_assignment_changes_nothing(rig: SupervisorRig) -> None:
    rig.code("wc-1-1")
    rig.assign("wc-1-1", 6900)
    rig.supervisor()
    before = eventually(lambda: rig.running(), what="the worker")
    rig.cluster.state.set_data(paths.assignment("wc-1-1"), b'{"v": 1, "workers": []}')
    eventually(
        lambda: "/assignments/wc-1-1 is not a valid Assignment" in rig.log(), what="the complaint"
    )
    rig.code("next-2-2")
    rig.assign("next-2-2", 6901)
    eventually(lambda: 6901 in rig.running(), what="another topology's worker")
    assert rig.running()[6900] == before[6900]
