"""Loading of objects by name.

Names are the public ones of a package, and ``module:attribute`` in a conf.
"""

import importlib
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.model.errors import InvalidRequest


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package that loads its names at first use.

    ``modules`` maps each name to the module that defines it. The package imports the same names for
    type checkers only. :class:`~storm_dagster.model.errors.MissingPart` at the first use of a name
    whose module needs a distribution that is not installed.
    """

    def load(name: str) -> Any:
        """Value of a name, which is then an attribute of the package."""
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from storm_dagster.host.requirements import needs

        with needs(f"{package}.{name}"):
            module = importlib.import_module(modules[name])
            value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return load, list_names


def load_plugin(key: str, name: str) -> Any:
    """Load the class, function or object that the conf key ``key`` names.

    :class:`InvalidRequest` if there is none.
    """
    module, colon, attribute = name.partition(":")
    try:
        if not colon:
            raise ImportError("it is not of the form module:attribute")
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(
            f"{key} {name!r:.200} cannot be loaded ({error}): correct it, or put the module on "
            "PYTHONPATH"
        ) from None
