"""Storm's sequence numbers of blobs, as pure functions (``docs/decisions.md#blob-ownership``).

Each nimbus that holds a blob has an ephemeral child ``<host:port>-<number>`` below ``/blobstore/<key>``;
``/blobstoremaxkeysequencenumber/<key>`` keeps the highest number that the content ever had. A nimbus with the
highest number has the newest content. The number tells *who* has it; *what* it is, is always verified
by the content hash.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from storm_dagster.model.errors import Corrupt


@dataclass(frozen=True)
class SequenceDecision:
    """Number that a nimbus registers, and maximum that is stored in ZooKeeper afterwards."""

    sequence: int
    """0: it holds something, but not the newest."""
    maximum: int


def split_holder(holder: str) -> tuple[str, int]:
    """``"nimbus-1:7800-4"`` -> ``("nimbus-1:7800", 4)``: split at the last dash (hosts may contain dashes)."""
    address, dash, number = holder.rpartition("-")
    if not dash or not address or not number.isdecimal():
        raise Corrupt(f"{holder!r} is not a blob holder of the form <host>:<port>-<number>: remove that node")
    return address, int(number)


def holders_of_latest(holders: Iterable[str]) -> list[str]:
    """Addresses of those that show the highest number, sorted; holders of 0 have nothing worth fetching."""
    listed = [split_holder(holder) for holder in holders]
    top = max((number for _, number in listed), default=0)
    return sorted(address for address, number in listed if number == top and top > 0)


def next_sequence(holders: Iterable[str], maximum: int | None, *, me: str, leader: bool) -> SequenceDecision:
    """The number under which ``me`` (``host:port``) registers a blob that it has just stored.

    ``maximum`` is ``None`` when the key is unknown to ZooKeeper. The rules are Storm's ``KeySequenceNumber``:
    a first creation is 1; with no holder left the maximum stays; a nimbus that is not listed takes the next
    number as the leader, else the maximum when the listed ones lag behind it, else 0; a listed one raises the
    number when all listed agree, and takes the highest otherwise.
    """
    listed = dict(split_holder(holder) for holder in holders)
    if maximum is None:
        return SequenceDecision(1, 1)
    if not listed:
        return SequenceDecision(maximum, maximum)
    top = max(listed.values())
    if me not in listed:
        if leader:
            return SequenceDecision(maximum + 1, maximum + 1)
        return SequenceDecision(maximum if top < maximum else 0, maximum)
    if len(set(listed.values())) == 1:
        number = maximum + 1 if top < maximum else top + 1
        return SequenceDecision(number, max(number, maximum))
    return SequenceDecision(top, max(top, maximum))
