"""Values of a row, as the bolt of a sink makes them of a tuple."""

from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.json_text import type_name


def row_values(
    row_of: Callable[[Tuple], Mapping[str, Any] | None], tup: Tuple, bolt: str
) -> Mapping[str, Any] | None:
    """What ``row_of`` of the class ``bolt`` makes of a tuple.

    :class:`InvalidRequest` if it is neither a map nor ``None``.
    """
    values: Any = row_of(tup)
    # The check of an abstract class costs more than the other one.
    if values is None or type(values) is dict or isinstance(values, Mapping):
        return values
    raise InvalidRequest(
        f"row_of of {bolt} returned a value of type {type_name(values)}: return a map from columns "
        "to values, or None to write no row"
    )
