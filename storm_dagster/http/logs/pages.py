"""One page of a log, by position and size, whatever the size of the file; and the text of
stacks.
"""

import codecs
import os
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from storm_dagster.model.errors import InvalidRequest

PAGE_BYTES = 131_072
"""JStorm's ``log.page.size``."""
LONGEST_PAGE = 1 << 20
_ENCODINGS = frozenset(
    {
        "utf-8",
        "ascii",
        "iso8859-1",
        "cp1252",
        "utf-16-le",
        "utf-16-be",
        "gbk",
        "gb18030",
        "big5",
        "shift_jis",
    }
)


class RangeNotSatisfiable(InvalidRequest):
    """A page that begins after the end of the file."""

    http_status = 416


def check_encoding(name: str | None) -> str:
    """The codec of that name, one of a few that only decode text; :class:`InvalidRequest` for any
    other.
    """
    try:
        found = codecs.lookup(name or "utf-8").name
    except (LookupError, ValueError):
        found = ""
    if found not in _ENCODINGS:
        raise InvalidRequest(
            f"encoding {name!r:.40} is unknown: use one of {', '.join(sorted(_ENCODINGS))}"
        )
    return found


def page_bounds(size: int, position: int | None, length: int | None) -> tuple[int, int]:
    """(first byte, number of bytes). Without a position it is the end of the file, as in JStorm.

    A length of more than 1 MiB is cut to that. :class:`InvalidRequest` for negative numbers,
    :class:`RangeNotSatisfiable` for a position after the end.
    """
    if length is not None and length < 1:
        raise InvalidRequest(f"size must be at least 1, got {length}")
    if position is not None and position < 0:
        raise InvalidRequest(f"pos must be at least 0, got {position}")
    wanted = min(length or PAGE_BYTES, LONGEST_PAGE)
    if position is None:
        position = max(0, size - wanted)
    if position > size:
        raise RangeNotSatisfiable(f"the log has {size} bytes: ask for a position of at most that")
    return position, min(wanted, size - position)


def read_page(stream: BinaryIO, position: int, length: int) -> bytes:
    """The bytes there; fewer when the file was truncated meanwhile."""
    parts: list[bytes] = []
    while length > 0 and (part := os.pread(stream.fileno(), length, position)):
        parts.append(part)
        position += len(part)
        length -= len(part)
    return b"".join(parts)


def whole_characters(raw: bytes, encoding: str, *, cut_before: bool) -> str:
    """Text of a page: characters that the page's ends cut are left out, bytes that are none become
    U+FFFD.
    """
    if encoding == "utf-8":
        if cut_before:
            skip = next((index for index, byte in enumerate(raw[:3]) if byte & 0xC0 != 0x80), 0)
            raw = raw[skip:]
        return codecs.getincrementaldecoder("utf-8")("replace").decode(raw, final=False)
    return raw.decode(encoding, "replace")


def stacks_text(header: str, stacks: Mapping[str, Sequence[str]] | None, problem: str = "") -> str:
    """One worker's block; ``problem`` is the reason for no stacks."""
    lines = ["=" * 80, header, "=" * 80]
    if stacks is None:
        return "\n".join([*lines, problem, ""]) + "\n"
    for thread, frames in stacks.items():
        lines.append(f'"{thread}"')
        lines.extend(frame.rstrip("\n") for frame in frames)
        lines.append("")
    return "\n".join(lines) + "\n"
