"""Values that a tuple can hold, for Hypothesis."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

from hypothesis import strategies as st

_HOUR = timedelta(hours=1)
ZONES = st.none() | st.integers(-14, 14).map(lambda hours: timezone(hours * _HOUR))
LOOKALIKES: list[Any] = [
    "", "1", "1.0", "-0.0", "true", "True", "None", "null", "nan", "b'a'", "a", "{}", "[]", "{1,2}",
    "\\x61", "007", " 5 ", "now", "2026-01-01", "2026-01-01T00:00:00+05:00", 'quo"te', "a,b", "a\nb",
    "a\r\nb", "x" * 300, "\ufeff", "a\0", "\ud800", b"", b"a", b"\\x61", b"\xff\x00",
    0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40, True, False, None,
    0.0, -0.0, 1.0, 0.1, 0.1 + 0.2, 1e16, 1e23, 5e-324, float("inf"), float("nan"), float(2**63),
    Decimal("1.0"), Decimal("0.1"), Decimal("1E+3"), Decimal("NaN"), Decimal("1.23456789012345678901"),
    [], {}, (), [[]], [None], [1, None], [1, 2.5], [1, "a"], [{"sku": 1}, {"sku": 2}], [[1], [2, 3]],
    {"a": 1}, {"a": None}, {1: "a"}, {b"a": 1}, {"a": {"b": [1]}}, {1, 2}, frozenset({"a"}), bytearray(b"a"),
    timedelta(microseconds=1), datetime(2026, 1, 1),
    datetime(2026, 1, 1, 12, 0, 0, 1, timezone.utc), datetime(2026, 10, 25, 2, 30, fold=1),
    datetime.min, datetime.max, datetime.min.replace(tzinfo=timezone(14 * _HOUR)),
    datetime.max.replace(tzinfo=timezone(-14 * _HOUR)), date.min, date.max, time(2, 30, fold=1),
    timedelta.min, timedelta.max, Decimal("-0"), Decimal("0E-30"), Decimal("sNaN"), Decimal("-Infinity"),
    UUID(int=0), {True: 1}, {None: 1}, {2**64: 1}, {(1, 2): 1}, {"a": Decimal("sNaN")}, [b"a", "a", 1],
]  # fmt: skip
"""Values that one system or another takes for a value of another type."""
SCALARS = (
    st.sampled_from(LOOKALIKES)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.datetimes(timezones=ZONES)
    | st.dates()
    | st.times(timezones=ZONES)
    | st.timedeltas()
    | st.decimals()
    | st.uuids()
)
_KEYS = st.text(max_size=4) | st.integers() | st.binary(max_size=4) | st.booleans() | st.none()
TUPLE_VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=3)
        | st.sets(_KEYS, max_size=3)
        | st.binary(max_size=8).map(bytearray)
    ),
    max_leaves=5,
)
"""Every type of ``docs/authoring.md`` but registered classes."""


def same(left: Any, right: Any) -> bool:
    """True if both are equal, and of one type everywhere; a tuple is a list, as readers return it.

    NaN is the same as NaN, and 0.0 is not -0.0.
    """
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return False
        return all(same(one, other) for one, other in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, bytes | bytearray) and isinstance(right, bytes | bytearray):
        return bytes(left) == bytes(right)
    if isinstance(left, set | frozenset) and isinstance(right, set | frozenset):
        return left == right
    if type(left) is not type(right):
        return False
    if isinstance(left, float | Decimal):
        return repr(left) == repr(right)
    return bool(left == right)
