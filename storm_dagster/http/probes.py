"""Probes of a daemon: ``/livez`` and ``/readyz``, in the words of Kubernetes.

Liveness means that the daemon's loop makes passes, or progress in a long one: a restart helps if it
does not. Readiness means that the daemon does its work for others now: a restart need not help, but
no further daemon should be replaced before. Both answer 200 or 503, with the problems. They need no
proof, and so name no topology, host or address. Neither waits for anything, also not for a thread.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from storm_dagster.http.responses import JSONResponse
from storm_dagster.http.router import Router

LIVE = "/livez"
READY = "/readyz"
_SILENT_SECS = 60.0
"""Time without a pass of its loop, or progress in it, after which a daemon is not live."""
_MAX_PASS_SECS = 900.0
"""Time after which a pass that still makes progress does not count as live any longer."""


class ProbeDocument(BaseModel, extra="forbid"):
    """Answer to a probe; without problems it is ``ok``."""

    status: Literal["ok", "failed"]
    problems: list[str]


class LoopPasses:
    """Time of the last pass of a daemon's loop, for its liveness.

    A pass may take long, such as that in which a nimbus reads the whole cluster as a new leader.
    Then the daemon is live while the loop's own thread makes progress, for at most 15 minutes.
    ``clock`` returns seconds that never go back and do not count the sleep of the machine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._passed_at = clock()
        self._progressed_at = self._passed_at
        self._thread: int | None = None
        """Id of the loop's thread; ``None`` before its first pass."""

    def passed(self) -> None:
        """Record a pass, in the loop's thread; a loop that waits records it as well."""
        self._thread = threading.get_ident()
        self._passed_at = self._clock()

    def progressed(self) -> None:
        """Record that the pass under way has made progress; without effect in another thread."""
        if threading.get_ident() == self._thread:
            self._progressed_at = self._clock()

    def problems(self) -> list[str]:
        """The problem of a loop that made no pass, and no progress in it, for a minute."""
        now = self._clock()
        silent_secs = now - max(self._passed_at, self._progressed_at)
        pass_secs = now - self._passed_at
        if silent_secs > _SILENT_SECS:
            return [f"the loop of this daemon made no pass for {pass_secs:.0f} s"]
        if pass_secs > _MAX_PASS_SECS:
            return [f"the loop of this daemon has not ended its pass for {pass_secs:.0f} s"]
        return []


class Probes:
    """Routes of the probes; each function returns the problems, without waiting for anything."""

    router: ClassVar = Router("probes")

    def __init__(
        self, live: Callable[[], Sequence[str]], ready: Callable[[], Sequence[str]]
    ) -> None:
        self._live = live
        self._ready = ready

    # ``async``: other handlers wait for a thread, of which a busy daemon may have none.
    @router.route(
        "GET",
        LIVE,
        summary="Liveness: 503 if the daemon's loop made no pass for 60 s",
        responses={200: ProbeDocument, 503: ProbeDocument},
    )
    async def liveness(self, request: Request) -> Response:
        """Answer to the probe of liveness."""
        return probe_response(self._live())

    @router.route(
        "GET",
        READY,
        summary="Readiness: 503 if the daemon cannot do its work now",
        responses={200: ProbeDocument, 503: ProbeDocument},
    )
    async def readiness(self, request: Request) -> Response:
        """Answer to the probe of readiness; a daemon that is not live is not ready."""
        return probe_response([*self._live(), *self._ready()])


def probe_response(problems: Sequence[str]) -> Response:
    """Status 200 without problems, and 503 with some."""
    document = ProbeDocument(status="failed" if problems else "ok", problems=list(problems))
    headers = {"Cache-Control": "no-store"}
    return JSONResponse(
        document.model_dump(), status_code=503 if problems else 200, headers=headers
    )
