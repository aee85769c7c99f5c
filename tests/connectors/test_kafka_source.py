"""Kafka as a source: librdkafka's own brokers, or those of ``KAFKA_BOOTSTRAP`` (``make test-kafka``)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from storm_dagster.api import Bolt, Spout, Topology, Tuple
from storm_dagster.connectors import KafkaSource, SourceRecord, SourceSpout, kafka_source, source_spout
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, MissingPart
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_rigs.kafka import REAL, KafkaRig

GROUP = "harness.records"


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaRig]:
    rig = KafkaRig()
    yield rig
    rig.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_spout, "_COMMIT_SECS", 0.05)
    monkeypatch.setattr(source_spout, "_LAG_SECS", 0.05)
    monkeypatch.setattr(KafkaSource, "refresh_secs", 0.3)


class Use(Bolt):
    seen: ClassVar[list[Any]] = []

    def process(self, tup: Tuple) -> None:
        self.seen.append(tup.values)


def reading(
    topic: str, par: int = 1, body: dict[str, Any] | None = None, bolt: type[Bolt] = Use, **how: Any
) -> type[Topology]:
    parts = {"source": KafkaSource(topic, **how), "outputs": ["n"], "__module__": __name__, **(body or {})}
    # Tasks import the class by its name.
    globals()["Records"] = made = type("Records", (SourceSpout,), parts)
    Use.seen.clear()

    class Reading(Topology):
        records = made.spec(par=par)
        use = bolt.spec(inputs=[records])

    return Reading


def run_until(harness: TopologyHarness, condition: Callable[[], Any], timeout: float = 20) -> Any:
    def turn() -> Any:
        harness.engine.run(harness.shared.clock())
        return condition()

    return eventually(turn, timeout, interval=0.001)


def harness_of(kafka: KafkaRig, topology: type[Topology], **conf: Any) -> TopologyHarness:
    return TopologyHarness(topology, conf={"kafka.bootstrap.servers": kafka.bootstrap, "kafka.log_level": 0, **conf})


def stored(harness: TopologyHarness) -> dict[str, int]:
    return {name: offset for one in harness.tasks("records") for name, offset in one._source._stored.items()}


def everything(record: SourceRecord) -> list[Any]:
    return [record.value, record.key, record.headers, record.partition, record.after, record.at_ms]


def test_all_records_are_read_and_the_end_is_committed(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(1000), key=b"k", headers={"h": b"x"})
    ends = kafka.ends(topic)
    body = {"values": lambda self, record: everything(record), "outputs": list("vkhpat")}
    with harness_of(kafka, reading(topic, body=body)) as harness:
        run_until(harness, lambda: stored(harness) == ends)
        run_until(harness, lambda: harness.tasks("records")[0]._next_lag and lags(harness) == dict.fromkeys(ends, 0))
        assert harness.errors == []
    assert sorted(int(row[0]) for row in Use.seen) == list(range(1000))
    first = next(row for row in Use.seen if row[0] == b"2")
    assert first[1:5] == [b"k", {"h": b"x"}, f"{topic}[2]", 1] and first[5] > 1_600_000_000_000
    assert kafka.committed(GROUP, topic) == ends, "others see them"
    assert {one.metadata for one in kafka.offsets(GROUP, topic)} == {"harness-1-0 task 3"}
    # Nothing comes twice to whoever is next, and each of two tasks reads its own.
    kafka.produce(topic, range(1000, 1008))
    with harness_of(kafka, reading(topic, par=2)) as harness:
        run_until(harness, lambda: len(Use.seen) >= 8 and stored(harness) == kafka.ends(topic))
        owned = [set(one._source._assigned) for one in harness.tasks("records")]
    assert sorted(n for (n,) in Use.seen) == list(range(1000, 1008))
    assert [len(one) for one in owned] == [2, 2] and not owned[0] & owned[1]


def lags(harness: TopologyHarness) -> dict[str, Any]:
    metrics = [one.metrics for one in harness.engine.stats().values() if one.component == "records"]
    return {name: lag[0] for one in metrics for name, lag in one.get("lag_by_partition", {}).items()}


def test_a_limit_of_records_that_a_sink_needs_is_no_error_of_a_source(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    with harness_of(kafka, reading(topic), **{"kafka.message.max.bytes": 8_000_000}) as harness:
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        assert harness.errors == []
    assert len(Use.seen) == 40


def test_transaction_markers_and_aborted_records_leave_no_lag(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40), transaction=True)
    kafka.produce(topic, range(100, 140), transaction=False)
    # Aborted records have offsets, and on a real broker the markers, too.
    least = 22 if REAL else 20
    ends = eventually(lambda: min(kafka.ends(topic).values()) >= least and kafka.ends(topic))
    with harness_of(kafka, reading(topic)) as harness:
        run_until(harness, lambda: stored(harness) == ends)
        run_until(harness, lambda: lags(harness) == dict.fromkeys(ends, 0))
    # Librdkafka's brokers show aborted records.
    assert sorted(n for (n,) in Use.seen if n < 100 or REAL) == list(range(40))


def test_an_offset_that_went_back_is_stored_again_and_none_is_by_who_has_lost_the_task(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    ends = kafka.ends(topic)
    with harness_of(kafka, reading(topic)) as harness:
        run_until(harness, lambda: stored(harness) == ends)
        # As a commit of the reader before, which reaches the broker late.
        kafka.commit(GROUP, topic, [1] * 4)
        run_until(harness, lambda: kafka.committed(GROUP, topic) == ends)
        (spout,) = harness.tasks("records")
        spout.context._owns = lambda: False
        spout._source._wanted = dict.fromkeys(ends, 2)
    # Consumers are closed in a thread.
    time.sleep(0.5)
    assert kafka.committed(GROUP, topic) == ends


def test_latest_is_where_the_topology_was_first_started(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    with harness_of(kafka, reading(topic, start="latest")) as harness:
        run_until(harness, lambda: len(stored(harness)) == 4)
    # What came while nobody ran is read.
    kafka.produce(topic, range(100, 104))
    with harness_of(kafka, reading(topic, start="latest")) as harness:
        run_until(harness, lambda: len(Use.seen) == 4 and stored(harness) == kafka.ends(topic))
    assert sorted(n for (n,) in Use.seen) == [100, 101, 102, 103]


class Asker:
    """Asks the brokers, which know no leader of some partitions and say so late."""

    def __init__(self, consumer: Any, leaderless: set[int]) -> None:
        self.consumer, self.leaderless = consumer, leaderless
        self.said: list[Any] = []
        self.late = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.consumer, name)

    def commit(self, **how: Any) -> Any:
        self.said.append("commit")
        return self.consumer.commit(**how)

    def get_watermark_offsets(self, one: TopicPartition, **how: Any) -> Any:
        if one.partition not in self.leaderless:
            return self.consumer.get_watermark_offsets(one, **how)
        self.late.wait(20)
        self.said.append(one.partition)
        raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))


def test_partitions_without_a_leader_stop_no_other(kafka: KafkaRig) -> None:
    """Neither their reading nor their commits, which do not wait until all of those are asked for."""
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    askers: list[Asker] = []

    class Leaderless(KafkaSource):
        def open(self, conf: Any, context: Any) -> None:
            super().open(conf, context)
            self._asker = Asker(self._asker, {1, 2, 3})  # pyright: ignore[reportAttributeAccessIssue]
            askers.append(self._asker)

    with harness_of(kafka, reading(topic, body={"source": Leaderless(topic)})) as harness:
        run_until(harness, lambda: len(Use.seen) == 10)
        source = harness.tasks("records")[0]._source
        run_until(harness, lambda: any(what == "commit" for what, *_ in source._asked))
        (asker,) = askers
        asker.said.clear()
        asker.late.set()
        run_until(harness, lambda: kafka.committed(GROUP, topic) == {f"{topic}[0]": 10})
        run_until(harness, lambda: len(asker.said) > 3)
        assert asker.said[1] == "commit", asker.said
        run_until(harness, lambda: harness.errors)
        assert "LEADER_NOT_AVAILABLE" in str(harness.errors[0][1])
        # They have one again.
        asker.leaderless = set()
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
    assert sorted(n for (n,) in Use.seen) == list(range(40))


def test_latest_leaves_out_no_record_of_a_partition_that_is_added_later(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    hidden = [3]

    class Growing(KafkaSource):
        def open(self, conf: Any, context: Any) -> None:
            super().open(conf, context)
            asker, ask = self._asker, self._asker.list_topics

            class Fewer(Asker):
                def list_topics(self, *args: Any, **how: Any) -> Any:
                    found = ask(*args, **how)
                    for one in hidden:
                        del found.topics[topic].partitions[one]
                    return found

            self._asker = Fewer(asker, set())  # pyright: ignore[reportAttributeAccessIssue]

    with harness_of(kafka, reading(topic, body={"source": Growing(topic, start="latest")})) as harness:
        run_until(harness, lambda: len(stored(harness)) == 3)
        hidden.clear()
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        assert harness.errors == []
    assert sorted(n for (n,) in Use.seen) == list(range(3, 40, 4))


def test_different_errors_of_the_brokers_are_reported_and_few_are_kept(kafka: KafkaRig) -> None:
    with harness_of(kafka, reading(kafka.topic())) as harness:
        run_until(harness, lambda: len(stored(harness)) == 4)
        source = harness.tasks("records")[0]._source
        # As of a month while the topology is inactive, which reads none of them.
        found = [KafkaError._FAIL, KafkaError._SSL, *[KafkaError._AUTHENTICATION] * 98]
        for code in found * 1000:
            source._errors.append(source._readable(KafkaError(code)))
        assert len(source._errors) == 100
        run_until(harness, lambda: len(harness.errors) == 3)
        said = sorted(str(error).split(" ")[0] for _, error in harness.errors)
        assert said == ["_AUTHENTICATION", "_FAIL", "_SSL"]


@pytest.mark.skipif(not REAL, reason="librdkafka's brokers know no times: set KAFKA_BOOTSTRAP")
def test_reading_begins_at_a_time(kafka: KafkaRig) -> None:
    topic = kafka.topic(4, **{"retention.ms": "-1"})
    kafka.produce(topic, range(40), timestamp=1_600_000_000_000)
    kafka.produce(topic, range(100, 104), timestamp=1_700_000_000_000)
    with harness_of(kafka, reading(topic, start="2022-01-01")) as harness:
        run_until(harness, lambda: len(Use.seen) == 4 and stored(harness) == kafka.ends(topic))
    assert sorted(n for (n,) in Use.seen) == [100, 101, 102, 103]


def test_an_offset_that_somebody_commits_for_a_partition_that_stands_still_stays(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    ends = kafka.ends(topic)
    with harness_of(kafka, reading(topic)) as harness:
        run_until(harness, lambda: stored(harness) == ends)
        source = harness.tasks("records")[0]._source
        # As when retention has overtaken its reader.
        name = next(iter(ends))
        source._assigned.discard(name)
        source._waiting.add(name)
        source._next_lookup = time.monotonic() + 60
        kafka.commit(GROUP, topic, [5] * 4)
        rest = {other: end for other, end in ends.items() if other != name}
        run_until(harness, lambda: kafka.committed(GROUP, topic) == {**rest, name: 5})


def test_what_was_acked_last_is_stored_at_the_end(kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    with harness_of(kafka, reading(topic)) as harness:
        run_until(harness, lambda: len(stored(harness)) == 4)
        monkeypatch.setattr(source_spout, "_COMMIT_SECS", 3600)
        monkeypatch.setattr(kafka_source, "_CLOSE_SECS", 20)
        kafka.produce(topic, range(100, 108))
        run_until(harness, lambda: len(Use.seen) == 48 and harness.engine.drained() and not harness.engine.open_trees())
    # Consumers are closed in a thread.
    eventually(lambda: kafka.committed(GROUP, topic) == kafka.ends(topic), 20)


@pytest.mark.skipif(bool(REAL), reason="ends its brokers")
def test_brokers_that_are_away_at_the_end_are_not_waited_for() -> None:
    kafka = KafkaRig()
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    with harness_of(kafka, reading(topic)) as harness:
        run_until(harness, lambda: len(stored(harness)) == 4)
        source = harness.tasks("records")[0]._source
        kafka.close()
        source._wanted = dict.fromkeys(source._wanted, 1)
        source.close()
        # The loop did not wait for the questions that brokers do not answer.
        assert any(thread.name == "kafka-close" for thread in threading.enumerate())
        assert source._stored != source._wanted


@pytest.mark.parametrize("why", ["inactive", "full"])
def test_lag_grows_while_nothing_is_read(kafka: KafkaRig, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_spout, "_BATCH", 4)
    monkeypatch.setattr(kafka_source, "_STALE_SECS", 0.1)
    topic = kafka.topic()
    Chokes.bad = set(range(4000))
    # Each task has one partition: when that is full, all of its are.
    body = {"on_poison": "block", "max_open": 1}
    topology = reading(topic, par=4 if why == "full" else 1, body=body, bolt=Chokes)
    # Librdkafka fetches nothing while its queue has a record.
    conf = {"kafka.queued.min.messages": 1}
    with harness_of(kafka, topology, **conf) as harness:
        run_until(harness, lambda: len(stored(harness)) == 4)
        harness.engine.activate(why == "full")
        total = 0
        for more in (80, 400, 800):
            kafka.produce(topic, range(total, total + more))
            total += more
            run_until(harness, lambda total=total: sum(lag or 0 for lag in lags(harness).values()) == total)
        assert harness.errors == [] or why == "full"


def test_a_lost_position_stops_its_partition_and_says_so_until_another_is_committed(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    kafka.commit(GROUP, topic, [99])
    with harness_of(kafka, reading(topic)) as harness:
        run_until(harness, lambda: len(Use.seen) == 30 and harness.errors)
        ((_, error),) = harness.errors
        said = str(error)
        assert f"{topic}[0] stands still" in said and "99 is lost" in said and "0 to 10" in said and "on_lost" in said
        assert kafka.committed(GROUP, topic)[f"{topic}[0]"] == 99, "nothing is committed there"
        run_until(harness, lambda: lags(harness).get(f"{topic}[0]") == 0)
        kafka.commit(GROUP, topic, [4])
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
    assert len(Use.seen) == 36


@pytest.mark.parametrize(("on_lost", "read"), [("earliest", 40), ("latest", 30)])
def test_a_lost_position_goes_on_as_configured_and_says_so(kafka: KafkaRig, on_lost: Any, read: int) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    kafka.commit(GROUP, topic, [99])
    with harness_of(kafka, reading(topic, on_lost=on_lost)) as harness:
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        assert [on_lost in str(error) for _, error in harness.errors] == [True]
    assert len(Use.seen) == read


class Chokes(Bolt):
    bad: ClassVar[set[Any]] = set()

    def process(self, tup: Tuple) -> None:
        if tup.values[0] in self.bad:
            raise ValueError("bad")
        Use.seen.append(tup.values)


def test_a_full_partition_is_not_fetched_and_the_others_are(kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_spout, "_BATCH", 100)
    topic = kafka.topic()
    kafka.produce(topic, range(800))
    Chokes.bad = {1, *range(9, 42, 4)}
    topology = reading(topic, body={"on_poison": "block", "max_open": 10}, bolt=Chokes)
    with harness_of(kafka, topology) as harness:
        ends = kafka.ends(topic)
        others = {name: end for name, end in ends.items() if name != f"{topic}[1]"}
        run_until(harness, lambda: others.items() <= stored(harness).items())
        assert stored(harness)[f"{topic}[1]"] == 0
        run_until(harness, lambda: harness.tasks("records")[0]._source._paused == {f"{topic}[1]"})
        Chokes.bad = set()
        run_until(harness, lambda: stored(harness) == ends, 60)
    assert len(Use.seen) == len({n for (n,) in Use.seen}) == 800


@pytest.mark.skipif(not REAL, reason="librdkafka's brokers delete nothing: set KAFKA_BOOTSTRAP")
def test_retention_overtakes_a_partition_that_waits(kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_spout, "_BATCH", 100)
    topic = kafka.topic()
    kafka.produce(topic, range(1600))
    Chokes.bad = {1, *range(9, 42, 4)}
    topology = reading(topic, body={"on_poison": "block", "max_open": 10}, bolt=Chokes, on_lost="earliest")
    with harness_of(kafka, topology) as harness:
        source = run_until(harness, lambda: harness.tasks("records")[0])._source
        run_until(harness, lambda: source._paused == {f"{topic}[1]"})
        kafka.admin.delete_records([TopicPartition(topic, 1, 390)])
        eventually(lambda: kafka.first(topic, 1) == 390)
        Chokes.bad = set()
        run_until(harness, lambda: stored(harness) == kafka.ends(topic), 60)
        said = [str(error) for name, error in harness.errors if name == "records"]
        assert any(f"{topic}[1] goes on at 390" in text and "was lost" in text for text in said)
    assert {n for (n,) in Use.seen} >= set(range(390 * 4 + 1, 1600, 4))


class Memory(Spout):
    outputs: ClassVar[Any] = ["n"]
    at = 0

    def next_tuple(self) -> None:
        self.at += 1
        self.emit([self.at], tup_id=self.at)


class FromMemory(Topology):
    records = Memory.spec()
    use = Use.spec(inputs=[records])


@pytest.mark.skipif(not REAL, reason="its brokers would work in this process: set KAFKA_BOOTSTRAP")
def test_the_rate_is_printed_beside_that_of_a_spout_in_memory(kafka: KafkaRig) -> None:
    topic, count = kafka.topic(), 200_000
    kafka.produce(topic, range(count))
    conf = {"topology.testing.always.try.serialize": False, "topology.max.spout.pending": 2000}
    rates = []
    for made in (FromMemory, reading(topic)):
        Use.seen.clear()
        with harness_of(kafka, made, **conf) as harness:
            while not Use.seen:
                harness.engine.run(harness.shared.clock())
            began = time.monotonic()
            while len(Use.seen) < count:
                harness.engine.run(harness.shared.clock())
            rates.append(count / (time.monotonic() - began))
    print(f"\nacked: {rates[1]:,.0f} records/s from Kafka, {rates[0]:,.0f} from memory, {rates[1] / rates[0]:.0%}")


def test_no_broker_is_one_error_and_the_loop_goes_on(kafka: KafkaRig) -> None:
    conf = {"kafka.bootstrap.servers": "127.0.0.1:1"}
    with harness_of(kafka, reading("any"), **conf) as harness:
        run_until(harness, lambda: harness.errors)
        harness.run()
        assert ["127.0.0.1:1 does not answer" in str(error) for _, error in harness.errors] == [True]


def test_a_topic_that_is_not_there_is_named(kafka: KafkaRig) -> None:
    if not REAL:
        pytest.skip("librdkafka's brokers make every topic: set KAFKA_BOOTSTRAP")
    with harness_of(kafka, reading("nowhere")) as harness:
        run_until(harness, lambda: harness.errors)
        assert "topic 'nowhere' cannot be read" in str(harness.errors[0][1])


def test_a_missing_client_library_is_named_with_its_extra(kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingPart, match=r"pip install storm-dagster\[kafka\]"):
        KafkaSource("t").open({}, None)


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({}, "set kafka.bootstrap.servers"),
        (
            {"kafka.bootstrap.servers": "x:1", "kafka.enable.auto.commit": True},
            "enable.auto.commit is set by the source",
        ),
        ({"kafka.bootstrap.servers": "x:1", "kafka.sasl.password": "secret"}, "sasl.password.file"),
    ],
)
def test_settings_that_cannot_be_are_refused(conf: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        KafkaSource("t").open(conf, None)


@pytest.mark.parametrize(("how", "said"), [({"start": "soon"}, "start of"), ({"on_lost": "skip"}, "on_lost of")])
def test_words_that_mean_nothing_are_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidTopology, match=said):
        KafkaSource("t", **how)
