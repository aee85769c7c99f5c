"""Fields of Storm's documents that are values of a snapshot as they are, by the tables of ``rows.yaml``."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

_TABLES = {
    name: {field: attrgetter(place) for field, place in table.items()}
    for name, table in yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text(encoding="utf-8")).items()
}


def fields_of(name: str, source: object) -> dict[str, Any]:
    """The fields of a table, read from their source."""
    return {field: value(source) for field, value in _TABLES[name].items()}
