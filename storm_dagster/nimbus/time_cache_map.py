"""A map whose entries expire when they are left idle: Storm's TimeCacheMap.

Entries sit in a few buckets by age. A rotation drops the oldest bucket and pushes an empty one; an entry that
is put again moves to the newest bucket. With ``n`` buckets and expiry ``E`` there is a rotation every
``E/(n-1)`` seconds, and an idle entry is removed at an age between ``E`` and ``E*n/(n-1)``.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_log = logging.getLogger(__name__)


class TimeCacheMap(Generic[K, V]):
    """An expiring map, safe for many threads.

    Nothing runs by itself: the owner calls :meth:`advance` with its monotonic time (each nimbus does so from one
    upkeep thread). ``on_expire(key, value)`` is called there, outside the lock, after the entry has left the map.
    ``limit`` bounds the number of entries, whatever callers do.
    """

    def __init__(
        self,
        expiry_secs: float,
        *,
        now: float,
        buckets: int = 3,
        on_expire: Callable[[K, V], None] | None = None,
        limit: int | None = None,
    ) -> None:
        if buckets < 2:
            raise ValueError(f"a TimeCacheMap needs at least 2 buckets, got {buckets}")
        if expiry_secs <= 0:
            raise ValueError(f"expiry must be positive, got {expiry_secs}")
        self.rotation_secs: float = expiry_secs / (buckets - 1)
        self._buckets: deque[dict[K, V]] = deque({} for _ in range(buckets))
        self._on_expire = on_expire
        self._limit = limit
        self._rotated_at = now
        self._lock = threading.Lock()

    def advance(self, now: float) -> int:
        """Make every rotation that is due at ``now`` (monotonic seconds); how many entries expired."""
        expired = 0
        while True:
            with self._lock:
                if now - self._rotated_at < self.rotation_secs:
                    return expired
                if now - self._rotated_at > self.rotation_secs * (len(self._buckets) + 1):
                    # A pause of the whole machine: each bucket is old by now, more rotations add nothing.
                    self._rotated_at = now - self.rotation_secs * len(self._buckets)
                self._rotated_at += self.rotation_secs
                dead = self._buckets.pop()
                self._buckets.appendleft({})
            expired += len(dead)
            for key, value in dead.items():
                if self._on_expire is None:
                    continue
                try:
                    self._on_expire(key, value)
                except Exception:
                    _log.exception("expiring %r failed", key)

    def put(self, key: K, value: V) -> bool:
        """Put or refresh the entry: its life starts again. ``False``, and no change, when the map is full."""
        with self._lock:
            bucket = self._bucket_of(key)
            if bucket is not None:
                del bucket[key]
            elif self._limit is not None and self._size() >= self._limit:
                return False
            self._buckets[0][key] = value
            return True

    def touch(self, key: K) -> V | None:
        """The value, its life started again; ``None`` when it is not there (any more)."""
        with self._lock:
            bucket = self._bucket_of(key)
            if bucket is None:
                return None
            value = self._buckets[0][key] = bucket.pop(key)
            return value

    def get(self, key: K) -> V | None:
        """The value; its life goes on as it was. ``None`` when it is not there (any more)."""
        with self._lock:
            bucket = self._bucket_of(key)
            return None if bucket is None else bucket[key]

    def remove(self, key: K) -> V | None:
        """Take the entry out and return its value; the expiry callback is not called."""
        with self._lock:
            bucket = self._bucket_of(key)
            return None if bucket is None else bucket.pop(key)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return self._bucket_of(key) is not None

    def __len__(self) -> int:
        with self._lock:
            return self._size()

    def build_map(self) -> dict[K, V]:
        """All entries, merged."""
        with self._lock:
            return {key: value for bucket in self._buckets for key, value in bucket.items()}

    def _bucket_of(self, key: object) -> dict[K, V] | None:
        return next((bucket for bucket in self._buckets if key in bucket), None)

    def _size(self) -> int:
        return sum(len(bucket) for bucket in self._buckets)
