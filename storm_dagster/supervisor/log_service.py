"""HTTP service of a supervisor: logs, and stacks and restarts of workers."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from storm_dagster.http.authentication import Authentication
from storm_dagster.http.description import HttpApi
from storm_dagster.http.guard import Guard, allowed_hosts
from storm_dagster.http.logs.routes import LogRoutes
from storm_dagster.http.probes import Probes
from storm_dagster.http.responses import EXCEPTION_HANDLERS
from storm_dagster.http.server import AnnouncedName, HttpService, listen
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.names import url_host
from storm_dagster.model.version import __version__
from storm_dagster.security.exposure import check_exposure
from storm_dagster.security.peers import owners_only
from storm_dagster.security.settings import Security
from storm_dagster.supervisor.processes import LiveWorker
from storm_dagster.supervisor.worker_routes import WorkerRoutes
from storm_dagster.zk.access_tokens import AccessTokenList
from storm_dagster.zk.state_protocol import ClusterState

_log = logging.getLogger(__name__)


class LogService:
    """HTTP service of one supervisor.

    It listens from the start, and serves once the supervisor has adopted its workers. If the port
    is in use, any free one is used and announced (as in JStorm).
    """

    def __init__(self, conf: ClusterConf, home: Path, supervisor_id: str) -> None:
        self._conf = conf
        self._home = home
        self._id = supervisor_id
        self._security = Security.of(conf)
        self._workers: Callable[[], Sequence[LiveWorker]] = lambda: ()
        """Returns the live workers; replaced by :meth:`start`."""
        self._state: Callable[[], ClusterState | None] = lambda: None
        """Returns the state of the cluster; replaced by :meth:`start`."""
        self._live: Callable[[], Sequence[str]] = lambda: ()
        self._ready: Callable[[], Sequence[str]] = lambda: ()
        """Return the problems of the probes; replaced by :meth:`start`."""
        self._tokens = AccessTokenList(lambda: self._state())
        self._stopped = threading.Event()
        host = check_exposure(conf, "the supervisor's HTTP service", "secret or tls")
        try:
            listener = listen(host, conf["supervisor.http.port"], "supervisor.http.port")
        except Unavailable as error:
            _log.warning("%s; a free port is used instead", error.message)
            listener = listen(host, 0, "supervisor.http.port")
        self.announced = AnnouncedName(host, listener)
        self.port: int = int(listener.getsockname()[1])
        self.url: str = f"{self._security.scheme}://{url_host(host)}:{self.port}"
        """URL in the supervisor's record."""
        tls = None
        if self._security.tls:
            tls = self._security.server_context(
                client_certificate=self._security.http_needs_certificate
            )
        self._service = HttpService(
            self._app(host),
            listener,
            name="supervisor-http",
            tls=tls,
            own_user_only=owners_only(self._security),
        )

    def start(
        self,
        workers: Callable[[], Sequence[LiveWorker]],
        state: Callable[[], ClusterState | None] = lambda: None,
        live: Callable[[], Sequence[str]] = lambda: (),
        ready: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        """Start to serve. ``workers()`` returns the workers that run at its call.

        ``state()`` returns the state of the cluster, which has the list of access tokens; ``None``
        before a connection. ``live()`` and ``ready()`` return the problems of the two probes.
        """
        self._workers = workers
        self._state = state
        self._live = live
        self._ready = ready
        if self._security.secret is not None:
            threading.Thread(
                target=self._tokens.run, args=(self._stopped,), name="access-tokens", daemon=True
            ).start()
        self._service.start()

    def stop(self) -> None:
        """Stop within a few seconds."""
        self._stopped.set()
        self._service.stop()

    def _app(self, host: str) -> Any:
        """Application with the routes of logs and workers, behind the guard of ``host``."""
        conf = self._conf
        workers = WorkerRoutes(self._home, self._id, lambda: self._workers())
        api = HttpApi("storm_dagster supervisor", __version__)
        api.add(LogRoutes(self._home / "logs", workers.stacks, conf.values))
        api.add(workers)
        api.add(Probes(lambda: self._live(), lambda: self._ready()))
        routes = api.routes()
        app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
        app.router.redirect_slashes = False
        guarded = Authentication(
            app, self._security, conf.values, lambda name: None, tokens=self._tokens
        )
        return Guard(guarded, hosts=allowed_hosts([host]), observe=lambda *_: None, routes=routes)
