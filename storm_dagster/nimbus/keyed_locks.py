"""Locks by key."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary


class KeyedLocks:
    """One lock for each key in use.

    It exists while a thread holds it or waits for it.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Hold the key's lock."""
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            yield
