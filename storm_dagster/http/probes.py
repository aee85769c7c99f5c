"""Probes of a daemon: ``/livez`` and ``/readyz``, in the words of Kubernetes.

Liveness means that the daemon's loop makes passes: a restart helps if it does not. Readiness means
that the daemon does its work for others now: a restart need not help, but no further daemon should
be replaced before. Both answer 200 or 503, with the problems. They need no proof, and so name no
topology, host or address. Neither waits for anything, also not for a thread.
"""

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
"""Time without a pass of its loop after which a daemon is not live."""


class ProbeDocument(BaseModel, extra="forbid"):
    """Answer to a probe; without problems it is ``ok``."""

    status: Literal["ok", "failed"]
    problems: list[str]


class LoopPasses:
    """Time of the last pass of a daemon's loop, for its liveness.

    ``clock`` returns seconds that never go back and do not count the sleep of the machine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._passed_at = clock()

    def passed(self) -> None:
        """Record a pass; a loop that waits records it as well."""
        self._passed_at = self._clock()

    def problems(self) -> list[str]:
        """The problem of a loop that made no pass for a minute."""
        silent_secs = self._clock() - self._passed_at
        if silent_secs <= _SILENT_SECS:
            return []
        return [f"the loop of this daemon made no pass for {silent_secs:.0f} s"]


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
