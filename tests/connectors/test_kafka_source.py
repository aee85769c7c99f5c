"""Kafka as a source: librdkafka's own brokers, or those of ``KAFKA_BOOTSTRAP`` (``make
test-kafka``).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from storm_dagster.api import Bolt, Topology
from storm_dagster.connectors import (
    KafkaSource,
    SinkBolt,
    SourceRecord,
    SourceSpout,
    kafka_source,
    kafka_topic_ids,
    source_spout,
)
from storm_dagster.connectors.kafka_positions import position_metadata
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, MissingPart
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.components import CollectBolt, RangeSpout, RejectBolt
from storm_rigs.servers.kafka import REAL, KafkaRig
from storm_rigs.worker.sources_in_harness import run_until

GROUP = "harness.records"
SEEN = CollectBolt.everything
"""Values of all records that were read."""


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
    if not REAL:
        # Librdkafka's brokers give no ids, however long a client waits.
        monkeypatch.setattr(kafka_topic_ids, "_RESPONSE_SECS", 0.1)


def reading(
    topic: str,
    par: int = 1,
    body: dict[str, Any] | None = None,
    bolt: type[Bolt] = CollectBolt,
    args: dict[str, Any] | None = None,
    **how: Any,
) -> type[Topology]:
    parts = {
        "source": KafkaSource(topic, **how),
        "outputs": ["n"],
        "__module__": __name__,
        **(body or {}),
    }
    # Tasks import the class by its name.
    globals()["Records"] = made = type("Records", (SourceSpout,), parts)
    SEEN.clear()

    class Reading(Topology):
        records = made.spec(par=par)
        use = bolt.spec(inputs=[records], args=args)

    return Reading


def harness_of(kafka: KafkaRig, topology: type[Topology], **conf: Any) -> TopologyHarness:
    return TopologyHarness(
        topology, conf={"kafka.bootstrap.servers": kafka.bootstrap, "kafka.log_level": 0, **conf}
    )


def stored(harness: TopologyHarness) -> dict[str, int]:
    offsets: dict[str, int] = {}
    for spout in harness.tasks("records"):
        offsets.update((name, position.offset) for name, position in spout._source._stored.items())
    return offsets


def everything(record: SourceRecord) -> list[Any]:
    return [record.value, record.key, record.headers, record.partition, record.after, record.at_ms]


def test_all_records_are_read_and_the_end_is_committed(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(1000), key=b"k", headers={"h": b"x"})
    ends = kafka.ends(topic)
    body = {"values": lambda self, record: everything(record), "outputs": list("vkhpat")}
    with harness_of(kafka, reading(topic, body=body)) as harness:
        run_until(harness, lambda: stored(harness) == ends)
        run_until(
            harness,
            lambda: (
                harness.tasks("records")[0]._next_lag and lags(harness) == dict.fromkeys(ends, 0)
            ),
        )
        assert harness.errors == []
    assert sorted(int(row[0]) for row in SEEN) == list(range(1000))
    first = next(row for row in SEEN if row[0] == b"2")
    assert first[1:5] == [b"k", {"h": b"x"}, f"{topic}[2]", 1] and first[5] > 1_600_000_000_000
    assert kafka.committed(GROUP, topic) == ends, "others see them"
    assert {one.metadata for one in kafka.offsets(GROUP, topic)} == {
        position_metadata("harness-1-0 task 3", kafka.topic_id(topic))
    }
    # Nothing comes twice to whoever is next, and each of two tasks reads its own.
    kafka.produce(topic, range(1000, 1008))
    with harness_of(kafka, reading(topic, par=2)) as harness:
        run_until(harness, lambda: len(SEEN) >= 8 and stored(harness) == kafka.ends(topic))
        owned = [set(one._source._assigned) for one in harness.tasks("records")]
    assert sorted(n for (n,) in SEEN) == list(range(1000, 1008))
    assert [len(one) for one in owned] == [2, 2] and not owned[0] & owned[1]


def lags(harness: TopologyHarness) -> dict[str, Any]:
    metrics = [one.metrics for one in harness.engine.stats().values() if one.component == "records"]
    return {
        name: lag[0] for one in metrics for name, lag in one.get("lag_by_partition", {}).items()
    }


def test_a_limit_for_sinks_is_not_an_error_of_a_source(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    with harness_of(kafka, reading(topic), **{"kafka.message.max.bytes": 8_000_000}) as harness:
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        assert harness.errors == []
    assert len(SEEN) == 40


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
    assert sorted(n for (n,) in SEEN if n < 100 or REAL) == list(range(40))


def test_only_the_owner_of_a_task_restores_an_offset_that_went_back(
    kafka: KafkaRig,
) -> None:
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
        spout._source._to_commit = dict.fromkeys(ends, 2)
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
        run_until(harness, lambda: len(SEEN) == 4 and stored(harness) == kafka.ends(topic))
    assert sorted(n for (n,) in SEEN) == [100, 101, 102, 103]


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
        self.late.wait(patience(20))
        self.said.append(one.partition)
        raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))


def test_partitions_without_a_leader_stop_no_other(kafka: KafkaRig) -> None:
    """Neither their reading nor their commits, which do not wait until all of those are asked
    for.
    """
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    askers: list[Asker] = []

    class Leaderless(KafkaSource):
        def open(self, conf: Any, context: Any) -> None:
            super().open(conf, context)
            self._requester = Asker(self._requester, {1, 2, 3})  # pyright: ignore[reportAttributeAccessIssue]
            self._reads.client = self._requester
            askers.append(self._requester)

    with harness_of(kafka, reading(topic, body={"source": Leaderless(topic)})) as harness:
        run_until(harness, lambda: len(SEEN) == 10)
        source = harness.tasks("records")[0]._source
        run_until(harness, lambda: "commit" in source._requests.queued_names())
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
    assert sorted(n for (n,) in SEEN) == list(range(40))


def test_latest_leaves_out_no_record_of_a_partition_that_is_added_later(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    hidden = [3]

    class Growing(KafkaSource):
        def open(self, conf: Any, context: Any) -> None:
            super().open(conf, context)
            asker, ask = self._requester, self._requester.list_topics

            class Fewer(Asker):
                def list_topics(self, *args: Any, **how: Any) -> Any:
                    found = ask(*args, **how)
                    for one in hidden:
                        del found.topics[topic].partitions[one]
                    return found

            self._requester = Fewer(asker, set())  # pyright: ignore[reportAttributeAccessIssue]
            self._reads.client = self._requester

    with harness_of(
        kafka, reading(topic, body={"source": Growing(topic, start="latest")})
    ) as harness:
        run_until(harness, lambda: len(stored(harness)) == 3)
        hidden.clear()
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        assert harness.errors == []
    assert sorted(n for (n,) in SEEN) == list(range(3, 40, 4))


def test_different_errors_of_the_brokers_are_reported_and_few_are_kept(kafka: KafkaRig) -> None:
    with harness_of(kafka, reading(kafka.topic())) as harness:
        run_until(harness, lambda: len(stored(harness)) == 4)
        source = harness.tasks("records")[0]._source
        # As of a month while the topology is inactive, which reads none of them.
        found = [KafkaError._FAIL, KafkaError._SSL, *[KafkaError._AUTHENTICATION] * 98]
        for code in found * 1000:
            source._add_error(KafkaError(code))
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
        run_until(harness, lambda: len(SEEN) == 4 and stored(harness) == kafka.ends(topic))
    assert sorted(n for (n,) in SEEN) == [100, 101, 102, 103]


def test_an_offset_that_somebody_commits_for_a_partition_that_stands_still_stays(
    kafka: KafkaRig,
) -> None:
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


def test_what_was_acked_last_is_stored_at_the_end(
    kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    with harness_of(kafka, reading(topic)) as harness:
        run_until(harness, lambda: len(stored(harness)) == 4)
        monkeypatch.setattr(source_spout, "_COMMIT_SECS", 3600)
        monkeypatch.setattr(kafka_source, "_CLOSE_SECS", 20)
        kafka.produce(topic, range(100, 108))
        run_until(
            harness,
            lambda: (
                len(SEEN) == 48 and harness.engine.drained() and not harness.engine.open_trees()
            ),
        )
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
        source._to_commit = dict.fromkeys(source._to_commit, 1)
        source.close()
        # The loop did not wait for the questions that brokers do not answer.
        assert any(thread.name == "kafka-close" for thread in threading.enumerate())
        assert stored(harness) != source._to_commit


@pytest.mark.parametrize("why", ["inactive", "full"])
def test_lag_grows_while_nothing_is_read(
    kafka: KafkaRig, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_spout, "_BATCH", 4)
    monkeypatch.setattr(kafka_source, "_STALE_SECS", 0.1)
    topic = kafka.topic()
    # Each task has one partition: when that is full, all of its are.
    body = {"on_poison": "block", "max_open": 1}
    topology = reading(topic, par=4 if why == "full" else 1, body=body, bolt=RejectBolt)
    # Librdkafka fetches nothing while its queue has a record.
    conf = {"kafka.queued.min.messages": 1}
    with harness_of(kafka, topology, **conf) as harness:
        run_until(harness, lambda: len(stored(harness)) == 4)
        harness.engine.activate(why == "full")
        total = 0
        for more in (80, 400, 800):
            kafka.produce(topic, range(total, total + more))
            total += more
            run_until(
                harness,
                lambda total=total: sum(lag or 0 for lag in lags(harness).values()) == total,
            )
        assert harness.errors == [] or why == "full"


def test_a_lost_position_stops_its_partition_until_another_is_committed(
    kafka: KafkaRig,
) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    kafka.commit(GROUP, topic, [99])
    with harness_of(kafka, reading(topic)) as harness:
        run_until(harness, lambda: len(SEEN) == 30 and harness.errors)
        ((_, error),) = harness.errors
        said = str(error)
        assert (
            f"{topic}[0] stands still" in said
            and "99 is lost" in said
            and "0 to 10" in said
            and "on_lost" in said
        )
        assert kafka.committed(GROUP, topic)[f"{topic}[0]"] == 99, "nothing is committed there"
        run_until(harness, lambda: lags(harness).get(f"{topic}[0]") == 0)
        kafka.commit(GROUP, topic, [4])
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
    assert len(SEEN) == 36


@pytest.mark.parametrize(("on_lost", "read"), [("earliest", 40), ("latest", 30)])
def test_a_lost_position_goes_on_as_configured_and_says_so(
    kafka: KafkaRig, on_lost: Any, read: int
) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    kafka.commit(GROUP, topic, [99])
    with harness_of(kafka, reading(topic, on_lost=on_lost)) as harness:
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        assert [on_lost in str(error) for _, error in harness.errors] == [True]
    assert len(SEEN) == read


needs_ids = pytest.mark.skipif(
    not REAL, reason="librdkafka's brokers give no topic ids: set KAFKA_BOOTSTRAP"
)
OLD, NEW = range(20), range(1000, 1032)
"""Records of a topic, and those of the longer one that is created after it: five and eight in each
partition.
"""


def error_texts(harness: TopologyHarness) -> list[str]:
    return [str(error) for name, error in harness.errors if name == "records"]


def new_records() -> set[int]:
    return {n for (n,) in SEEN if n >= NEW[0]}


def committed_metadata(kafka: KafkaRig, topic: str) -> set[str]:
    return {str(position.metadata) for position in kafka.offsets(GROUP, topic)}


@needs_ids
@pytest.mark.parametrize("tasks", [1, 2])
def test_a_topic_that_is_created_again_is_read_from_its_first_record(
    kafka: KafkaRig, tasks: int
) -> None:
    topic = kafka.topic()
    kafka.produce(topic, OLD)
    with harness_of(kafka, reading(topic, par=tasks, on_lost="earliest")) as harness:
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        old_id = kafka.topic_id(topic)
        kafka.recreate(topic)
        kafka.produce(topic, NEW)
        run_until(
            harness, lambda: new_records() == set(NEW) and stored(harness) == kafka.ends(topic)
        )
        run_until(harness, lambda: kafka.committed(GROUP, topic) == kafka.ends(topic))
        for number in range(4):
            (text,) = [text for text in error_texts(harness) if f"{topic}[{number}]" in text]
            assert (
                "goes on at 0" in text
                and "position 5 was lost" in text
                and "on_lost is earliest" in text
            )
            assert str(old_id) in text and str(kafka.topic_id(topic)) in text
        assert all(str(kafka.topic_id(topic)) in text for text in committed_metadata(kafka, topic))


@needs_ids
def test_a_recreated_topic_is_read_from_its_end_if_so_configured(
    kafka: KafkaRig,
) -> None:
    topic = kafka.topic()
    kafka.produce(topic, OLD)
    with harness_of(kafka, reading(topic, on_lost="latest")) as harness:
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        kafka.recreate(topic)
        kafka.produce(topic, NEW)
        run_until(
            harness, lambda: len(error_texts(harness)) == 4 and stored(harness) == kafka.ends(topic)
        )
        assert all(
            "goes on at" in text and "on_lost is latest" in text for text in error_texts(harness)
        )
        later = range(2000, 2008)
        kafka.produce(topic, later)
        run_until(
            harness, lambda: new_records() >= set(later) and stored(harness) == kafka.ends(topic)
        )


@needs_ids
@pytest.mark.parametrize("records", [NEW, range(1000, 1008)], ids=["longer", "shorter"])
def test_a_recreated_topic_stops_by_name_until_an_offset_is_committed(
    kafka: KafkaRig, records: range
) -> None:
    topic = kafka.topic()
    kafka.produce(topic, OLD)
    with harness_of(kafka, reading(topic)) as harness:
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        old_id = kafka.topic_id(topic)
        kafka.recreate(topic)
        kafka.produce(topic, records)
        run_until(harness, lambda: len(error_texts(harness)) == 4)
        for number in range(4):
            (text,) = [text for text in error_texts(harness) if f"{topic}[{number}]" in text]
            assert "stands still" in text and "position 5 is lost" in text and "on_lost" in text
            assert str(old_id) in text and str(kafka.topic_id(topic)) in text
        # All of the new topic is unread, and stays so while its partitions are asked for again.
        run_until(
            harness, lambda: lags(harness) == dict.fromkeys(kafka.ends(topic), len(records) // 4)
        )
        until = time.monotonic() + 1
        run_until(harness, lambda: time.monotonic() > until)
        assert kafka.committed(GROUP, topic) == {}, "the old number is not put back"
        kafka.commit(GROUP, topic, [0] * 4)
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        assert new_records() == set(records)


@needs_ids
def test_open_records_of_a_deleted_topic_hold_up_nothing_and_commit_nothing(
    kafka: KafkaRig,
) -> None:
    topic = kafka.topic()
    kafka.produce(topic, range(80))
    topology = reading(
        topic,
        body={"on_poison": "block", "max_open": 1},
        bolt=RejectBolt,
        args={"values": [*range(80)]},
        on_lost="earliest",
    )
    with harness_of(kafka, topology) as harness:
        run_until(harness, lambda: stored(harness) == dict.fromkeys(kafka.ends(topic), 0))
        run_until(
            harness, lambda: harness.tasks("records")[0]._tracker.full == set(kafka.ends(topic))
        )
        kafka.recreate(topic)
        kafka.produce(topic, NEW)
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        assert new_records() == set(NEW)
        # Records of the deleted topic that are finished now are no position.
        harness.tasks("use")[0].values = []
        until = time.monotonic() + 1
        run_until(harness, lambda: time.monotonic() > until)
        assert kafka.committed(GROUP, topic) == kafka.ends(topic)


@needs_ids
def test_a_topic_recreated_while_its_reader_is_stopped_is_noticed(
    kafka: KafkaRig,
) -> None:
    topic = kafka.topic()
    kafka.produce(topic, OLD)
    with harness_of(kafka, reading(topic)) as harness:
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
    (metadata,) = committed_metadata(kafka, topic)
    kafka.recreate(topic)
    kafka.produce(topic, NEW)
    # Kafka has deleted the offsets; the reader's last commit comes after that.
    assert kafka.committed(GROUP, topic) == {}
    kafka.commit(GROUP, topic, [5] * 3, metadata)
    with harness_of(kafka, reading(topic)) as harness:
        last = f"{topic}[3]"
        run_until(
            harness, lambda: len(error_texts(harness)) == 3 and stored(harness).get(last) == 8
        )
        assert all(
            "stands still" in text and "which was deleted" in text for text in error_texts(harness)
        )
        # The partition without a committed offset begins where any new one does.
        assert new_records() == set(NEW[3::4])
    with harness_of(kafka, reading(topic, on_lost="earliest")) as harness:
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        assert new_records() == set(NEW) - set(NEW[3::4])


@needs_ids
@pytest.mark.parametrize("metadata", ["", "harness-1-0 task 3", "of another tool"])
def test_a_position_without_a_topic_id_counts_and_gets_one(kafka: KafkaRig, metadata: str) -> None:
    topic = kafka.topic()
    kafka.produce(topic, OLD)
    kafka.commit(GROUP, topic, [5] * 4, metadata)
    with harness_of(kafka, reading(topic)) as harness:
        expected = {position_metadata("harness-1-0 task 3", kafka.topic_id(topic))}
        run_until(harness, lambda: committed_metadata(kafka, topic) == expected)
        assert kafka.committed(GROUP, topic) == dict.fromkeys(kafka.ends(topic), 5)
        assert harness.errors == [] and SEEN == []


@needs_ids
def test_a_record_has_the_id_of_its_topic(kafka: KafkaRig) -> None:
    topic = kafka.topic()
    kafka.produce(topic, OLD)
    body = {"values": lambda self, record: [record.topic_id]}
    with harness_of(kafka, reading(topic, body=body)) as harness:
        run_until(harness, lambda: len(SEEN) == len(OLD))
    assert [[kafka.topic_id(topic)]] * len(OLD) == SEEN


class Rows:
    """A sink in memory that keeps tokens."""

    assets: Sequence[str] = ()
    written: ClassVar[list[int]] = []
    tokens: ClassVar[dict[str, int]] = {}

    def open(self, conf: Any, owner: str) -> int:
        self.owner = owner
        return self.tokens.get(owner, 0)

    def write(self, rows: Any, token: int) -> None:
        self.written.extend(row.values["n"] for row in rows)
        self.tokens[self.owner] = token

    def close(self) -> None:
        pass


class ById(SinkBolt):
    sink = Rows()
    exactly_once = True
    batch_secs = 0.1
    record_id = ["partition", "after"]


class ByTopicAndId(ById):
    record_id = ["partition", "after", "topic_id"]


@needs_ids
@pytest.mark.parametrize("bolt", [ById, ByTopicAndId])
def test_ids_of_records_differ_between_topics_by_the_topics_id_only(
    kafka: KafkaRig, bolt: type[Bolt]
) -> None:
    """A sink that writes each record once takes a number of the new topic for a repeated record,
    without it.
    """
    topic = kafka.topic()
    kafka.produce(topic, OLD)
    Rows.written.clear()
    Rows.tokens.clear()
    body = {
        "outputs": ["n", "partition", "after", "topic_id"],
        "values": lambda self, record: [
            int(record.value),
            record.partition,
            record.after,
            record.topic_id,
        ],
    }
    with harness_of(kafka, reading(topic, body=body, bolt=bolt, on_lost="earliest")) as harness:
        run_until(
            harness, lambda: set(Rows.written) == set(OLD) and stored(harness) == kafka.ends(topic)
        )
        kafka.recreate(topic)
        run_until(harness, lambda: len(error_texts(harness)) == 4)
        kafka.produce(topic, NEW)
        run_until(harness, lambda: kafka.committed(GROUP, topic) == kafka.ends(topic))
        repeated = set(NEW[:20]) if bolt is ById else set()
        run_until(harness, lambda: set(Rows.written) == set(OLD) | set(NEW) - repeated)
        assert len(Rows.written) == len(set(Rows.written))


def test_a_topic_with_another_id_is_read_anew_under_that_id(kafka: KafkaRig) -> None:
    """Librdkafka's brokers give no ids: here the source gives them itself, and the topic stays what
    it is.
    """
    topic = kafka.topic()
    kafka.produce(topic, range(40))
    first_id, second_id = "a" * 22, "b" * 22
    current_ids = {topic: first_id}

    class WithIds(KafkaSource):
        def open(self, conf: Any, context: Any) -> None:
            super().open(conf, context)
            self._topic_ids.read = lambda: dict(current_ids)

    with harness_of(
        kafka, reading(topic, body={"source": WithIds(topic, on_lost="earliest")})
    ) as harness:
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        assert committed_metadata(kafka, topic) == {
            position_metadata("harness-1-0 task 3", first_id)
        }
        assert len(SEEN) == 40 and harness.errors == []
        current_ids[topic] = second_id
        expected = {position_metadata("harness-1-0 task 3", second_id)}
        run_until(harness, lambda: len(SEEN) == 80 and committed_metadata(kafka, topic) == expected)
        run_until(harness, lambda: kafka.committed(GROUP, topic) == kafka.ends(topic))
        # A broker that is behind the others answers the id of the deleted topic.
        current_ids[topic] = first_id
        until = time.monotonic() + 1
        run_until(harness, lambda: time.monotonic() > until)
        assert len(SEEN) == 80 and len(error_texts(harness)) == 4
    current_ids[topic] = "c" * 22
    with harness_of(kafka, reading(topic, body={"source": WithIds(topic)})) as harness:
        run_until(harness, lambda: len(error_texts(harness)) == 4)
        assert all("stands still" in text and second_id in text for text in error_texts(harness))
        assert SEEN == [] and kafka.committed(GROUP, topic) == kafka.ends(topic)
        # Unknown again: the position counts, as one without an id.
        current_ids.clear()
    with harness_of(kafka, reading(topic, body={"source": WithIds(topic)})) as harness:
        run_until(harness, lambda: stored(harness) == kafka.ends(topic))
        assert harness.errors == [] and SEEN == []


def reading_blocked(topic: str, **options: Any) -> Any:
    """A topology that reads the topic, and whose bolt rejects the first records of partition 1."""
    return reading(
        topic,
        body={"on_poison": "block", "max_open": 10},
        bolt=RejectBolt,
        args={"values": [1, *range(9, 42, 4)]},
        **options,
    )


def test_a_full_partition_is_not_fetched_and_the_others_are(
    kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_spout, "_BATCH", 100)
    topic = kafka.topic()
    kafka.produce(topic, range(800))
    topology = reading_blocked(topic)
    with harness_of(kafka, topology) as harness:
        ends = kafka.ends(topic)
        others = {name: end for name, end in ends.items() if name != f"{topic}[1]"}
        run_until(harness, lambda: others.items() <= stored(harness).items())
        assert stored(harness)[f"{topic}[1]"] == 0
        run_until(harness, lambda: harness.tasks("records")[0]._source._paused == {f"{topic}[1]"})
        harness.tasks("use")[0].values = []
        run_until(harness, lambda: stored(harness) == ends, 60)
    assert len(SEEN) == len({n for (n,) in SEEN}) == 800


@pytest.mark.skipif(not REAL, reason="librdkafka's brokers delete nothing: set KAFKA_BOOTSTRAP")
def test_retention_overtakes_a_partition_that_waits(
    kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_spout, "_BATCH", 100)
    topic = kafka.topic()
    kafka.produce(topic, range(1600))
    topology = reading_blocked(topic, on_lost="earliest")
    with harness_of(kafka, topology) as harness:
        source = run_until(harness, lambda: harness.tasks("records")[0])._source
        run_until(harness, lambda: source._paused == {f"{topic}[1]"})
        kafka.admin.delete_records([TopicPartition(topic, 1, 390)])
        eventually(lambda: kafka.first(topic, 1) == 390)
        harness.tasks("use")[0].values = []
        run_until(harness, lambda: stored(harness) == kafka.ends(topic), 60)
        said = [str(error) for name, error in harness.errors if name == "records"]
        assert any(f"{topic}[1] goes on at 390" in text and "was lost" in text for text in said)
    assert {n for (n,) in SEEN} >= set(range(390 * 4 + 1, 1600, 4))


def test_a_partition_that_is_interrupted_while_it_is_full_is_read_on(
    kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Librdkafka would keep its pause for the next assignment."""
    monkeypatch.setattr(source_spout, "_BATCH", 100)
    topic = kafka.topic()
    kafka.produce(topic, range(1600))
    topology = reading_blocked(topic)
    name = f"{topic}[1]"
    with harness_of(kafka, topology) as harness:
        source = run_until(harness, lambda: harness.tasks("records")[0])._source
        run_until(harness, lambda: source._paused == {name})
        source._interrupt(name)
        harness.tasks("use")[0].values = []
        run_until(harness, lambda: stored(harness) == kafka.ends(topic), 60)
    assert {n for (n,) in SEEN} == set(range(1600))


