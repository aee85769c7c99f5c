"""Rows as the bytes of a file: JSON lines, CSV and Parquet."""

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, timezone
from decimal import Decimal
from itertools import chain
from typing import Any

import pyarrow as pa
from pyarrow import parquet, types

from storm_dagster.api.arrow_values import fast_converter, plain_types, written_type
from storm_dagster.connectors.json_rows import encode_lines
from storm_dagster.connectors.sinks import Rejected
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.json_text import type_name

_Rows = Sequence[Mapping[str, Any]]
TYPES_NOT_IN_CSV = (list, tuple, dict, bytes, bytearray, set, frozenset)
"""Types of values that CSV has no form of."""


_COLUMN_TESTS_NOT_IN_CSV = (
    types.is_nested,
    types.is_binary,
    types.is_large_binary,
    types.is_fixed_size_binary,
    types.is_duration,
)
"""Tests of the types of columns that CSV has no form of."""


def encode_rows(format: str, rows: _Rows, schema: pa.Schema | None) -> bytes:
    """The bytes of a file with these rows, whose columns have the types of ``schema``.

    It is ``None`` while no column is known. Raises :class:`Rejected` for the rows that the format
    or the schema cannot hold unchanged.
    """
    table = _Columns(pa.schema([]) if schema is None else schema, rows)
    if format == "jsonl":
        table.check()
        return encode_lines(rows)
    return table.csv() if format == "csv" else table.parquet()


def check_parquet_types(schema: pa.Schema) -> None:
    """Raise :class:`InvalidRequest` for a column that a file of Parquet cannot have.

    Such as a union, an interval of months, or a decimal with a negative scale. Without this check
    every batch would fail, and its rows wait.
    """
    for field in schema:
        column_type = written_type(field.type)
        if column_type is None:
            continue
        try:
            table = pa.schema([field.with_type(column_type)]).empty_table()
            parquet.write_table(table, pa.BufferOutputStream())
        except (pa.ArrowException, OSError) as error:
            raise InvalidRequest(
                f"column {field.name!r} of a FileSink: Parquet has no form of {field.type} "
                f"({' '.join(str(error).split()):.200}): declare another type in schema"
            ) from None


