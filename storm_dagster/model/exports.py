"""Objects that are loaded by name: public names of a package at first use, and what a conf names as ``module:attribute``."""

import importlib
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.model.errors import InvalidRequest


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package: ``modules`` are its modules, each with its names in one text."""
    public = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from storm_dagster.model.host import needs

        with needs(f"{package}.{name}"):
            value = getattr(importlib.import_module(f"{package}.{public[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(sys.modules[package].__all__)


def load_plugin(key: str, name: str) -> Any:
    """The class, function or object that the conf key ``key`` names; :class:`InvalidRequest` when there is none."""
    module, colon, attribute = name.partition(":")
    try:
        if not colon:
            raise ImportError("it is not of the form module:attribute")
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(
            f"{key} {name!r:.200} cannot be loaded ({error}): correct it, or put the module on PYTHONPATH"
        ) from None