class FromMemory(Topology):
    records = RangeSpout.spec()
    use = CollectBolt.spec(inputs=[records])


@pytest.mark.skipif(not REAL, reason="its brokers would work in this process: set KAFKA_BOOTSTRAP")
def test_the_rate_is_printed_beside_that_of_a_spout_in_memory(kafka: KafkaRig) -> None:
    topic, count = kafka.topic(), 200_000
    kafka.produce(topic, range(count))
    conf = {"topology.testing.always.try.serialize": False, "topology.max.spout.pending": 2000}
    rates = []
    for made in (FromMemory, reading(topic)):
        SEEN.clear()
        with harness_of(kafka, made, **conf) as harness:
            while not SEEN:
                harness.engine.run(harness.shared.clock())
            began = time.monotonic()
            while len(SEEN) < count:
                harness.engine.run(harness.shared.clock())
            rates.append(count / (time.monotonic() - began))
    print(
        f"\nacked: {rates[1]:,.0f} records/s from Kafka, {rates[0]:,.0f} from memory, {rates[1] / rates[0]:.0%}"
    )


def test_no_broker_is_one_error_and_the_loop_goes_on(kafka: KafkaRig) -> None:
    conf = {"kafka.bootstrap.servers": "127.0.0.1:1"}
    with harness_of(kafka, reading("any"), **conf) as harness:
        run_until(harness, lambda: harness.errors)
        harness.run()
        assert ["127.0.0.1:1 does not answer" in str(error) for _, error in harness.errors] == [
            True
        ]


def test_a_topic_that_is_not_there_is_named(kafka: KafkaRig) -> None:
    if not REAL:
        pytest.skip("librdkafka's brokers make every topic: set KAFKA_BOOTSTRAP")
    with harness_of(kafka, reading("nowhere")) as harness:
        run_until(harness, lambda: harness.errors)
        assert "topic 'nowhere' cannot be read" in str(harness.errors[0][1])


def test_a_missing_client_library_is_named_with_its_extra(
    kafka: KafkaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingPart, match=r"pip install 'confluent-kafka.* \(the extra kafka of"):
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


@pytest.mark.parametrize(
    ("how", "said"), [({"start": "soon"}, "start of"), ({"on_lost": "skip"}, "on_lost of")]
)
def test_words_that_mean_nothing_are_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidTopology, match=said):
        KafkaSource("t", **how)
