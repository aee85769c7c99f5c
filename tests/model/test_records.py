"""Records: read back exactly, refused when damaged, forged, of another version or too large."""

from __future__ import annotations

import importlib
import json
import pickle
import pkgutil
from typing import Any

import pytest

import storm_dagster
from storm_dagster.defs.metadata import failure_of
from storm_dagster.model.errors import (
    Corrupt,
    InvalidTopology,
    StormDagsterError,
    error_from_document,
    error_text,
    typed_error_text,
)
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    GrayUpgrade,
    StormBase,
    TaskBeats,
    TaskTable,
    WorkerBeat,
    WorkerSlot,
    decode_record,
    encode_record,
)
from storm_dagster.model.topology import decode_topology

BASE = StormBase(
    name="t",
    launch_time_secs=2_147_483_648,
    status="ACTIVE",
    workers=1,
    executors={"a": 1},
    token="x",
)
ASSIGNMENT = Assignment(
    topology_id="t-1-1", code_dir="t-1-1", node_host={"s1": "h1"}, timestamp_ms=1,
    workers=(WorkerSlot(node="s1", host="h1", port=6900, tasks="1-3"),),
    task_start_secs=Assignment.pack_start_secs({1: 5, 2: 5, 3: 6}),
)  # fmt: skip
TABLE = TaskTable(
    components={
        "a": ComponentTasks(type="bolt", tasks="1-2"),
        "s": ComponentTasks(type="spout", tasks="3"),
    }
)
BEATS = TaskBeats(
    topology_id="t-1-1",
    topology_master=3,
    workers={"s1:6900": WorkerBeat(count=1, silent_ms=0, uptime_secs=2)},
    dead="4,7-9",
)
GRAY = GrayUpgrade(expires=1, **{"continue": True})


@pytest.mark.parametrize(
    "record", [BASE, ASSIGNMENT, TABLE, BEATS, GRAY], ids=lambda r: type(r).__name__
)
def test_a_record_is_read_back_and_carries_its_schema_number(record: Any) -> None:
    raw = encode_record(record)
    assert decode_record(type(record), raw) == record
    assert json.loads(raw)["v"] == 1


def test_what_an_assignment_says() -> None:
    assert ASSIGNMENT.task_slots() == {1: ("s1", 6900), 2: ("s1", 6900), 3: ("s1", 6900)}
    assert ASSIGNMENT.start_secs() == {1: 5, 2: 5, 3: 6}
    assert TABLE.component_of() == {1: "a", 2: "a", 3: "s"}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        pickle.dumps({"name": "t"}),
        encode_record(BASE)[:-3],
        encode_record(BASE).replace(b'"v":1', b'"v":2'),
        encode_record(BASE).replace(b'"workers":1', b'"workers":"1"'),
        encode_record(BASE).replace(b'"ACTIVE"', b'"active"', 1),
    ],
)
def test_bytes_that_are_no_such_record_are_corrupt_and_named(raw: bytes) -> None:
    with pytest.raises(Corrupt, match="/topology/t-1-1"):
        decode_record(StormBase, raw, "/topology/t-1-1")


def test_a_record_that_no_node_may_hold_is_refused_before_the_write() -> None:
    large = StormBase.model_validate(
        {**BASE.model_dump(), "executors": {f"component-{n}": 1 for n in range(40_000)}}
    )
    with pytest.raises(InvalidTopology, match="a ZooKeeper node may hold"):
        encode_record(large)


def test_errors_travel_as_documents() -> None:
    error = InvalidTopology("what, why, and what to do")
    again = error_from_document(error.to_document())
    assert type(again) is InvalidTopology and again.message == error.message
    assert (
        type(error_from_document({"error": {"type": "FromTheFuture", "message": "x"}})).__name__
        == "StormDagsterError"
    )
    assert "not an error document" in error_from_document("<html>").message


def test_an_error_without_a_text_is_named_by_its_class() -> None:
    assert error_text(ValueError("no number")) == "no number"
    assert typed_error_text(ValueError("no number")) == "ValueError: no number"
    for silent in (TimeoutError(), OSError(""), AssertionError(" \n")):
        name = type(silent).__name__
        assert (error_text(silent), typed_error_text(silent)) == (name, name)


def test_whoever_gets_an_error_of_any_class_ends_with_its_exit_code() -> None:
    """Classes that only one module knows travel as the one that all know."""
    for module in pkgutil.walk_packages(storm_dagster.__path__, "storm_dagster."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = [StormDagsterError]
    for kind in found:
        found += kind.__subclasses__()
    ours = {kind for kind in found if kind.__module__.startswith("storm_dagster.")}
    assert {"ReplyLost", "NotAlive"} < {kind.__name__ for kind in ours}
    for kind in ours:
        error = kind.__new__(kind, "what, why, and what to do")
        again = error_from_document(error.to_document())
        assert (again.exit_code, again.message) == (error.exit_code, error.message)
        assert isinstance(error, type(again))
        metadata = failure_of(error).metadata
        assert (metadata["error_type"].value, metadata["message"].value) == (
            type(again).__name__,
            error.message,
        )


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'{"bolts": {"a": {}}}',
        b'{"bolts": {"a": {"object": {}}}}',
        b"\xff",
        b'{"x": 1}',
    ],
)
def test_a_topology_document_that_is_none(raw: bytes) -> None:
    with pytest.raises(InvalidTopology):
        decode_topology(raw)
