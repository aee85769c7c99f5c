"""Pages of a log, in bounded memory, and the text of stacks."""

import codecs
import os
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from storm_dagster.model.errors import InvalidRequest

PAGE_BYTES = 131_072
"""JStorm's ``log.page.size``."""
MAX_PAGE_BYTES = 1 << 20
"""Largest page; a longer one is cut to it."""
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
"""Codecs that a request may name."""


class RangeNotSatisfiable(InvalidRequest):
    """A page that begins after the end of the file."""

    http_status = 416


def check_encoding(name: str | None) -> str:
    """The name of a codec that decodes text; by default UTF-8.

    :class:`InvalidRequest` for a codec that is not in the list.
    """
    try:
        codec = codecs.lookup(name or "utf-8").name
    except (LookupError, ValueError):
        codec = ""
    if codec not in _ENCODINGS:
        raise InvalidRequest(
            f"encoding {name!r:.40} is unknown: use one of {', '.join(sorted(_ENCODINGS))}"
        )
    return codec


def page_bounds(size: int, position: int | None, length: int | None) -> tuple[int, int]:
    """(first byte, number of bytes) of a page.

    Without a position it is the end of the file, as in JStorm. A length of more than 1 MiB is cut
    to that. :class:`InvalidRequest` for negative numbers, :class:`RangeNotSatisfiable` for a
    position after the end.
    """
    if length is not None and length < 1:
        raise InvalidRequest(f"size must be at least 1, got {length}")
    if position is not None and position < 0:
        raise InvalidRequest(f"pos must be at least 0, got {position}")
    page_bytes = min(length or PAGE_BYTES, MAX_PAGE_BYTES)
    if position is None:
        position = max(0, size - page_bytes)
    if position > size:
        raise RangeNotSatisfiable(f"the log has {size} bytes: ask for a position of at most that")
    return position, min(page_bytes, size - position)


def read_page(stream: BinaryIO, position: int, length: int) -> bytes:
    """``length`` bytes from a position on; fewer if the file was truncated."""
    parts: list[bytes] = []
    while length > 0:
        part = os.pread(stream.fileno(), length, position)
        if not part:
            break
        parts.append(part)
        position += len(part)
        length -= len(part)
    return b"".join(parts)


def whole_characters(raw: bytes, encoding: str, *, cut_before: bool) -> str:
    """Text of a page, without the characters that the ends of the page cut.

    Bytes that are not a character become U+FFFD. ``cut_before``: the page does not begin at the
    beginning of the file.
    """
    if encoding == "utf-8":
        if cut_before:
            raw = raw[_cut_bytes(raw) :]
        return codecs.getincrementaldecoder("utf-8")("replace").decode(raw, final=False)
    return raw.decode(encoding, "replace")


def _cut_bytes(raw: bytes) -> int:
    """Number of first bytes that continue a UTF-8 character; 0 if invalid."""
    for index, byte in enumerate(raw[:3]):
        is_continuation = byte & 0xC0 == 0x80
        if not is_continuation:
            return index
    return 0


def stacks_text(header: str, stacks: Mapping[str, Sequence[str]] | None, problem: str = "") -> str:
    """Text of one worker's stacks; ``problem`` is the reason for no stacks."""
    lines = ["=" * 80, header, "=" * 80]
    if stacks is None:
        return "\n".join([*lines, problem, ""]) + "\n"
    for thread, frames in stacks.items():
        lines.append(f'"{thread}"')
        lines.extend(frame.rstrip("\n") for frame in frames)
        lines.append("")
    return "\n".join(lines) + "\n"
