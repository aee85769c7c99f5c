"""Objects that are loaded by name: public names of a package at first use, and what a conf names as
``module:attribute``.
"""

import ast
import functools
import importlib
import linecache
import operator
import sys
from collections.abc import Callable
from typing import Any

from storm_dagster.model.errors import InvalidRequest


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, whose public names are those that it imports
    for type checkers only: each is taken from the module that is named there.
    """

    @functools.cache
    def modules() -> dict[str, str]:
        module = sys.modules[package]
        lines = linecache.getlines(str(module.__file__), vars(module))
        if not lines:
            raise ImportError(
                f"the source of {package} is missing, which says where its names are: install it whole"
            )
        found = ast.walk(ast.parse("".join(lines)))
        # Imports for type checkers are indented.
        imports = [node for node in found if isinstance(node, ast.ImportFrom) and node.col_offset]
        return {each.name: str(node.module) for node in imports for each in node.names}

    def load(name: str) -> Any:
        if name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from storm_dagster.host.requirements import needs

        with needs(f"{package}.{name}"):
            value = getattr(importlib.import_module(modules()[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(sys.modules[package].__all__)


def load_plugin(key: str, name: str) -> Any:
    """The class, function or object that the conf key ``key`` names; :class:`InvalidRequest` when
    there is none.
    """
    module, colon, attribute = name.partition(":")
    try:
        if not colon:
            raise ImportError("it is not of the form module:attribute")
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(
            f"{key} {name!r:.200} cannot be loaded ({error}): correct it, or put the module on PYTHONPATH"
        ) from None
