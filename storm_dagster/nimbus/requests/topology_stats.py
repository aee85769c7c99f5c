"""Statistics of a topology: asked of its topology master's worker, never kept in ZooKeeper."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.security import Security
from storm_dagster.model.view import TopologyView
from storm_dagster.operations.live.worker_curve import link_key_of
from storm_dagster.operations.live.worker_requests import ask_topology_master

__all__ = ["TopologyStats"]

_log = logging.getLogger(__name__)
_ANSWER_SECS = 1.0
_LEFT_ALONE_SECS = 2.0
"""A topology master that did not answer is left alone for this long, so that pages do not wait for it each time."""


class TopologyStats:
    """Asks topology masters, and remembers for a moment which of them are silent."""

    def __init__(self, security: Security | None = None) -> None:
        self._security = security or Security()
        self._silent: dict[str, float] = {}
        self._lock = threading.Lock()

    def ask(self, topology: TopologyView) -> Mapping[str, Any] | None:
        """``{"tasks": ..., "workers": ...}``; ``None`` when the topology master does not run or does not answer."""
        began = time.monotonic()
        with self._lock:
            self._silent = {key: until for key, until in self._silent.items() if until > began}
            if topology.id in self._silent:
                return None
        try:
            key = link_key_of(self._security, topology.id)
            answer = ask_topology_master(topology, timeout=_ANSWER_SECS, link_key=key)
        except StormDagsterError as error:
            _log.info("the topology master of %s answered with an error: %s", topology.id, error)
            answer = None
        now = time.monotonic()
        if answer is None and now - began >= _ANSWER_SECS:
            _log.info("the topology master of %s does not answer", topology.id)
            with self._lock:
                self._silent[topology.id] = now + _LEFT_ALONE_SECS
        return answer
