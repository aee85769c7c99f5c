"""Types and values of columns of files and of Spark's batches. What readers of files get is in
``connectors/test_file_values.py``.
"""

from __future__ import annotations

from datetime import date, datetime, timezone
from decimal import Decimal
from enum import Enum
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.api.arrow_values import (
    MAX_DEPTH,
    arrow_value,
    distinct_names,
    fast_converter,
    inferred_type,
    is_open,
    joined_type,
    plain_types,
    refined_type,
    written_type,
)
from storm_rigs.worker.tuple_values import TUPLE_VALUES, same

NULL, WHOLE, FLOAT, TEXT = pa.null(), pa.int64(), pa.float64(), pa.string()
UTC_TIME = pa.timestamp("us", "UTC")
_LEAVES = st.sampled_from(
    [NULL, WHOLE, FLOAT, TEXT, pa.bool_(), pa.binary(), pa.date32(), UTC_TIME, pa.timestamp("us"),
     pa.decimal128(38, 18), pa.int8(), pa.float32(), pa.large_string()]
)  # fmt: skip


def _structs(parts: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = st.dictionaries(st.sampled_from("abc"), parts, min_size=1, max_size=3)
    return fields.map(lambda types: pa.struct(list(types.items())))


TYPES: st.SearchStrategy[pa.DataType] = st.recursive(
    _LEAVES, lambda parts: parts.map(pa.list_) | _structs(parts), max_leaves=4
)


def outcome(convert: Any, value: Any) -> tuple[bool, Any]:
    """(True, value) of a conversion, or (False, text of its error)."""
    try:
        return True, convert(value)
    except ValueError as error:
        return False, str(error)


@given(TYPES, st.lists(TUPLE_VALUES, min_size=1, max_size=5))
def test_the_fast_way_converts_and_refuses_as_the_table_of_types(
    column_type: pa.DataType, values: list[Any]
) -> None:
    for value in values:
        fits, expected = outcome(lambda part: arrow_value(part, column_type), value)
        fits_fast, result = outcome(fast_converter(column_type), value)
        assert fits_fast == fits, value
        assert same(result, expected), value


@given(TUPLE_VALUES)
def test_a_value_fits_the_type_that_is_inferred_from_it(value: Any) -> None:
    fits, column_type = outcome(inferred_type, value)
    if not fits or written_type(column_type) is None:
        return
    fits, kept = outcome(lambda part: arrow_value(part, column_type), value)
    if fits:
        pa.array([kept], written_type(column_type) if not is_open(column_type) else column_type)


@pytest.mark.parametrize(
    ("value", "column_type"),
    [
        (None, NULL),
        (True, pa.bool_()),
        (1, WHOLE),
        (1.0, FLOAT),
        ("1", TEXT),
        (bytearray(b"1"), pa.binary()),
        (date(2026, 1, 1), pa.date32()),
        (datetime(2026, 1, 1), pa.timestamp("us")),
        (datetime(2026, 1, 1, tzinfo=timezone.utc), UTC_TIME),
        (Decimal("1.5"), pa.decimal128(38, 18)),
        ([], pa.list_(NULL)),
        ((1, None, 2.5), pa.list_(FLOAT)),
        ({}, NULL),
        ({"a": 1, "b": None}, pa.struct([("a", WHOLE), ("b", NULL)])),
        ([{"a": 1}, {"b": "x"}], pa.list_(pa.struct([("a", WHOLE), ("b", TEXT)]))),
    ],
)
def test_the_type_of_a_column_follows_from_its_first_value(
    value: Any, column_type: pa.DataType
) -> None:
    assert inferred_type(value) == column_type


class Color(Enum):
    """An enumeration, which files have no type for."""

    RED = "red"


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Color.RED, "is an Enum: write its .name or .value"),
        ({1}, "type set: make it a list"),
        ({1: "a"}, "a key of the map is of type int: make the keys text"),
        ({"": 1}, "a key of the map is empty"),
        ({"a": 1, "A": 2}, "differ in upper and lower case only"),
        (nested(MAX_DEPTH + 1), "nested deeper than 64 levels: make it flatter"),
    ],
)
def test_a_value_that_no_column_can_have_is_refused_with_remedy(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        inferred_type(value)
    assert inferred_type(nested(MAX_DEPTH)) is not None


def test_names_that_differ_by_case_alone_are_one_column() -> None:
    """The first one counts; also for letters whose upper case has two."""
    assert distinct_names(["b", "B", "a", "b", "straße", "STRASSE"]) == ["b", "a", "straße"]


@pytest.mark.parametrize(
    ("value_types", "joined"),
    [
        ([], NULL),
        ([NULL, TEXT], TEXT),
        ([WHOLE, FLOAT], FLOAT),
        ([FLOAT, WHOLE], FLOAT),
        ([WHOLE, TEXT], WHOLE),
        ([TEXT, WHOLE], TEXT),
        ([pa.list_(NULL), pa.list_(WHOLE), pa.list_(FLOAT)], pa.list_(FLOAT)),
        (
            [pa.struct([("a", NULL)]), pa.struct([("a", TEXT), ("b", WHOLE)])],
            pa.struct([("a", TEXT), ("b", WHOLE)]),
        ),
        ([pa.struct([("a", WHOLE)]), pa.struct([("A", TEXT)])], pa.struct([("a", WHOLE)])),
    ],
)
def test_values_of_several_types_share_a_column(
    value_types: list[pa.DataType], joined: pa.DataType
) -> None:
    assert joined_type(value_types) == joined


@given(TYPES, TYPES)
def test_a_type_that_is_known_changes_only_where_it_is_open(
    known: pa.DataType, value_type: pa.DataType
) -> None:
    """So files that were written before stay readable with the new schema."""
    refined = refined_type(known, value_type)
    if not is_open(known):
        assert refined == known
    assert refined_type(known, NULL) == known
    assert refined_type(refined, value_type) == refined
    _assert_refines(known, refined)


def _assert_refines(known: pa.DataType, refined: pa.DataType) -> None:
    if known == NULL:
        return
    assert refined.id == known.id and refined.num_fields == known.num_fields
    if known.num_fields == 0:
        assert refined == known
    for index in range(known.num_fields):
        assert refined.field(index).name == known.field(index).name
        _assert_refines(known.field(index).type, refined.field(index).type)


@given(TYPES)
def test_no_open_part_of_a_type_is_written(column_type: pa.DataType) -> None:
    written = written_type(column_type)
    if written is not None:
        assert not is_open(written)
    if not is_open(column_type):
        assert written == column_type


@pytest.mark.parametrize(
    ("column_type", "written"),
    [
        (pa.list_(NULL), None),
        (pa.struct([("a", NULL)]), None),
        (pa.struct([("a", NULL), ("b", WHOLE)]), pa.struct([("b", WHOLE)])),
        (pa.struct([("a", pa.list_(NULL)), ("b", WHOLE)]), pa.struct([("b", WHOLE)])),
        (pa.struct([]), None),
        (pa.struct([("a", pa.struct([])), ("b", WHOLE)]), pa.struct([("b", WHOLE)])),
        (pa.list_(pa.struct([])), None),
    ],
)
def test_a_column_is_written_without_parts_that_no_file_can_have(
    column_type: pa.DataType, written: pa.DataType | None
) -> None:
    """Parts whose type is not known yet, and maps without a key."""
    assert written_type(column_type) == written


@given(_LEAVES, TUPLE_VALUES)
def test_a_value_of_a_plain_type_is_left_to_arrow_as_it_is(
    column_type: pa.DataType, value: Any
) -> None:
    """Arrow then converts it exactly, or refuses it."""
    if type(value) not in plain_types(column_type):
        return
    try:
        kept = pa.array([value], column_type)[0].as_py()
    except (pa.ArrowException, ValueError, OverflowError):
        return
    assert same(kept, value)
