"""Ids of records: text and whole numbers as they are, every other type by a form of its own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.api import TopologyBuilder
from storm_dagster.connectors.sinks import SinkBolt
from storm_dagster.core.dataplane.keyed_state import (
    Checkpoint,
    Contents,
    frame,
    id_key,
    key_of,
    read_log,
)
from storm_dagster.model.identities import former_identity_text, identity_text
from storm_dagster.testing.task_state import open_task_state
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_rigs.components import InputSpout
from storm_rigs.worker.tuple_values import LOOKALIKES, TUPLE_VALUES, same

FORMS: list[tuple[Any, str]] = [
    ("ann", "ann"),
    ("%", "%"),
    ("a/b", "a/b"),
    (7, "7"),
    (-(2**70), str(-(2**70))),
    (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (datetime(2026, 1, 2, tzinfo=timezone.utc), "2026-01-02 00:00:00+00:00"),
    (date(2026, 1, 2), "2026-01-02"),
    (b"ab", "%bytes:6162"),
    (bytearray(b"ab"), "%bytes:6162"),
    (1.0, "%float:1.0"),
    (float("nan"), "%float:nan"),
    (True, "%bool:true"),
    (None, "%none:"),
    (Decimal("1.0"), "%decimal:1.0"),
    (timedelta(seconds=1), "%timedelta:1000000"),
    ("%bytes:6162", "%text:%bytes:6162"),
    ({"a": 1, "b": [2, None]}, "%value:8b0291b1d4596f5aaffabe24f82d3fc3"),
    ({1, b"a"}, "%value:271bddf642f6cd587962e1f2ad934f3d"),
]


@pytest.mark.parametrize(("value", "text"), FORMS)
def test_the_form_of_each_type_stays(value: Any, text: str) -> None:
    assert identity_text(value) == text


def test_only_the_types_whose_form_changed_have_a_former_one() -> None:
    unchanged = ["ann", 7, UUID(int=1), datetime(2026, 1, 2, tzinfo=timezone.utc)]
    assert [former_identity_text(value) for value in unchanged] == [None] * 4
    assert former_identity_text(b"ab") == "b'ab'"
    assert former_identity_text(1.5) == "1.5"
    assert former_identity_text({"a": 1}) == "{'a': 1}"


@given(TUPLE_VALUES, TUPLE_VALUES)
def test_two_values_have_two_ids(one: Any, other: Any) -> None:
    if identity_text(one) == identity_text(other):
        plain = {str, int, UUID, date, datetime}
        assert same(one, other) or {type(one), type(other)} <= plain


def test_values_that_look_alike_have_different_ids() -> None:
    texts: dict[str, list[Any]] = {}
    for value in LOOKALIKES:
        texts.setdefault(identity_text(value), []).append(value)
    shared = [values for values in texts.values() if len(values) > 1]
    # A number and its text are one id, as they were; a tuple is a list in stored state.
    assert [sorted(map(repr, values)) for values in shared] == [
        ["'1'", "1"],
        ["b'a'", "bytearray(b'a')"],
        ["()", "[]"],
    ]


@given(st.dictionaries(st.text(max_size=3), TUPLE_VALUES, max_size=4))
def test_the_order_of_a_map_does_not_matter(value: dict[str, Any]) -> None:
    turned = dict(reversed(value.items()))
    assert identity_text(turned) == identity_text(value)


@given(st.lists(TUPLE_VALUES, min_size=1, max_size=3))
def test_an_id_of_any_values_is_found_after_a_restart(values: list[Any]) -> None:
    tuple_id = ("spout", "default", *map(id_key, values))
    contents = Contents()
    for record in read_log(frame(Checkpoint(ids=[(1, tuple_id)])), "log"):
        contents.apply(record)
    assert ("spout", "default", *map(id_key, values)) in contents.ids
    assert key_of(tuple_id) == tuple_id


@dataclass(frozen=True)
class Frozen:
    n: Any


@dataclass
class Changing:
    n: int


def test_a_hashable_dataclass_stays_the_id_that_it_was() -> None:
    assert id_key(Frozen(1)) == Frozen(1)
    assert {id_key(Frozen([1])), id_key(Frozen([1]))} == {id_key(Frozen([1]))}
    assert id_key(Changing(1)) == id_key(Changing(1)) != id_key(Changing(2))
    assert len({id_key(Changing(1)), id_key(Frozen(1))}) == 2


class Rows:
    """A sink that keeps what it is given."""

    rows: list[Any] = []

    def open(self, conf: Any, owner: str) -> int:
        return 0

    def write(self, rows: Any, token: int) -> None:
        self.rows += [(row.id, row.former_id, row.values) for row in rows]

    def close(self) -> None:
        pass


class Keep(SinkBolt):
    sink = Rows()
    record_id = "id"
    exactly_once = True


ODD_IDS = [b"a", "b'a'", 1.5, "1.5", {"k": [1]}, {"k": [2]}, {3}, bytearray(b"c"), None, "None"]


def test_records_with_odd_ids_are_written_once() -> None:
    builder = TopologyBuilder("odd-ids")
    builder.set_spout("records", InputSpout, outputs=["id"])
    builder.set_bolt("keep", Keep, inputs=["records"])
    Rows.rows.clear()
    rows = [[value] for value in [*ODD_IDS, *ODD_IDS, float("nan"), float("nan")]]
    with TopologyHarness(builder, {"records": rows}, simulated=True) as harness:
        result = harness.advance(4)
    assert len(result.acked["records"]) == len(rows)
    written = [values["id"] for _, _, values in Rows.rows]
    assert written[:-1] == ODD_IDS and repr(written[-1]) == "nan"
    assert Rows.rows[0][:2] == ("%bytes:61", "b'a'") and Rows.rows[1][:2] == ("b'a'", None)


def test_ids_of_an_earlier_release_are_found_in_the_state_of_a_task(tmp_path: Path) -> None:
    state = open_task_state(tmp_path, "t", "c", 1)
    # As earlier releases wrote them: without a form in the log.
    log = state._store._log  # type: ignore[attr-defined]
    log.append(Checkpoint(ids=[(0, "b'a'"), (0, "1.5"), (0, "7"), (0, "ann")]))
    log.contents.apply_ids(Checkpoint(ids=[(0, "b'a'"), (0, "1.5"), (0, "7"), (0, "ann")]))
    for _ in range(2):
        assert all(state.applied(id) for id in (b"a", 1.5, 7, "ann"))
        assert not state.applied(b"b") and not state.applied(2.5)
        state.save({"k": 1}, applied=[b"c"])
        assert state.applied(b"c")
        state.close()
        state = open_task_state(tmp_path, "t", "c", 1)
    state.save(forget=[b"a", b"c"])
    assert not state.applied(b"a") and not state.applied(b"c") and state.applied(1.5)
    state.close()


def test_a_new_state_of_a_task_takes_no_text_for_another_type(tmp_path: Path) -> None:
    state = open_task_state(tmp_path, "t", "c", 1)
    state.save(applied=["b'a'", "1.5", "None", 7])
    state.close()
    state = open_task_state(tmp_path, "t", "c", 1)
    assert [state.applied(id) for id in ("b'a'", "1.5", "None", "7", 7)] == [True] * 5
    assert [state.applied(id) for id in (b"a", 1.5, None)] == [False] * 3
    # A state that is emptied begins in the new form.
    state.clear()
    state.save(applied=["1.5"])
    assert not state.applied(1.5)
    state.close()
