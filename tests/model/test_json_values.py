"""JSON of users' values in all places: what is read, refused by name, converted and shown."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.model.json_text import NoJsonForm, json_text
from storm_dagster.model.json_values import (
    InvalidJson,
    decode_json,
    encode_converted,
    shown_json,
)


@dataclass
class Order:
    sku: int = 1


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_what_is_written_is_read_also_after_a_byte_order_mark(value: Any) -> None:
    text = json_text(value)
    for raw in (text, text.encode(), "\ufeff" + text, b"\xef\xbb\xbf" + text.encode()):
        assert repr(decode_json(raw)) == repr(value)
    assert decode_json(encode_converted(value, str)) == value


NOT_JSON = [
    (b"", "it is empty"),
    (b" \n", "it is empty"),
    (b"\xef\xbb\xbf", "it is empty"),
    (b"NaN", "NaN is not a number of JSON"),
    (b'{"a": -Infinity}', "-Infinity is not a number of JSON"),
    (b"\xef\xbb\xbf[NaN]", "NaN is not a number of JSON"),
    (b"[1e400]", "the number 1e400 is beyond the largest float"),
    pytest.param(b"1" * 5000, "5000 digits, more than 4300", id="5000 digits"),
    (b'{"a": ["\\ud800"]}', r"at \.a\[0\]: .* half of a surrogate pair"),
    ('"\ud800"', "half of a surrogate pair"),
    (b'"caf\xe9"', r"byte 4 \(0xe9\) is not UTF-8"),
    (b"[1] 2", "Extra data at character 4"),
    (b"{'a': 1}", "double quotes at character 1"),
    (b'{"a": 1', "at character 7"),
    pytest.param(b"[" * 5000 + b"]" * 5000, "nested too deep", id="5000 levels"),
]


@pytest.mark.parametrize(("text", "reason"), NOT_JSON)
def test_text_that_is_not_json_is_refused_with_the_reason(text: Any, reason: str) -> None:
    with pytest.raises(InvalidJson, match=reason) as error:
        decode_json(text)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("value", "at", "shown"),
    [
        (math.nan, "nan", "nan"),
        ([1, None, {"a": (math.inf,)}], r"at \[2\]\.a\[0\]: inf", [1, None, {"a": ["inf"]}]),
        ({"k": "a\udc80"}, r"at \.k: ", {"k": "a\\udc80"}),
        ({"\udc80": None}, "half of a surrogate pair", {"\\udc80": None}),
        ([Order(), -math.inf], r"at \[1\]: -inf", [{"sku": 1}, "-inf"]),
    ],
)
def test_nan_and_half_pairs_are_refused_and_text_in_what_is_shown(
    value: Any, at: str, shown: Any
) -> None:
    with pytest.raises(NoJsonForm, match=at):
        encode_converted(value, str)
    assert json.loads(shown_json(value, repr)) == shown


def test_types_without_a_json_form_are_converted_where_that_is_documented() -> None:
    value = [b"x", date(2026, 1, 1), (1,), {2: None}, 2**70, 1j]
    converted = ["eA==", "2026-01-01", [1], {"2": None}, 2**70, "1j"]
    assert json.loads(encode_converted(value, str)) == converted
