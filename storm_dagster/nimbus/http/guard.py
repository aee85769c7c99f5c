"""What every request passes: who may speak to a service on loopback, and counting (S11, DNS rebinding)."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.nimbus.http.answers import error_response
from storm_dagster.nimbus.http.metrics import Metrics

__all__ = ["Guard", "allowed_hosts", "host_of"]


def allowed_hosts(configured: Iterable[str]) -> frozenset[str]:
    """Host names under which the service may be addressed: the configured ones, this machine's, localhost."""
    own = {"localhost", socket.gethostname().lower()}
    return frozenset(own | {name.lower() for name in configured})


def host_of(authority: str) -> str:
    """The host in ``host:port`` or ``[v6]:port``, in lower case; ``""`` when it is none."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").lower()
    except ValueError:
        return ""


def _is_known(host: str, known: frozenset[str]) -> bool:
    if host in known:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Guard:
    """Refuses requests that a foreign page makes a browser send, and counts all others.

    A page of another site can make its own name resolve to this machine; the name then stands in ``Host``
    and ``Origin``. An address literal cannot be forged in that way.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: frozenset[str], metrics: Metrics, routes: Iterable[Route]
    ) -> None:
        self._app = app
        self._patterns = {route.endpoint: route.path for route in routes}
        self._hosts = hosts
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(headers)
        began = time.monotonic()
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            await send(message)

        try:
            if refusal is not None:
                await error_response(refusal)(scope, receive, watched)
            else:
                await self._app(scope, receive, watched)
        finally:
            endpoint = scope.get("endpoint")
            route = self._patterns.get(endpoint, "none") if endpoint is not None else "none"
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.requests.labels(method, route, str(status)).inc()
            self._metrics.seconds.labels(method, route).observe(time.monotonic() - began)

    def _refusal(self, headers: dict[bytes, str]) -> InvalidRequest | None:
        host = host_of(headers.get(b"host", ""))
        if not _is_known(host, self._hosts):
            return InvalidRequest(
                f"this service is not called {host!r:.100}: use its address, or set storm.local.hostname to that name"
            )
        origin = headers.get(b"origin")
        if origin is not None and not _is_known(host_of(urlsplit(origin).netloc), self._hosts):
            return InvalidRequest(f"requests of pages from {origin!r:.100} are refused")
        return None


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
