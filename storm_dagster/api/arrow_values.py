"""Values for columns of Arrow's types: :func:`arrow_value` is the table of types.

Files of sinks and batches of Spark components have it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyarrow import types

from storm_dagster.model.json_text import type_name
from storm_dagster.model.numbers import exact_decimal, is_nan

MAX_DEPTH = 64
"""Levels of lists and maps in one value, so that a cycle ends with an error."""
_MIN_INT64 = -(2**63)
_MAX_INT64 = 2**63 - 1
_UTC_TIME = pa.timestamp("us", "UTC")
_DECIMAL = pa.decimal128(38, 18)
"""Type of a column of decimals without a declared one: 20 digits before the point."""
_PLAIN: dict[pa.DataType, frozenset[type]] = {
    pa.bool_(): frozenset((bool,)),
    pa.int64(): frozenset((int,)),
    pa.float64(): frozenset((float,)),
    pa.string(): frozenset((str,)),
    pa.binary(): frozenset((bytes,)),
    pa.date32(): frozenset((date,)),
}
"""Type -> types of values that Arrow converts exactly, or refuses."""
_REMEDIES: dict[str, str] = {
    "time": "make it text with isoformat(), or declare a schema with time64",
    "timedelta": "make it a number with total_seconds(), or declare a schema with duration",
    "UUID": "make it text with str()",
    "set": "make it a list",
    "frozenset": "make it a list",
}
"""Name of a type without a type in files -> the remedy."""


# -- types of values -------------------------------------------------------------------------------


def inferred_type(value: Any, levels: int = MAX_DEPTH) -> pa.DataType:
    """The type of a column that has this value; of ``None``, the type ``null``.

    It is one that pyarrow, Spark and DuckDB read as an equal value. Parts whose type cannot be
    known have the type ``null``, such as the elements of an empty list. Raises ``ValueError`` for a
    value without such a type.
    """
    if value is None:
        return pa.null()
    if isinstance(value, Enum):
        raise ValueError(f"{type_name(value)} is an Enum: write its .name or .value")
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, str):
        return pa.string()
    if isinstance(value, bytes | bytearray | memoryview):
        return pa.binary()
    if isinstance(value, datetime):
        return pa.timestamp("us") if value.utcoffset() is None else _UTC_TIME
    if isinstance(value, date):
        return pa.date32()
    if isinstance(value, Decimal):
        return _DECIMAL
    if isinstance(value, list | tuple | dict):
        return _inferred_nested(value, levels)
    remedy = _REMEDIES.get(type(value).__name__, "make it text, a number, a list or a map")
    raise ValueError(f"files have no type for a value of type {type_name(value)}: {remedy}")


def _inferred_nested(value: Any, levels: int) -> pa.DataType:
    if not levels:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels: make it flatter")
    if not isinstance(value, dict):
        return pa.list_(joined_type([inferred_type(part, levels - 1) for part in value]))
    if not value:
        # Files have no map without keys.
        return pa.null()
    fields: list[pa.Field] = []
    for key, part in value.items():
        _check_key(key)
        if not key:
            raise ValueError("a key of the map is empty, which DuckDB does not read: name it")
        fields.append(pa.field(key, inferred_type(part, levels - 1)))
    names = [field.name for field in fields]
    if len(distinct_names(names)) < len(names):
        raise ValueError(
            "keys of the map differ in upper and lower case only, which Spark does not read: "
            f"{names}"
        )
    return pa.struct(fields)


def distinct_names(names: Iterable[str]) -> list[str]:
    """The names without those that differ from an earlier one in upper and lower case only."""
    first_names: dict[str, str] = {}
    for name in names:
        first_names.setdefault(name.casefold(), name)
    return list(first_names.values())


def _check_key(key: Any) -> None:
    if not isinstance(key, str):
        raise ValueError(f"a key of the map is of type {type_name(key)}: make the keys text")


def joined_type(value_types: Sequence[pa.DataType]) -> pa.DataType:
    """The type of a column whose values have these types; of none, ``null``.

    If they do not fit together, the first one decides. Whole numbers and floats are floats.
    """
    joined = pa.null()
    for value_type in value_types:
        joined = _join(joined, value_type)
    return joined


def _join(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    if types.is_null(first):
        return second
    if types.is_int64(first) and types.is_float64(second):
        return second
    if types.is_list(first) and types.is_list(second):
        return pa.list_(_join(first.value_type, second.value_type))
    if types.is_struct(first) and types.is_struct(second):
        fields = {field.name: field.type for field in first}
        for field in second:
            fields[field.name] = _join(fields.get(field.name, pa.null()), field.type)
        return pa.struct([(name, fields[name]) for name in distinct_names(fields)])
    return first


def refined_type(column_type: pa.DataType, value_type: pa.DataType) -> pa.DataType:
    """The type of a column, with types of the values instead of ``null``.

    No other part changes.
    """
    if types.is_null(column_type):
        return value_type
    if types.is_list(column_type) and types.is_list(value_type):
        return pa.list_(refined_type(column_type.value_type, value_type.value_type))
    if types.is_struct(column_type) and types.is_struct(value_type):
        new_types = {field.name: field.type for field in value_type}
        fields = [
            pa.field(field.name, refined_type(field.type, new_types.get(field.name, pa.null())))
            for field in column_type
        ]
        return pa.struct(fields)
    return column_type


def is_open(column_type: pa.DataType) -> bool:
    """True if a part of the type is ``null``: it waits for a value."""
    if types.is_null(column_type):
        return True
    return any(is_open(column_type.field(index).type) for index in range(column_type.num_fields))


def written_type(column_type: pa.DataType) -> pa.DataType | None:
    """The type without its open parts; ``None`` if a file cannot have such a column yet.

    A map without keys is left out like an open part: files have none.
    """
    if types.is_null(column_type):
        return None
    if types.is_list(column_type):
        element = written_type(column_type.value_type)
        return None if element is None else pa.list_(element)
    if not types.is_struct(column_type):
        return column_type
    fields: list[tuple[str, pa.DataType]] = []
    for field in column_type:
        field_type = written_type(field.type)
        if field_type is not None:
            fields.append((field.name, field_type))
    if not fields:
        return None
    is_whole = fields == [(field.name, field.type) for field in column_type]
    return column_type if is_whole else pa.struct(fields)


# -- values of a type ------------------------------------------------------------------------------


def plain_types(arrow_type: pa.DataType) -> frozenset[type]:
    """Types of values that Arrow converts exactly to this type, or refuses."""
    return _PLAIN.get(arrow_type, frozenset())


def arrow_value(value: Any, arrow_type: pa.DataType) -> Any:
    """The value for a column of a type, from which a reader gets an equal one.

    Raises ``ValueError`` with reason and remedy if the cast would change it.
    """
    if value is None:
        return None
    if isinstance(value, Enum):
        raise ValueError(f"{type_name(value)} is an Enum: write its .name or .value")
    if written_type(arrow_type) is None:
        # Raises for a value without a type.
        inferred_type(value)
        raise ValueError(
            f"the type of the parts of {value!r:.40} is not known yet: declare it in schema"
        )
    return _conversion_of(arrow_type)(value, arrow_type)


@lru_cache(maxsize=1000)
def _conversion_of(arrow_type: pa.DataType) -> "_Convert":
    for is_type, convert in _CONVERSIONS:
        if is_type(arrow_type):
            return convert
    return _by_arrow


def _misfit(value: Any, arrow_type: pa.DataType) -> ValueError:
    reason = f"the column is {arrow_type}, and the value is of type {type_name(value)}"
    return ValueError(f"{reason}: convert it, or declare another type in schema")


def _inexact(value: Any, arrow_type: pa.DataType) -> ValueError:
    reason = f"the column is {arrow_type}, which would change {value!r:.60}"
    return ValueError(f"{reason}: make it fit, or declare another type in schema")


def _boolean(value: Any, arrow_type: pa.DataType) -> Any:
    if isinstance(value, bool):
        return value
    raise _misfit(value, arrow_type)


def _whole(value: Any, arrow_type: pa.DataType) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _misfit(value, arrow_type)
    bits = arrow_type.bit_width
    is_signed = types.is_signed_integer(arrow_type)
    if is_signed:
        least = -(2 ** (bits - 1))
        most = 2 ** (bits - 1) - 1
    else:
        least = 0
        most = 2**bits - 1
    # The comparison bounds the conversion.
    if is_nan(value) or not least <= value <= most or value != int(value):
        raise _inexact(value, arrow_type)
    return int(value)


def _floating(value: Any, arrow_type: pa.DataType) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _misfit(value, arrow_type)
    if isinstance(value, Decimal) and not value.is_finite():
        return float("nan") if value.is_nan() else float(value)
    try:
        number = float(value)
        if number == value and arrow_type.bit_width < 64:
            number = pa.array([number], arrow_type)[0].as_py()
    except OverflowError:
        raise _inexact(value, arrow_type) from None
    if number == value or number != number:
        return number
    raise _inexact(value, arrow_type)


def _decimal(value: Any, arrow_type: pa.DataType) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _misfit(value, arrow_type)
    number = exact_decimal(value)
    try:
        stored_value = pa.array([number], arrow_type)[0].as_py()
    except (pa.ArrowException, ValueError, OverflowError):
        raise _inexact(value, arrow_type) from None
    if stored_value != number:
        raise _inexact(value, arrow_type)
    return number


def _text(value: Any, arrow_type: pa.DataType) -> str:
    if not isinstance(value, str):
        raise _misfit(value, arrow_type)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("the text has half of a surrogate pair: remove or replace it") from None
    return str.__str__(value)


def _binary(value: Any, arrow_type: pa.DataType) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _misfit(value, arrow_type)
    content = bytes(value)
    if types.is_fixed_size_binary(arrow_type) and len(content) != arrow_type.byte_width:
        raise _inexact(value, arrow_type)
    return content


def _date(value: Any, arrow_type: pa.DataType) -> date:
    if isinstance(value, datetime) or not isinstance(value, date):
        raise _misfit(value, arrow_type)
    return value


def _timestamp(value: Any, arrow_type: pa.DataType) -> datetime:
    """Times with an offset if the type has a zone, else times without one."""
    if not isinstance(value, datetime):
        raise _misfit(value, arrow_type)
    has_offset = value.utcoffset() is not None
    if has_offset != (arrow_type.tz is not None):
        offset = "an offset" if has_offset else "no offset"
        raise ValueError(
            f"the column is {arrow_type}, and the time has {offset}: "
            "use times in UTC everywhere, datetime.now(timezone.utc)"
        )
    if has_offset:
        try:
            value = value.astimezone(timezone.utc)
        except OverflowError:
            raise _inexact(value, arrow_type) from None
    if getattr(value, "nanosecond", 0) and arrow_type.unit != "ns":
        # A time of pandas.
        raise _inexact(value, arrow_type)
    # Python's times have microseconds.
    return value if arrow_type.unit == "us" else _by_arrow(value, arrow_type)


def _time(value: Any, arrow_type: pa.DataType) -> time:
    if not isinstance(value, time) or value.tzinfo is not None:
        raise _misfit(value, arrow_type)
    return _by_arrow(value, arrow_type)


def _duration(value: Any, arrow_type: pa.DataType) -> timedelta:
    if not isinstance(value, timedelta):
        raise _misfit(value, arrow_type)
    return _by_arrow(value, arrow_type)


def _by_arrow(value: Any, arrow_type: pa.DataType) -> Any:
    """A value that Arrow converts, if it returns an equal one."""
    try:
        stored_value = pa.array([value], arrow_type)[0].as_py()
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"the column is {arrow_type}: {error}") from None
    # With nanoseconds, Arrow returns a time of pandas.
    is_same_type = type(stored_value) is type(value) or isinstance(stored_value, datetime)
    if not is_same_type or stored_value != value:
        raise _inexact(value, arrow_type)
    return value


def _elements(value: Any, arrow_type: pa.DataType) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _misfit(value, arrow_type)
    if types.is_fixed_size_list(arrow_type) and len(value) != arrow_type.list_size:
        raise _inexact(value, arrow_type)
    is_nullable = arrow_type.value_field.nullable
    elements: list[Any] = []
    for index, part in enumerate(value):
        elements.append(_part(part, arrow_type.value_type, f"[{index}]", is_nullable))
    return elements


def _structure(value: Any, arrow_type: pa.DataType) -> dict[str, Any]:
    """A map with the keys of the type; a key that it lacks is null."""
    if not isinstance(value, dict):
        raise _misfit(value, arrow_type)
    part_types = {field.name: field.type for field in arrow_type}
    parts: dict[str, Any] = {}
    for field in arrow_type:
        if not field.nullable:
            _part(value.get(field.name), field.type, f".{field.name}", False)
    for key, part in value.items():
        _check_key(key)
        if key not in part_types:
            raise ValueError(f"the schema has no key {key!r} here: declare it in schema")
        parts[key] = _part(part, part_types[key], f".{key}")
    return parts


def _entries(value: Any, arrow_type: pa.DataType) -> list[tuple[Any, Any]]:
    """The entries of a map of Arrow, whose keys are of one type."""
    if not isinstance(value, dict):
        raise _misfit(value, arrow_type)
    entries: list[tuple[Any, Any]] = []
    for key, part in value.items():
        if key is None:
            raise _misfit(value, arrow_type)
        converted_key = arrow_value(key, arrow_type.key_type)
        item = arrow_type.item_field
        entries.append((converted_key, _part(part, item.type, f"[{key!r:.20}]", item.nullable)))
    return entries


def _part(value: Any, arrow_type: pa.DataType, step: str, is_nullable: bool = True) -> Any:
    """The value of a part; ``step`` leads to it, for the error."""
    if value is None and not is_nullable:
        raise ValueError(f"at {step}: the schema has no null here, and there is no value for it")
    try:
        return arrow_value(value, arrow_type)
    except ValueError as error:
        raise ValueError(f"at {step}: {error}") from None


# -- the short way ---------------------------------------------------------------------------------


class _LongWay(Exception):
    """A value that only :func:`arrow_value` decides about."""


@lru_cache(maxsize=1000)
def fast_converter(arrow_type: pa.DataType) -> Callable[[Any], Any]:
    """A function as :func:`arrow_value` of a type, fast for values that fit as they are."""
    convert = _short_way(arrow_type)

    def converter(value: Any) -> Any:
        try:
            return convert(value)
        except _LongWay:
            return arrow_value(value, arrow_type)

    return converter


def _short_way(arrow_type: pa.DataType) -> Callable[[Any], Any]:
    """A function that returns a value that fits as it is.

    It raises :class:`_LongWay` for others.
    """
    if not _are_parts_nullable(arrow_type):
        return _long_way
    if types.is_list(arrow_type) and not is_open(arrow_type):
        return _short_list(_short_way(arrow_type.value_type))
    if types.is_struct(arrow_type) and not is_open(arrow_type):
        return _short_map({field.name: _short_way(field.type) for field in arrow_type})
    if types.is_string(arrow_type):
        return _short_text
    if types.is_int64(arrow_type):
        return _short_whole
    if arrow_type == _UTC_TIME:
        return _short_time(timezone.utc)
    if arrow_type == pa.timestamp("us"):
        return _short_time(None)
    own_types = (type(None), *plain_types(arrow_type))

    def plain(value: Any) -> Any:
        if type(value) in own_types and not types.is_null(arrow_type):
            return value
        raise _LongWay

    return plain


def _are_parts_nullable(arrow_type: pa.DataType) -> bool:
    """True if each part of a list or a struct may be null."""
    if not types.is_list(arrow_type) and not types.is_struct(arrow_type):
        return True
    return all(arrow_type.field(index).nullable for index in range(arrow_type.num_fields))


def _long_way(value: Any) -> Any:
    raise _LongWay


def _short_text(value: Any) -> Any:
    # Text beyond ASCII may have halves of surrogate pairs.
    if value is None or (type(value) is str and value.isascii()):
        return value
    raise _LongWay


def _short_whole(value: Any) -> Any:
    if value is None or (type(value) is int and _MIN_INT64 <= value <= _MAX_INT64):
        return value
    raise _LongWay


def _short_time(zone: timezone | None) -> Callable[[Any], Any]:
    def convert_time(value: Any) -> Any:
        if value is None or (type(value) is datetime and value.tzinfo is zone):
            return value
        raise _LongWay

    return convert_time


def _short_list(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert_list(value: Any) -> Any:
        if type(value) is not list:
            raise _LongWay
        return [convert(part) for part in value]

    return convert_list


def _short_map(convert_of: Mapping[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def convert_map(value: Any) -> Any:
        if type(value) is not dict or not convert_of.keys() >= value.keys():
            raise _LongWay
        return {key: convert_of[key](part) for key, part in value.items()}

    return convert_map


_Convert = Callable[[Any, pa.DataType], Any]
_CONVERSIONS: list[tuple[Callable[[pa.DataType], bool], _Convert]] = [
    (types.is_string, _text),
    (types.is_integer, _whole),
    (types.is_floating, _floating),
    (types.is_boolean, _boolean),
    (types.is_list, _elements),
    (types.is_struct, _structure),
    (types.is_timestamp, _timestamp),
    (types.is_decimal, _decimal),
    (types.is_binary, _binary),
    (types.is_date, _date),
    (types.is_time, _time),
    (types.is_duration, _duration),
    (types.is_large_string, _text),
    (types.is_large_binary, _binary),
    (types.is_fixed_size_binary, _binary),
    (types.is_large_list, _elements),
    (types.is_fixed_size_list, _elements),
    (types.is_map, _entries),
]
"""(test of a type, function that converts a value to it)."""
