"""Check of the methods that a worker calls: one that it would never run is refused."""

import inspect
from typing import Any

from storm_dagster.model.errors import InvalidTopology

_CALLBACKS = (
    "initialize",
    "close",
    "next_tuple",
    "ack",
    "fail",
    "given_up",
    "activate",
    "deactivate",
    "process",
    "process_tick",
    "process_batch",
    "process_window",
    "process_again",
    "merge_states",
    "group_key",
    "row_of",
    "values",
    "decode",
)
"""Names of methods of components that are called for their effect or result."""
_EMITTING = ("next_tuple ", "process ", "process_")
"""Beginnings of the names of methods that emit tuples."""
_OWN_PACKAGE = "storm_dagster."


def check_component(cls: type[Any]) -> None:
    """Raise :class:`InvalidTopology` if a worker would not run a method of a component's class.

    A call of a generator function or a coroutine function only makes an object: its tuples would be
    acked although no line of it ran. A bolt may have an ``async`` ``process``, and then an
    ``async`` ``process_tick``.
    """
    may_be_async: set[str] = set()
    if inspect.iscoroutinefunction(getattr(cls, "process", None)):
        may_be_async = {"process", "process_tick"}
    for name in _CALLBACKS:
        if _is_of_package(cls, name):
            _check(f"{name} of {cls.__name__}", getattr(cls, name), name in may_be_async)


def check_source(source: Any) -> None:
    """:func:`check_methods` of a source."""
    calls = ("open", "assign", "commit", "ack", "nack", "identity", "resume", "lag", "close")
    check_methods(source, calls, iterables=("partitions", "read", "recreated"))


def check_methods(subject: Any, names: tuple[str, ...], iterables: tuple[str, ...] = ()) -> None:
    """Raise :class:`InvalidTopology` if a method of a sink or source would not run when called.

    ``iterables``: names of methods whose result is iterated, which may be generators.
    """
    for name in names + iterables:
        method = getattr(subject, name, None)
        if name in iterables and inspect.isgeneratorfunction(method):
            continue
        _check(f"{name} of {type(subject).__name__}", method, False)


def _is_of_package(cls: type[Any], name: str) -> bool:
    """True if a base class of storm_dagster has the method; else it is one of the author's own."""
    bases = (base for base in cls.__mro__ if base.__module__.startswith(_OWN_PACKAGE))
    return any(name in vars(base) for base in bases)


def _check(subject: str, method: Any, may_be_async: bool) -> None:
    if inspect.isgeneratorfunction(method):
        remedy = "return the result"
        if subject.startswith(_EMITTING):
            remedy = "call self.emit([...]), or write a function with @bolt or @spout,"
        raise InvalidTopology(
            f"{subject} has a yield, so that a call of it runs none of its lines: {remedy} "
            "instead of yield"
        )
    is_async = inspect.isasyncgenfunction(method) or inspect.iscoroutinefunction(method)
    is_allowed = may_be_async and not inspect.isasyncgenfunction(method)
    if is_async and not is_allowed:
        raise InvalidTopology(
            f"{subject} is async, and is called without await, so that none of its lines would "
            "run: make it a plain method, with blocking = True if it waits; only process of a "
            "bolt, and process_tick beside it, may be async"
        )
