"""Keys of messages, made of the values of a field."""

from __future__ import annotations

import enum
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.connectors.kafka_sink import encode_key


class Level(enum.IntEnum):
    LOW = 3


class Color(str, enum.Enum):
    RED = "red"


@given(st.binary())
def test_bytes_are_the_key(value: bytes) -> None:
    assert encode_key("k", value) == value
    for kind in (bytearray, memoryview):
        key = encode_key("k", kind(value))
        assert type(key) is bytes and key == value


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_is_utf_8(value: str) -> None:
    assert encode_key("k", value) == value.encode("utf-8")


@given(st.integers())
def test_a_whole_number_is_its_decimal_text(value: int) -> None:
    assert encode_key("k", value) == b"%d" % value


def test_none_is_no_key_and_empty_text_is_a_key() -> None:
    assert encode_key("k", None) is None
    assert [encode_key("k", ""), encode_key("k", b"")] == [b"", b""]


def test_a_member_of_an_enumeration_is_its_value() -> None:
    assert [encode_key("k", Level.LOW), encode_key("k", Color.RED)] == [b"3", b"red"]


def test_every_second_byte_of_a_view_is_the_key() -> None:
    assert encode_key("k", memoryview(b"a-b-c-")[::2]) == b"abc"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, "bool"),
        (False, "bool"),
        (1.0, "float"),
        (float("nan"), "float"),
        ((1, 2), "tuple"),
        ([b"a"], "list"),
        ({"a": 1}, "dict"),
        ({1}, "set"),
        (Decimal(1), "decimal.Decimal"),
        (UUID(int=1), "uuid.UUID"),
        (object(), "object"),
    ],
)
def test_another_type_is_refused_with_field_type_and_remedy(value: Any, kind: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"'customer' is of type {kind}, and a key is bytes.* in row_of, or set key",
    ):
        encode_key("customer", value)


def test_text_outside_unicode_and_too_long_numbers_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'customer' has half of a surrogate pair at position 1.*: remove it"
    ):
        encode_key("customer", "a\ud800")
    with pytest.raises(ValueError, match=r"'customer' cannot be written: .*4300 digits"):
        encode_key("customer", 10**5000)
