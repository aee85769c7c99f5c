"""Runs in Spark: which old slots a rebalance uses on, so that the fewest tasks move."""

from __future__ import annotations

import heapq
from typing import Any

__all__ = ["Saving", "most_saving"]

Row = dict[str, Any]
_Order = tuple[int, int, str, int]


class Saving:
    """What using an old slot on would save, for workers that hold ``share`` executors, or one more."""

    __slots__ = ("base", "more", "row")

    def __init__(self, row: Row, share: int) -> None:
        self.row: Row = row
        self.base = self.more = 0
        room = share
        # ``weights`` are descending: how many tasks an executor has here, and how many such executors there are.
        for weight, number in zip(row["weights"], row["numbers"], strict=True):
            fit = min(room, number)
            self.base += fit * weight
            if number > fit:
                self.more = weight
                break
            room -= fit

    def order(self, value: int) -> _Order:
        """Most saved first, then the fullest, then the lower slot."""
        return (-value, -self.row["size"], self.row["node"], self.row["port"])


def most_saving(savings: list[Saving], places: int, rest: int) -> tuple[int, list[Row], list[Row]]:
    """(tasks that stay, seats with the share, seats with one more), at most ``places``, at most ``rest`` with more.

    Those that get one more can always be chosen before those that do not, in the order of what it saves: it
    is enough to move a border along that order.
    """
    places = max(0, min(places, len(savings)))
    rest = min(rest, places)
    line = sorted(savings, key=lambda saving: (-saving.more, *saving.order(saving.base)))
    tail = [0] * (len(line) + 1)
    best_behind: list[int] = []
    for index in range(len(line) - 1, -1, -1):
        heapq.heappush(best_behind, line[index].base)
        lost = heapq.heappop(best_behind) if len(best_behind) > places - rest else 0
        tail[index] = tail[index + 1] + line[index].base - lost
    most, border, head = -1, 0, 0
    best_before: list[int] = []
    for index in range(len(line) + 1):
        if rest <= index <= len(line) - (places - rest) and head + tail[index] > most:
            most, border = head + tail[index], index
        if index < len(line):
            value = line[index].base + line[index].more
            heapq.heappush(best_before, value)
            head += value - (heapq.heappop(best_before) if len(best_before) > rest else 0)
    fuller = sorted(line[:border], key=lambda saving: saving.order(saving.base + saving.more))[:rest]
    plain = sorted(line[border:], key=lambda saving: saving.order(saving.base))[: places - rest]
    return most, [saving.row for saving in plain], [saving.row for saving in fuller]
