"""HTTP routes of a supervisor: health, workers, restarts and stacks."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel

from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.http.documents import Port
from storm_dagster.http.logs.pages import stacks_text
from storm_dagster.http.router import Parameter, Router
from storm_dagster.model.errors import InvalidRequest, KeyNotFound, StormDagsterError
from storm_dagster.model.version import __version__
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.supervisor.launcher import SPEC
from storm_dagster.supervisor.processes import LiveWorker

_log = logging.getLogger(__name__)
_RESPONSE_SECS = 2.0
"""Longest time that a worker has to send its stacks."""


class SupervisorHealth(BaseModel, extra="forbid"):
    """Response of a supervisor that serves."""

    status: Literal["ok"]
    id: str
    version: str


class SupervisorWorker(BaseModel, extra="forbid"):
    """A worker process of this supervisor."""

    port: int
    topology_id: str
    worker_id: str
    pid: int
    status: str


class SupervisorWorkers(BaseModel, extra="forbid"):
    """Workers of this supervisor."""

    workers: list[SupervisorWorker]


class WorkerRoutes:
    """Routes of a supervisor; ``workers()`` returns the live workers."""

    router: ClassVar = Router("supervisor")

    def __init__(
        self, home: Path, supervisor_id: str, workers: Callable[[], Sequence[LiveWorker]]
    ) -> None:
        self._home = home
        self._id = supervisor_id
        self._workers = workers

    @router.route(
        "GET",
        "/healthz",
        summary="Health of this supervisor",
        responses={200: SupervisorHealth},
    )
    def health(self) -> dict[str, Any]:
        """Document of a supervisor that serves."""
        return {"status": "ok", "id": self._id, "version": __version__}

    @router.route(
        "GET",
        "/v1/workers",
        summary="Workers that run on this supervisor",
        responses={200: SupervisorWorkers},
    )
    def list_workers(self) -> dict[str, Any]:
        """Rows of the workers, in order of their ports."""
        workers = sorted(self._workers(), key=lambda live: live.port)
        return {"workers": [_row(live) for live in workers]}

    @router.route(
        "POST",
        "/v1/workers/{port}/restart",
        summary="End a worker in good order; its slot starts it again at once",
        responses={202: SupervisorWorker},
        errors=[404],
    )
    def restart(
        self,
        port: Annotated[str, Parameter("path", "port", "Port of the worker", schema=Port)],
    ) -> dict[str, Any]:
        """Send SIGTERM to the worker of a port; its row before it ends."""
        if not port.isascii() or not port.isdecimal() or len(port) > 5:
            raise InvalidRequest(f"a port is a number, got {port!r:.40}")
        # A port has two workers only while the second one, found at the start, is being ended.
        live = self._workers_at(int(port))[-1]
        row = _row(live)
        _log.info("worker %s in slot %d is restarted by request", live.worker.id, live.port)
        live.process.signal(signal.SIGTERM)
        return row

    def stacks(self, port: int) -> str:
        """Stacks of the workers of a port, as text."""
        return "\n".join(self._stacks_of(live) for live in self._workers_at(port))

    def _workers_at(self, port: int) -> list[LiveWorker]:
        """Live workers of a port, at least one; :class:`KeyNotFound` without any."""
        workers = [live for live in self._workers() if live.port == port]
        if not workers:
            raise KeyNotFound(
                f"no worker runs on port {port} of supervisor {self._id}: see /v1/workers"
            )
        return workers

    def _stacks_of(self, live: LiveWorker) -> str:
        """Stacks of a worker as text, or the reason why it sent none."""
        # Imported here, because it loads zmq.
        from storm_dagster.operations.live.worker_requests import ask_worker

        topology_id = live.worker.work.topology_id
        header = f"topology {topology_id} worker port {live.port} pid {live.process.pid}"
        try:
            spec = WorkerSpec.read(self._home / "workers" / live.worker.id / SPEC)
            # Its process says which user serves: workers may run as others than this one.
            user = os.stat(f"/proc/{live.process.pid}").st_uid
            response = ask_worker(
                spec.host,
                live.port,
                spec.token,
                "stacks",
                _RESPONSE_SECS,
                spec.link_key,
                TrustedServers.of(spec.conf, users=[user]),
            )
            return stacks_text(header, response["stacks"])
        except StormDagsterError as error:
            return stacks_text(header, None, error.message)
        except OSError:
            return stacks_text(header, None, "the worker just ended")


def _row(live: LiveWorker) -> dict[str, Any]:
    return {
        "port": live.port,
        "topology_id": live.worker.work.topology_id,
        "worker_id": live.worker.id,
        "pid": live.process.pid,
        "status": live.status,
    }
