"""Metadata: secrets are blotted out, long tables are cut and say so."""

from __future__ import annotations

import dagster as dg

from storm_dagster.defs.metadata import failure_of, notes, table, tasks_table
from storm_dagster.model.conf import mask
from storm_dagster.model.errors import Fenced, InvalidTopology, Unavailable
from storm_dagster.model.records import ComponentTasks, TaskTable


def test_secrets_are_blotted_out_at_any_depth() -> None:
    conf = {
        "topology.workers": 3,
        "storm.zookeeper.topology.auth.payload": "user:pw",
        "db": {"password": "hunter2", "host": "h", "nested": [{"api_key": "k"}]},
        "kafka.sasl.secret": ["a", "b"],
        "token.ttl.secs": 60,
        "empty.password": None,
    }
    shown = mask(conf)
    assert shown["topology.workers"] == 3
    assert shown["db"]["host"] == "h"
    assert shown["token.ttl.secs"] == 60
    assert shown["empty.password"] is None
    for secret in ("user:pw", "hunter2", "'k'", "'a'", "'b'"):
        assert secret not in str(shown)


def test_long_tables_are_cut_and_say_so() -> None:
    value = table("name n:int", [(str(n), n) for n in range(700)])
    assert len(value.records) == 501
    assert value.records[-1].data["name"] == "... and 200 more"


def test_tables_name_what_they_show() -> None:
    tasks = TaskTable(components={"count": ComponentTasks(type="bolt", tasks="1-3,7")})
    assert tasks_table(tasks).records[0].data == {
        "component": "count",
        "type": "bolt",
        "tasks": "1-3,7",
        "count": 4,
    }
    assert table("key bytes:int", []).records == []


def test_notes_escape_markdown() -> None:
    assert notes(["a <b> [c](d)"]).value == "- a \\<b\\> \\[c\\](d)"
    assert notes([]).value == "none"


def test_typed_errors_become_failures_that_keep_their_type() -> None:
    failure = failure_of(InvalidTopology("topology 'x' has no spout: add one"))
    assert failure.description == "topology 'x' has no spout: add one"
    assert failure.metadata["error_type"] == dg.MetadataValue.text("InvalidTopology")
    assert failure.metadata["message"] == dg.MetadataValue.text(
        "topology 'x' has no spout: add one"
    )
    assert failure.allow_retries is False
    assert failure_of(Fenced("over")).allow_retries is False
    assert failure_of(Unavailable("later")).allow_retries is True
