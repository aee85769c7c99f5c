"""Service of Dagster's web application: guard, authentication, and JSON as the only way to change something."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from storm_dagster.http.authentication import Authentication
from storm_dagster.http.guard import Guard, allowed_hosts, host_of
from storm_dagster.http.listening import listen
from storm_dagster.http.responses import error_response
from storm_dagster.http.server import HttpService
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.exposure import check_exposure
from storm_dagster.model.security import Security
from storm_dagster.web.compatibility import dagster_application

# Dagster's pages have a policy of their own for scripts.
_HEADERS = [(b"x-frame-options", b"DENY"), (b"cross-origin-resource-policy", b"same-origin")]


class JsonOnly:
    """Refuses what a page of another site can make a browser send without asking: links that execute GraphQL, and forms."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> InvalidRequest | None:
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            if scope["path"].rstrip("/") == "/graphql" and scope.get("query_string"):
                return InvalidRequest("GraphQL in an address is refused: POST it as application/json")
            return None
        kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
        if kind.partition(b";")[0].strip().lower() != b"application/json":
            return InvalidRequest(f"a {scope['method']} needs the content type application/json")
        return None


def guard_application(app: ASGIApp, conf: Any, host: str) -> ASGIApp:
    """``app`` for pages of its own origin and programs; with a secret or TLS for administrators alone."""
    named = host_of(urlsplit(conf.get("dagster.graphql.url") or "").netloc)
    asked = Authentication(
        JsonOnly(app),
        Security.of(conf),
        conf,
        lambda name: None,
        challenge='Basic realm="storm_dagster", charset="UTF-8"',
    )
    return Guard(asked, hosts=allowed_hosts([host, named]), headers=_HEADERS)


def serve(conf: Any, workspace: Path, host: str | None, port: int, stop: threading.Event) -> None:
    """Serve until ``stop``. Without a secret or TLS: on loopback, to this user alone."""
    security = Security.of(conf)
    host = check_exposure(conf, "Dagster's web application", "secret or tls", host)
    with dagster_application(workspace) as app:
        service = HttpService(
            guard_application(app, conf, host),
            listen(host, port, "--port"),
            name="dagster-web",
            tls=security.server_context(client_certificate=security.http_needs_certificate) if security.tls else None,
            websockets=True,
            own_user_only=not security.configured,
        )
        service.start()
        try:
            stop.wait()
        finally:
            service.stop()
