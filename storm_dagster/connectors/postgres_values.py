"""Values for columns of PostgreSQL: :func:`column_value` is the table of types of that sink.

See ``docs/decisions.md#values-at-sinks``.
"""

import struct
from collections.abc import Callable
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any
from uuid import UUID

from storm_dagster.connectors.postgres_columns import Column
from storm_dagster.connectors.postgres_times import (
    clock_word_of,
    dropped_from_interval,
    dropped_from_time,
    is_plain_time,
    is_range_of_times,
)
from storm_dagster.model.json_text import NoJsonForm, json_text, type_name
from storm_dagster.model.numbers import exact_decimal

_MAX_SCALE = 16_383
"""Digits behind the point of a ``numeric``."""
_MAX_NAME_BYTES = 63
"""Length of a ``name``."""
_MONEY_SCALE = 2
"""Digits behind the point of ``money`` in nearly all locales of a server."""
_WHOLE_TEXT_TYPES = ("bool", "int2", "int4", "int8", "text", "varchar", "bytea", "uuid")
"""Types without a modifier that keep every part of a text that the server reads."""
_PLAIN_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int2": (int,),
    "int4": (int,),
    "int8": (int,),
    "numeric": (int,),
    "float8": (float,),
    "text": (str,),
    "bytea": (bytes,),
    "uuid": (UUID,),
    "date": (date,),
    "timestamp": (datetime,),
    "timestamptz": (datetime,),
    "interval": (timedelta,),
}
"""Type of a column without a modifier -> types of values that are sent as they are.

The server refuses those that are out of range.
"""


class ColumnMisfit(ValueError):
    """A value of a type that a column does not take.

    If no row of a batch fits, the table is at fault.
    """


def plain_types(column: Column | None) -> tuple[type, ...]:
    """Types of values that :func:`column_value` returns unchanged, for a short way."""
    if column is None or column.is_array or column.modifier >= 0:
        return ()
    return _PLAIN_TYPES.get(column.type, ())


def column_value(value: Any, column: Column | None, *, rounds: bool = False) -> Any:
    """The parameter of the statement for a value in a column, from which an equal value is read.

    ``None`` as ``column`` is a column that the table does not have. With ``rounds``, numbers and
    times are rounded to the precision of the column, as PostgreSQL does. Raises
    :class:`ColumnMisfit` for a value of another type, and ``ValueError`` for a value that the
    column would change; both have the reason and the remedy.
    """
    if value is None or type(value).__module__.startswith("psycopg"):
        return _unwrapped(value, column)
    if column is None:
        return _other(value, column, rounds)
    if column.is_array:
        return _array(value, column, rounds)
    if column.is_json:
        return _json(value)
    write = _WRITERS.get(column.type, _other)
    return write(value, column, rounds)


def _unwrapped(value: Any, column: Column | None) -> Any:
    """The value of a wrapper of psycopg; the text of one of JSON, for a column of JSON."""
    if value is None or column is None or not column.is_json or column.is_array:
        return value
    return _json(value)


def _misfit(value: Any, column: Column, remedy: str) -> ColumnMisfit:
    return ColumnMisfit(f"{column.type} takes no value of type {type_name(value)}: {remedy}")


def _changed(value: Any, column: Column, reason: str) -> ValueError:
    remedy = "make it fit in row_of, use another type of column, or PostgresSink(rounds=True)"
    return ValueError(f"{column.name} would change {value!r:.60}, {reason}: {remedy}")


# -- numbers ---------------------------------------------------------------------------------------


def _whole(value: Any, column: Column, rounds: bool) -> Any:
    """Whole numbers; other numbers if they have no fraction."""
    if isinstance(value, bool):
        raise _misfit(value, column, "make it 0 or 1, or use a column of boolean")
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return _number_text(value, column, rounds)
    if not isinstance(value, float | Decimal):
        raise _misfit(value, column, "make it a whole number")
    number = exact_decimal(value)
    if number.is_finite() and _scale(number) == 0 and number.adjusted() < 40:
        return int(value)
    if rounds and number.is_finite():
        return value
    raise _changed(value, column, "which is not a whole number")


