"""Fields of Storm's documents that are values of a snapshot as they are: one table for REST and
Thrift.
"""

from operator import attrgetter
from typing import Any

from storm_dagster.model.tables import load_table

_TABLES = {
    name: {field: attrgetter(place) for field, place in table.items()}
    for name, table in load_table(__name__, "rows").items()
}


def fields_of(name: str, source: object) -> dict[str, Any]:
    """The fields of a table, read from their source."""
    return {field: value(source) for field, value in _TABLES[name].items()}
