"""What the leader did while Dagster was away, to be reported to it when it answers again (best effort)."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass

from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.nimbus.dagster_client import DagsterClient

__all__ = ["Deed", "Unreported"]

_log = logging.getLogger(__name__)
_MOST = 1000


@dataclass(frozen=True)
class Deed:
    """One thing that was done without a run."""

    asset: tuple[str, ...]
    partition: str
    description: str


class Unreported:
    """A bounded memory of deeds; the oldest are forgotten first, and a restart forgets all."""

    def __init__(self) -> None:
        self._deeds: deque[Deed] = deque(maxlen=_MOST)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._deeds)

    def add(
        self, partition: str, description: str, asset: tuple[str, ...] = ("storm", "active_topology")
    ) -> None:
        """Remember a deed."""
        with self._lock:
            self._deeds.append(Deed(asset, partition, description))

    def flush(self, dagster: DagsterClient) -> int:
        """Report what is remembered, oldest first, until Dagster does not answer; how many were reported."""
        reported = 0
        while True:
            with self._lock:
                if not self._deeds:
                    return reported
                deed = self._deeds[0]
            try:
                dagster.report(deed.asset, deed.partition, deed.description)
                reported += 1
            except Unavailable:
                return reported
            except StormDagsterError as error:
                _log.warning("not reported to Dagster: %s (%s)", deed.description, error)
            with self._lock:
                if self._deeds and self._deeds[0] is deed:
                    self._deeds.popleft()
