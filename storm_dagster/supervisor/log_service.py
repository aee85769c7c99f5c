"""HTTP service of a supervisor: logs, and stacks and restarts of workers."""

import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.http.authentication import Authentication
from storm_dagster.http.description import HttpApi
from storm_dagster.http.guard import Guard, allowed_hosts
from storm_dagster.http.logs.pages import stacks_text
from storm_dagster.http.logs.routes import LogRoutes
from storm_dagster.http.responses import EXCEPTION_HANDLERS
from storm_dagster.http.server import AnnouncedName, HttpService, listen
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import InvalidRequest, KeyNotFound, StormDagsterError, Unavailable
from storm_dagster.model.version import __version__
from storm_dagster.security.exposure import check_exposure
from storm_dagster.security.peers import owners_only
from storm_dagster.security.settings import Security
from storm_dagster.supervisor.launcher import SPEC
from storm_dagster.supervisor.processes import LiveWorker

_log = logging.getLogger(__name__)
_RESPONSE_SECS = 2.0


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
        host = check_exposure(conf, "the supervisor's HTTP service", "secret or tls")
        try:
            listener = listen(host, conf["supervisor.http.port"], "supervisor.http.port")
        except Unavailable as error:
            _log.warning("%s; a free port is used instead", error.message)
            listener = listen(host, 0, "supervisor.http.port")
        self.announced = AnnouncedName(host, listener)
        self.port: int = int(listener.getsockname()[1])
        url_host = f"[{host}]" if ":" in host else host
        self.url: str = f"{self._security.scheme}://{url_host}:{self.port}"
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

    def start(self, workers: Callable[[], Sequence[LiveWorker]]) -> None:
        """Start to serve. ``workers()`` returns the workers that run at its call."""
        self._workers = workers
        self._service.start()

    def stop(self) -> None:
        """Stop within a few seconds."""
        self._service.stop()

    def _app(self, host: str) -> Any:
        conf = self._conf
        logs = LogRoutes(self._home / "logs", self._stacks, conf.values)
        api = HttpApi("storm_dagster supervisor", __version__)
        logs.add_to(api)
        handlers = {
            "health": lambda: {
                "status": "ok",
                "id": self._id,
                "version": __version__,
            },
            "workers": lambda: {
                "workers": [
                    _row(live) for live in sorted(self._workers(), key=lambda one: one.port)
                ]
            },
            "restart": self._restart,
        }
        api.add("storm_dagster.supervisor", handlers)
        routes = api.routes()
        app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
        app.router.redirect_slashes = False
        guarded = Authentication(app, self._security, conf.values, lambda name: None)
        return Guard(guarded, hosts=allowed_hosts([host]), observe=lambda *_: None, routes=routes)

    def _workers_at(self, port: int) -> list[LiveWorker]:
        workers = [live for live in self._workers() if live.port == port]
        if not workers:
            raise KeyNotFound(
                f"no worker runs on port {port} of supervisor {self._id}: see /v1/workers"
            )
        return workers

    def _restart(self, text: str) -> dict[str, Any]:
        if not text.isascii() or not text.isdecimal() or len(text) > 5:
            raise InvalidRequest(f"a port is a number, got {text!r:.40}")
        live = self._workers_at(int(text))[-1]
        row = _row(live)
        _log.info("worker %s in slot %d is restarted by request", live.worker.id, live.port)
        live.process.signal(signal.SIGTERM)
        return row

    def _stacks(self, port: int) -> str:
        # Loads zmq, only now.
        from storm_dagster.operations.live.worker_requests import ask_worker

        blocks: list[str] = []
        for live in self._workers_at(port):
            topology_id = live.worker.work.topology_id
            header = f"topology {topology_id} worker port {port} pid {live.process.pid}"
            try:
                spec = WorkerSpec.read(self._home / "workers" / live.worker.id / SPEC)
                response = ask_worker(
                    spec.host, port, spec.token, "stacks", _RESPONSE_SECS, spec.link_key
                )
                blocks.append(stacks_text(header, response["stacks"]))
            except StormDagsterError as error:
                blocks.append(stacks_text(header, None, error.message))
            except OSError:
                blocks.append(stacks_text(header, None, "the worker just ended"))
        return "\n".join(blocks)


def _row(live: LiveWorker) -> dict[str, Any]:
    return {
        "port": live.port,
        "topology_id": live.worker.work.topology_id,
        "worker_id": live.worker.id,
        "pid": live.process.pid,
        "status": live.status,
    }
