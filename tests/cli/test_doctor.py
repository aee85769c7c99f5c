"""``doctor``: the parts that it names, counts, and could not check."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from storm_dagster.cli.check_runner import run_checks
from storm_dagster.model import paths
from storm_dagster.model.conf import default_conf
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.healing_pause import HealingPause
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    SupervisorInfo,
    TaskTable,
    WorkerSlot,
    encode_record,
)
from storm_dagster.operations.read.exposures import HealthResult
from storm_dagster.supervisor.host_measurements import HostMeasurements
from storm_dagster.testing.cluster import CommandResult, run_cli
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.builder import Stage

TOPOLOGIES = 52
"""Two more than ``doctor`` names."""


def test_a_check_that_does_not_end_holds_up_no_other() -> None:
    never = threading.Event()

    def late() -> Iterator[HealthResult]:
        yield "ok", "the first part", ""
        never.wait(60)
        yield "ok", "the second part", ""

    def broken() -> Iterator[HealthResult]:
        yield "ok", "before", ""
        raise Unavailable("it does not answer")

    def quick() -> Iterator[HealthResult]:
        yield "ok", "quick", ""

    checks = {"late": late, "broken": broken, "quick": quick}
    found = [entry for entry in run_checks(checks, {"late": 0.5}, 30.0) if entry is not None]
    never.set()
    texts: dict[str, list[str]] = {}
    for name, (_, text, _) in found:
        texts.setdefault(name, []).append(text)
    assert texts["quick"] == ["quick"]
    assert texts["broken"] == ["before", "it does not answer"]
    first, second = texts["late"]
    assert first == "the first part" and second.startswith("no answer within 0.5 s")


class ShiftedClock(BaseHTTPRequestHandler):
    """A nimbus whose clock is behind by ``behind_secs``."""

    behind_secs: ClassVar[float] = 0.0

    def do_GET(self) -> None:
        self.send_response_only(200)
        self.send_header("Date", formatdate(time.time() - self.behind_secs, usegmt=True))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.mark.parametrize("behind_secs", [0.0, 600.0, -600.0])
def test_a_supervisor_compares_its_clock_with_the_leaders(
    behind_secs: float, tmp_path: Path
) -> None:
    handler = type("Handler", (ShiftedClock,), {"behind_secs": behind_secs})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        measurements = HostMeasurements(
            default_conf(), tmp_path, lambda: ["http://127.0.0.1:9", url]
        )
        with httpx.Client(trust_env=False) as http:
            measurements.measure(http)
        server.shutdown()
        thread.join()
    assert measurements.clock_ahead_secs is not None
    # The header has whole seconds, and the time of the request is no difference.
    assert abs(measurements.clock_ahead_secs - behind_secs) <= (1.5 if behind_secs else 0.0)
    assert measurements.disk.free_mb and measurements.disk.total_mb


@contextlib.contextmanager
def opened(zk_conf: dict[str, object]) -> Iterator[StormClusterState]:
    with StormClusterState.open(zk_conf) as state:
        yield state


def add_records(state: StormClusterState) -> None:
    """A supervisor in trouble, and topologies whose workers and hosts are gone."""
    supervisor = SupervisorInfo(
        host="h1",
        ports=(1, 2),
        started=0,
        count=1,
        version="t",
        clock_ahead_secs=600.0,
        disk_free_mb=100,
        disk_mb=1000,
    )
    state.state.set_ephemeral_node(paths.supervisor("s1"), encode_record(supervisor))
    for number in range(TOPOLOGIES):
        place = WorkerSlot(node="gone", host="h9", port=1000 + number, tasks="1-2")
        add_topology(state, f"wc{number:03}", number + 1, place, 1_700_000_000)


def add_topology(
    state: StormClusterState, name: str, number: int, place: WorkerSlot, placed_secs: int
) -> None:
    """A topology of two tasks whose only worker was placed at a time, and never started."""
    topology_id = f"{name}-{number}-1700000000"
    assignment = Assignment(
        topology_id=topology_id,
        code_dir=topology_id,
        node_host={place.node: place.host},
        workers=(place,),
        task_start_secs={"1-2": placed_secs},
        timestamp_ms=placed_secs * 1000,
    )
    base = StormBase(
        name=name,
        launch_time_secs=1_700_000_000,
        status="ACTIVE",
        workers=1,
        executors={"lines": 2},
        token="t",
    )
    records = {
        paths.tasks(topology_id): TaskTable(
            components={"lines": ComponentTasks(type="spout", tasks="1-2")}
        ),
        paths.assignment(topology_id): assignment,
        paths.topology(topology_id): base,
    }
    for path, record in records.items():
        state.state.create_node(path, encode_record(record))


def doctor(home: Path, conf: dict[str, object]) -> CommandResult:
    (home / "storm.yaml").write_text(json.dumps(conf), encoding="utf-8")
    return run_cli("doctor", "--json", "--conf-dir", str(home), home=home)


def found_by(done: CommandResult, check: str) -> list[tuple[str, str]]:
    return [
        (row["state"], row["found"]) for row in done.document["findings"] if row["check"] == check
    ]


@pytest.mark.zookeeper
def test_one_answer_of_nimbus_names_all_that_is_wrong(
    stage: Stage, zk_conf: dict[str, object], tmp_path: Path
) -> None:
    nimbus = stage.nimbus(nimbus__monitor__backstop__secs=3600).await_leading()
    with opened(zk_conf) as state:
        add_records(state)
        first = nimbus.get("/v1/problems?limit=40").json()
        rest = nimbus.get(f"/v1/problems?limit=40&after={first['next']}").json()
        conf = {"nimbus.seeds": [nimbus.url.removeprefix("http://")], "dagster.graphql.url": ""}
        done = doctor(tmp_path, conf)
        free = 'storm_supervisor_disk_free_bytes{host="h1",supervisor="s1"} 1.048576e+08'
        # They are left out while the cluster cannot be read. The record of the supervisor ends
        # with its session.
        metrics = eventually(
            lambda: (text := nimbus.get("/metrics").text) and free in text and text,
            what="the disk of the supervisor in the metrics",
        )

    def topologies(document: dict[str, Any]) -> set[str]:
        subjects = {row["subject"] for row in document["problems"]}
        return {subject for subject in subjects if subject.startswith("topology ")}

    assert len(topologies(first)) == 40 and first["more"] == TOPOLOGIES - 40
    assert len(topologies(first) | topologies(rest)) == TOPOLOGIES
    assert rest["next"] is None and rest["more"] == 0
    texts = found_by(done, "cluster")
    assert any(state == "broken" and "the disk of supervisor s1 on h1" in t for state, t in texts)
    assert any("the clock of supervisor s1 on h1 is 10 min ahead" in text for _, text in texts)
    assert ("warning", "and 2 more topologies have tasks that do not run") in texts
    assert nimbus.get("/v1/problems?limit=0").status_code == 400
    assert 'storm_supervisor_clock_ahead_seconds{host="h1",supervisor="s1"} 600.0' in metrics
    assert "storm_nimbus_disk_free_bytes" in metrics


@pytest.mark.zookeeper
def test_without_a_nimbus_it_reads_zookeeper_and_names_the_rest(
    stage: Stage, zk_conf: dict[str, object], tmp_path: Path
) -> None:
    stage.nimbus().await_leading().stop()
    names = ("storm.zookeeper.servers", "storm.zookeeper.port", "storm.zookeeper.root")
    conf: dict[str, object] = {name: zk_conf[name] for name in names if name in zk_conf}
    with opened(zk_conf) as state:
        add_records(state)
        # On a host that lives, and within the time that the conf grants.
        place = WorkerSlot(node="s1", host="h1", port=1, tasks="1-2")
        add_topology(state, "late", 100, place, int(time.time()) - 600)
        now_ms = int(time.time()) * 1000
        pause = HealingPause(since_ms=now_ms, until_ms=now_ms + 600_000, user="ann")
        state.state.create_node(paths.HEALING_PAUSE, encode_record(pause))
        conf.update({"nimbus.seeds": ["127.0.0.1:9"], "nimbus.task.launch.secs": 3600})
        done = doctor(tmp_path, conf)
    texts = found_by(done, "cluster")
    assert done.code == 4 and texts[0][0] == "broken"
    assert any("by ZooKeeper: 1 supervisors" in text for _, text in texts)
    assert any(text.startswith("healing is paused by ann until") for _, text in texts)
    assert ("warning", "topology wc000: 2 tasks do not run") in texts
    assert ("warning", "and 2 more topologies have tasks that do not run") in texts
    assert not any("topology late" in text for _, text in texts)
    assert any(text.startswith("not checked") for _, text in texts)