class _Columns:
    """Values of rows by the columns of a schema."""

    def __init__(self, schema: pa.Schema, rows: _Rows) -> None:
        self._schema = schema
        self._rows = rows
        self._refused: dict[int, str] = {}
        """Index of a row -> the first reason why it is rejected."""

    def check(self) -> None:
        """Raise :class:`Rejected` for the rows that do not fit the schema."""
        self._check_names()
        for field in self._schema:
            self._converted(field)
        self._raise_refused()

    def parquet(self) -> bytes:
        """A file with the columns whose types are known."""
        self._check_names()
        fields: list[pa.Field] = []
        arrays: list[pa.Array] = []
        for field in self._schema:
            column_type = written_type(field.type)
            if column_type is None:
                self._converted(field)
                continue
            fields.append(field.with_type(column_type))
            arrays.append(self._array(field, column_type))
        if self._rows and not fields:
            for index in range(len(self._rows)):
                self._refuse(index, "no column has a type yet: declare schema of the FileSink")
        self._raise_refused()
        sink = pa.BufferOutputStream()
        parquet.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), sink)
        return sink.getvalue().to_pybytes()

    def csv(self) -> bytes:
        """A file with a header of all columns."""
        self._check_names()
        self._check_flat()
        columns: list[list[str]] = []
        for field in self._schema:
            if any(is_type(field.type) for is_type in _COLUMN_TESTS_NOT_IN_CSV):
                for index, row in enumerate(self._rows):
                    if row.get(field.name) is not None:
                        self._refuse(
                            index, f"column {field.name!r}: CSV has no form of {field.type}"
                        )
                columns.append([""] * len(self._rows))
                continue
            columns.append(self._cells(field))
        if len(columns) == 1:
            for index, cell in enumerate(columns[0]):
                if not cell:
                    self._refuse(index, "CSV has no form of a row with one column that is None")
        self._raise_refused()
        lines = [",".join([_quoted(name) for name in self._schema.names])]
        lines += [",".join(cells) for cells in zip(*columns, strict=True)]
        return "".join([f"{line}\r\n" for line in lines]).encode()

    def _check_names(self) -> None:
        names = set(self._schema.names)
        if names.issuperset(chain.from_iterable(self._rows)):
            return
        for index, row in enumerate(self._rows):
            if names.issuperset(row):
                continue
            name = next(name for name in row if name not in names)
            if isinstance(name, str):
                reason = f"the dataset has no column {name!r}: declare it in schema of the FileSink"
            else:
                reason = f"the name of a column is of type {type_name(name)}: make it text"
            self._refuse(index, reason)

    def _check_flat(self) -> None:
        """Note the rows with lists, maps and bytes, which CSV has no form of."""
        kinds = set(map(type, chain.from_iterable([row.values() for row in self._rows])))
        if kinds.isdisjoint(TYPES_NOT_IN_CSV):
            return
        for index, row in enumerate(self._rows):
            for name, value in row.items():
                if type(value) in TYPES_NOT_IN_CSV:
                    kind = f"CSV has no form of a value of type {type_name(value)}"
                    self._refuse(index, f"column {name!r}: {kind}: make it text in row_of")

    def _array(self, field: pa.Field, column_type: pa.DataType) -> pa.Array:
        """The column of a field, of its type without open parts.

        Rows with values that it cannot hold are noted.
        """
        values = self._plain_values(field)
        if values is not None:
            try:
                return pa.array(values, column_type)
            except (pa.ArrowException, ValueError, OverflowError):
                # One value is out of range: the next line finds it.
                pass
        # Keys of maps whose type is open are None, and left out.
        return pa.array(self._converted(field), column_type)

    def _plain_values(self, field: pa.Field) -> list[Any] | None:
        """The values, if Arrow converts their types exactly or refuses; else ``None``."""
        values = [row.get(field.name) for row in self._rows]
        kinds = set(map(type, values))
        if field.nullable:
            kinds.discard(type(None))
        return values if kinds <= plain_types(field.type) else None

    def _converted(self, field: pa.Field) -> list[Any]:
        """Values for the column of a field; ``None`` in rows that are noted as rejected."""
        converted: list[Any] = []
        convert = fast_converter(field.type)
        for index, row in enumerate(self._rows):
            value = row.get(field.name)
            try:
                if value is None and not field.nullable:
                    raise ValueError("the column is not null, and the row has no value for it")
                value = convert(value)
            except ValueError as error:
                self._refuse(index, f"column {field.name!r}: {error}")
                value = None
            converted.append(value)
        return converted

    def _cells(self, field: pa.Field) -> list[str]:
        """Cells of CSV. Text has quotes, so that readers tell ``None`` from it."""
        values = self._converted(field)
        # Also of string_view, and of a dictionary of texts.
        for index, value in enumerate(values):
            if isinstance(value, str) and "\0" in value:
                reason = f"column {field.name!r}: CSV has no NUL character: remove it"
                self._refuse(index, reason)
        return [_CELLS.get(type(value), str)(value) for value in values]

    def _refuse(self, index: int, reason: str) -> None:
        self._refused.setdefault(index, reason)

    def _raise_refused(self) -> None:
        if self._refused:
            raise Rejected(dict(sorted(self._refused.items())))


def _quoted(text: str) -> str:
    escaped = text.replace('"', '""') if '"' in text else text
    return f'"{escaped}"'


def _time_cell(value: datetime) -> str:
    """A time in ISO 8601; one with an offset in UTC, with ``Z`` at its end."""
    if value.tzinfo is None:
        return value.isoformat()
    return value.astimezone(timezone.utc).replace(tzinfo=None).isoformat() + "Z"


_CELLS: dict[type, Callable[[Any], str]] = {
    type(None): lambda value: "",
    str: _quoted,
    bool: lambda value: "true" if value else "false",
    float: repr,
    Decimal: lambda value: format(value, "f"),
    datetime: _time_cell,
    date: lambda value: value.isoformat(),
}
"""Type of a value -> its text in CSV. Whole numbers are decimal."""
