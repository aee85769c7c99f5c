"""Objects that a conf names as ``module:attribute``."""

from __future__ import annotations

import importlib
from typing import Any

from storm_dagster.model.errors import InvalidRequest


def load_plugin(key: str, name: str) -> Any:
    """The class, function or object that the conf key ``key`` names; :class:`InvalidRequest` when there is none."""
    module, colon, attribute = name.partition(":")
    try:
        if not colon:
            raise ImportError("it is not of the form module:attribute")
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(
            f"{key} {name!r:.200} cannot be loaded ({error}): correct it, or put the module on PYTHONPATH"
        ) from None
    return found
