"""Reports of sinks on their tables: when, with which rows, and what they never hold up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from storm_dagster.api import Topology, Tuple
from storm_dagster.connectors import Row, Sink, SinkBolt
from storm_dagster.model.dagster_events import DagsterEvent, decode_event
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_rigs.components import InputSpout

DECLARED = {"declared.code.version": "abc"}


class NullSink(Sink):
    assets = ["postgres/shop.orders", "files/orders"]

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        return None

    def write(self, rows: Sequence[Row], token: int) -> None: ...

    def close(self) -> None: ...


class Store(SinkBolt):
    sink = NullSink()
    # Not a table of the sink: the bolt reports on it by itself.
    assets = ["lake/orders"]
    timestamp_field = "at"


class Reporter(Store):
    def row_of(self, tup: Tuple) -> Mapping[str, Any] | None:
        self.dagster.materialize("@target/store/postgres/orders")
        return None


class Odd(Topology):
    orders = InputSpout.spec(outputs=["order", "at"])
    store = Reporter.spec(inputs=[orders])


class Shop(Topology):
    orders = InputSpout.spec(outputs=["order", "at"])
    store = Store.spec(inputs=[orders])


@contextmanager
def shop(conf: Mapping[str, Any]) -> Iterator[TopologyHarness]:
    with TopologyHarness(Shop, {"orders": []}, simulated=True, conf=conf) as harness:
        harness.advance(1.0)
        yield harness


def later(harness: TopologyHarness, secs: float) -> list[DagsterEvent]:
    """All reports after so many seconds. The time comes in one leap, and then that of a batch."""
    assert harness.clock is not None
    harness.clock.secs += secs
    harness.advance(1.5)
    return list(harness.dagster_events)


def test_a_table_is_reported_once_an_interval_with_its_rows() -> None:
    with shop(DECLARED) as harness:
        harness.give("orders", ["a", 1_000], ["b", 9_000], ["c", None])
        assert later(harness, 1) == []
        harness.give("orders", ["d", 5_000])
        later(harness, 1)
        first = later(harness, 600)
        assert [event.asset for event in first] == [
            "@target/store/postgres/shop.orders",
            "@target/store/files/orders",
        ]
        assert {event.kind for event in first} == {"materialization"}
        report = first[0].metadata
        assert (report["rows"], report["tasks"]) == (4, 1)
        assert report["newest_event_time"] == "1970-01-01T00:00:09.000+00:00"
        # The nimbus takes it as any event.
        assert decode_event({**event_fields(first[0])}) == first[0]
        # Without rows there is no report.
        assert later(harness, 600) == later(harness, 600) == first
        harness.give("orders", ["e", 1])
        later(harness, 10)
        second = later(harness, 600)[len(first) :]
        assert [event.metadata["rows"] for event in second] == [1, 1]
        assert second[0].metadata["since"] > report["since"]


def event_fields(event: DagsterEvent) -> dict[str, Any]:
    return {
        "id": event.id,
        "kind": event.kind,
        "key": list(event.key),
        "metadata": event.metadata,
    }


@pytest.mark.parametrize(
    "conf", [{}, {**DECLARED, "topology.sink.report.secs": 0}], ids=["by hand", "switched off"]
)
def test_without_a_declaration_or_an_interval_no_table_is_reported(conf: dict[str, Any]) -> None:
    with shop(conf) as harness:
        harness.give("orders", ["a", 1])
        later(harness, 1)
        assert later(harness, 1200) == []
        assert len(harness.run().acked["orders"]) == 1


def test_a_report_that_waits_holds_no_tuple_back() -> None:
    with shop(DECLARED) as harness:
        harness.dagster_up = False
        harness.give("orders", ["a", 1])
        later(harness, 1)
        later(harness, 600)
        harness.give("orders", ["b", 2])
        later(harness, 1)
        later(harness, 600)
        # One report for each table waits, however long that takes.
        assert len(harness.shared.events.outbox) == 2
        assert len(harness.run().acked["orders"]) == 2
        assert not harness.dagster_events and not harness.errors
        harness.dagster_up = True
        assert [event.metadata["rows"] for event in later(harness, 60)] == [1, 1]
        assert [event.metadata["rows"] for event in later(harness, 600)[2:]] == [1, 1]


def test_a_report_without_room_is_dropped_and_its_rows_come_with_the_next() -> None:
    with shop(DECLARED) as harness:
        (runner,) = [run for run in harness.engine.runners.values() if run.component == "store"]
        outbox = harness.shared.events.outbox
        harness.dagster_up = False
        harness.give("orders", ["a", 1], ["b", 2])
        later(harness, 1)
        later(harness, 600)
        waiting = len(outbox)
        assert waiting == 2, "a report for each table"
        harness.give("orders", ["c", 3])
        later(harness, 1)
        later(harness, 600)
        # Neither an error of the report nor a failed tuple.
        assert len(outbox) == waiting
        result = harness.run()
        assert len(result.acked["orders"]) == 3 and not result.failed["orders"]
        assert not [error for _, error in harness.errors if "@target" in str(error)]
        harness.dagster_up = True
        # The pause between two attempts to send them.
        later(harness, 20)
        assert not len(outbox)
        reports = [event for event in later(harness, 600) if event.key[0] == "@target"]
        assert [event.metadata["rows"] for event in reports] == [2, 2, 1, 1]
        assert runner.stats.metrics["table_reports_dropped"] == 2


def test_the_field_of_event_times_must_be_in_the_inputs() -> None:
    class Other(Topology):
        orders = InputSpout.spec(outputs=["order"])
        store = Store.spec(inputs=[orders])

    with pytest.raises(InvalidTopology, match="timestamp_field is 'at'"):
        Other.to_spec()


def test_users_cannot_report_under_the_keys_of_sinks() -> None:
    with TopologyHarness(Odd, {"orders": [["a", 1]]}, simulated=True) as harness:
        harness.advance(1.0)
    assert "name the asset itself" in str(harness.errors[0][1])
    assert not harness.dagster_events
