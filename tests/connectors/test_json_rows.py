"""JSON of rows for messages and files: an equal row comes back, or the part at fault is named."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.connectors.json_rows import encode_lines, json_bytes
from storm_dagster.connectors.sinks import Rejected
from storm_dagster.model.json_text import NoJsonForm
from storm_rigs.worker.tuple_values import TUPLE_VALUES, same


@dataclass
class Order:
    sku: int = 1


WITHOUT_FORM: list[Any] = [
    (math.nan, "nan is not a number of JSON"),
    (-math.inf, "-inf is not a number of JSON"),
    pytest.param(10**5000, "too many digits", id="a number of 5001 digits"),
    ("a\ud800", "half of a surrogate pair"),
    (b"raw", "bytes: decode it"),
    (bytearray(b"raw"), "bytearray: decode it"),
    (datetime(2026, 1, 1, tzinfo=timezone.utc), r"make it text with isoformat\(\)"),
    (date(2026, 1, 1), r"isoformat\(\)"),
    (timedelta(1), r"total_seconds\(\)"),
    (Decimal("0.1"), r"decimal.Decimal: make it text with str\(\)"),
    (UUID(int=1), r"uuid.UUID: make it text with str\(\)"),
    ({1, 2}, "set: make it a list"),
    (Order(), "Order: make it one of text, numbers"),
    ({1: "a"}, "a key of the map is of type int"),
    ({b"k": "a"}, "a key of the map is of type bytes"),
    ({"a\ud800": 1}, "half of a surrogate pair"),
]


def _has_no_form(row: dict[str, Any]) -> bool:
    try:
        json_bytes(row)
    except NoJsonForm:
        return True
    return False


@given(st.lists(st.dictionaries(st.sampled_from("abc"), TUPLE_VALUES), max_size=4))
def test_lines_of_rows_are_equal_or_the_rows_at_fault_are_named(rows: list[dict[str, Any]]) -> None:
    try:
        encoded = encode_lines(rows)
    except Rejected as error:
        assert set(error.rows) == {index for index, row in enumerate(rows) if _has_no_form(row)}
    else:
        assert same([json.loads(line) for line in encoded.splitlines()], rows)


def test_a_float_that_json_lacks_is_refused_beside_text_and_nulls() -> None:
    rows = [{"a": 1.5, "b": None}, {"a": math.nan, "b": "null"}, {"a": math.inf, "b": "x"}]
    with pytest.raises(Rejected) as error:
        encode_lines(rows)
    assert set(error.value.rows) == {1, 2}


@given(TUPLE_VALUES)
def test_json_of_a_message_or_file_is_equal_or_refused(value: Any) -> None:
    row = {"a": value, "b": [value]}
    try:
        encoded = json_bytes(row)
    except NoJsonForm as error:
        assert str(error).startswith("at .a")
    else:
        assert same(json.loads(encoded), row)


def test_json_of_a_message_keeps_nul_long_numbers_and_tuples() -> None:
    row = {"text": "a\0", "long": 2**70, "tuple": (1, (2,)), "e": 1e23}
    returned = {"text": "a\0", "long": 2**70, "tuple": [1, [2]], "e": 1e23}
    assert json.loads(json_bytes(row)) == returned


@pytest.mark.parametrize(
    ("value", "reason"),
    WITHOUT_FORM,
)
def test_json_of_a_message_refuses_what_a_column_refuses(value: Any, reason: str) -> None:
    with pytest.raises(NoJsonForm, match=reason) as error:
        json_bytes({"items": [{}, {"price": value}]})
    assert str(error.value).startswith("at .items[1].price")
