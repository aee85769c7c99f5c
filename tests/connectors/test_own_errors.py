"""Errors of the code of sources and sinks: reported with file and line, and no outages."""

from __future__ import annotations

import sqlite3
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import TimeoutError as FuturesTimeout
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException

from storm_dagster.api import ReliableSpout, SystemUnavailable, Topology, TopologyBuilder
from storm_dagster.api.error_origins import is_of_system
from storm_dagster.connectors import (
    Lag,
    Row,
    SinkBolt,
    Source,
    SourceRecord,
    SourceSpout,
    source_spout,
)
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.names import AWAITED_METRIC
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_rigs.components import CollectBolt

_SECS = 300.0
"""Simulated time in which a call always raises."""
_MAX_CALLS = 15
"""Calls in that time whose pauses grow from 1 s to 60 s."""


@pytest.fixture(autouse=True)
def quick_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    # The spout measures this by the real clock, and its pauses by the simulated one.
    monkeypatch.setattr(source_spout, "_COMMIT_SECS", 0.0)


class OwnError(Exception):
    """An error that a project defines itself."""


class Faulty:
    """The call that is at fault, and its error."""

    call: ClassVar[str] = ""
    error: ClassVar[Exception] = TypeError()
    calls: ClassVar[int] = 0

    @classmethod
    def at(cls, call: str) -> None:
        """Raise if this call is at fault."""
        if call == cls.call:
            cls.calls += 1
            # Otherwise the traceback grows with each call.
            raise cls.error.with_traceback(None)


def fault(call: str, error: Exception) -> None:
    Faulty.call = call
    Faulty.error = error
    Faulty.calls = 0
    Numbers.committed = {}
    Store.rows = []


class Numbers(Source):
    """Ten numbers, each in its own call; positions are kept here."""

    blocking: ClassVar[bool] = False
    keeps_positions: ClassVar[bool] = True
    refresh_secs: ClassVar[float] = 0.0
    committed: ClassVar[dict[str, Any]] = {}

    def open(self, conf: Mapping[str, Any], context: Any) -> None:
        self.next = 0

    def partitions(self) -> Collection[str]:
        Faulty.at("partitions")
        return ["p"]

    def assign(self, mine: Mapping[str, Any]) -> None:
        Faulty.at("assign")

    def read(self, most: int, full: Collection[str]) -> Sequence[SourceRecord]:
        Faulty.at("read")
        if self.next == 10:
            return []
        self.next += 1
        return [SourceRecord(str(self.next).encode(), "p", self.next, handle=self.next)]

    def recreated(self) -> Collection[str]:
        Faulty.at("recreated")
        return ()

    def commit(self, after: Mapping[str, Any]) -> None:
        Faulty.at("commit")
        self.committed.update(after)

    def ack(self, handles: Sequence[Any]) -> None:
        Faulty.at("ack")

    def lag(self) -> Mapping[str, Lag]:
        Faulty.at("lag")
        return {}


class NumbersInThread(Numbers):
    blocking: ClassVar[bool] = True


class Reads(SourceSpout):
    source = Numbers()
    outputs = ["n"]


class ReadsInThread(SourceSpout):
    source = NumbersInThread()
    outputs = ["n"]


class Reading(Topology):
    records = Reads.spec()
    use = CollectBolt.spec(inputs=[records])


class ReadingInThread(Topology):
    records = ReadsInThread.spec()
    use = CollectBolt.spec(inputs=[records])


class Store:
    """A sink of a user."""

    assets: ClassVar[Sequence[str]] = ()
    rows: ClassVar[list[Any]] = []

    def open(self, conf: Any, owner: str) -> int | None:
        Faulty.at("open")
        return None

    def write(self, rows: Sequence[Row], token: int) -> None:
        Faulty.at("write")
        self.rows.extend(row.values["n"] for row in rows)

    def close(self) -> None: ...


class Write(SinkBolt):
    sink = Store()
    batch_secs = 0.2


def storing() -> TopologyBuilder:
    builder = TopologyBuilder("storing")
    builder.set_spout("records", ReliableSpout, outputs=["n"])
    builder.set_bolt("write", Write, inputs=["records"])
    return builder


def awaited(harness: TopologyHarness) -> list[str]:
    """What the tasks say that they wait for."""
    texts = [
        runner.stats.metrics.get(AWAITED_METRIC, "") for runner in harness.engine.runners.values()
    ]
    return [text for text in texts if text]


