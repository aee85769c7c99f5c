"""Columns of a batch for Spark: values of the types that a schema declares, unchanged."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from storm_dagster.model.errors import InvalidRequest

if TYPE_CHECKING:
    import pyarrow as pa


def arrow_types(struct: Any, count: int) -> list[Any]:
    """Arrow's types of the columns whose values are checked, ``None`` for others.

    Times are converted by the session's time zone, and ``float`` has the precision of its own.
    """
    if struct is None or len(struct.fields) != count:
        return [None] * count
    from pyarrow import types
    from pyspark.sql.pandas.types import to_arrow_type

    def has_other_rule(arrow_type: Any) -> bool:
        if types.is_timestamp(arrow_type) or types.is_float32(arrow_type):
            return True
        parts = [arrow_type.field(index).type for index in range(arrow_type.num_fields)]
        return any(map(has_other_rule, parts))

    checked_types: list[Any] = []
    for field in struct.fields:
        try:
            arrow_type = to_arrow_type(field.dataType, timezone="UTC")
        except Exception:
            # A type without one of Arrow, which Spark names itself.
            arrow_type = None
        if arrow_type is not None and has_other_rule(arrow_type):
            arrow_type = None
        checked_types.append(arrow_type)
    return checked_types


def column_array(subject: str, column: Sequence[Any], arrow_type: Any) -> "pa.Array":
    """The values of a column, of its type; with types that Arrow infers for ``None``.

    ``subject`` names the column in errors. Raises :class:`InvalidRequest` for a value that the type
    would change, as a cast does: it drops keys of maps and the time of a ``datetime``, and rounds
    floats to decimals. Raises the errors of Arrow for values without a common type.
    """
    import pyarrow

    kinds = set(map(type, column))
    if arrow_type is None or str in kinds:
        # Spark reads text as the type of the column.
        return pyarrow.array(column)
    from storm_dagster.api.arrow_values import fast_converter, plain_types

    if kinds <= plain_types(arrow_type):
        # Arrow converts each value exactly, or raises.
        return pyarrow.array(column, arrow_type)
    convert = fast_converter(arrow_type)
    try:
        converted = [convert(value) for value in column]
    except ValueError as error:
        raise InvalidRequest(f"{subject}: {error}") from None
    return pyarrow.array(converted, arrow_type)
