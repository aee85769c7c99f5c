"""Values of a tuple, from the value of a source's record."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from storm_dagster.connectors.decoding import OnNull, WrongShape, decoder_of, tuple_of


@pytest.mark.parametrize(
    ("decode", "raw", "decoded"),
    [
        ("json", b'{"a": [1]}', {"a": [1]}),
        ("json", "null", None),
        ("text", "ü".encode(), "ü"),
        ("json", bytearray(b'{"a": 1}'), {"a": 1}),
        ("json", memoryview(b"[1]"), [1]),
        ("text", bytearray("ü".encode()), "ü"),
        ("none", b"\xff", b"\xff"),
        # A source that has decoded its records, such as rows of CSV, and tombstones.
        ("json", {"a": 1}, {"a": 1}),
        ("json", None, None),
        ("text", "a", "a"),
        ("text", None, None),
        (len, b"abc", 3),
    ],
)
def test_bytes_are_decoded_and_decoded_values_stay(decode: Any, raw: Any, decoded: Any) -> None:
    assert decoder_of(decode)(raw) == decoded


@pytest.mark.parametrize("decoded", [7, "ab", [1, 2], {"a": 1, "b": 2}, {"n": 1}, []])
def test_with_one_field_the_decoded_value_is_emitted(decoded: Any) -> None:
    """Also a map that has an entry of that name."""
    assert tuple_of(decoded, ["n"], "emit") == [decoded]


MAPS: list[Mapping[Any, Any]] = [
    {"b": 2, "a": 1},
    {"a": 1, "b": 2, "more": 3},
    OrderedDict(b=2, a=1),
    MappingProxyType({"a": 1, "b": 2}),
]


@pytest.mark.parametrize("decoded", [*MAPS, [1, 2], (1, 2)])
def test_with_several_fields_their_entries_are_emitted_in_order(decoded: Any) -> None:
    assert list(tuple_of(decoded, ["a", "b"], "emit") or ()) == [1, 2]


def test_an_entry_that_is_null_is_there() -> None:
    assert tuple_of({"a": None, "b": 2}, ["a", "b"], "skip") == [None, 2]


@pytest.mark.parametrize(
    ("decoded", "reason"),
    [
        ({"a": 1}, "its map has no 'b', only: 'a'"),
        ({}, "its map has no 'a', 'b', only: nothing"),
        ({1: 2}, "its map has no 'a', 'b', only: 1"),
        ([1], "a list of 1 values, and not a map or a list of the 2 fields 'a', 'b'"),
        ((1, 2, 3), "a tuple of 3 values"),
        # Text and bytes have as many elements, and are no lists of them.
        ("ab", "str, and not a map or a list"),
        (b"ab", "bytes, and not a map or a list"),
        (7, "int, and not a map or a list"),
    ],
)
def test_a_value_without_the_fields_is_refused_with_remedy(decoded: Any, reason: str) -> None:
    with pytest.raises(WrongShape, match="override values") as refusal:
        tuple_of(decoded, ["a", "b"], "emit")
    assert reason in str(refusal.value)


@pytest.mark.parametrize("fields", [["a"], ["a", "b"]])
@pytest.mark.parametrize("on_null", ["emit", "skip", "dead_letter"])
def test_null_is_emitted_skipped_or_refused_as_the_spout_says(
    on_null: OnNull, fields: list[str]
) -> None:
    if on_null == "skip":
        assert tuple_of(None, fields, on_null) is None
    elif on_null == "emit" and len(fields) == 1:
        assert tuple_of(None, fields, on_null) == [None]
    else:
        with pytest.raises(WrongShape, match="its value is null"):
            tuple_of(None, fields, on_null)


def test_a_map_with_a_default_emits_it() -> None:
    assert tuple_of(defaultdict(int, a=1), ["a", "b"], "emit") == [1, 0]
