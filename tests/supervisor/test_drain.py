"""SIGTERM of a supervisor: what becomes of its workers, as ``supervisor.on.term`` says."""

from __future__ import annotations

import os
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from storm_dagster.core.slots.drain import (
    ALONE_SECS,
    KNOWN_SECS,
    MAX_UNKNOWN_SECS,
    DrainState,
    end_of_drain,
)
from storm_dagster.supervisor.drain_watch import DrainWatch
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.blob_server import BlobServer
from storm_rigs.servers.pid_namespaces import CONTAINER, first_process, missing_requirement
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.supervisor_processes import SupervisorRig

pytestmark = pytest.mark.zookeeper


@pytest.fixture
def rig(stage: Stage, blob_server: BlobServer, stand_in: str) -> SupervisorRig:
    stage.conf |= {
        "nimbus.seeds": [blob_server.url.removeprefix("http://")],
        "supervisor.http.port": 0,
        "supervisor.heartbeat.frequency.secs": 1,
        "supervisor.monitor.frequency.secs": 0.5,
        "supervisor.worker.shutdown.sleep.secs": 2,
        "supervisor.worker.spares": 0,
    }
    return stage.supervisors(blob_server, stand_in)


def with_a_worker(
    rig: SupervisorRig, on_term: str = "drain", behaviour: str = "", **more: Any
) -> subprocess.Popen[bytes]:
    """A supervisor with one running worker."""
    rig.code("wc-1-1", behaviour)
    rig.assign("wc-1-1", 6900)
    process = rig.supervisor(supervisor__on__term=on_term, **more)
    eventually(lambda: "-> running" in rig.log(), what="the worker")
    return process


def ended(process: subprocess.Popen[bytes]) -> int:
    return process.wait(timeout=patience(30))


def drains(rig: SupervisorRig) -> bool:
    info = rig.info()
    return info is not None and info.draining


@pytest.mark.skipif(missing_requirement() is not None, reason=missing_requirement() or "")
def test_a_container_ends_when_its_tasks_have_moved(rig: SupervisorRig) -> None:
    container = with_a_worker(rig, prefix=CONTAINER)
    os.kill(first_process(container.pid), signal.SIGTERM)
    eventually(lambda: drains(rig), what="the record of the drain")
    info = rig.info()
    # The free slot is withdrawn, so that a leader of a former release places nothing here.
    assert info is not None and info.ports == (6900,)
    assert container.poll() is None
    rig.assign("wc-1-1", 6900, node="another")
    assert ended(container) == 0
    log = rig.log()
    assert "ended, status 0" in log
    assert "the drain is over: all slots are empty after" in log
    assert rig.info() is None


def test_at_the_limit_of_a_drain_workers_end_by_term(rig: SupervisorRig) -> None:
    process = with_a_worker(rig, supervisor__drain__secs=0.5)
    process.terminate()
    assert ended(process) == 0
    assert not rig.running()
    log = rig.log()
    assert "0.5 s (supervisor.drain.secs) have passed; the tasks in slots 6900" in log
    assert "ended, status 0" in log and "1 workers have ended" in log


def test_a_second_signal_ends_a_drain_and_its_workers(rig: SupervisorRig) -> None:
    process = with_a_worker(rig)
    process.terminate()
    eventually(lambda: drains(rig), what="the drain")
    assert rig.running()
    process.terminate()
    assert ended(process) == 0
    assert not rig.running()
    assert "a second signal ended the drain; the tasks in slots 6900" in rig.log()


def test_a_kill_during_a_drain_leaves_nothing_to_undo(rig: SupervisorRig) -> None:
    process = with_a_worker(rig)
    before = rig.running()
    process.terminate()
    eventually(lambda: drains(rig), what="the drain")
    process.kill()
    process.wait()
    rig.supervisor(supervisor__on__term="drain")
    eventually(
        lambda: (info := rig.info()) is not None and info.ports == (6900, 6901),
        what="all slots",
    )
    assert not drains(rig)
    assert rig.running() == before


@pytest.mark.long
def test_a_worker_that_crashes_during_a_drain_is_restarted(rig: SupervisorRig) -> None:
    process = with_a_worker(rig)
    (pid,) = rig.running().values()
    process.terminate()
    eventually(lambda: drains(rig), what="the drain")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: rig.running() and pid not in rig.running().values(), what="its successor")
    process.terminate()
    assert ended(process) == 0


