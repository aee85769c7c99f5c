"""Measurements of a supervisor's host for its record: its disk, and its clock."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from storm_dagster.host.disk import DiskRoom, disk_room
from storm_dagster.http.clocks import clock_ahead_secs
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.security.settings import Security

_log = logging.getLogger(__name__)

_MEASURE_SECS = 60.0
"""Interval between two measurements."""
_RETRY_SECS = 5.0
"""Pause before the next measurement while the leader's clock was never read."""
_ANSWER_SECS = 2.0
"""Longest wait for a nimbus, whose clock is compared."""


class HostMeasurements:
    """Newest measurements of the host.

    A thread of its own makes them, since a nimbus can be silent.
    """

    def __init__(
        self, conf: Mapping[str, Any], home: Path, nimbus_urls: Callable[[], Sequence[str]]
    ) -> None:
        """``nimbus_urls`` has the HTTP base URLs of the nimbuses, the leader's first."""
        self.disk: DiskRoom = disk_room(home)
        self.clock_ahead_secs: float | None = None
        """This clock less the leader's; ``None`` before the first answer."""
        self._home = home
        self._nimbus_urls = nimbus_urls
        self._options = Security.of(conf).client_options()

    def start(self, stop: threading.Event) -> None:
        """Start the thread, which ends with ``stop``."""
        threading.Thread(target=self._run, args=(stop,), name="measurements", daemon=True).start()

    def _run(self, stop: threading.Event) -> None:
        with httpx.Client(timeout=_ANSWER_SECS, **self._options) as http:
            while not stop.is_set():
                try:
                    self.measure(http)
                except Exception:
                    _log.exception("the disk and the clock of this host could not be measured")
                has_clock = self.clock_ahead_secs is not None
                stop.wait(_MEASURE_SECS if has_clock else _RETRY_SECS)

    def measure(self, http: httpx.Client) -> None:
        """Measure the disk, and the clock against the first nimbus of the list that answers."""
        self.disk = disk_room(self._home)
        try:
            urls = self._nimbus_urls()
        except StormDagsterError:
            return
        for url in urls:
            asked_at = time.time()
            try:
                response = http.get(f"{url}/healthz")
            except httpx.HTTPError:
                continue
            ahead_secs = clock_ahead_secs(response.headers, asked_at)
            if ahead_secs is not None:
                self.clock_ahead_secs = ahead_secs
                return
