"""Guard against requests of other sites; counts; headers for browsers.

A page of another site may make a browser send requests here (CSRF), or make its own name resolve to
this machine (DNS rebinding). So the name in ``Host`` must be a name of this service or an address
literal, which no other site can forge. The ``Origin`` of a page must be this very service. A
browser that sends ``Sec-Fetch-Site: cross-site`` can only follow a link, by a request that changes
no state. No response has a CORS header and none is JSONP, so that other sites cannot read responses
either. A response may have its own content security policy.
"""

import ipaddress
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from storm_dagster.http.responses import error_response, refuse_websocket
from storm_dagster.model.errors import InvalidRequest

Observe = Callable[[str, str, int, float], None]
"""Called after each request with method, route pattern, status and seconds."""

# Any other method is counted as one, so that clients cannot create metrics.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_SAFE = frozenset({"GET", "HEAD"})
"""Methods that change no state."""
# They forbid a browser to guess the type of a response, to show it inside of other pages, to tell
# its address to others, and to run scripts or load parts of it.
_BROWSER_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    ),
)


def allowed_hosts(configured: Iterable[str]) -> frozenset[str]:
    """Host names of the service: configured ones, this machine's, localhost."""
    return frozenset({"localhost", socket.gethostname().lower(), *map(str.lower, configured)})


def host_of(authority: str) -> str:
    """The host in ``host:port`` or ``[v6]:port``; ``""`` if invalid."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").lower()
    except ValueError:
        return ""


def _is_own_name(host: str, own_names: frozenset[str]) -> bool:
    """True for a name of this service and for an address literal."""
    if host in own_names:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _same_origin(origin: str, scheme: str, authority: str) -> bool:
    """True if a page of ``origin`` was served at this scheme and authority."""
    try:
        parts = urlsplit(origin)
        return (parts.scheme, parts.netloc.lower()) == (scheme, authority.lower())
    except ValueError:
        return False


@dataclass(eq=False, repr=False)
class Guard:
    """Middleware that refuses requests of other sites, and counts requests."""

    _app: ASGIApp
    _: KW_ONLY
    hosts: frozenset[str]
    """Names of the service, in lower case; an address literal is always accepted."""
    observe: Observe = lambda *_: None
    routes: Iterable[Route] = ()
    """Routes whose patterns ``observe`` gets; it gets "none" for a request without one."""
    headers: Iterable[tuple[bytes, bytes]] = _BROWSER_HEADERS
    """Headers of every response that does not have its own value."""

    def __post_init__(self) -> None:
        # Endpoint of a route -> its path pattern.
        self._patterns: dict[Any, str] = {route.endpoint: route.path for route in self.routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request of another site with an error, and pass any other one on.

        Requests over HTTP are observed. A WebSocket that is refused gets the status 403.
        """
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
        if scope["type"] == "websocket":
            # Its page must be of this service, too: browsers open a WebSocket to any server.
            scheme = scope.get("scheme", "ws").replace("ws", "http")
            if self._refusal("CONNECT", scheme, headers) is None:
                await self._app(scope, receive, send)
            else:
                await refuse_websocket(send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["method"], scope.get("scheme", "http"), headers)
        began = time.monotonic()
        # Of a request that ends without a response.
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers_of_response = list(message["headers"])
                own_names = {name for name, _ in headers_of_response}
                for name, value in self.headers:
                    if name not in own_names:
                        headers_of_response.append((name, value))
                message["headers"] = headers_of_response
            await send(message)

        try:
            if refusal is not None:
                await error_response(refusal)(scope, receive, watched)
            else:
                await self._app(scope, receive, watched)
        finally:
            route = self._patterns.get(scope.get("endpoint"), "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.observe(method, route, status, time.monotonic() - began)

    def _refusal(
        self, method: str, scheme: str, headers: dict[bytes, str]
    ) -> InvalidRequest | None:
        """The error of a request that another site may have caused; ``None`` for any other one."""
        authority = headers.get(b"host", "")
        host = host_of(authority)
        if not _is_own_name(host, self.hosts):
            return InvalidRequest(
                f"this service is not called {host!r:.100}: use its address, or set "
                "storm.local.hostname to that name"
            )
        origin = headers.get(b"origin")
        if origin is not None and not _same_origin(origin, scheme, authority):
            return InvalidRequest(f"requests of pages from {origin!r:.100} are refused")
        is_link = headers.get(b"sec-fetch-mode") == "navigate" and method in _SAFE
        if headers.get(b"sec-fetch-site") in ("cross-site", "same-site") and not is_link:
            return InvalidRequest("requests that a browser makes for another site are refused")
        return None
