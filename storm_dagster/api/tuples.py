"""Tuples, which components send each other."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["SYSTEM_TASK", "TICK_STREAM", "Tuple", "is_tick"]

TICK_STREAM = "__tick"
SYSTEM_TASK = -1


class Tuple(msgspec.Struct, eq=False, gc=False, weakref=False):
    """One received tuple: its sender, stream and values.

    ``values`` belong to the receiver: neither the emitter nor other receivers see changes. They have the types that
    they were emitted with, in the same worker and in others.
    """

    id: int | str
    """Unique within the receiving worker; a replayed tuple has a new one."""
    component: str
    """Component id of the sender."""
    stream: str
    task: int
    """Task id of the sender; -1 for the system."""
    values: Any
    """Values in the order of the stream's fields."""
    _tree: Any = None

    def __repr__(self) -> str:
        return (
            f"Tuple(id={self.id!r}, component={self.component!r}, stream={self.stream!r}, "
            f"task={self.task!r}, values={self.values!r})"
        )


def is_tick(tup: Tuple) -> bool:
    """Whether the tuple is a tick of the system."""
    return tup.stream == TICK_STREAM and tup.component == "__system"
