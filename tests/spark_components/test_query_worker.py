"""Spark components in real workers: what stops with the topology, ends with a worker, and outlives
one.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.api import TopologyBuilder
from storm_dagster.api.spark.session import drop_worker_session, worker_session
from storm_dagster.security.spark_remote import remote_with_session
from storm_dagster.spark.query_sessions import end_query_session
from storm_dagster.spark.session import open_connect
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.worker_processes import WorkerRig

pytestmark = [pytest.mark.spark, pytest.mark.zookeeper, pytest.mark.long, pytest.mark.timeout(600)]

CODE = """
import time
from pathlib import Path

from storm_dagster.api import Spout


def read(spark, folder):
    return spark.readStream.format("text").load(folder)


class Ones(Spout):
    def next_tuple(self):
        time.sleep(0.01)
        self.emit([1])


def note(frame, path):
    Path(path).write_text(f"{frame.sparkSession.session_id} {frame.count()}")


def store(frame, batch_id, out):
    Path(out, str(batch_id)).write_text("".join(row[0] + "\\n" for row in frame.collect()))
"""


@pytest.fixture
def conf(spark_remote: str) -> dict[str, Any]:
    return {"spark.remote": spark_remote}


@pytest.fixture
def rig(tmp_path: Path, stage: Stage, conf: dict[str, Any]) -> Iterator[WorkerRig]:
    builder = TopologyBuilder("stored")
    args: dict[str, Any] = {
        "query": "rig_query:read",
        "args": {"folder": str(tmp_path / "in")},
        "each_batch": "rig_query:store",
        "batch_args": {"out": str(tmp_path / "out")},
        "checkpoint": str(tmp_path / "checkpoint"),
        "trigger": "100 milliseconds",
    }
    builder.set_spout("lines", "storm_dagster.api.spark.query:SparkQuery", args=args)
    tasks = {"__acker": "1", "__topology_master": "2", "lines": "3"}
    made = stage.workers(builder, tasks, code={"rig_query.py": CODE}, conf=conf)
    with zipfile.ZipFile(made.code_dir / "stormjar.jar", "w") as packed:
        packed.writestr("rig_query.py", CODE)
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    yield made
    made.stop()
    drop_worker_session(conf, code=made.topology_id)
    end_query_session(conf["spark.remote"], made.topology_id)


def test_a_query_stops_while_inactive_and_goes_on_without_its_worker(
    rig: WorkerRig, conf: dict[str, Any]
) -> None:
    expected: list[str] = []

    def add() -> None:
        expected.append(f"line {len(expected)}")
        (rig.folder / "in" / f"{len(expected)}.txt").write_text(f"{expected[-1]}\n")

    def lines() -> list[str]:
        return sorted(
            line
            for path in (rig.folder / "out").glob("*")
            for line in path.read_text().splitlines()
        )

    def owner() -> str:
        # Spark replaces the record: for a moment there is none.
        return "".join(
            path.read_text() for path in (rig.folder / "checkpoint" / "owner").glob("*.txt")
        )

    add()
    one, two = ("s1", free_port()), ("s2", free_port())
    rig.assign({one: "1,3", two: "2"})
    rig.start(*one)
    rig.start(*two)
    eventually(lambda: lines() == expected, 240, "the first line")
    assert f"task 3 at 127.0.0.1:{one[1]}" in owner()
    rig.set_status("INACTIVE")
    session = worker_session(conf, code=rig.topology_id)
    eventually(lambda: not session.streams.active, 60, "the end of the query")
    add()
    rig.set_status("ACTIVE")
    eventually(lambda: lines() == expected, 120, "the line after the pause")
    os.kill(rig.processes[one].pid, 9)
    rig.processes[one].wait()
    add()
    eventually(lambda: lines() == expected, 60, "a line that no worker watches")
    rig.assign({two: "1-3"})
    eventually(lambda: f":{two[1]}" in owner(), 120, "the new owner")
    eventually(lambda: "continues: run" in rig.log(*two), 60, "the run that goes on")
    (query,) = session.streams.active
    assert str(query.runId) in rig.log(*two)
    add()
    eventually(lambda: lines() == expected, 60, "the next line")
    assert len(list((rig.folder / "out").glob("*"))) == len(expected), "each batch is written once"


def test_a_worker_that_is_stopped_leaves_no_session_on_the_server(
    tmp_path: Path, stage: Stage, conf: dict[str, Any]
) -> None:
    noted = tmp_path / "session"
    builder = TopologyBuilder("noted")
    builder.set_spout("ones", "rig_query:Ones", outputs=["n"])
    args: dict[str, Any] = {
        "function": "rig_query:note",
        "args": {"path": str(noted)},
        "batch_secs": 0.2,
    }
    builder.set_bolt("note", "storm_dagster.api.spark:SparkBolt", inputs="ones", args=args)
    tasks = {"__acker": "1", "__topology_master": "2", "note": "3", "ones": "4"}
    rig = stage.workers(builder, tasks, code={"rig_query.py": CODE}, conf=conf, name="noted")
    slot = ("s1", free_port())
    try:
        rig.assign({slot: "1-4"})
        process = rig.start(*slot)
        eventually(lambda: noted.exists() and len(noted.read_text().split()) == 2, 240, "a batch")
        process.terminate()
        assert process.wait(patience(20)) == 0
    finally:
        rig.stop()
    session_id = noted.read_text().split()[0]
    with pytest.raises(Exception, match="SESSION_CLOSED"):
        open_connect(remote_with_session(conf["spark.remote"], session_id)).range(1).count()
