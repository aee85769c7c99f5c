"""Sets of task ids as short text: ``"1-3,7"``.

Task ids are positive integers. Contiguous runs are written as ``first-last``, so that the record of
a topology with a hundred thousand tasks stays far below ZooKeeper's node limit.
"""

import re
from collections.abc import Iterable

from storm_dagster.model.errors import Corrupt

# Ids and runs of them, joined by commas, without leading zeros.
_RANGES = re.compile(r"[1-9][0-9]{0,9}(-[1-9][0-9]{0,9})?(,[1-9][0-9]{0,9}(-[1-9][0-9]{0,9})?)*")
_MAX_IDS = 10_000_000
"""Bound of the memory that a forged record can make a reader allocate."""


def encode_ranges(ids: Iterable[int]) -> str:
    """The ids in ascending order as ``first-last`` runs joined by commas.

    No ids give ``""``.
    """
    ordered = sorted(set(ids))
    if not ordered:
        return ""
    if ordered[0] < 1:
        raise ValueError(f"task ids start at 1, got {ordered[0]}")
    runs: list[str] = []
    first = last = ordered[0]
    for number in ordered[1:]:
        if number != last + 1:
            runs.append(str(first) if first == last else f"{first}-{last}")
            first = number
        last = number
    runs.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(runs)


def check_ranges(text: str) -> None:
    """Raise :class:`Corrupt` for text that :func:`encode_ranges` does not write.

    That is an overlap, a descending run, a leading zero, a blank, or more than ten million ids. No
    id is expanded: the work follows the length of the text, not the number of ids.
    """
    _runs(text)


def highest_id(texts: Iterable[str]) -> int:
    """The highest id of valid ranges; 0 without any. Only the end of each text is read."""
    highest = 0
    for text in texts:
        last_run = text.rpartition(",")[2]
        highest = max(highest, int(last_run.rpartition("-")[2] or 0))
    return highest


def decode_ranges(text: str, highest: int | None = None) -> tuple[int, ...]:
    """The ids that :func:`encode_ranges` wrote, ascending.

    With ``highest``, ids above it are left out and are not expanded, so that a record of a worker
    costs no more than its topology has tasks. :class:`Corrupt` as :func:`check_ranges`.
    """
    ids: list[int] = []
    for first, last in _runs(text):
        if highest is not None:
            if first > highest:
                break
            last = min(last, highest)
        if first == last:
            ids.append(first)
        else:
            ids.extend(range(first, last + 1))
    return tuple(ids)


def _runs(text: str) -> list[tuple[int, int]]:
    """First and last id of each run, checked as :func:`check_ranges` says."""
    if text == "":
        return []
    if not _RANGES.fullmatch(text):
        raise Corrupt(
            f"task ranges {text!r:.80} are not of the form '1-3,7': the record was damaged or "
            "forged"
        )
    runs: list[tuple[int, int]] = []
    count = 0
    previous = 0
    for run in text.split(","):
        low, dash, high = run.partition("-")
        first = int(low)
        last = int(high) if dash else first
        if first <= previous or last < first:
            raise Corrupt(
                f"task ranges {text!r:.80} overlap or descend at {run!r}: the record was damaged"
                " or forged"
            )
        count += last - first + 1
        if count > _MAX_IDS:
            raise Corrupt(
                f"task ranges {text!r:.80} name more than {_MAX_IDS} tasks: the record was damaged"
                " or forged"
            )
        runs.append((first, last))
        previous = last
    return runs
