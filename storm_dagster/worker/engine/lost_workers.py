"""Bits for the other workers of a topology, so that a tree notes in one number which of them have parts of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from operator import or_

Slot = tuple[str, int]


class WorkerBits:
    """A bit for each other worker. The worker that replaces a lost one in its slot has a bit of its own.

    Tuples for a slot without a worker count as the next worker's, which will receive them.
    """

    def __init__(self, keep_secs: float) -> None:
        """``keep_secs``: time for which trees may still name a lost worker."""
        self._keep = keep_secs
        self._keys: dict[Slot, str] = {}
        """Slot -> start token of its worker; ``host:port`` while there is none."""
        self._bits: dict[str, int] = {}
        self._lost: dict[str, tuple[int, float]] = {}
        """Start token of a lost worker -> its bits, and when they may be used again."""

    def place(self, slots: Collection[Slot], tokens: Mapping[str, Slot], now: float) -> int:
        """Apply the slots in use and the live workers; the bits of the workers that are gone since the last call."""
        live = {slot: token for token, slot in tokens.items()}
        gone = 0
        for slot in {*self._keys, *slots}:
            before, empty = self._keys.pop(slot, ""), f"{slot[0]}:{slot[1]}"
            key = live.get(slot, empty) if slot in slots else ""
            if key:
                self._keys[slot] = key
            if key == before:
                continue
            if key:
                self._lost.pop(key, None)
            if key and before == empty:
                self._bits[key] = self._bits.pop(empty) | self._bits.get(key, 0)
                continue
            if before:
                bits = self._bits.pop(before)
                self._lost[before] = (bits, now + self._keep)
                gone |= bits
            if key:
                self.bit_of(key, now)
        return gone

    def of_slot(self, slot: Slot) -> tuple[str, int]:
        """(start token or ``""``, bits) of the worker of a slot."""
        key = self._keys.get(slot, "")
        return ("" if ":" in key else key, self._bits.get(key, 0))

    def bit_of(self, token: str, now: float) -> int:
        """The bits of a worker, also of one that is not known yet; 0: it is lost."""
        if token in self._lost:
            return 0
        if token not in self._bits:
            self._lost = {one: entry for one, entry in self._lost.items() if entry[1] > now}
            taken = reduce(or_, [*self._bits.values(), *(bits for bits, _ in self._lost.values())], 0)
            self._bits[token] = ~taken & (taken + 1)
        return self._bits[token]

    def tokens_of(self, bits: int) -> Iterator[str]:
        """The start tokens of workers, lost ones included."""
        for token, own in (*self._bits.items(), *((token, entry[0]) for token, entry in self._lost.items())):
            if own & bits and ":" not in token:
                yield token
