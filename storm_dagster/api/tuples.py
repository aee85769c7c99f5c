"""Tuples, which components send to each other."""

from collections.abc import Sequence
from itertools import count
from operator import itemgetter
from typing import Any, ClassVar

import msgspec

TICK_STREAM = "__tick"
SYSTEM_TASK = -1
"""Task id of the sender of ticks and other tuples of the system."""


class Values(list[Any]):
    """Values of a tuple: a list that has the stream's fields as attributes.

    Unlike a list it is hashable, and equals a tuple of the same values.
    """

    __slots__ = ()
    # The form in which copies and messages have it (``model.values``).
    travels_as = list
    _fields: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of_stream(cls, fields: Sequence[str]) -> "type[Values]":
        """The class for the values of a stream.

        A field hides a method of lists with the same name (``count``).
        """
        attributes: dict[str, Any] = {"__slots__": (), "_fields": tuple(fields)}
        for position, name in enumerate(fields):
            if not name.startswith("_"):
                attributes[name] = property(itemgetter(position))
        return type("Values", (cls,), attributes)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | tuple):
            return tuple(self) == tuple(other)
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __add__(self, other: Any) -> list[Any]:  # type: ignore[override]
        return [*self, *other]

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *self]

    def __reduce__(self) -> Any:
        return list, ([*self],)

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=False))


class TupleId(int):
    """Id of a received tuple.

    ``ack``, ``fail`` and ``anchors`` accept it in place of the tuple.
    """

    travels_as = int
    _tuple: Any

    @property
    def _tree(self) -> Any:
        return self._tuple._tree


class Tuple(msgspec.Struct, eq=False, gc=False, weakref=False):
    """One received tuple: its sender, stream and values.

    ``values`` belong to the receiver: neither the emitter nor other receivers see changes. They
    have the types that they were emitted with, in the same worker and in others.
    """

    id: int | str
    """Unique within the receiving worker; a replayed tuple has another one.

    0 is replaced by a new id at the first access.
    """
    component: str
    """Component id of the sender."""
    stream: str
    task: int
    """Task id of the sender; -1 for the system."""
    values: Any
    """Values in the order of the stream's fields, which are attributes too: ``tup.values.word``."""
    _tree: Any = None
    """Its place in the trees of spout tuples; only for the worker."""

    def __repr__(self) -> str:
        return (
            f"Tuple(id={self.id!r}, component={self.component!r}, stream={self.stream!r}, "
            f"task={self.task!r}, values={self.values!r})"
        )


_STORED_ID = Tuple.__dict__["id"]
"""The slot of the struct behind the property ``Tuple.id``."""
_next_number = count(1).__next__


def _id_of(tup: Tuple) -> Any:
    """The id of a tuple, which gets one at the first access.

    A number is returned as a :class:`TupleId`, text unchanged.
    """
    number = _STORED_ID.__get__(tup)
    if type(number) is not int:
        return number
    if not number:
        number = _next_number()
        _STORED_ID.__set__(tup, number)
    # Created at each access: a tuple that referred to its id object would never be freed.
    tuple_id = TupleId(number)
    tuple_id._tuple = tup
    return tuple_id


Tuple.id = property(_id_of)  # type: ignore[assignment]


def is_tick(tup: Tuple) -> bool:
    """True if the tuple is a tick of the system."""
    return tup.stream == TICK_STREAM and tup.component == "__system"