@pytest.mark.long
def test_a_stubborn_worker_is_killed_after_the_drain(rig: SupervisorRig) -> None:
    process = with_a_worker(rig, "stop", "stubborn", supervisor__worker__shutdown__sleep__secs=0.5)
    process.terminate()
    assert ended(process) == 0
    assert not rig.running()


@pytest.mark.long
def test_a_supervisor_that_is_stopped_during_its_start_ends_at_once(rig: SupervisorRig) -> None:
    process = rig.supervisor(
        supervisor__on__term="drain", storm__zookeeper__servers=["127.0.0.1:9"]
    )
    eventually(lambda: "supervisor s1 starts" in rig.log(), what="its start")
    process.terminate()
    assert ended(process) == 0
    assert "the drain is over: no worker was started yet" in rig.log()


def test_a_drain_waits_for_its_limit_while_a_host_may_take_work() -> None:
    state = DrainState(seconds=119, max_secs=120, used_ports=(6900, 6902), has_read=True)
    assert end_of_drain(state) is None
    at_the_limit = end_of_drain(
        DrainState(seconds=120, max_secs=120, used_ports=(6900, 6902), has_read=True)
    )
    assert at_the_limit is not None and "slots 6900, 6902 were not moved" in at_the_limit


def empty(seconds: float, known_secs: float | None, *, is_hurried: bool = False) -> str | None:
    """End of a drain whose slots are empty."""
    return end_of_drain(
        DrainState(
            seconds=seconds,
            max_secs=120,
            used_ports=(),
            has_read=True,
            known_secs=known_secs,
            is_hurried=is_hurried,
        )
    )


def test_empty_slots_end_a_drain_once_no_placement_can_fill_them() -> None:
    assert empty(1, None) is None, "nimbus does not know of the drain"
    assert empty(60, KNOWN_SECS / 2) is None, "a move was perhaps planned before"
    assert empty(3, KNOWN_SECS) == "all slots are empty after 3.0 s"
    # ZooKeeper is away, a second signal came, or the limit is reached: nothing is waited for.
    assert empty(MAX_UNKNOWN_SECS, None) is not None
    assert empty(0.1, None, is_hurried=True) is not None
    assert empty(120, 0.0) is not None


def test_work_that_comes_right_after_the_signal_is_moved_as_well(rig: SupervisorRig) -> None:
    """The leader moved it here from another host that drains, before it read of this drain."""
    process = rig.supervisor(supervisor__on__term="drain")
    rig.code("wc-1-1")
    eventually(lambda: rig.info() is not None, what="the supervisor")
    process.terminate()
    eventually(lambda: drains(rig), what="the record of the drain")
    rig.assign("wc-1-1", 6900)
    eventually(lambda: rig.running(), what="the worker")
    assert process.poll() is None
    rig.assign("wc-1-1", 6900, node="another")
    assert ended(process) == 0
    assert "the drain is over: all slots are empty after" in rig.log()


def test_a_cluster_that_is_stopped_as_a_whole_is_not_waited_for() -> None:
    state = DrainState(
        seconds=20, max_secs=120, used_ports=(6900,), has_read=True, alone_secs=ALONE_SECS
    )
    reason = end_of_drain(state)
    assert reason is not None and "every supervisor of the cluster drains" in reason


def test_what_a_drain_waits_for_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    obstacles = "wc (6900): no slot is free for it on another host"
    link: Any = SimpleNamespace(
        all_drain=False, drain_obstacles=obstacles, desired=object(), drain_known_secs=0.0
    )
    table: Any = SimpleNamespace(used_ports=lambda: (6900,))
    watch = DrainWatch(began=100.0, max_secs=120.0)
    for now in (110.0, 110.25):
        assert watch.end(now, table, link, is_hurried=False) is None
    (line,) = caplog.messages
    assert line.startswith(
        f"the drain waits at most 110 s longer (supervisor.drain.secs): {obstacles}"
    )
    link.drain_obstacles = ""
    assert watch.end(120.0, table, link, is_hurried=False) is None
    assert caplog.messages[1:] == ["the drain continues: every topology can leave this host"]
    link.all_drain = True
    assert watch.end(121.0, table, link, is_hurried=False) is None
    reason = watch.end(121.0 + ALONE_SECS, table, link, is_hurried=False)
    assert reason is not None and "every supervisor of the cluster drains" in reason
