"""Codec between the memories of observers and the JSON in which sensors store them.

A ``msgspec.Struct`` is an object of its fields, a named tuple an array, a field that is ``msgspec.UNSET`` is absent.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

M = TypeVar("M")


def encode_memory(memory: object) -> bytes:
    """The memory as JSON with sorted keys: equal memories give equal bytes."""
    return msgspec.json.encode(memory, order="sorted")


def decode_memory(kind: type[M], raw: bytes | str | None) -> M:
    """The memory of :func:`encode_memory`; anything else is an empty memory, which only grants time."""
    try:
        found = msgspec.json.decode(raw or b"", type=kind)
        # A part that is absent must not pass for one that was seen: the document has every field, and no other.
        if msgspec.json.decode(encode_memory(found)) == msgspec.json.decode(raw or b""):
            return found
    except (msgspec.MsgspecError, UnicodeError):
        pass
    return kind()