def _double(value: Any, column: Column, rounds: bool) -> Any:
    """Floats; other numbers whose digits a float keeps. ``real`` keeps fewer."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise _misfit(value, column, "make it a number")
    if isinstance(value, str):
        return _number_text(value, column, rounds)
    number = exact_decimal(value)
    if number.is_finite() and not rounds and not _keeps(number, column):
        raise _changed(value, column, "which has more digits than the column keeps")
    try:
        return float(value)
    except (OverflowError, ValueError):
        raise _changed(value, column, "which is out of range") from None


def _keeps(number: Decimal, column: Column) -> bool:
    """True if a reader of a column of floats gets this number.

    A number is equal to a float by its digits, as ``0.1`` is, or exactly.
    """
    try:
        double = float(number)
        if column.type == "float8":
            return number in (Decimal(repr(double)), Decimal(double))
        # Only the standard size checks the range.
        struct.pack("<f", double)
    except OverflowError:
        return False
    from numpy import float32

    # The server shows the fewest digits, which a reader takes for a double.
    return number == Decimal(str(float32(double)))


def _numeric(value: Any, column: Column, rounds: bool) -> Any:
    """Numbers with all of their digits: a float has those of its shortest text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise _misfit(value, column, "make it a number")
    if isinstance(value, str):
        return _number_text(value, column, rounds)
    number = exact_decimal(value)
    _check_scale(value, number, column, rounds)
    return number


def _check_scale(value: Any, number: Decimal, column: Column, rounds: bool) -> None:
    max_scale = column.digits[1] if column.digits else _MAX_SCALE
    if rounds or not number.is_finite() or not number:
        return
    if _scale(number) > max_scale:
        reason = f"which has more than {max_scale} digits behind the point"
        if max_scale < 0:
            reason = f"which is not a multiple of 10^{-max_scale}"
        raise _changed(value, column, reason)


def _scale(number: Decimal) -> int:
    """Digits behind the point, without zeros at the end; negative for zeros before the point."""
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    zeros = 0
    for digit in reversed(digits):
        if digit:
            break
        zeros += 1
    scale = -exponent - zeros
    return 0 if not number or (scale < 0 and number == 0) else scale


def _number_text(text: str, column: Column, rounds: bool) -> str:
    """Text of a number, which the server reads; checked only for digits that would be lost."""
    try:
        number = Decimal(text.strip())
    except (InvalidOperation, ValueError):
        # The server reads other notations, or refuses the text.
        return str.__str__(text)
    if number.is_finite():
        if column.type == "numeric":
            _check_scale(text, number, column, rounds)
        is_float = column.type in ("float4", "float8")
        if is_float and not rounds and not _keeps(number, column):
            raise _changed(text, column, "which has more digits than the column keeps")
    return str.__str__(text)


def _boolean(value: Any, column: Column, rounds: bool) -> Any:
    if isinstance(value, bool | str):
        return value
    raise _misfit(value, column, "make it True or False")


# -- text and bytes --------------------------------------------------------------------------------


def _text(value: Any, column: Column, rounds: bool) -> Any:
    """Text as it is; numbers, times and UUIDs in the server's notation; maps as JSON."""
    if isinstance(value, str):
        text = str.__str__(value)
        _check_length(text, column)
        return text
    if isinstance(value, bytes | bytearray | memoryview):
        raise _misfit(value, column, "decode it to text, or use a column of bytea")
    if isinstance(value, dict):
        return json_text(value)
    if isinstance(value, list | tuple):
        raise _misfit(value, column, "make it text with json.dumps(), or use a column of jsonb")
    return _other(value, column, rounds)


