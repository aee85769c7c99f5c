"""A map whose entries expire when they are left idle: Storm's TimeCacheMap.

Time passes in rotations: with ``n`` generations and expiry ``E`` there is one every ``E/(n-1)``
seconds. A refreshed entry belongs to the newest generation, and is removed by the ``n``-th rotation
after that. So an idle entry is removed at an age between ``E`` and ``E*n/(n-1)``.
"""

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_log = logging.getLogger(__name__)
_GENERATIONS = 3
"""``n`` above: an entry expires at an age between ``E`` and ``1.5 * E``."""


class TimeCacheMap(Generic[K, V]):
    """An expiring map, safe for many threads.

    The map has no thread: its owner calls :meth:`advance` with its monotonic time (each nimbus does
    so from one upkeep thread). ``on_expire(key, value)`` is called there, outside the lock, after
    the entry has left the map. ``limit`` always bounds the number of entries.
    """

    def __init__(
        self,
        expiry_secs: float,
        *,
        now: float,
        limit: int,
        on_expire: Callable[[K, V], None] = lambda *_: None,
    ) -> None:
        if expiry_secs <= 0:
            raise ValueError(f"expiry must be positive, got {expiry_secs}")
        self._rotation_secs = expiry_secs / (_GENERATIONS - 1)
        """Interval of the rotations."""
        self._entries: dict[K, tuple[int, V]] = {}
        """Key -> number of rotations at its last refresh, and the value."""
        self._on_expire = on_expire
        self._limit = limit
        self._began = now
        self._rotations = 0
        """Number of rotations since ``_began``."""
        self._lock = threading.Lock()

    def advance(self, now: float) -> None:
        """Make every rotation that is due at ``now`` (monotonic seconds).

        Expired entries are removed, and then ``on_expire`` is called for each; its errors are
        logged.
        """
        with self._lock:
            rotations = int((now - self._began) / self._rotation_secs)
            if rotations == self._rotations:
                return
            self._rotations = rotations
            expired: dict[K, V] = {}
            for key, (refreshed_at, value) in self._entries.items():
                if rotations - refreshed_at >= _GENERATIONS:
                    expired[key] = value
            for key in expired:
                del self._entries[key]
        for key, value in expired.items():
            try:
                self._on_expire(key, value)
            except Exception:
                _log.exception("expiring %r failed", key)

    def put(self, key: K, value: V) -> bool:
        """Put or refresh the entry; return ``False`` if it is new and the map is full."""
        with self._lock:
            if key not in self._entries and len(self._entries) >= self._limit:
                return False
            self._entries[key] = self._rotations, value
            return True

    def touch(self, key: K) -> V | None:
        """Refresh the entry and return its value; ``None`` if it does not exist."""
        with self._lock:
            if key not in self._entries:
                return None
            _, value = self._entries[key]
            self._entries[key] = self._rotations, value
            return value

    def get(self, key: K) -> V | None:
        """Return the value without a refresh; ``None`` if it does not exist."""
        with self._lock:
            return self._entries.get(key, (0, None))[1]

    def remove(self, key: K) -> V | None:
        """Remove the entry and return its value; the expiry callback is not called."""
        with self._lock:
            return self._entries.pop(key, (0, None))[1]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def build_map(self) -> dict[K, V]:
        """Return a copy with all entries."""
        with self._lock:
            return {key: value for key, (_, value) in self._entries.items()}
