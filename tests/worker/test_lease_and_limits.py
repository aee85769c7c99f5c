"""The lease's arithmetic, throttled errors, durable state, and what a worker imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from storm_dagster.api import TaskState
from storm_dagster.host.clock import boot_clock
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.slot import Slot
from storm_dagster.testing.task_state import open_task_state, read_task_states
from storm_dagster.testing.waiting import patience
from storm_dagster.worker.runtime.lease import WorkerLease
from storm_dagster.worker.state.storage import open_task_log
from storm_dagster.worker.state.task_store import TaskStore, task_folder
from storm_dagster.worker.tasks.errors import ErrorReporter, error_group


class Session:
    """A session whose end the test sets."""

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}

    def lease_end(self, session_id: int | None = None) -> float:
        return self.ends.get(session_id or 0, 0.0)


def test_a_lease_that_ended_stays_ended_until_it_is_granted() -> None:
    session = Session()
    lease = WorkerLease(session.lease_end)
    assert not lease.valid()
    session.ends[1] = boot_clock() + 100
    lease.grant(1)
    assert lease.valid() and lease.granted
    session.ends[1] = boot_clock() - 1
    assert lease.valid(), "what was answered before still holds"
    lease.grant(1)
    assert not lease.valid() and lease.pauses == 1
    session.ends[1] = boot_clock() + 100
    assert not lease.valid(), "the assignment must be read first"
    lease.grant(1)
    assert lease.valid()


def test_a_new_session_does_not_renew_the_lease_of_the_old_one() -> None:
    session = Session()
    session.ends[1] = boot_clock() + 100
    lease = WorkerLease(session.lease_end)
    lease.grant(1)
    session.ends = {2: boot_clock() + 1000}
    lease._until = boot_clock() - 1
    assert not lease.valid()


def test_errors_are_throttled_by_task() -> None:
    now = [0.0]
    seen: list[int] = []
    counted: list[int] = []

    def record(task: int, component: str, text: str, secs: int, group: str) -> None:
        (seen if text else counted).append(task)

    conf = {
        "topology.error.throttle.interval.secs": 10,
        "topology.max.error.report.per.interval": 2,
    }
    report = ErrorReporter(conf, record, lambda: now[0])
    for _ in range(5):
        report(1, "a", ValueError("x"), "process")
    report(2, "b", ValueError("x"), "process")
    assert seen == [1, 1, 2] and counted == [1, 1, 1]
    now[0] = 10.5
    report(1, "a", ValueError("x"), "process")
    assert seen == [1, 1, 2, 1]


def raised(message: str, deeper: bool = False) -> Exception:
    def inner() -> None:
        raise ValueError(message)

    try:
        if deeper:
            inner()
        raise ValueError(message)
    except ValueError as error:
        return error


def test_errors_of_one_place_are_one_group() -> None:
    assert error_group(raised("13"), "process") == error_group(raised("14"), "process")
    assert error_group(raised("13"), "process") != error_group(raised("13"), "process_tick")
    assert error_group(raised("13"), "process") != error_group(raised("13", deeper=True), "process")
    assert error_group(ValueError("13"), "process") == error_group(ValueError("13"), "process")
    assert error_group(ValueError("13"), "process") != error_group(ValueError("14"), "process")
    assert len(error_group(ValueError("\udc80" * 1000), "process").encode()) < 3000


def test_state_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    owns = [True]
    folder = task_folder(tmp_path, "wc", "count/er..", 4)
    state = TaskState(TaskStore(open_task_log(folder, lambda: owns[0])))
    state.save({"a": 1, "b": [1, {"x": None}]}, applied=["line-1", 2])
    with pytest.raises(TypeError):
        state.save({"a": 2, "c": object()}, applied=["line-2"])
    owns[0] = False
    with pytest.raises(Unavailable):
        state.save({"a": 3}, applied=["line-3"])
    state.close()
    with pytest.raises(InvalidRequest, match="closed"):
        state.get("a")
    again = open_task_state(tmp_path, "wc", "count/er..", 4)
    assert dict(again.items()) == {"a": 1, "b": [1, {"x": None}]}
    assert (
        again.applied_ids() == {"line-1", "2"} and again.applied(2) and not again.applied("line-3")
    )
    again.save({"c": 1}, remove=["a"], forget=[2], sync=True)
    assert dict(again.items("c")) == {"c": 1} and len(again) == 2 and not again.applied(2)
    (reader,) = read_task_states(tmp_path, "wc", "count/er..").values()
    assert dict(reader.items()) == dict(again.items()) and reader.applied("line-1")
    with pytest.raises(InvalidRequest, match="opened to be read"):
        reader.save({"c": 2})
    again.save({"c": 3})
    again.clear()
    assert len(again) == 0 and again.applied_ids() == set()
    assert (
        again.path.is_relative_to(tmp_path / "wc")
        and len(again.path.relative_to(tmp_path).parts) == 3
    )


def test_a_worker_imports_no_heavy_package() -> None:
    code = (
        "import sys, storm_dagster.worker.__main__\n"
        "assert 'asyncio' not in sys.modules\n"
        "import storm_dagster.worker.threads.bolts, storm_dagster.worker.threads.spouts\n"
        "import storm_dagster.worker.multilang.bolts, storm_dagster.worker.multilang.spouts\n"
        "bad = {'dagster', 'pyspark', 'pandas', 'pyarrow', 'numpy', 'httpx', 'grpc'} & set(sys.modules)\n"
        "bad |= {'email', 'importlib.metadata', 'difflib'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(60))


def test_models_of_users_get_the_plugins_of_pydantic_and_ours_do_not(tmp_path: Path) -> None:
    (tmp_path / "plug-1.dist-info").mkdir()
    (tmp_path / "plug-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: plug\nVersion: 1\n"
    )
    (tmp_path / "plug-1.dist-info" / "entry_points.txt").write_text(
        "[pydantic]\nplug = plug:plugin\n"
    )
    (tmp_path / "plug.py").write_text(
        "class Plugin:\n"
        "    seen = []\n"
        "    def new_schema_validator(self, schema, kind, *rest):\n"
        "        self.seen.append(kind.__name__)\n"
        "        return None, None, None\n"
        "plugin = Plugin()\n"
    )
    code = (
        "import storm_dagster.worker.__main__, pydantic, importlib.metadata\n"
        "from importlib.metadata import version\n"
        "class Mine(pydantic.BaseModel): pass\n"
        "import plug\n"
        "assert plug.plugin.seen == ['Mine'] and version('plug') == '1', plug.plugin.seen"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(60), env=environment)


def test_unreported_tasks_die_after_the_launch_window_silent_ones_after_the_timeout() -> None:
    from storm_dagster.model.wire import TaskReport, WorkerReport
    from storm_dagster.worker.engine.system import TopologyMasterTable

    def report(*tasks: int) -> WorkerReport:
        return WorkerReport(
            node="s1", host="h", port=1, pid=7, count=1, uptime_secs=0, version=0, status="running",
            tasks={str(task): TaskReport(component="b", status="running") for task in tasks}, system={},
        )  # fmt: skip

    table = TopologyMasterTable("t-1-1", 9)
    table.receive(report(1, 2), 0.0)
    assert table.beats(10.0, 30, (1, 2, 3), 120).dead == ""
    table.receive(report(1, 2), 130.0)
    assert table.beats(130.0, 30, (1, 2, 3), 120).dead == ""
    table.receive(report(1, 2), 131.0)
    assert table.beats(131.0, 30, (1, 2, 3), 120).dead == "3"  # never reported: missed since 10
    table.receive(report(1, 2, 3), 132.0)
    assert table.beats(133.0, 30, (1, 2, 3), 120).dead == ""
    assert table.beats(163.0, 30, (1, 2, 3), 120).dead == "1-3"  # reported, then silent


def test_a_topology_master_judges_its_named_placement_and_current_processes() -> None:
    from storm_dagster.model.wire import TaskReport, WorkerReport
    from storm_dagster.worker.dataplane.routes import Placement
    from storm_dagster.worker.engine.system import TopologyMasterTable

    def report(port: int, *tasks: int) -> WorkerReport:
        return WorkerReport(
            node="s1", host="h", port=port, pid=7, count=1, uptime_secs=0, version=0, status="running",
            tasks={str(task): TaskReport(component="b", status="running") for task in tasks}, system={},
        )  # fmt: skip

    def placed(version: int, tokens: dict[str, int], **tasks: int) -> Placement:
        slots = {int(task[1:]): Slot("s1", port) for task, port in tasks.items()}
        running = {token: Slot("s1", port) for token, port in tokens.items()}
        return Placement(version, slots, {}, {}, frozenset(), frozenset(), running)

    def judged(now: float) -> tuple[int, str]:
        beats = table.beats(now, 30, (1, 2), 120)
        return beats.version, beats.dead

    table = TopologyMasterTable("t-1-1", 9)
    table.follow(placed(0, {"a": 1, "b": 2}, t1=1, t2=2))
    table.receive(report(1, 1), 0.0)
    table.receive(report(2, 2), 0.0)
    assert judged(31.0) == (0, "1-2")
    # Task 1 was moved: what its former slot said, also too late, is nothing about the new one.
    table.follow(placed(1, {"a": 1, "b": 2}, t1=3, t2=2))
    table.receive(report(1, 1), 32.0)
    assert judged(63.0) == (1, "2")
    # Another process in the slot of task 2 has its own time.
    table.follow(placed(1, {"c": 2}, t1=3, t2=2))
    assert judged(64.0) == (1, "")
