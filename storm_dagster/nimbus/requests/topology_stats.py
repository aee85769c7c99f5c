"""Requests to topology masters, shared by the callers of one moment."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Executor, Future, TimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.view import TopologyView
from storm_dagster.model.wire import HistoryQuery
from storm_dagster.operations.live.worker_requests import WorkerLinks, ask_topology_master

_log = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")

_ANSWER_SECS = 1.0
"""Longest wait for the answer of a topology master."""
_SILENCE_SECS = 2.0
"""Time in which a topology master that did not answer is not called, so that pages do not wait for
it each time.
"""
_MAX_WAIT_SECS = 10.0
"""Maximum wait for the request of another caller, which may have to wait for a thread."""


class TopologyStats:
    """Calls of topology masters, which skip for a moment those that do not answer."""

    def __init__(self, links: WorkerLinks | None = None) -> None:
        self._links = links or WorkerLinks()
        self._silent: dict[str, float] = {}
        """Topology id -> monotonic time until which its topology master is not called."""
        self._lock = threading.Lock()

    def ask(
        self, topology: TopologyView, history: HistoryQuery | None = None
    ) -> Mapping[str, Any] | None:
        """Return ``{"tasks": ..., "workers": ...}``; with ``history`` rows of its rings.

        ``None`` if the topology master does not run, does not answer, or did not a moment ago.
        """
        started = time.monotonic()
        extra = {"topology": topology.id}
        with self._lock:
            self._silent = {key: until for key, until in self._silent.items() if until > started}
            if topology.id in self._silent:
                return None
        try:
            key, trusted = self._links.to(topology)
            answer = ask_topology_master(
                topology, timeout=_ANSWER_SECS, link_key=key, history=history, trusted=trusted
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
        # One that fails at once makes no page wait. One of an earlier release does not answer a
        # request for a history.
        if answer is None and history is None and now - started >= _ANSWER_SECS:
            _log.info("the topology master of %s does not answer", topology.id, extra=extra)
            with self._lock:
                self._silent[topology.id] = now + _SILENCE_SECS
        return answer


@dataclass(frozen=True)
class _Answer(Generic[ValueT]):
    """Answer to one request."""

    at: float
    """Time at which it came, monotonic seconds."""
    fresh_secs: float
    """Age up to which it is returned without a new request."""
    value: ValueT


class SharedValues(Generic[ValueT]):
    """Newest value for each key, at most ``secs`` old.

    A request is a function, which returns ``None`` without an answer. Callers that come during a
    request wait for the same request. The number of keys is not limited: values older than
    ``oldest_secs`` are dropped. With ``times`` a value is only fresh for that many times the
    processor time that its thread took for it.
    """

    def __init__(self, secs: float, times: float | None = None, oldest_secs: float = 60.0) -> None:
        self._secs = secs
        self._times = times
        self._oldest_secs = oldest_secs
        self._lock = threading.Lock()
        self._requests: dict[Hashable, Future[ValueT | None]] = {}
        """Requests under way."""
        self._answers: dict[Hashable, _Answer[ValueT]] = {}
        """Newest answers, also those that are not fresh any longer."""

    def get(self, key: Hashable, ask: Callable[[], ValueT | None]) -> ValueT | None:
        """Return the value; ``None`` without one, or if it does not come in time.

        The request runs in the caller's thread if no request for the key is under way. An error of
        ``ask`` is raised there; other callers get ``None``.
        """
        future, is_new = self._begin(key)
        if is_new:
            self._finish(key, ask, future)
        try:
            return future.result(_MAX_WAIT_SECS)
        except TimeoutError:
            return None

    def latest(
        self,
        key: Hashable,
        ask: Callable[[], ValueT | None],
        askers: Executor,
        wait_secs: float,
    ) -> tuple[ValueT | None, float]:
        """Return the newest value and its age in seconds, after at most ``wait_secs``.

        If the answer does not come in that time, it is the one before; ``None``, whose age has no
        meaning, if there is none or it was dropped. The request continues in ``askers``.
        """
        future, is_new = self._begin(key)
        if is_new:
            askers.submit(self._finish, key, ask, future)
        with suppress(TimeoutError):
            future.result(wait_secs)
        with self._lock:
            answer = self._answers.get(key)
        if answer is None:
            return None, time.monotonic()
        return answer.value, time.monotonic() - answer.at

    def _begin(self, key: Hashable) -> tuple[Future[ValueT | None], bool]:
        """Future of the answer, and True if the caller must make the request.

        The future of a fresh answer is done. With a new request old answers of all keys are
        dropped.
        """
        with self._lock:
            now = time.monotonic()
            answer = self._answers.get(key)
            if answer is not None and now - answer.at < answer.fresh_secs:
                ready: Future[ValueT | None] = Future()
                ready.set_result(answer.value)
                return ready, False
            request = self._requests.get(key)
            if request is not None:
                return request, False
            self._answers = {
                other_key: other_answer
                for other_key, other_answer in self._answers.items()
                if now - other_answer.at < self._oldest_secs
            }
            request = Future()
            self._requests[key] = request
            return request, True

    def _finish(
        self, key: Hashable, ask: Callable[[], ValueT | None], future: Future[ValueT | None]
    ) -> None:
        """Make the request, and pass its answer to all callers that wait for ``future``.

        An error of ``ask`` is raised after the callers got ``None``.
        """
        value: ValueT | None = None
        started = time.thread_time()
        try:
            value = ask()
        finally:
            with self._lock:
                # A missing answer is not kept: the next caller of a topology that is just starting
                # makes a new request.
                del self._requests[key]
                if value is not None:
                    fresh_secs = self._secs
                    if self._times is not None:
                        cpu_secs = time.thread_time() - started
                        fresh_secs = min(fresh_secs, self._times * cpu_secs)
                    self._answers[key] = _Answer(time.monotonic(), fresh_secs, value)
            future.set_result(value)
