"""Errors of PostgreSQL about one row, as the reason with which it is rejected."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from storm_dagster.connectors.postgres_columns import Column
from storm_dagster.model.json_text import type_name

_PARAMETER = re.compile(r"portal parameter \$(\d+)")
"""Number of a statement's parameter, from 1 on, in the context of an error."""
_MAX_NUMBERS: dict[str, int] = {
    "int2": 2**15 - 1,
    "int4": 2**31 - 1,
    "int8": 2**63 - 1,
    "oid": 2**32 - 1,
    "money": 2**63 // 100,
}
"""Type of a column -> its largest number."""


def reason_of(
    error: Any, names: Sequence[str], values: Mapping[str, Any], columns: Mapping[str, Column]
) -> str:
    """The reason in one line, with the column and the type of the value if they are known.

    ``error`` is one of psycopg, ``names`` the columns of the statement in their order, ``values``
    the row, and ``columns`` the types of the table's columns.
    """
    diag = error.diag
    text = " ".join(str(diag.message_primary or error).split())
    if diag.message_detail:
        text += f" ({' '.join(diag.message_detail.split())})"
    name = _column_at_fault(error, names, values, columns)
    if name is None:
        return text
    column = columns[name]
    place = f'column "{name}" ({column.name}), value of type {type_name(values[name])}'
    return f"{place}: {text}: make it fit in row_of, or use another type of column"


def unsent_reason_of(error: Exception, name: str | None, values: Mapping[str, Any]) -> str:
    """The reason of a value that the client cannot send, such as text with a NUL character."""
    text = " ".join(str(error).split())
    if isinstance(error, UnicodeError):
        text = "the text has half of a surrogate pair, and is not UTF-8"
    if name is None:
        return text
    place = f'column "{name}", value of type {type_name(values[name])}'
    return f"{place}: {text}: make it fit in row_of"


def _column_at_fault(
    error: Any, names: Sequence[str], values: Mapping[str, Any], columns: Mapping[str, Column]
) -> str | None:
    """Name of the column whose value the server refuses; ``None`` if it is not known."""
    diag = error.diag
    name: str | None = diag.column_name
    parameter = _PARAMETER.search(diag.context or "")
    if parameter and int(parameter[1]) <= len(names):
        name = names[int(parameter[1]) - 1]
    for other in names:
        if name is None and type(error).__name__ == "DatatypeMismatch":
            name = other if f'column "{other}" is of type' in str(error) else None
        if name is None and type(error).__name__ == "NumericValueOutOfRange":
            name = other if _is_out_of_range(values.get(other), columns.get(other)) else None
    return name if name in columns and name in values else None


def _is_out_of_range(value: Any, column: Column | None) -> bool:
    """True if a number has more digits before the point than a column."""
    if column is None or isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return False
    try:
        number = Decimal(value)
        if not number.is_finite() or not number:
            return False
        if column.type in _MAX_NUMBERS:
            return abs(number) > _MAX_NUMBERS[column.type]
        precision, scale = column.digits or (131_072, 0)
        # Rounding may add a digit.
        return column.type == "numeric" and number.adjusted() >= precision - scale - 1
    except ArithmeticError:
        return True
