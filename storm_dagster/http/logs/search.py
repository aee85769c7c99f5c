"""Search in a log: plain text, in linear time, with a budget for each request."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

BLOCK = 131_072
MOST_BLOCKS = 1024
"""Blocks that one request reads at most, as in JStorm: 128 MiB. ``next_offset`` is where to go
on.
"""
_SECS = 2.0
"""Longest time that one request searches, seconds."""
_LONGEST_CONTEXT = 64 * 1024
_MOST_CHARACTERS = 1024**2
"""Of all matches with their context, but the last."""


@dataclass(frozen=True)
class Search:
    """Parameters of a search."""

    key: bytes
    offset: int = 0
    """From the head: where to begin; from the tail: how many bytes of the end to leave out."""
    most: int = 10
    context_before: int = 2
    """Lines shown before a match."""
    context_after: int = 10
    """Lines shown after it."""
    ignore_case: bool = False
    search_from: Literal["head", "tail"] = "head"


def search_log(stream: BinaryIO, size: int, search: Search) -> tuple[dict[int, str], int | None]:
    """Up to ``most`` matches within the budget, by their offset, and where to go on (``None``: all
    was searched).

    A key is bytes: binary logs and any encoding will do.
    """
    deadline = time.monotonic() + _SECS
    found: dict[int, str] = {}
    key = search.key.lower() if search.ignore_case else search.key
    forward = search.search_from == "head"
    shown = 0
    for number, (start, raw) in enumerate(
        _blocks(stream, size, search.offset, len(key) - 1, forward), 1
    ):
        for place in _places(raw.lower() if search.ignore_case else raw, key, forward):
            offset = start + place
            found.setdefault(offset, _context(stream, size, offset, len(key), search))
            shown += len(found[offset])
            if len(found) >= search.most or shown > _MOST_CHARACTERS:
                following = offset + len(key) if forward else size - offset
                return found, following if following < size else None
        if number >= MOST_BLOCKS or time.monotonic() > deadline:
            following = (start + len(raw) if forward else size - start) - (len(key) - 1)
            return found, following if following < size else None
    return found, None


def _blocks(
    stream: BinaryIO, size: int, offset: int, overlap: int, forward: bool
) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes): blocks that overlap by a key's length less one, so that no match is cut."""
    first, last = (offset, size) if forward else (0, size - offset)
    for bound in range(first, last, BLOCK) if forward else range(last, first, -BLOCK):
        start, end = (bound, bound + BLOCK) if forward else (max(0, bound - BLOCK), bound)
        raw = os.pread(stream.fileno(), min(end + overlap, last) - start, start)
        if not raw:
            return
        yield start, raw


def _places(haystack: bytes, key: bytes, forward: bool) -> Iterator[int]:
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
    first = max(0, offset - _LONGEST_CONTEXT)
    before = os.pread(stream.fileno(), offset - first, first)
    after = os.pread(stream.fileno(), min(length + _LONGEST_CONTEXT, size - offset), offset)
    start = len(before)
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
