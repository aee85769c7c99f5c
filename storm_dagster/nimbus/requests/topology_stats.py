"""Answers of topology masters: each is asked once for all who want to know the same at the same
time.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Executor, Future, TimeoutError
from contextlib import suppress
from typing import Any

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.view import TopologyView
from storm_dagster.model.wire import HistoryQuery
from storm_dagster.operations.live.worker_requests import ask_topology_master, link_key_of
from storm_dagster.security.settings import Security

_log = logging.getLogger(__name__)

Ask = Callable[[], Mapping[str, Any] | None]
"""A request; ``None`` without an answer."""

_ANSWER_SECS = 1.0
_LEFT_ALONE_SECS = 2.0
"""A topology master that did not answer is left alone for this long, so that pages do not wait for
it each time.
"""
_LONGEST_WAIT_SECS = 10.0
"""For a request of somebody else, which may have to wait for a thread."""


class TopologyStats:
    """Asks topology masters, and remembers for a moment which of them are silent."""

    def __init__(self, security: Security | None = None) -> None:
        self._security = security or Security()
        self._silent: dict[str, float] = {}
        self._lock = threading.Lock()

    def ask(
        self, topology: TopologyView, history: HistoryQuery | None = None
    ) -> Mapping[str, Any] | None:
        """``{"tasks": ..., "workers": ...}``, with ``history`` rows of its rings.

        ``None`` when the topology master does not run or does not answer.
        """
        began, extra = time.monotonic(), {"topology": topology.id}
        with self._lock:
            self._silent = {key: until for key, until in self._silent.items() if until > began}
            if topology.id in self._silent:
                return None
        try:
            key = link_key_of(self._security, topology.id)
            answer = ask_topology_master(
                topology, timeout=_ANSWER_SECS, link_key=key, history=history
            )
        except StormDagsterError as error:
            _log.info(
                "the topology master of %s answered with an error: %s",
                topology.id,
                error,
                extra=extra,
            )
            answer = None
        now = time.monotonic()
        # An older one does not know of a history, and answers everything else.
        if answer is None and history is None and now - began >= _ANSWER_SECS:
            _log.info("the topology master of %s does not answer", topology.id, extra=extra)
            with self._lock:
                self._silent[topology.id] = now + _LEFT_ALONE_SECS
        return answer


class SharedAnswers:
    """The newest answer for each key, at most ``secs`` old; whoever asks meanwhile waits for the
    same request.

    However many keys there are, none drops the answer of another: what is older than
    ``oldest_secs`` goes. With ``times`` an answer is only fresh for so many times the processor
    time that its own thread took for it.
    """

    def __init__(self, secs: float, times: float | None = None, oldest_secs: float = 60.0) -> None:
        self._secs, self._times, self._oldest_secs = secs, times, oldest_secs
        self._lock = threading.Lock()
        self._asked: dict[Hashable, Future[Mapping[str, Any] | None]] = {}
        self._known: dict[Hashable, tuple[float, float, Mapping[str, Any]]] = {}
        """When it came, for how long it is fresh, and the answer."""

    def get(self, key: Hashable, ask: Ask) -> Mapping[str, Any] | None:
        """The answer, asked for in the caller's thread if nobody waits for it yet; ``None`` without
        one in time.
        """
        future, mine = self._begin(key)
        if mine:
            self._finish(key, ask, future)
        try:
            return future.result(_LONGEST_WAIT_SECS)
        except TimeoutError:
            return None

    def latest(
        self, key: Hashable, ask: Ask, askers: Executor, wait_secs: float
    ) -> tuple[Mapping[str, Any] | None, float]:
        """The answer if it comes within ``wait_secs``, else the one before (``None``: none of the
        last minute).

        And its age in seconds. The request goes on in ``askers`` meanwhile.
        """
        future, mine = self._begin(key)
        if mine:
            askers.submit(self._finish, key, ask, future)
        with suppress(TimeoutError):
            future.result(wait_secs)
        with self._lock:
            at, _, answer = self._known.get(key, (0.0, 0.0, None))
        return answer, time.monotonic() - at

    def _begin(self, key: Hashable) -> tuple[Future[Mapping[str, Any] | None], bool]:
        with self._lock:
            now = time.monotonic()
            at, fresh_secs, answer = self._known.get(key, (0.0, 0.0, None))
            future = self._asked.get(key)
            if answer is not None and now - at < fresh_secs:
                future = Future()
                future.set_result(answer)
                return future, False
            if future is not None:
                return future, False
            self._known = {
                one: known
                for one, known in self._known.items()
                if now - known[0] < self._oldest_secs
            }
            future = self._asked[key] = Future()
            return future, True

    def _finish(self, key: Hashable, ask: Ask, future: Future[Mapping[str, Any] | None]) -> None:
        answer: Mapping[str, Any] | None = None
        began = time.thread_time()
        try:
            answer = ask()
        finally:
            with self._lock:
                # No answer is not kept: a topology that is just starting is asked again at once.
                del self._asked[key]
                if answer is not None:
                    longest = (
                        self._secs
                        if self._times is None
                        else self._times * (time.thread_time() - began)
                    )
                    self._known[key] = (time.monotonic(), min(self._secs, longest), answer)
            future.set_result(answer)
