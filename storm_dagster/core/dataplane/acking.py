"""Storm's XOR acking: one number tracks the completion of a tree of tuples.

Each edge of a tree between workers has a random 64-bit id. It is XORed into the tree's number
twice, when it is emitted and when it has been processed. The number is zero exactly when no edge is
left (or by an accident of one in 2**64). The order in which the values arrive does not matter.

These functions run for every tuple and are measured (``benchmarks/dataplane.py``): their loops
avoid calls, and work on lists and tuples.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")

_LONG_WAIT = 0.25
"""Share of a timeout from which on a wait restarts the timeout."""


class PendingMap(Generic[V]):
    """A map whose entries expire ``timeout`` seconds after their addition.

    They never expire earlier. Entries are kept in the order in which they were added, so that
    expiry reads only the oldest.
    """

    __slots__ = (
        "_extended_at",
        "_is_waiting",
        "_late",
        "_pauses",
        "_wait_began",
        "_wait_ended",
        "entries",
        "timeout",
    )

    def __init__(self, timeout: float) -> None:
        self.timeout: float = timeout
        self._late = -math.inf
        """Entries added until this time were reported by :meth:`overdue`."""
        self._extended_at = -math.inf
        """End of the last long wait: no timeout counts from before it."""
        self._is_waiting = False
        """True from a call of :meth:`extend_deadlines` to the next one of :meth:`overdue`."""
        self._wait_began: float | None = None
        """First call of :meth:`extend_deadlines` of the present wait; ``None`` without one."""
        self._wait_ended = -math.inf
        """Last call of :meth:`extend_deadlines`."""
        self._pauses: list[tuple[float, float]] = []
        """Begin and end of the short waits that still matter, in order."""
        self.entries: dict[int, tuple[V, float]] = {}
        """Key -> (value, time added). Add at the end only; deleting is free."""

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, key: int, value: V, now: float) -> None:
        """Add an entry; ``now`` must not be less than in earlier calls."""
        self.entries[key] = (value, now)

    def pop(self, key: int) -> tuple[V, float] | None:
        """Remove and return the entry, or ``None``."""
        return self.entries.pop(key, None)

    def extend_deadlines(self, now: float) -> None:
        """Stop the timeouts; called repeatedly while the entries wait for a target.

        A wait of at least a quarter of the timeout restarts the timeout of every entry. A shorter
        one only stops the clock: a target that fails now and then must not keep lost entries
        permanently.
        """
        self._is_waiting = True
        if self._wait_began is None:
            self._wait_began = now
        self._wait_ended = now

    def _end_wait(self) -> None:
        """Add the wait that has ended, if there is one, to the timeouts."""
        began = self._wait_began
        if began is None:
            return
        self._wait_began = None
        if self._wait_ended - began >= self.timeout * _LONG_WAIT:
            self._extended_at = self._wait_ended
            self._pauses.clear()
        elif self._wait_ended > began:
            self._pauses.append((began, self._wait_ended))

    def _limit(self, now: float) -> float:
        """Time before which an entry must have been added to be overdue ``now``.

        Short waits do not count towards the timeout. Those that ended before this time are dropped.
        """
        limit = now - self.timeout
        for began, ended in reversed(self._pauses):
            if ended <= limit:
                break
            limit -= ended - began
        self._pauses = [(began, ended) for began, ended in self._pauses if ended > limit]
        return limit

    def overdue(
        self, now: float, entries: Iterable[tuple[int, tuple[V, float]]] | None = None
    ) -> list[int]:
        """Keys of the entries that timed out since the last call, oldest first.

        They stay in the map, and are not returned once more. Empty during a wait. ``entries`` is a
        copy, for a map from which another thread removes entries.
        """
        if self._is_waiting:
            self._is_waiting = False
            return []
        self._end_wait()
        late = self._limit(now)
        if late < self._extended_at:
            # The timeout of every entry restarted at the end of the last long wait.
            return []
        before = self._late
        self._late = late
        overdue: list[int] = []
        for key, (_, added) in self.entries.items() if entries is None else entries:
            if added > late:
                break
            if added > before:
                overdue.append(key)
        return overdue

    def expire(self, now: float) -> list[tuple[int, V]]:
        """Remove and return the overdue entries."""
        return [(key, self.entries.pop(key)[0]) for key in self.overdue(now)]


@dataclass(slots=True, eq=False)
class AckerResult:
    """Roots that an acker reports to spout tasks.

    Task 0 stands for an unknown spout: all spout tasks must be notified.
    """

    acked: dict[int, list[int]] = field(default_factory=dict)
    """Spout task -> roots whose trees are complete."""
    failed: dict[int, list[int]] = field(default_factory=dict)
    """Spout task -> roots that failed."""
    lost: dict[int, list[int]] = field(default_factory=dict)
    """Spout task -> roots with parts in a task or worker that has ended."""


class AckTracker:
    """Open trees of one acker task.

    A tree that is neither completed nor failed is forgotten after ``timeout`` seconds: by then its
    spout has failed it.
    """

    def __init__(self, timeout: float) -> None:
        self._trees: PendingMap[list[int]] = PendingMap(timeout)
        """Root -> [value, spout task or 0, bits of the workers it was sent on to]."""

    def __len__(self) -> int:
        return len(self._trees)

    def apply(
        self,
        now: float,
        inits: Iterable[tuple[int, int, int]] = (),
        acks: Iterable[tuple[int, int]] = (),
        fails: Iterable[int] = (),
        losses: Iterable[int] = (),
        into: AckerResult | None = None,
    ) -> AckerResult:
        """Apply frames, and return the roots to report.

        ``inits`` are (root, value, spout task), ``acks`` are (root, value), ``fails`` and
        ``losses`` are roots. An ack may come before the init of its tree, which then has no spout
        task yet. The result is added to ``into``, which is returned.
        """
        result = AckerResult() if into is None else into
        trees = self._trees.entries
        for root, value, task in inits:
            entry = trees.get(root)
            if entry is None:
                trees[root] = ([value, task, 0], now)
            else:
                tree = entry[0]
                value ^= tree[0]
                if value:
                    tree[0] = value
                    tree[1] = task
                else:
                    del trees[root]
                    result.acked.setdefault(task, []).append(root)
        for root, value in acks:
            entry = trees.get(root)
            if entry is None:
                trees[root] = ([value, 0, 0], now)
                continue
            tree = entry[0]
            value ^= tree[0]
            tree[0] = value
            if not value and tree[1]:
                del trees[root]
                result.acked.setdefault(tree[1], []).append(root)
        for roots, verdict in ((fails, result.failed), (losses, result.lost)):
            for root in roots:
                entry = trees.pop(root, None)
                verdict.setdefault(entry[0][1] if entry is not None else 0, []).append(root)
        return result

    def touch(self, roots: Iterable[int], bits: int) -> None:
        """Note that open trees have parts in the workers of these bits.

        Roots without an open tree are ignored, here and in :meth:`lose`.
        """
        trees = self._trees.entries
        for root in roots:
            if (entry := trees.get(root)) is not None:
                entry[0][2] |= bits

    def touching(self, bits: int) -> list[int]:
        """Roots of the open trees that have parts in one of these workers."""
        return [root for root, entry in self._trees.entries.items() if entry[0][2] & bits]

    def lose(self, roots: Iterable[int], into: AckerResult) -> None:
        """Fail the open trees of these roots, because a worker with parts has ended."""
        for root in roots:
            if (entry := self._trees.pop(root)) is not None:
                into.lost.setdefault(entry[0][1], []).append(root)

    def extend_deadlines(self, now: float) -> None:
        """Stop the timeouts of open trees (:meth:`PendingMap.extend_deadlines`)."""
        self._trees.extend_deadlines(now)

    def expire(self, now: float) -> int:
        """Forget trees older than the timeout; returns their number."""
        return len(self._trees.expire(now))
