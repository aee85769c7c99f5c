"""The HTTP service of one nimbus: the application, and the thread that serves it."""

from __future__ import annotations

import logging
import socket
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from storm_dagster.model.errors import Unavailable
from storm_dagster.nimbus.http.answers import EXCEPTION_HANDLERS
from storm_dagster.nimbus.http.blob_routes import blob_routes
from storm_dagster.nimbus.http.guard import Guard, allowed_hosts, host_of
from storm_dagster.nimbus.http.metrics import Metrics
from storm_dagster.nimbus.http.topology_routes import topology_routes
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.reading import ClusterReader
from storm_dagster.nimbus.submitting import Submissions

__all__ = ["HttpService", "build_app"]

_log = logging.getLogger(__name__)
_MOST_CONNECTIONS = 512


def build_app(nimbus: Nimbus, reader: ClusterReader, submissions: Submissions) -> ASGIApp:
    """The ASGI application of a nimbus."""
    metrics = Metrics(nimbus, reader)
    routes = [*blob_routes(nimbus), *topology_routes(nimbus, reader, submissions, metrics)]
    app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    seeds = [host_of(seed.partition("://")[2] or seed) for seed in nimbus.conf["nimbus.seeds"]]
    hosts = allowed_hosts([nimbus.identity.host, *seeds])
    return Guard(app, hosts=hosts, metrics=metrics, routes=routes)


class HttpService:
    """Serves an application on an open socket in a thread of its own."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=3,
        )
        self._server = uvicorn.Server(config)
        self._listener = listener
        self._thread = threading.Thread(target=self._serve, name="nimbus-http", daemon=True)

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException:
            _log.exception("the HTTP service ended")

    @property
    def alive(self) -> bool:
        """Whether the thread serves."""
        return self._thread.is_alive()

    def start(self, timeout: float = 10.0) -> None:
        """Begin to serve; :class:`Unavailable` when that does not happen in time."""
        self._thread.start()
        deadline = time.monotonic() + timeout
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise Unavailable("the HTTP service did not start: see nimbus's log")
            time.sleep(0.01)

    def stop(self) -> None:
        """End within a few seconds; requests in progress get three."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._listener.close()
