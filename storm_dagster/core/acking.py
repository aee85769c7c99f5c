"""Storm's XOR acking: completion of a tree of tuples, tracked with one number for each tree.

Each edge of a tree between workers has a random 64-bit id. It is XORed into the tree's number twice, when
it is emitted and when it has been processed, so that the number is zero exactly when nothing is left (or
by an accident of one in 2**64). The order in which the values arrive does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

V = TypeVar("V")


class PendingMap(Generic[V]):
    """A map whose entries expire ``timeout`` seconds after they were added, never before.

    Entries are kept in the order in which they were added, so that expiry looks only at the oldest.
    """

    __slots__ = ("entries", "timeout")

    def __init__(self, timeout: float) -> None:
        self.timeout: float = timeout
        self.entries: dict[int, tuple[V, float]] = {}
        """Key -> (value, time added). Add at the end only; deleting is free."""

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, key: int, value: V, now: float) -> None:
        """Add an entry; ``now`` may not be less than in earlier calls."""
        self.entries[key] = (value, now)

    def pop(self, key: int) -> tuple[V, float] | None:
        """Remove and return the entry, or ``None``."""
        return self.entries.pop(key, None)

    def expire(self, now: float) -> list[tuple[int, V]]:
        """Remove and return the entries that are older than the timeout, oldest first."""
        limit = now - self.timeout
        found: list[tuple[int, V]] = []
        for key, (value, added) in self.entries.items():
            if added > limit:
                break
            found.append((key, value))
        for key, _ in found:
            del self.entries[key]
        return found


class AckerResult:
    """Roots that an acker reports to spout tasks."""

    __slots__ = ("acked", "failed", "unrouted")

    def __init__(self) -> None:
        self.acked: dict[int, list[int]] = {}
        """Spout task -> roots whose trees are complete."""
        self.failed: dict[int, list[int]] = {}
        """Spout task -> roots that failed."""
        self.unrouted: list[int] = []
        """Roots that failed before their spout's task was known here: all spouts must be told."""


class AckTracker:
    """Open trees of one acker task. A tree that is neither completed nor failed is forgotten after ``timeout``
    seconds: by then its spout has failed it by itself."""

    def __init__(self, timeout: float) -> None:
        self._trees: PendingMap[list[int]] = PendingMap(timeout)
        self.updates: int = 0
        """Number of values that were applied."""

    def __len__(self) -> int:
        return len(self._trees)

    def apply(
        self,
        now: float,
        inits: Iterable[tuple[int, int, int]] = (),
        acks: Iterable[tuple[int, int]] = (),
        fails: Iterable[int] = (),
        into: AckerResult | None = None,
    ) -> AckerResult:
        """Apply (root, value, spout task) inits, (root, value) acks and failed roots; the roots to report."""
        result = AckerResult() if into is None else into
        trees = self._trees.entries
        count = 0
        for root, value, task in inits:
            count += 1
            entry = trees.get(root)
            if entry is None:
                trees[root] = ([value, task], now)
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
            count += 1
            entry = trees.get(root)
            if entry is None:
                trees[root] = ([value, 0], now)
                continue
            tree = entry[0]
            value ^= tree[0]
            tree[0] = value
            if not value and tree[1]:
                del trees[root]
                result.acked.setdefault(tree[1], []).append(root)
        for root in fails:
            count += 1
            entry = trees.pop(root, None)
            task = entry[0][1] if entry is not None else 0
            if task:
                result.failed.setdefault(task, []).append(root)
            else:
                result.unrouted.append(root)
        self.updates += count
        return result

    def expire(self, now: float) -> int:
        """Forget trees older than the timeout; returns their number."""
        return len(self._trees.expire(now))
