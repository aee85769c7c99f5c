"""Columns of a table of PostgreSQL, as its catalog describes them, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.connectors.postgres_columns import Column, column_of, columns_of


def numeric(precision: int, scale: int) -> Column:
    """A column of ``numeric(precision, scale)``, packed as PostgreSQL does."""
    return Column("numeric", ((precision << 16) | (scale & 0x7FF)) + 4, is_array=False)


@given(st.integers(1, 1000), st.integers(-1000, 1000))
def test_precision_and_scale_are_those_of_the_declaration(precision: int, scale: int) -> None:
    column = numeric(precision, scale)
    assert column.digits == (precision, scale)
    assert column.name == f"numeric({precision},{scale})"


@pytest.mark.parametrize(
    ("column", "name", "max_length", "digits"),
    [
        (Column("numeric", -1, False), "numeric", None, None),
        (Column("varchar", 3 + 4, False), "varchar(3)", 3, None),
        (Column("varchar", -1, False), "varchar", None, None),
        (Column("bpchar", 1 + 4, True), "bpchar(1)[]", 1, None),
        (Column("jsonb", -1, True), "jsonb[]", None, None),
        (Column("timestamptz", 0, False), "timestamptz", None, None),
        (Column("", -1, False, "e"), "a type of its own", None, None),
    ],
)
def test_a_column_is_named_for_errors_as_it_was_declared(
    column: Column, name: str, max_length: int | None, digits: Any
) -> None:
    assert column.name == name
    assert (column.max_length, column.digits) == (max_length, digits)


@pytest.mark.parametrize(("modifier", "digits"), [(-1, 6), (0, 0), (3, 3), (6, 6)])
def test_times_keep_the_declared_digits_of_a_second(modifier: int, digits: int) -> None:
    assert Column("timestamptz", modifier, False).second_digits == digits


def test_an_interval_without_digits_of_a_second_keeps_all() -> None:
    """Its modifier has the fields, such as ``interval day``, beside the digits 0xFFFF."""
    assert Column("interval", (8 << 16) | 0xFFFF, False).second_digits == 6
    assert Column("interval", (0x7FFF << 16) | 2, False).second_digits == 2


def test_a_type_of_the_same_name_in_another_schema_is_not_postgres_own() -> None:
    lines = [
        ("n", "int4", -1, False, True, "b"),
        ("own", "int4", -1, False, False, "b"),
        ("mood", "mood", -1, True, False, "e"),
    ]
    assert columns_of(lines) == {
        "n": Column("int4", -1, False),
        "own": Column("", -1, False),
        "mood": Column("", -1, True, "e"),
    }


def stored_name(name: str) -> str:
    """The name that PostgreSQL stores: whole characters of the first 63 bytes."""
    while len(name.encode()) > 63:
        name = name[:-1]
    return name


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=80))
def test_a_column_is_found_by_the_name_that_postgres_truncates(name: str) -> None:
    column = Column("int4", -1, False)
    assert column_of({stored_name(name): column}, name) == column
    assert column_of({f"{stored_name(name)}x"[:80]: column}, name) is None


@pytest.mark.parametrize("name", [None, 7, b"n", "N", "n ", ""])
def test_a_field_of_another_name_has_no_column(name: Any) -> None:
    assert column_of({"n": Column("int4", -1, False)}, name) is None
