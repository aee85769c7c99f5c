"""Checks of a frame before it is decoded.

thriftpy2 decodes every frame: a container that claims 2^31 elements of an unknown type keeps it
busy for minutes, and one of 16 million empty structures becomes gigabytes of objects. So a frame is
walked over first, without making objects. It is refused if it announces more bytes than it has,
nests deeply, or holds more values than any client sends.
"""

import struct

MAX_DEPTH = 32
"""Nesting of structures and containers; Storm's deepest structure has 9 levels."""
MAX_VALUES = 250_000
"""Fields, elements, keys and values in one message; a topology of 5,000 components has about as
many.
"""

# Types of values, as numbers of Thrift's binary protocol.
_STOP = 0
_STRING = 11
_STRUCT = 12
_MAP = 13
_SET = 14
_LIST = 15
# Bytes of the types that have a fixed size: bool, byte, double, i16, i32, i64.
_FIXED = {2: 1, 3: 1, 4: 8, 6: 2, 8: 4, 10: 8}
# Smallest number of bytes of a value of each type.
_MIN_BYTES = {**_FIXED, _STRING: 4, _STRUCT: 1, _MAP: 6, _SET: 5, _LIST: 5}
_CALLS = (1, 4)
"""Types of messages that clients send: a call, and one without a reply."""
_VERSION = 0x8001
"""Upper half of the first number of a message; an old client sends the length of a name there."""
_MAX_NAME = 128
"""Longest name of a method, bytes."""

_i8 = struct.Struct("!b").unpack_from
_i32 = struct.Struct("!i").unpack_from
_list = struct.Struct("!bi").unpack_from
_map = struct.Struct("!bbi").unpack_from
"""Heads of values: a type; a length; element type and number; key type, value type and number."""


class MalformedFrame(Exception):
    """The bytes are not a message that a client of this protocol would send."""


class _Walk:
    """Position in a frame, and the number of values before it.

    A method that reads or skips a value moves the position behind it. Every method raises
    :class:`MalformedFrame`, or ``struct.error`` at the end of the frame.
    """

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.size = len(frame)
        self.at = 0
        self.values = 0

    def skip(self, count: int) -> None:
        if count < 0 or count > self.size - self.at:
            raise MalformedFrame(f"{count} bytes are announced, {self.size - self.at} are left")
        self.at += count

    def text(self) -> None:
        (length,) = _i32(self.frame, self.at)
        self.at += 4
        self.skip(length)

    def count(self, number: int, min_bytes: int) -> None:
        """Count values that are announced, each of ``min_bytes`` or more.

        They are refused before they are read if the rest of the frame is too short for them.
        """
        if number < 0 or number * min_bytes > self.size - self.at:
            raise MalformedFrame(f"a container of {number} elements in {self.size - self.at} bytes")
        self.values += number
        if self.values > MAX_VALUES:
            raise MalformedFrame(f"more than {MAX_VALUES} values")

    def value(self, kind: int, depth: int) -> None:
        """Skip a value of type ``kind``, which may nest ``depth`` levels of others."""
        if kind in _FIXED:
            self.skip(_FIXED[kind])
        elif kind == _STRING:
            self.text()
        elif depth <= 0:
            raise MalformedFrame(f"nested more than {MAX_DEPTH} deep")
        elif kind == _STRUCT:
            self.structure(depth - 1)
        elif kind in (_LIST, _SET):
            element, number = _list(self.frame, self.at)
            self.at += 5
            self.count(number, self.min_bytes(element, number))
            self.elements((element,), number, depth - 1)
        elif kind == _MAP:
            key, value, number = _map(self.frame, self.at)
            self.at += 6
            self.count(number, self.min_bytes(key, number) + self.min_bytes(value, number))
            self.elements((key, value), number, depth - 1)
        else:
            raise MalformedFrame(f"type {kind} does not exist")

    def min_bytes(self, kind: int, number: int) -> int:
        """Smallest size of one of ``number`` elements of type ``kind``."""
        if number == 0:
            return 0  # Empty containers name any type, also one that does not exist.
        if kind not in _MIN_BYTES:
            raise MalformedFrame(f"type {kind} does not exist")
        return _MIN_BYTES[kind]

    def elements(self, kinds: tuple[int, ...], number: int, depth: int) -> None:
        """Skip the elements of a container; ``kinds`` are the types of one, of a map two."""
        if number and all(kind in _FIXED for kind in kinds):
            self.skip(number * sum(_FIXED[kind] for kind in kinds))
            return
        for _ in range(number):
            for kind in kinds:
                self.value(kind, depth)

    def structure(self, depth: int) -> None:
        """Skip the fields of a structure, up to its end."""
        while True:
            (kind,) = _i8(self.frame, self.at)
            if kind == _STOP:
                self.at += 1
                return
            # A field begins with its type (one byte) and its id (two).
            self.count(1, 3)
            self.at += 3
            self.value(kind, depth)


def check_message(frame: bytes) -> int:
    """Return the number of values in a frame that can be decoded.

    The frame is one whole call, and its decoding is bounded. Otherwise :class:`MalformedFrame`
    names the reason.
    """
    walk = _Walk(frame)
    try:
        (first,) = _i32(frame, 0)
        if first < 0:  # The version has its highest bit set; a length has not.
            if (first >> 16) & 0xFFFF != _VERSION:
                raise MalformedFrame("another protocol than Thrift's binary one")
            walk.at = 4
        (length,) = _i32(frame, walk.at)
        if not 0 < length <= _MAX_NAME:
            raise MalformedFrame(f"a method name of {length} bytes")
        walk.text()
        kind = first & 0xFF
        if first >= 0:  # An old client's message: its kind comes after the name.
            (kind,) = _i8(frame, walk.at)
            walk.skip(1)
        if kind not in _CALLS:
            raise MalformedFrame(f"message type {kind} is not a call")
        walk.skip(4)
        walk.structure(MAX_DEPTH)
    except struct.error:
        raise MalformedFrame("the message ends too early") from None
    if walk.at != walk.size:
        raise MalformedFrame(f"{walk.size - walk.at} bytes after the end of the message")
    return walk.values
