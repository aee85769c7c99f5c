"""Mutual heartbeat with the container that nimbus runs in (JStorm's container heartbeat, by files).

Each side touches a file in its folder every few seconds, named by the present time in seconds; the other one
checks for a newer name. The age is taken from this process's own clock since the newest name last
changed: a clock that is set meanwhile, here or there, ends nobody.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from storm_dagster.model.errors import StormDagsterError, Unavailable

_log = logging.getLogger(__name__)
_KEPT = 10
_TOLERATED = 30
"""Checks without any beat of the container before it counts as absent (JStorm)."""


class ContainerHeartbeat:
    """Writes own beats to ``own`` and watches those in ``container``."""

    def __init__(
        self,
        container: Path,
        own: Path,
        *,
        timeout_secs: float,
        pause_secs: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._container = container
        self._own = own
        self._timeout = timeout_secs
        self.pause_secs = pause_secs
        self._clock = clock
        self._wall = wall
        self._newest: int | None = None
        self._seen_at = clock()
        self._misses = 0
        self.failure: StormDagsterError | None = None

    def tick(self) -> None:
        """Beat once and check once; :class:`Unavailable` when the container is gone."""
        self._own.mkdir(parents=True, exist_ok=True)
        (self._own / str(int(self._wall()))).touch()
        for old in _stamps(self._own)[:-_KEPT]:
            (self._own / str(old)).unlink(missing_ok=True)
        found = _stamps(self._container)
        now = self._clock()
        if not found:
            self._misses += 1
            if self._misses > _TOLERATED:
                raise Unavailable(
                    f"no beat of the container is in {self._container} after {self._misses} checks: "
                    "start its heartbeat, or unset container.nimbus.heartbeat"
                )
            return
        self._misses = 0
        if found[-1] != self._newest:
            self._newest, self._seen_at = found[-1], now
        elif now - self._seen_at > self._timeout:
            raise Unavailable(
                f"the container's newest beat in {self._container} is {self._newest}, unchanged for "
                f"{now - self._seen_at:g} s: the container is gone, and nimbus ends with it"
            )

    def run(self, ended: threading.Event, stop: threading.Event) -> None:
        """Run until ``ended``; sets ``stop``, with :attr:`failure`, when the container is gone."""
        while True:
            try:
                self.tick()
            except StormDagsterError as error:
                self.failure = error
                stop.set()
                return
            except OSError as error:
                _log.warning("the container's heartbeat cannot be kept: %s", error)
            if ended.wait(self.pause_secs):
                return


def _stamps(folder: Path) -> list[int]:
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    except FileNotFoundError:
        return []
