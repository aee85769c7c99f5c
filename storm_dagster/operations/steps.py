"""Named steps of the operations (``docs/decisions.md#crash-points``).

A step is one change that is applied wholly or not at all: a transaction, a blob stored, a blob
deleted. Each operation declares its steps next to its code with :func:`operation`, so that the list
of all crash points is known without running an operation. The tests end a real process before and
after each of them.

No code here can end a process. A step only calls the observer of the context
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
"""Name -> operation of each call of :func:`operation` up to now."""
_NO_STEP = nullcontext()
"""Block of a step that is not observed."""


@dataclass(frozen=True)
class Operation:
    """One operation and its steps, in the order in which a full run passes them."""

    name: str
    steps: tuple[str, ...]

    def points(self) -> tuple[str, ...]:
        """The crash points: ``before.<step>`` and ``after.<step>`` of each step."""
        points: list[str] = []
        for name in self.steps:
            points.append(f"before.{name}")
            points.append(f"after.{name}")
        return tuple(points)


def shared_steps(name: str, *parts: str | Operation) -> Operation:
    """Steps that several operations share.

    An operation among ``parts`` contributes its steps. Each step is in the result once.
    """
    steps: dict[str, None] = {}
    for part in parts:
        part_steps = part.steps if isinstance(part, Operation) else (part,)
        steps.update(dict.fromkeys(part_steps))
    return Operation(name, tuple(steps))


def operation(name: str, *parts: str | Operation) -> Operation:
    """Declare an operation made of ``parts``.

    Each of its steps needs a scenario in the crash tests. :class:`ValueError` if another operation
    has the name, or if the operation has no steps.
    """
    declared = shared_steps(name, *parts)
    if not declared.steps or _declared.setdefault(name, declared) != declared:
        raise ValueError(
            f"operation {name!r} is declared already, or has no step: give it a name of its own"
        )
    return declared


def all_operations() -> Mapping[str, Operation]:
    """Name -> declaration of every operation of the package, in order of the names.

    It imports all modules of the package, because an operation is declared at their import.
    """
    name = __name__.rpartition(".")[0]
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        importlib.import_module(module.name)
    return MappingProxyType(dict(sorted(_declared.items())))


def step(ctx: OperationsContext, name: str) -> AbstractContextManager[None]:
    """Mark the block as one step.

    The observer is called before the block, and after it if the block did not fail.
    """
    observer = ctx.checkpoint
    if observer is no_observer:
        return _NO_STEP
    return _observe(observer, name)


@contextmanager
def _observe(observer: Callable[[str], None], name: str) -> Iterator[None]:
    # No `finally`: after a failure the step did not take place.
    observer(f"before.{name}")
    yield
    observer(f"after.{name}")
