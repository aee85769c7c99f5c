"""JSON text of values for columns of a database: an equal value comes back, or the part at fault is
named.
"""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.model.json_text import MAX_DEPTH, NoJsonForm, json_text

Point = namedtuple("Point", "x y")


class Level(enum.IntEnum):
    LOW = 3


class Color(str, enum.Enum):
    RED = "red"


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
FLOATS = [1e16, 1e22, 1e23, -1e23, 1.5e300, math.ldexp(1, 1023), 5e-324, 0.1, -0.0]
WHOLE_NUMBERS = [2**53, 2**64, -(10**40), 10**4299]
TEXTS = ["", "123", "null", "true", '"q"', "[]", "{}", "\\", "\x01\x1f\x7f\u2028", "\U0001f600"]


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@given(VALUES)
def test_a_reader_gets_an_equal_value_of_the_same_type(value: Any) -> None:
    text = json_text(value)
    # The text of a float tells whether it is one, also after 1 == 1.0.
    assert repr(json.loads(text)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [*FLOATS, *WHOLE_NUMBERS, *TEXTS, nested(MAX_DEPTH)],
    ids=lambda value: ascii(value)[:20],
)
def test_numbers_and_text_at_the_limits_come_back(value: Any) -> None:
    text = json_text(value)
    returned = json.loads(text)
    assert returned == value and type(returned) is type(value)
    # PostgreSQL keeps numbers as decimals, and writes none with an exponent.
    assert not isinstance(value, float) or "e+" not in text


@pytest.mark.parametrize(
    ("value", "returned"),
    [
        ((1, (2,)), [1, [2]]),
        (Point(1, 2), [1, 2]),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(int, a=1), {"a": 1}),
        (Level.LOW, 3),
        ({Color.RED: Color.RED}, {"red": "red"}),
    ],
)
def test_a_kind_of_list_map_number_or_text_is_one(value: Any, returned: Any) -> None:
    assert json.loads(json_text(value)) == returned


WITHOUT_FORM = [
    (math.nan, "nan is not a number of JSON"),
    (math.inf, "inf is not a number of JSON"),
    (-math.inf, "-inf is not a number of JSON"),
    pytest.param(10**5000, "too many digits", id="a number of 5001 digits"),
    ("a\0b", "NUL character: remove it"),
    ("a\ud800", "half of a surrogate pair"),
    ("\udc00" * 1000, "half of a surrogate pair"),
    (b"raw", "bytes: decode it"),
    (bytearray(b"raw"), "bytearray: decode it"),
    (memoryview(b"raw"), "memoryview: decode it"),
    (
        datetime(2026, 1, 1, tzinfo=timezone.utc),
        r"datetime.datetime: make it text with isoformat\(\)",
    ),
    (date(2026, 1, 1), r"isoformat\(\)"),
    (time(1), r"isoformat\(\)"),
    (timedelta(1), r"total_seconds\(\)"),
    (Decimal("0.1"), r"decimal.Decimal: make it text with str\(\)"),
    (UUID(int=1), r"uuid.UUID: make it text with str\(\)"),
    ({1, 2}, "set: make it a list"),
    (frozenset(), "frozenset: make it a list"),
    (1j, "complex: make it one of text, numbers"),
    (Order(), "Order: make it one of text, numbers"),
    (MappingProxyType({}), "mappingproxy: make it one of"),
    (range(3), "range: make it one of"),
    (object(), "object: make it one of"),
    ({1: "a"}, "a key of the map is of type int"),
    ({None: "a"}, "a key of the map is of type NoneType"),
    ({b"k": "a"}, "a key of the map is of type bytes"),
    ({("a", 1): "a"}, "a key of the map is of type tuple"),
    ({"a\0": 1}, "NUL character"),
    ({"a\ud800": 1}, "half of a surrogate pair"),
    (nested(MAX_DEPTH + 1), "nested deeper than 200 levels"),
]


@pytest.mark.parametrize(("value", "reason"), WITHOUT_FORM)
def test_a_value_without_a_json_form_is_refused_with_a_remedy(value: Any, reason: str) -> None:
    with pytest.raises(NoJsonForm, match=reason) as error:
        json_text(value)
    assert len(str(error.value)) < 1500 and str(error.value).isascii()
    with pytest.raises(NoJsonForm, match=r"^at \.items\[1\]\.price.*: ") as error:
        json_text({"id": 1, "items": [{}, {"sku": "x", "price": value}]})


def test_a_list_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(NoJsonForm, match="nested deeper"):
        json_text(value)
