"""Words of the definitions, from ``catalog.yaml`` beside this module."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import Field

from storm_dagster.model.tables import load_table


@functools.cache
def catalog() -> dict[str, Any]:
    """``catalog.yaml``, which says what it holds."""
    return load_table(__name__, "catalog")


def described(field: str, **settings: Any) -> Any:
    """A field with the description and the examples that the catalog has for it; ``settings`` are pydantic's."""
    group, _, name = field.partition(".")
    words = catalog()["fields"][group][name]
    return Field(**(words if isinstance(words, dict) else {"description": words}), **settings)