def _check_length(text: str, column: Column) -> None:
    """Raise for text of which the server would cut blanks, or which a type of its own truncates."""
    max_length = column.max_length
    if max_length is not None and len(text) > max_length:
        raise ValueError(f"{column.name} is too short for text of {len(text)} characters")
    if column.type == "bpchar" and text.endswith(" "):
        raise ValueError(f"{column.name} drops the blanks at the end of the text: remove them")
    if column.type == "name" and len(text.encode("utf-8", "replace")) > _MAX_NAME_BYTES:
        raise ValueError(f"name keeps {_MAX_NAME_BYTES} bytes of the text: shorten it")
    if column.type == "char" and len(text.encode("utf-8", "replace")) != 1:
        raise ValueError('"char" keeps one byte of the text: use a column of text')


def _bytes(value: Any, column: Column, rounds: bool) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    remedy = "encode it with .encode()" if isinstance(value, str) else "make it bytes"
    raise _misfit(value, column, remedy)


# -- times -----------------------------------------------------------------------------------------


def _date(value: Any, column: Column, rounds: bool) -> Any:
    """Dates. A ``datetime`` would lose its time."""
    if isinstance(value, str):
        return _time_text(value, column, rounds)
    if isinstance(value, datetime):
        if rounds:
            return value
        raise _misfit(value, column, "make it a date with .date(), or use a column of timestamptz")
    if isinstance(value, date):
        return value
    raise _misfit(value, column, "make it a date")


def _timestamp(value: Any, column: Column, rounds: bool) -> Any:
    """Times, with and without an offset as the server converts them; a date is its midnight."""
    if isinstance(value, str):
        return _time_text(value, column, rounds)
    if isinstance(value, datetime):
        _check_fraction(value, value.microsecond, column, rounds)
        return value
    if isinstance(value, date):
        return value
    raise _misfit(value, column, "make it a datetime")


def _time_text(text: str, column: Column, rounds: bool) -> str:
    """Text of a time, which the server reads, if the column keeps all of its parts."""
    if is_plain_time(text, column):
        return str.__str__(text)
    word = clock_word_of(text)
    if word:
        raise ValueError(
            f"{column.name} would hold the time of the write instead of {text!r:.60}: write the "
            "time"
        )
    dropped = "" if rounds else dropped_from_time(text, column)
    if dropped:
        raise _changed(text, column, dropped)
    return str.__str__(text)


def _time(value: Any, column: Column, rounds: bool) -> Any:
    """Times of a day; ``time`` has no offset."""
    if isinstance(value, str):
        return _time_text(value, column, rounds)
    if not isinstance(value, time):
        raise _misfit(value, column, "make it a time")
    if value.tzinfo is not None and column.type == "time" and not rounds:
        raise _changed(value, column, "whose offset it drops")
    _check_fraction(value, value.microsecond, column, rounds)
    return value


def _interval(value: Any, column: Column, rounds: bool) -> Any:
    """Intervals; one such as ``interval hour`` keeps no smaller units."""
    if isinstance(value, str):
        dropped = "" if rounds else dropped_from_interval(value, column)
        if dropped:
            raise _changed(value, column, dropped)
        return str.__str__(value)
    if not isinstance(value, timedelta):
        raise _misfit(value, column, "make it a timedelta")
    step = column.interval_step_secs
    if step and value and not rounds and (step < 0 or value % timedelta(seconds=step)):
        raise _changed(value, column, "whose smaller units it drops")
    _check_fraction(value, value.microseconds, column, rounds)
    return value


def _check_fraction(value: Any, microseconds: int, column: Column, rounds: bool) -> None:
    """Raise for a fraction of a second that the column would round."""
    if getattr(value, "nanosecond", 0):
        # A time of pandas, of which the client drops them.
        raise _changed(value, column, "which has nanoseconds")
    if not rounds and microseconds % 10 ** (6 - column.second_digits):
        raise _changed(value, column, f"of which it keeps {column.second_digits} digits")


# -- other types -----------------------------------------------------------------------------------


def _json(value: Any) -> str:
    """JSON text of a value. In psycopg's wrappers ``None`` is null of JSON."""
    if not hasattr(value, "obj") or not type(value).__module__.startswith("psycopg"):
        return json_text(value)
    if value.dumps is None:
        return json_text(value.obj)
    text = value.dumps(value.obj)
    return text.decode() if isinstance(text, bytes) else text


