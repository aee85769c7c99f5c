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


def decode_ranges(text: str) -> tuple[int, ...]:
    """The ids that :func:`encode_ranges` wrote, ascending.

    :class:`Corrupt` for text that it does not write: overlaps, descending runs, leading zeros,
    blanks, or more than ten million ids.
    """
    if text == "":
        return ()
    if not _RANGES.fullmatch(text):
        raise Corrupt(
            f"task ranges {text!r:.80} are not of the form '1-3,7': the record was damaged or "
            "forged"
        )
    ids: list[int] = []
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
        if len(ids) + last - first >= _MAX_IDS:
            raise Corrupt(
                f"task ranges {text!r:.80} name more than {_MAX_IDS} tasks: the record was damaged"
                " or forged"
            )
        if first == last:
            ids.append(first)
        else:
            ids.extend(range(first, last + 1))
        previous = last
    return tuple(ids)
