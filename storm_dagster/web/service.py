"""Service of Dagster's web application, made by internals that are imported here alone: guard,
authentication, and JSON as the only way to change something.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dagster as dg
from starlette.types import ASGIApp, Receive, Scope, Send

from storm_dagster.http.authentication import BASIC, Authentication
from storm_dagster.http.guard import Guard, allowed_hosts, host_of
from storm_dagster.http.responses import error_response
from storm_dagster.http.server import HttpService, listen
from storm_dagster.model.dagster_names import TESTED_DAGSTER
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.security.exposure import check_exposure
from storm_dagster.security.settings import Security

# Statement timeout in milliseconds, recycling of connections in seconds, overflow of the pool: as
# the stock server has them.
_STORAGE = (15_000, 3_600, 20)
_POLL_MS = 2_000
_MOST_BODY_BYTES = 8 << 20
"""Dagster holds a whole body in memory, many times over."""


@contextmanager
def dagster_application(workspace: Path) -> Iterator[ASGIApp]:
    """Dagster's web application for a workspace file, without any server.

    :class:`Unavailable` for a Dagster that does not fit: then there is no UI, for the stock server
    asks nobody.
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
                instance, WorkspaceFileTarget(paths=[str(workspace)]), dg.__version__
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
        f"Dagster's web application does not fit: Dagster {dg.__version__} ({error}). The UI does not start, because the "
        f"stock dagster-webserver lets everybody in: install dagster {TESTED_DAGSTER}, or "
        "protect the stock server yourself (docs/security.md) and set dagster.graphql.url"
    )


# Dagster's pages have a policy of their own for scripts.
_HEADERS = [(b"x-frame-options", b"DENY"), (b"cross-origin-resource-policy", b"same-origin")]


class JsonOnly:
    """Refuses what a page of another site can make a browser send without asking: links that
    execute GraphQL, and forms.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> InvalidRequest | None:
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            if scope["path"].rstrip("/") == "/graphql" and scope.get("query_string"):
                return InvalidRequest(
                    "GraphQL in an address is refused: POST it as application/json"
                )
            return None
        headers = dict(reversed(scope["headers"]))
        kind, length = headers.get(b"content-type", b""), headers.get(b"content-length", b"")
        # In small letters: for any other type Dagster executes the address.
        if kind.partition(b";")[0].strip() != b"application/json":
            return InvalidRequest(f"a {scope['method']} needs the content type application/json")
        if (
            b"transfer-encoding" in headers
            or not length.isdigit()
            or int(length) > _MOST_BODY_BYTES
        ):
            return InvalidRequest(
                f"a {scope['method']} needs a Content-Length, and at most {_MOST_BODY_BYTES} bytes"
            )
        return None


def guard_application(app: ASGIApp, conf: Any, host: str) -> ASGIApp:
    """``app`` for pages of its own origin and programs; with a secret or TLS for administrators
    alone.
    """
    named = host_of(urlsplit(conf.get("dagster.graphql.url") or "").netloc)
    security = Security.of(conf)
    asked = Authentication(
        JsonOnly(app), security, conf, lambda name: None, challenge=BASIC, administrators_only=True
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
            tls=security.server_context(client_certificate=security.http_needs_certificate)
            if security.tls
            else None,
            websockets=True,
            own_user_only=not security.configured,
        )
        service.start()
        try:
            stop.wait()
        finally:
            service.stop()
