"""A pipeline over two workers whose Spark server is killed in the middle: nothing is lost, nothing
is made up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from storm_dagster.api import TopologyBuilder
from storm_dagster.security.spark_remote import SPARK_TOKEN, spark_token
from storm_dagster.spark.server import spark_connect_command, spark_environment
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.ports import free_port
from storm_rigs.servers.spark_server import wait_until_ready
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.worker_processes import WorkerRig

pytestmark = [pytest.mark.spark, pytest.mark.zookeeper, pytest.mark.timeout(300)]

CODE = '''
import os
from pathlib import Path
from storm_dagster.api import Bolt


def read(spark, folder):
    return spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(folder)


def shout(frame):
    from pyspark.sql import functions as f
    return frame.select(f.upper("line").alias("line"), "task")


class Tag(Bolt):
    """Adds which task of the spout a line came from."""
    outputs = ["line", "task"]

    def process(self, tup):
        self.emit([tup.values[0], tup.task])


class Sink(Bolt):
    def initialize(self, conf, context):
        self.out = (Path(os.environ["RIG_FOLDER"]) / "out.txt").open("a", buffering=1)

    def process(self, tup):
        self.out.write(f"{tup.values[0]} {tup.values[1]}\\n")
'''
FILES, LINES = 8, 150


class Server:
    """A Spark Connect server with a token, always on the same port."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.remote = f"sc://127.0.0.1:{self.port}"
        self._folder = folder
        self._token = spark_token({}, folder)

    def start(self) -> None:
        (self._folder / "spark").mkdir(exist_ok=True)
        with (self._folder / "spark.log").open("ab") as log:
            self.process = subprocess.Popen(
                spark_connect_command(self.port, self._folder / "spark"),
                env={**spark_environment(self._folder / "spark"), SPARK_TOKEN: self._token},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until_ready(self.port, self.process)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(patience(30))


@pytest.fixture
def rig(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[WorkerRig, Server]]:
    monkeypatch.setenv("STORM_DAGSTER_HOME", str(tmp_path))
    server = Server(tmp_path)
    builder = TopologyBuilder("shout")
    builder.set_spout(
        "lines",
        "storm_dagster.api.spark:SparkSpout",
        args={
            "source": "rig_code:read",
            "args": {"folder": str(tmp_path / "in")},
            "columns": ["value"],
            "checkpoint": str(tmp_path / "checkpoint"),
            "trigger": "100 milliseconds",
        },
        outputs=["line"],
        par=3,
    )
    builder.set_bolt("tag", "rig_code:Tag", inputs="lines", outputs=["line", "task"])
    builder.set_bolt(
        "shout",
        "storm_dagster.api.spark:SparkBolt",
        inputs="tag",
        args={"function": "rig_code:shout", "schema": "line string, task long", "batch_secs": 0.2},
        outputs=["line", "task"],
        config={"topology.tick.tuple.freq.secs": 0.2},
    )
    builder.set_bolt("sink", "rig_code:Sink", inputs="shout")
    bolts = {"tag": "1", "shout": "2", "sink": "3"}
    tasks = {**bolts, "__acker": "4", "__topology_master": "5", "lines": "6-8"}
    conf = {"topology.message.timeout.secs": 20, "topology.max.spout.pending": 500}
    stage.conf["spark.remote"] = server.remote
    made = stage.workers(builder, tasks, code=CODE, conf=conf)
    yield made, server
    made.stop()
    server.stop()


@pytest.mark.chaos
def test_spark_killed_in_the_middle_loses_nothing(rig: tuple[WorkerRig, Server]) -> None:
    workers, server = rig
    expected = set()
    (workers.folder / "in").mkdir()
    for number in range(FILES):
        lines = [f"line {number}-{n}" for n in range(LINES)]
        expected |= {line.upper() for line in lines}
        (workers.folder / "in" / f"{number}.txt").write_text("\n".join(lines) + "\n")
    out = workers.folder / "out.txt"

    def rows() -> list[tuple[str, str]]:
        text = out.read_text() if out.exists() else ""
        return [
            (line, task) for line, _, task in (row.rpartition(" ") for row in text.split("\n")[:-1])
        ]

    server.start()
    one, two = ("s1", free_port()), ("s2", free_port())
    workers.assign({one: "1-2,4-6", two: "3,7-8"})
    workers.start(*one)
    workers.start(*two)
    eventually(lambda: len(rows()) >= 2 * LINES, 120, "the first lines")
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(patience(30))
    assert {line for line, _ in rows()} < expected, (
        "it must be killed before the end to show anything"
    )
    server.stop()
    server.start()
    eventually(lambda: {line for line, _ in rows()} >= expected, 150, "all lines")
    assert {line for line, _ in rows()} == expected
    assert {task for _, task in rows()} == {"6", "7", "8"}, (
        "each task of the spout has its share, in both workers"
    )
    commits = workers.folder / "checkpoint" / "commits"
    eventually(
        lambda: len([path for path in commits.glob("*") if path.name.isdigit()]) == FILES,
        60,
        "commits",
    )
    assert workers.running()
