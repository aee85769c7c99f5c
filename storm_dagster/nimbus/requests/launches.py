"""Launches of Dagster runs by this nimbus: those under way, and their runs."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from storm_dagster.nimbus.time_cache_map import TimeCacheMap

_REMEMBERED_SECS = 600.0
"""Time after which the run of a key is forgotten if it is not noted once more."""
_MAX_RUNS = 10_000
"""Limit of the remembered runs; the runs of further keys are not remembered."""


@dataclass
class RecordWrite:
    """Outcome of writing the record of one launch."""

    was_begun: bool = False
    """True from the beginning of the write: its reply may be lost, and the record exist."""
    version: int | None = None
    """Data version of the record; ``None`` unless the write was confirmed."""


class Launches:
    """Memory of launches, by client token or request. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: Counter[str] = Counter()
        """Key -> number of threads that hold it now."""
        self.runs: TimeCacheMap[str, str] = TimeCacheMap(
            _REMEMBERED_SECS, now=time.monotonic(), limit=_MAX_RUNS
        )
        """Key -> id of the run that this nimbus launched, or found."""

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Mark the key as being launched, so that no other thread takes over its launch."""
        with self._lock:
            self._busy[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy[key] -= 1
                if not self._busy[key]:
                    del self._busy[key]

    def is_busy(self, key: str) -> bool:
        """True while a thread launches the run of that key."""
        with self._lock:
            return key in self._busy

    def note_run(self, key: str, run_id: str) -> None:
        """Remember the run of that key."""
        self.runs.put(key, run_id)