def _uuid(value: Any, column: Column, rounds: bool) -> Any:
    if isinstance(value, UUID | str):
        return value
    raise _misfit(value, column, "make it a UUID")


def _array(value: Any, column: Column, rounds: bool) -> list[Any] | str:
    """A list of values for the elements; of one dimension if they are JSON."""
    if isinstance(value, str) and not column.is_json:
        return _array_text(value, column, rounds)
    if not isinstance(value, list | tuple):
        reason = f"an array takes a list, and the value is of type {type_name(value)}"
        raise ColumnMisfit(f"{reason}: put it into a list")
    element_column = column._replace(is_array=False)
    elements: list[Any] = []
    for index, element in enumerate(value):
        try:
            if isinstance(element, list | tuple) and not column.is_json:
                if not element:
                    raise ValueError("an array in an array has elements: use a column of jsonb")
                elements.append(_array(element, column, rounds))
            else:
                elements.append(column_value(element, element_column, rounds=rounds))
        except NoJsonForm as error:
            error.path = f"[{index}]{error.path}"
            raise
    return elements


def _array_text(text: str, column: Column, rounds: bool) -> str:
    """The server's notation of an array, for elements of which it drops no part."""
    keeps_all = column.modifier < 0 and column.type in _WHOLE_TEXT_TYPES
    if rounds or keeps_all:
        return str.__str__(text)
    raise ValueError(f"{column.name} may drop a part of an element: make the text a list")


def _money(value: Any, column: Column, rounds: bool) -> Any:
    """Amounts with two digits behind the point."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise _misfit(value, column, "make it a Decimal")
    if isinstance(value, str):
        fraction = value.strip().rpartition(".")[2] if "." in value else ""
        digits = sum(map(str.isdigit, fraction.rstrip("0")))
    else:
        number = exact_decimal(value)
        digits = _scale(number) if number.is_finite() else 0
    if digits > _MONEY_SCALE and not rounds:
        raise _changed(value, column, f"which has more than {_MONEY_SCALE} digits behind the point")
    return str.__str__(value) if isinstance(value, str) else exact_decimal(value)


def _object_id(value: Any, column: Column, rounds: bool) -> Any:
    """Whole numbers of 32 bits without a sign: the server turns negative ones into others."""
    number = _whole(value, column, rounds)
    if str(number).lstrip().startswith("-"):
        raise _changed(value, column, "which is negative")
    return number


def _other(value: Any, column: Column | None, rounds: bool) -> Any:
    """A value as psycopg writes it, for the types that this module does not know."""
    remedy = "make it text, a number, a list or a map in row_of"
    if isinstance(value, str) and column is not None and is_range_of_times(column):
        return _time_text(value, column, rounds)
    if isinstance(value, set | frozenset) or is_dataclass(value):
        raise ColumnMisfit(
            f"PostgreSQL has no form of a value of type {type_name(value)}: {remedy}"
        )
    if isinstance(value, Enum) and (column is None or column.kind != "e"):
        raise ColumnMisfit(f"{type_name(value)} is an Enum: write its .name or .value")
    if isinstance(value, list | tuple) and not value:
        raise ColumnMisfit("an empty list has no form outside of columns of arrays and jsonb")
    if isinstance(value, dict):
        # The server converts jsonb, or refuses it.
        from psycopg.types.json import Jsonb

        return Jsonb(value, dumps=json_text)
    return value


_Write = Callable[[Any, Column, bool], Any]
_WRITERS: dict[str, _Write] = {
    "bool": _boolean,
    "int2": _whole,
    "int4": _whole,
    "int8": _whole,
    "float4": _double,
    "float8": _double,
    "numeric": _numeric,
    "money": _money,
    "oid": _object_id,
    "text": _text,
    "varchar": _text,
    "bpchar": _text,
    "name": _text,
    "char": _text,
    "bytea": _bytes,
    "date": _date,
    "timestamp": _timestamp,
    "timestamptz": _timestamp,
    "time": _time,
    "timetz": _time,
    "interval": _interval,
    "uuid": _uuid,
}
"""Type of a column -> the function that writes its values."""
