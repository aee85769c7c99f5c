"""The named steps of every operation that takes more than one (``docs/decisions.md#crash-points``).

A step is one thing that lands or does not: a transaction, a blob stored, a blob deleted. Each
operation declares its steps next to its code with :func:`operation`, so that the list of all crash
points is known without running anything; the tests end a real process before and after each of
them.

Nothing here can end a process. A step only calls the observer of the context
(:attr:`OperationsContext.checkpoint`), which no conf key, environment variable or request can set.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

from storm_dagster.operations.context import OperationsContext, no_observer

_declared: dict[str, Operation] = {}


@dataclass(frozen=True)
class Operation:
    """One operation and its steps, in the order in which a full run passes them."""

    name: str
    steps: tuple[str, ...]

    def points(self) -> tuple[str, ...]:
        """The crash points: ``before.<step>`` and ``after.<step>`` of each step."""
        return tuple(f"{side}.{name}" for name in self.steps for side in ("before", "after"))


def shared_steps(name: str, *parts: str | Operation) -> Operation:
    """Steps that several operations share; an operation among ``parts`` means its steps, each
    once.
    """
    steps = dict.fromkeys(
        step for each in parts for step in (each.steps if isinstance(each, Operation) else (each,))
    )
    return Operation(name, tuple(steps))


def operation(name: str, *parts: str | Operation) -> Operation:
    """Declare an operation made of ``parts``: each of its steps needs a scenario in the crash
    tests.

    :class:`ValueError` when another operation has the name, or there is no step.
    """
    made = shared_steps(name, *parts)
    if not made.steps or _declared.setdefault(name, made) != made:
        raise ValueError(
            f"operation {name!r} is declared already, or has no step: give it a name of its own"
        )
    return made


def all_operations() -> Mapping[str, Operation]:
    """Name -> declaration of every operation of the package."""
    name = __name__.rpartition(".")[0]
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        importlib.import_module(module.name)
    return MappingProxyType(dict(sorted(_declared.items())))


def step(ctx: OperationsContext, name: str) -> AbstractContextManager[None]:
    """Mark the block as one step; the observer is called before, and after when it did not fail."""
    observer = ctx.checkpoint
    return _NOTHING if observer is no_observer else _observed(observer, name)


_NOTHING = nullcontext()


@contextmanager
def _observed(observer: Callable[[str], None], name: str) -> Iterator[None]:
    observer(f"before.{name}")
    yield
    observer(f"after.{name}")
