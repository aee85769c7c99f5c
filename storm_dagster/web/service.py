"""Service of Dagster's web application.

It has a guard, authentication, and accepts changes only as JSON. The internals of Dagster that it
needs are imported only here.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dagster as dg
from starlette.types import ASGIApp, Receive, Scope, Send

from storm_dagster.http.authentication import BASIC, Authentication, NoTokens, TokenSource
from storm_dagster.http.guard import Guard, allowed_hosts, host_of
from storm_dagster.http.probes import LIVE, READY, probe_response
from storm_dagster.http.responses import error_response
from storm_dagster.http.server import HttpService, listen
from storm_dagster.model.dagster_names import TESTED_DAGSTER
from storm_dagster.model.errors import InvalidRequest, Unavailable, error_text
from storm_dagster.security.exposure import check_exposure
from storm_dagster.security.settings import Security

# Statement timeout in milliseconds, recycling of connections in seconds, overflow of the pool: the
# values of the stock server.
_STORAGE = (15_000, 3_600, 20)
_POLL_MS = 2_000
_MAX_BODY_BYTES = 8 << 20
"""Dagster has a complete body in memory, many times over."""
# Dagster's pages have their own policy for scripts.
_HEADERS = [(b"x-frame-options", b"DENY"), (b"cross-origin-resource-policy", b"same-origin")]


@contextmanager
def dagster_application(workspaces: Sequence[Path]) -> Iterator[ASGIApp]:
    """Dagster's web application for workspace files, without a server.

    :class:`Unavailable` for a Dagster that does not fit. Then no UI starts, because the stock
    server has no authentication.
    """
    try:
        from dagster._core.workspace.context import WorkspaceProcessContext
        from dagster._core.workspace.load_target import WorkspaceFileTarget
        from dagster_webserver.webserver import DagsterWebserver
    except ImportError as error:
        raise _unfit(error) from None
    with dg.DagsterInstance.get() as instance:
        try:
            instance.optimize_for_webserver(*_STORAGE)
            context = WorkspaceProcessContext(
                instance,
                WorkspaceFileTarget(paths=[str(path) for path in workspaces]),
                dg.__version__,
            )
        except (AttributeError, TypeError) as error:
            raise _unfit(error) from None
        with context:
            try:
                app = DagsterWebserver(context, live_data_poll_rate=_POLL_MS).create_asgi_app()
            except (AttributeError, TypeError) as error:
                raise _unfit(error) from None
            yield app


def _unfit(error: Exception) -> Unavailable:
    return Unavailable(
        f"Dagster's web application does not fit: Dagster {dg.__version__} ({error_text(error)}). "
        "The UI does not start, because the stock dagster-webserver accepts every client: "
        f"install dagster {TESTED_DAGSTER}, or protect the stock server yourself "
        "(docs/security.md) and set dagster.graphql.url"
    )


class WebProbes:
    """Probes of the web application, which need no proof.

    This daemon's loop is the one that answers. It is ready once it can check an access token.
    """

    def __init__(self, app: ASGIApp, tokens: TokenSource | None) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a probe, or pass the request on."""
        app = self._app
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            if scope["path"] == LIVE:
                app = probe_response(())
            elif scope["path"] == READY:
                app = probe_response(self._readiness_problems())
        await app(scope, receive, send)

    def _readiness_problems(self) -> list[str]:
        if self._tokens is not None and self._tokens.listing() is None:
            return ["the list of access tokens has not been read from ZooKeeper"]
        return []


class JsonOnly:
    """Refusal of the requests that a page of another site can make a browser send.

    They are links that execute GraphQL, and forms.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        app = self._app
        if scope["type"] == "http":
            refusal = self._refusal(scope)
            if refusal is not None:
                app = error_response(refusal)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> InvalidRequest | None:
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            if scope["path"].rstrip("/") == "/graphql" and scope.get("query_string"):
                return InvalidRequest(
                    "GraphQL in an address is refused: POST it as application/json"
                )
            return None
        headers = dict(reversed(scope["headers"]))
        content_type = headers.get(b"content-type", b"")
        length = headers.get(b"content-length", b"")
        # Only in lower case: for any other type Dagster executes the address.
        if content_type.partition(b";")[0].strip() != b"application/json":
            return InvalidRequest(f"a {scope['method']} needs the content type application/json")
        has_length = b"transfer-encoding" not in headers and length.isdigit()
        if not has_length or int(length) > _MAX_BODY_BYTES:
            return InvalidRequest(
                f"a {scope['method']} needs a Content-Length, and at most {_MAX_BODY_BYTES} bytes"
            )
        return None


def guard_application(
    app: ASGIApp, conf: Any, host: str, tokens: TokenSource | None = None
) -> ASGIApp:
    """``app`` for pages of its own origin and for programs.

    With a secret or TLS it is only for administrators. Without ``tokens`` no access token counts.
    """
    configured_host = host_of(urlsplit(conf.get("dagster.graphql.url") or "").netloc)
    security = Security.of(conf)
    authenticated = Authentication(
        JsonOnly(app),
        security,
        conf,
        lambda name: None,
        challenge=BASIC,
        administrators_only=True,
        tokens=tokens or NoTokens(),
    )
    probed = WebProbes(authenticated, tokens)
    return Guard(probed, hosts=allowed_hosts([host, configured_host]), headers=_HEADERS)


def serve(
    conf: Any,
    workspaces: Sequence[Path],
    host: str | None,
    port: int,
    stop: threading.Event,
    tokens: TokenSource | None = None,
) -> None:
    """Serve until ``stop``; without a secret or TLS on loopback, to this user alone.

    ``tokens`` are the access tokens that count; without them none does.
    """
    security = Security.of(conf)
    host = check_exposure(conf, "Dagster's web application", "secret or tls", host)
    tls = None
    if security.tls:
        tls = security.server_context(client_certificate=security.http_needs_certificate)
    with dagster_application(workspaces) as app:
        service = HttpService(
            guard_application(app, conf, host, tokens),
            listen(host, port, "--port"),
            name="dagster-web",
            tls=tls,
            websockets=True,
            own_user_only=not security.configured,
        )
        service.start()
        try:
            stop.wait()
        finally:
            service.stop()
