"""Search for text in a log, in linear time, with a budget for a request."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

BLOCK = 131_072
"""Bytes that one read takes from the file, without the overlap."""
MAX_BLOCKS = 1024
"""Blocks that one request reads at most, as in JStorm: 128 MiB. The next request continues at
``next_offset``.
"""
_SECS = 2.0
"""Longest time that one request searches, seconds."""
_MAX_CONTEXT_BYTES = 64 * 1024
"""Bytes of context on each side of a match."""
_MAX_CHARACTERS = 1024**2
"""Characters of matches with their context; the match that exceeds them is the last one."""


@dataclass(frozen=True)
class Search:
    """Parameters of a search."""

    key: bytes
    offset: int = 0
    """First byte from the head; from the tail the number of bytes at the end to leave out."""
    max_matches: int = 10
    context_before: int = 2
    """Lines shown before a match."""
    context_after: int = 10
    """Lines shown after a match."""
    ignore_case: bool = False
    search_from: Literal["head", "tail"] = "head"


def search_log(stream: BinaryIO, size: int, search: Search) -> tuple[dict[int, str], int | None]:
    """Matches by their offset, and the offset where the next search begins.

    A match is the text of its lines and their context. At most ``max_matches`` are found, within
    the budget of a request: blocks, seconds, characters. The next offset is one for
    ``Search.offset``, from the tail a number of bytes at the end; it is ``None`` when all of the
    file was searched. A key is bytes: a log can have any encoding.
    """
    deadline = time.monotonic() + _SECS
    matches: dict[int, str] = {}
    key = search.key.lower() if search.ignore_case else search.key
    forward = search.search_from == "head"
    characters = 0
    blocks = _blocks(stream, size, search.offset, len(key) - 1, forward)
    for number, (start, raw) in enumerate(blocks, 1):
        text = raw.lower() if search.ignore_case else raw
        for place in _places(text, key, forward):
            offset = start + place
            if offset not in matches:
                matches[offset] = _context(stream, size, offset, len(key), search)
            characters += len(matches[offset])
            if len(matches) >= search.max_matches or characters > _MAX_CHARACTERS:
                next_offset = offset + len(key) if forward else size - offset
                return matches, _before_end(next_offset, size)
        if number >= MAX_BLOCKS or time.monotonic() > deadline:
            searched = start + len(raw) if forward else size - start
            return matches, _before_end(searched - (len(key) - 1), size)
    return matches, None


def _before_end(offset: int, size: int) -> int | None:
    """The offset, ``None`` when no byte of the file is left to search."""
    return offset if offset < size else None


def _blocks(
    stream: BinaryIO, size: int, offset: int, overlap: int, forward: bool
) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of blocks, in the direction of the search.

    They overlap by ``overlap``, the length of a key less one, so that no match is cut.
    """
    # Exclusive. Backward, ``offset`` bytes at the end are left out.
    last = size if forward else size - offset
    starts = range(offset, last, BLOCK) if forward else range(last - BLOCK, -BLOCK, -BLOCK)
    for bound in starts:
        start = max(0, bound)
        end = bound + BLOCK
        raw = os.pread(stream.fileno(), min(end + overlap, last) - start, start)
        if not raw:
            return
        yield start, raw


def _places(haystack: bytes, key: bytes, forward: bool) -> Iterator[int]:
    """Offsets of matches in a block, in the direction of the search.

    Matches do not overlap.
    """
    if forward:
        place = haystack.find(key)
        while place >= 0:
            yield place
            place = haystack.find(key, place + len(key))
    else:
        # ``find`` takes linear time, ``rfind`` does not.
        places: list[int] = []
        place = haystack.find(key)
        while place >= 0:
            places.append(place)
            place = haystack.find(key, place + 1)
        end = len(haystack)
        for place in reversed(places):
            if place + len(key) <= end:
                yield place
                end = place


def _context(stream: BinaryIO, size: int, offset: int, length: int, search: Search) -> str:
    """The lines around a match, at most 64 KiB on each side."""
    first = max(0, offset - _MAX_CONTEXT_BYTES)
    before = os.pread(stream.fileno(), offset - first, first)
    after = os.pread(stream.fileno(), min(length + _MAX_CONTEXT_BYTES, size - offset), offset)
    start = len(before)
    # One more: the first line break begins the match's own line. -1: no break, so all of `before`.
    for _ in range(search.context_before + 1):
        start = before.rfind(b"\n", 0, start)
        if start < 0:
            break
    end = length
    for _ in range(search.context_after + 1):
        place = after.find(b"\n", end)
        if place < 0:
            end = len(after)
            break
        end = place + 1
    return (before[start + 1 :] + after[:end]).decode("utf-8", "replace")