def raised_here(error: BaseException) -> bool:
    """True if the report of an error names this file and the line that raised it."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f'File "{__file__}", line ' in text and "raise cls.error." in text


OWN_ERRORS: list[Exception] = [
    TypeError("a number is needed"),
    KeyError("customer"),
    AttributeError("no such method"),
    ZeroDivisionError("division by zero"),
    RuntimeError("the project says no"),
    OwnError("a rule of the project"),
]
SYSTEM_ERRORS: list[Exception] = [
    ConnectionRefusedError("refused"),
    TimeoutError("no answer"),
    FuturesTimeout(),
    OSError("no route"),
    RemoteDisconnected("gone"),
    sqlite3.OperationalError("database is locked"),
    SystemUnavailable("the orders API"),
    Unavailable("no cluster"),
    InvalidRequest("no such topic"),
    psycopg.OperationalError("the server is away"),
    KafkaException(KafkaError(KafkaError._TRANSPORT)),
]


@pytest.mark.parametrize("error", OWN_ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_code_is_not_of_a_system(error: Exception) -> None:
    assert not is_of_system(error)


@pytest.mark.parametrize("error", SYSTEM_ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_a_client_is_of_its_system(error: Exception) -> None:
    assert is_of_system(error)
    wrapped = OwnError("no orders")
    wrapped.__cause__ = error
    assert is_of_system(wrapped), "raised from it"


def test_the_origin_is_found_behind_an_error_that_calls_others_equal() -> None:
    class EqualError(Exception):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = Exception.__hash__

    error = EqualError("outer")
    error.__cause__ = EqualError("inner")
    error.__cause__.__cause__ = ConnectionResetError("lost")
    assert is_of_system(error)


def few(cases: Sequence[Any]) -> list[Any]:
    """The first two cases, and the others with the mark ``long``."""
    return [*cases[:2], *[pytest.param(case, marks=pytest.mark.long) for case in cases[2:]]]


SOURCE_CALLS = ["read", "commit", "partitions", "assign", "recreated", "ack", "lag"]


@pytest.mark.parametrize("call", few(SOURCE_CALLS))
def test_a_source_whose_code_is_at_fault_is_called_ever_less_often(call: str) -> None:
    fault(call, KeyError("customer"))
    with TopologyHarness(Reading, simulated=True) as harness:
        harness.advance(_SECS, timeout=120)
        # It is called before each read, and before each commit.
        callers = 2 if call == "recreated" else 1
        assert 6 <= Faulty.calls <= callers * _MAX_CALLS
        errors = [error for name, error in harness.errors if name == "records"]
        # The same error is reported once a minute.
        assert 2 <= len(errors) <= _SECS / 60 + 1
        assert all(error is Faulty.error and raised_here(error) for error in errors)
        assert awaited(harness) == []
        Faulty.call = ""
        run_until(harness, lambda: Numbers.committed == {"p": 10}, "it goes on")


@pytest.mark.parametrize("error", few(OWN_ERRORS), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("topology", [Reading, ReadingInThread])
def test_no_error_of_a_sources_code_is_an_outage(
    topology: type[Topology], error: Exception
) -> None:
    fault("read", error)
    with TopologyHarness(topology) as harness:
        eventually(lambda: harness.run() and harness.errors, 60, "the error")
        assert harness.errors[0][1] is error and raised_here(error)
        assert awaited(harness) == []


@pytest.mark.parametrize("error", few(SYSTEM_ERRORS), ids=lambda error: type(error).__name__)
def test_an_error_of_a_sources_client_is_an_outage(error: Exception) -> None:
    fault("read", error)
    with TopologyHarness(Reading, simulated=True) as harness:
        harness.advance(3)
        (begin,) = [str(found) for _, found in harness.errors]
        assert str(error) in begin or type(error).__name__ in begin
        (text,) = awaited(harness)
        assert text.startswith("waits for the source Numbers since ")
        Faulty.call = ""
        run_until(harness, lambda: Numbers.committed == {"p": 10}, "it goes on")
        assert awaited(harness) == []
        assert "answers again" in str(harness.errors[1][1])


def run_until(harness: TopologyHarness, condition: Callable[[], Any], what: str) -> None:
    """Move the simulated time a second for each turn; a sink runs in a thread."""

    def turn() -> Any:
        harness.advance(1)
        time.sleep(0.002)
        return condition()

    eventually(turn, 60, what, interval=0.001)


@pytest.mark.parametrize("call", ["open", "write"])
def test_a_sink_whose_code_is_at_fault_is_called_ever_less_often(call: str, tmp_path: Path) -> None:
    fault(call, KeyError("customer"))
    rows = {"records": [[n] for n in range(10)]}
    with TopologyHarness(storing(), rows, simulated=True, state_dir=tmp_path) as harness:
        start = harness.clock()
        run_until(harness, lambda: harness.clock() - start >= _SECS, "five minutes")
        assert 5 <= Faulty.calls <= _MAX_CALLS
        errors = [error for name, error in harness.errors if name == "write"]
        assert 2 <= len(errors) <= _SECS / 60 + 1
        assert all(error is Faulty.error and raised_here(error) for error in errors)
        assert awaited(harness) == []
        assert not harness.run().failed["records"], "the rows are kept"
        Faulty.call = ""
        run_until(harness, lambda: len(Store.rows) == 10, "it goes on")
        assert not harness.run().failed["records"]


@pytest.mark.parametrize("error", few(OWN_ERRORS), ids=lambda error: type(error).__name__)
def test_no_error_of_a_sinks_code_is_an_outage(error: Exception, tmp_path: Path) -> None:
    fault("write", error)
    rows = {"records": [[1]]}
    with TopologyHarness(storing(), rows, simulated=True, state_dir=tmp_path) as harness:
        run_until(harness, lambda: harness.errors, "the error")
        assert harness.errors[0][1] is error and raised_here(error)
        assert awaited(harness) == []


@pytest.mark.parametrize("error", few(SYSTEM_ERRORS), ids=lambda error: type(error).__name__)
def test_an_error_of_a_sinks_client_is_an_outage(error: Exception, tmp_path: Path) -> None:
    fault("write", error)
    rows = {"records": [[1]]}
    with TopologyHarness(storing(), rows, simulated=True, state_dir=tmp_path) as harness:
        run_until(harness, lambda: awaited(harness), "it waits")
        (text,) = awaited(harness)
        assert text.startswith("waits for the sink Store since ")
        Faulty.call = ""
        run_until(harness, lambda: Store.rows == [1], "it goes on")
        run_until(harness, lambda: awaited(harness) == [], "it waits no longer")
