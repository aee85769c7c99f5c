"""Functions and classes of users that run on Spark."""

import importlib
import operator
from typing import Any

from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.fusion import SPARK_CLASS_KEY


def class_conf(component: type) -> dict[str, Any]:
    """Conf that marks a user's class of Spark components; empty for the classes of this library.

    Nimbus has no code of users: it finds the Spark components of a topology by their names and this
    mark.
    """
    if component.__module__.startswith("storm_dagster.api."):
        return {}
    return {SPARK_CLASS_KEY: True}


def resolve_function(reference: str) -> Any:
    """The function that ``"module:function"`` names.

    Raises :class:`InvalidTopology` if it does not exist.
    """
    module_name, colon, name = reference.partition(":")
    if not colon or not module_name or not name:
        raise InvalidTopology(f"{reference!r} is not of the form 'module:function'")
    try:
        target: Any = operator.attrgetter(name)(importlib.import_module(module_name))
    except (ImportError, AttributeError) as error:
        raise InvalidTopology(f"cannot find {reference!r}: {error}") from None
    if not callable(target):
        raise InvalidTopology(f"{reference!r} is a {type(target).__name__}, not a function")
    return target


def check_function(reference: Any, owner: str) -> None:
    """Raise :class:`InvalidTopology` if ``reference`` does not name a function.

    A module that cannot be imported on this host is not checked.
    """
    try:
        resolve_function(str(reference))
    except InvalidTopology as error:
        # A module may need packages that only the workers have.
        if not isinstance(error.__context__, ImportError):
            raise InvalidTopology(f"{owner}: {error.message}") from None
