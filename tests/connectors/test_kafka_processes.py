"""Kafka read by real workers that are killed, moved, drained and cut off: nothing is lost.

``make test`` runs the first case on librdkafka's brokers. With ``KAFKA_BOOTSTRAP`` all run on real
ones (``make test-kafka``), with ``KAFKA_LONG=1`` a million records and twenty kills, and what is
away is away for longer. What they measure they print.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.api import TopologyBuilder
from storm_dagster.operations.live.worker_requests import ask_worker
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.kafka import REAL, KafkaRig
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.worker_processes import WorkerRig

pytestmark = pytest.mark.zookeeper
LONG = bool(os.environ.get("KAFKA_LONG"))
RECORDS = 1_000_000 if LONG else 20_000 if REAL else 3000
KILLS = 20 if LONG else 4 if REAL else 2
PARTITIONS = 12 if REAL else 4
real = pytest.mark.skipif(
    not REAL, reason="needs real brokers: set KAFKA_BOOTSTRAP, or make test-kafka"
)
if REAL:
    pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(1800)]

CODE = '''
"""Each number is written to a file of the process that got it."""
import os, threading, time
from pathlib import Path
from storm_dagster.api import Bolt, Spout
from storm_dagster.connectors import KafkaSource, Retries, SinkBolt, SourceSpout

FOLDER = Path(os.environ["RIG_FOLDER"])


class Records(SourceSpout):
    source = KafkaSource(os.environ["RIG_TOPIC"])
    outputs = ["n"]
    retries = Retries(most=3, first_secs=0.05)


class Use(Bolt):
    def initialize(self, conf, context):
        self.file = os.open(FOLDER / f"seen-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.pause = float(conf.get("rig.pause", 0))

    def process(self, tup):
        if self.pause:
            time.sleep(self.pause)
        os.write(self.file, b"%d\\n" % tup.values[0])


class Numbers:
    """A sink that is away while there is a file of this name."""
    assets = ()

    def open(self, conf, owner):
        if (FOLDER / "away").exists():
            raise ConnectionError("the sink is away")

    def write(self, rows, token):
        self.open(None, "")
        with (FOLDER / f"seen-{os.getpid()}").open("a") as file:
            file.writelines(f"{row.values['n']}\\n" for row in rows)

    def close(self):
        pass


class Store(SinkBolt):
    sink = Numbers()
    batch_secs = 0.2


class Beats(Spout):
    """How long the loop was away between two calls, at most."""

    def initialize(self, conf, context):
        self.last = time.monotonic()
        self.worst = 0.0

    def next_tuple(self):
        now = time.monotonic()
        if (FOLDER / "reset").exists():
            (FOLDER / "reset").unlink()
            self.worst = 0.0
        elif now - self.last > self.worst:
            self.worst = now - self.last
            (FOLDER / "worst.new").write_text(f"{self.worst:.4f}")
            os.replace(FOLDER / "worst.new", FOLDER / "worst")
        self.last = now
'''
ONE, TWO = "s1", "s2"


class Readers:
    """A topology of one spout that reads a topic, on two workers."""

    def __init__(self, rig: WorkerRig, kafka: KafkaRig, topic: str) -> None:
        self.rig, self.kafka, self.topic = rig, kafka, topic
        self.slots = {name: (name, free_port()) for name in (ONE, TWO)}

    @property
    def group(self) -> str:
        return f"{self.rig.name}.records"

    def assign(self, status: str = "ACTIVE", **tasks: str) -> None:
        """Tasks of the spout by host; the others stay where they are."""
        rest = {ONE: "1,3-4,9", TWO: "2"}
        both = {
            self.slots[name]: f"{rest[name]},{tasks[name]}" if tasks.get(name) else rest[name]
            for name in rest
        }
        self.rig.assign(both, status)

    def tasks(self, numbers: str) -> None:
        self.rig.set_tasks(tasks_of(numbers))

    def start(self, *names: str) -> None:
        for name in names or self.slots:
            self.rig.start(*self.slots[name])

    def kill(self, name: str) -> None:
        process = self.rig.processes[self.slots[name]]
        process.kill()
        process.wait()

    def seen(self) -> Counter[int]:
        found: Counter[int] = Counter()
        for path in self.rig.folder.glob("seen-*"):
            found.update(map(int, path.read_bytes().split()))
        return found

    def progress(self) -> int:
        return sum(self.kafka.committed(self.group, self.topic).values())

    def begin_outage(self) -> float:
        """Measure the worker of the first slot from now on; its memory in MiB."""
        reset = self.rig.folder / "reset"
        reset.touch()
        eventually(lambda: not reset.exists(), what="the beats begin anew")
        return self.memory()

    def memory(self) -> float:
        pages = (
            Path(f"/proc/{self.rig.processes[self.slots[ONE]].pid}/statm").read_text().split()[1]
        )
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def check_outage(self, before: float, what: str) -> None:
        """The worker's loop was never away for long, and its memory has not grown, since the outage
        began.
        """
        worst, grown = float((self.rig.folder / "worst").read_text()), self.memory() - before
        print(
            f"\n{what}: the loop was away for {worst * 1000:.0f} ms at most, memory {before:.0f} {grown:+.0f} MiB"
        )
        # Ten times what is promised: other processes have the processors, too.
        assert worst < 0.5
        # What librdkafka fetches ahead, and the open records of all partitions, have bounds: 21 MiB
        # were seen.
        assert grown < 40

    def finish(self, records: int, timeout: float = 120) -> Counter[int]:
        """Until everything is committed: what the bolts got."""
        self.kafka.wait_for_end(self.group, self.topic, timeout)
        seen = self.seen()
        lost = set(range(records)) - seen.keys()
        assert not lost, f"{len(lost)} records are lost: {sorted(lost)[:10]}"
        return seen

    def readers(self) -> dict[str, list[int]]:
        """Partition -> tasks that read it, as the statistics show it."""
        name, port = self.slots[ONE]
        document = ask_worker("127.0.0.1", port, self.rig.live()[name, port].token, "stats", 20)
        found: dict[str, list[int]] = {}
        for task, entry in document["tasks"].items():
            for partition in (
                (entry["metrics"].get("lag_by_partition") or {})
                if entry["component"] == "records"
                else ()
            ):
                found.setdefault(partition, []).append(int(task))
        return found

    def wait_for_readers(self, tasks: int, what: str) -> None:
        began = time.monotonic()

        def each_has_one() -> bool:
            found = self.readers()
            each = [one for ones in found.values() for one in ones]
            return len(found) == PARTITIONS == len(each) and len(set(each)) == min(
                tasks, PARTITIONS
            )

        # Five seconds are promised.
        eventually(each_has_one, 50, f"one reader for each partition: {what}", ignore=(Exception,))
        print(
            f"\n{what}: each partition has one reader in the statistics after {time.monotonic() - began:.1f} s"
        )


def tasks_of(records: str) -> dict[str, str]:
    return {
        "use": "1-2",
        "__acker": "3",
        "__topology_master": "4",
        "records": records,
        "beats": "9",
    }


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaRig]:
    rig = KafkaRig()
    yield rig
    rig.close()


@pytest.fixture
def make(stage: Stage, kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Readers]:
    def make(tasks: str = "10-11", use: str = "Use", **conf: Any) -> Readers:
        topic = kafka.topic(PARTITIONS)
        monkeypatch.setenv("RIG_TOPIC", topic)
        builder = TopologyBuilder(topic)
        builder.set_spout("records", "rig_code:Records", outputs=["n"])
        builder.set_spout("beats", "rig_code:Beats", outputs=["n"])
        builder.set_bolt(
            "use",
            f"rig_code:{use}",
            inputs="records",
            par=2,
            config={"topology.tick.tuple.freq.secs": 0.1},
        )
        settings = {
            "kafka.bootstrap.servers": kafka.bootstrap,
            "topology.message.timeout.secs": 5,
            "task.heartbeat.frequency.secs": 0.5,
            "task.refresh.poll.secs": 2,
            "supervisor.worker.shutdown.sleep.secs": 3,
            **conf,
        }
        rig = stage.workers(builder, tasks_of(tasks), code=CODE, conf=settings, name=topic)
        return Readers(rig, kafka, topic)

    return make


def test_killed_workers_lose_nothing_and_the_end_is_committed(
    make: Callable[..., Readers], kafka: KafkaRig
) -> None:
    readers = make()
    half = RECORDS // 2
    kafka.produce(readers.topic, range(half), PARTITIONS)
    # Markers lie between the records, and at the end.
    kafka.produce(readers.topic, range(half, RECORDS), PARTITIONS, transaction=True)
    if REAL:
        kafka.produce(readers.topic, range(10**9, 10**9 + 100), PARTITIONS, transaction=False)
    readers.assign(s1="10", s2="11")
    readers.start()
    draw, began = random.Random(7), time.monotonic()
    for number in range(KILLS):
        due = (number + 1) * RECORDS // (KILLS + 2)
        eventually(lambda due=due: readers.progress() >= due, 300, f"{due} records are committed")
        victim = draw.choice([ONE, TWO])
        readers.kill(victim)
        readers.start(victim)
    seen = readers.finish(RECORDS, 300)
    assert max(seen) < RECORDS, "an aborted record was read"
    again = sum(seen.values()) - len(seen)
    print(
        f"\n{RECORDS} records, {KILLS} kills: 0 lost, {again} twice, {time.monotonic() - began:.0f} s"
    )


def producing(
    kafka: KafkaRig, topic: str, rate: int, stop: threading.Event
) -> tuple[threading.Thread, list[int]]:
    """Numbers, from 0, in a thread."""
    produced = [0]

    def run() -> None:
        while not stop.is_set():
            kafka.produce(topic, range(produced[0], produced[0] + rate // 10), PARTITIONS)
            produced[0] += rate // 10
            time.sleep(0.1)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, produced


@real
def test_other_numbers_of_tasks_under_load_read_everything_once(
    make: Callable[..., Readers], kafka: KafkaRig
) -> None:
    readers = make()
    readers.assign(s1="10", s2="11")
    readers.start()
    stop = threading.Event()
    thread, produced = producing(kafka, readers.topic, 2000, stop)
    try:
        readers.wait_for_readers(2, "2 tasks")
        for tasks, count, where in (
            ("10-14", 5, {ONE: "10,12,14", TWO: "11,13"}),
            ("10", 1, {TWO: "10"}),
        ):
            at = readers.progress()
            eventually(lambda at=at: readers.progress() > at + 1000, what="more is read")
            # As a rebalance does it: spouts stop, open trees end, then tasks and assignment in one
            # step.
            readers.rig.set_status("REBALANCING")
            time.sleep(3)
            readers.tasks(tasks)
            readers.assign(**where)
            readers.wait_for_readers(count, f"{count} tasks")
        # All workers are replaced, as by a hot deploy.
        readers.rig.set_status("INACTIVE")
        time.sleep(3)
        for process in readers.rig.processes.values():
            process.terminate()
        assert [process.wait(patience(20)) for process in readers.rig.processes.values()] == [0, 0]
        readers.start()
        readers.rig.set_status("ACTIVE")
        readers.wait_for_readers(1, "new workers")
        at = readers.progress()
        eventually(lambda: readers.progress() > at + 1000, what="more is read")
    finally:
        stop.set()
        thread.join()
    seen = readers.finish(produced[0])
    assert [n for n, times in seen.items() if times > 1] == [], "read twice"


@real
def test_a_lost_host_is_followed_by_another_reader(
    make: Callable[..., Readers], kafka: KafkaRig
) -> None:
    readers = make()
    kafka.produce(readers.topic, range(RECORDS), PARTITIONS)
    readers.assign(s1="10", s2="11")
    readers.start()
    eventually(lambda: readers.progress() > RECORDS // 10, what="some are read")
    readers.kill(TWO)
    began = time.monotonic()
    readers.rig.assign({readers.slots[ONE]: "1-4,9-11"})
    readers.finish(RECORDS)
    print(
        f"\na lost host: everything is read after {time.monotonic() - began:.1f} s, with a session of 4 s"
    )
    readers.wait_for_readers(2, "a lost host")


@real
def test_retention_that_overtakes_a_reader_stops_its_partition_and_says_so(
    make: Callable[..., Readers], kafka: KafkaRig
) -> None:
    from confluent_kafka import TopicPartition

    readers = make(tasks="10")
    kafka.produce(readers.topic, range(1200), PARTITIONS)
    readers.assign("INACTIVE", s1="10")
    kafka.commit(readers.group, readers.topic, [5] * PARTITIONS)
    kafka.admin.delete_records([TopicPartition(readers.topic, 3, 50)])
    eventually(lambda: kafka.first(readers.topic, 3) == 50)
    readers.start()
    readers.rig.set_status("ACTIVE")
    others = {
        name: end for name, end in kafka.ends(readers.topic).items() if not name.endswith("[3]")
    }
    eventually(
        lambda: others.items() <= kafka.committed(readers.group, readers.topic).items(),
        what="others are read",
    )
    log = eventually(
        lambda: "stands still" in (text := readers.rig.log(*readers.slots[ONE])) and text
    )
    assert "position 5 is lost, the source has 50 to 100" in log and "on_lost" in log


@real
def test_a_topic_that_is_created_again_stops_running_workers_by_name(
    make: Callable[..., Readers], kafka: KafkaRig
) -> None:
    readers = make()
    kafka.produce(readers.topic, range(5 * PARTITIONS), PARTITIONS)
    readers.assign(s1="10", s2="11")
    readers.start()
    kafka.wait_for_end(readers.group, readers.topic)
    old_id = kafka.topic_id(readers.topic)
    kafka.recreate(readers.topic, PARTITIONS)
    first = 1000
    records = range(first, first + 8 * PARTITIONS)
    kafka.produce(readers.topic, records, PARTITIONS)
    new_id = kafka.topic_id(readers.topic)

    def stopped(slot: tuple[str, int]) -> bool:
        """True if a worker reports a partition with both ids. A task reports few errors at once."""
        lines = [line for line in readers.rig.log(*slot).splitlines() if "stands still" in line]
        return any(f"{old_id}" in line and f"{new_id}" in line for line in lines)

    for slot in readers.slots.values():
        eventually(
            lambda slot=slot: stopped(slot),
            60,
            "a partition stands still, and both topic ids are in the log",
        )
    assert kafka.committed(readers.group, readers.topic) == {}, "no old number is put back"
    # Killed workers read on where the operator says.
    readers.kill(TWO)
    kafka.commit(readers.group, readers.topic, [0] * PARTITIONS)
    readers.start(TWO)
    kafka.wait_for_end(readers.group, readers.topic)
    assert {n for n in readers.seen() if n >= first} == set(records)


@real
@pytest.mark.skipif(
    "KAFKA_PID" not in os.environ, reason="a broker that may be stopped: set KAFKA_PID"
)
def test_an_unreachable_broker_blocks_no_loop_and_work_resumes_alone(
    make: Callable[..., Readers], kafka: KafkaRig
) -> None:
    readers = make(tasks="10")
    readers.assign(s1="10")
    readers.start()
    stop = threading.Event()
    thread, produced = producing(kafka, readers.topic, 1000, stop)
    eventually(lambda: readers.progress() > 1000, what="some are read")
    stop.set()
    thread.join()
    pid = int(os.environ["KAFKA_PID"])
    before = readers.begin_outage()
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        eventually(
            lambda: "does not answer" in readers.rig.log(*readers.slots[ONE]),
            150,
            "the broker in the log",
        )
        print(f"reported after {time.monotonic() - began:.0f} s")
        time.sleep(65 if LONG else 5)
        readers.check_outage(before, "broker away")
    finally:
        os.kill(pid, signal.SIGCONT)
    kafka.produce(readers.topic, range(produced[0], produced[0] + 1000), PARTITIONS)
    readers.finish(produced[0] + 1000)
    readers.check_outage(before, "after it")


@real
def test_an_unreachable_broker_blocks_no_sink_fills_no_memory_loses_nothing(
    make: Callable[..., Readers], kafka: KafkaRig
) -> None:
    readers = make(tasks="10", use="Store")
    readers.assign(s1="10")
    readers.start()
    stop = threading.Event()
    thread, produced = producing(kafka, readers.topic, 2000, stop)
    away = readers.rig.folder / "away"
    try:
        eventually(lambda: readers.progress() > 2000, what="some are written")
        away.touch()
        # What fills up to its bound is full.
        at = produced[0]
        eventually(
            lambda: produced[0] > at + 6000 and readers.progress() < at + 6000,
            60,
            "spouts are held back",
        )
        before = readers.begin_outage()
        time.sleep(120 if LONG else 15)
        readers.check_outage(before, "sink away")
    finally:
        stop.set()
        thread.join()
    away.unlink()
    readers.finish(produced[0])
    readers.check_outage(before, "after it")
