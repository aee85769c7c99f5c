"""Identities of values: the text by which a record or an applied change is recognized.

The text is a contract with tables and with stored state: a type never gets another form.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec

from storm_dagster.model.errors import InvalidRequest

_FORM = re.compile(r"%(text|bool|none|int|float|decimal|bytes|timedelta|value):")
"""The beginning of the form of a type; text that begins with it gets a form, too."""
_MAX_INT_BITS = 14_000
"""Bits up to which Python writes a whole number in decimal."""
_LARGE_INT = 2**63
_encode = msgspec.msgpack.Encoder().encode


def identity_text(value: Any) -> str:
    """The identity of a value as text: no two values of different types or content have the same.

    Text, whole numbers, UUIDs, dates and times are their own text, as in the releases before. So
    ``7`` and ``"7"`` are one identity. Every other type has a form that begins with ``%``, such as
    ``%bytes:6162``. It does not depend on the order of a map or set, nor on the version of Python.
    Raises :class:`InvalidRequest` for a type that a tuple cannot hold.
    """
    kind = type(value)
    # The usual cases, which each tuple of a sink passes.
    if kind is str and not value.startswith("%"):
        return value
    if kind is int and -_LARGE_INT < value < _LARGE_INT:
        return str(value)
    if isinstance(value, Enum):
        return f"%value:{_digest(value)}"
    if isinstance(value, str):
        return f"%text:{value}" if _FORM.match(value) else value
    if value is None:
        return "%none:"
    if isinstance(value, bool):
        return f"%bool:{'true' if value else 'false'}"
    if isinstance(value, int):
        is_long = value.bit_length() > _MAX_INT_BITS
        return f"%int:{value:x}" if is_long else str(value)
    if isinstance(value, float):
        return f"%float:{value!r}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"%bytes:{bytes(value).hex()}"
    if isinstance(value, datetime):
        return value.isoformat(" ")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        return f"%decimal:{value}"
    if isinstance(value, timedelta):
        return f"%timedelta:{value // timedelta(microseconds=1)}"
    return f"%value:{_digest(value)}"


def former_identity_text(value: Any) -> str | None:
    """The identity that a value had before it depended on the type, ``None`` if it is the same.

    Tables and stored state of earlier releases have it.
    """
    if type(value) is int or (type(value) is str and not value.startswith("%")):
        return None
    try:
        former = str(value)
    except ValueError:
        # A long whole number had none: Python refuses to write it.
        return None
    return None if former == identity_text(value) else former


def _digest(value: Any) -> str:
    """A hash of 128 bits of the value, by its types and content."""
    return hashlib.blake2b(_encode(_content(value)), digest_size=16).hexdigest()


def _content(value: Any) -> list[Any]:
    """The value as lists of text and bytes, the type first."""
    if isinstance(value, Enum):
        return ["enum", _class_name(value), value.name]
    if isinstance(value, dict):
        return ["map", _sorted([[_content(key), _content(part)] for key, part in value.items()])]
    if isinstance(value, set | frozenset):
        return ["set", _sorted(map(_content, value))]
    if isinstance(value, list | tuple):
        # A tuple is a list in the keys and ids of stored state, too.
        return ["list", [_content(part) for part in value]]
    if is_dataclass(value):
        parts = [[field.name, _content(getattr(value, field.name))] for field in fields(value)]
        return ["object", _class_name(value), parts]
    kind = "bytes" if isinstance(value, bytearray | memoryview) else type(value).__name__
    if kind not in _SCALARS:
        raise InvalidRequest(
            f"a value of type {kind} is not an id: use text, numbers, bytes, times, UUIDs, "
            "or lists and maps of these"
        )
    return [kind, identity_text(value).encode("utf-8", "surrogatepass")]


_SCALARS = frozenset(
    [
        "str",
        "NoneType",
        "bool",
        "int",
        "float",
        "bytes",
        "datetime",
        "date",
        "time",
        "UUID",
        "Decimal",
        "timedelta",
    ]
)
"""Names of the types that have no parts."""


def _sorted(contents: Iterable[Any]) -> list[Any]:
    return sorted(contents, key=_encode)


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"
