"""Running workers asked by nimbus: levels of their loggers, kept for those that begin later, and stacks of threads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storm_dagster.http.logs.stacks import stacks_text
from storm_dagster.model.errors import KeyNotFound, StormDagsterError, Unavailable
from storm_dagster.model.security import Security
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.model.wire import LevelChange
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.live.log_levels import keep_log_levels
from storm_dagster.operations.live.worker_requests import ask_worker, link_key_of

_log = logging.getLogger(__name__)
_ANSWER_SECS = 2.0
_AT_ONCE = 8


class WorkerLevels:
    """Storm's dynamic log levels."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._security = Security.of(nimbus.conf)

    def change(self, topology: TopologyView, changes: Mapping[str, LevelChange]) -> None:
        """Change levels in every worker of the topology, and in those that will be started in their places.

        At the leader. :class:`Unavailable` when a worker did not answer: the others have changed then, and that one
        does when it starts again.
        """
        epoch = self._nimbus.status.require()
        if not changes:
            return
        keep_log_levels(self._nimbus.operations(epoch), topology.id, changes)
        silent = [who for who, answer in self._ask_all(topology, dict(changes)) if answer is None]
        if silent:
            raise Unavailable(
                f"log levels of topology {topology.base.name!r} are kept, and not yet changed at "
                f"{', '.join(sorted(silent))}: those workers did not answer and take them when they start again; try again"
            )

    def current(self, topology: TopologyView) -> dict[str, dict[str, Any]]:
        """Logger -> ``{"level", "secs", "reset"}``: what is changed in any worker that answers."""
        found: dict[str, dict[str, Any]] = {}
        for _, answer in self._ask_all(topology, {}):
            found.update(answer or {})
        return found

    def _ask_all(
        self, topology: TopologyView, changes: dict[str, LevelChange]
    ) -> list[tuple[str, dict[str, Any] | None]]:
        key = link_key_of(self._security, topology.id)

        def ask(worker: Any) -> tuple[str, dict[str, Any] | None]:
            who = f"{worker.host}:{worker.port}"
            live = topology.live_workers.get(worker.slot)
            if live is None:
                return who, None
            try:
                answer = ask_worker(
                    worker.host, worker.port, live.token, "log_levels", _ANSWER_SECS, key, levels=changes
                )
            except StormDagsterError as error:
                _log.info("%s gave no log levels: %s", who, error)
                return who, None
            return who, dict(answer.get("levels") or {})

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="nimbus-levels") as pool:
            return list(pool.map(ask, topology.workers))


def stacks_of_worker(topology: TopologyView, host: str, port: int, security: Security) -> dict[str, Any]:
    """Thread -> frames of one worker.

    :class:`KeyNotFound` when the topology has no worker there, :class:`Unavailable` when that does not run or answer.
    """
    for worker in topology.workers:
        if (worker.host, worker.port) != (host, port):
            continue
        live = topology.live_workers.get(worker.slot)
        if live is None:
            raise Unavailable(f"the worker at {host}:{port} does not run at this moment: see its log")
        key = link_key_of(security, topology.id)
        return ask_worker(host, port, live.token, "stacks", _ANSWER_SECS, key)["stacks"]
    raise KeyNotFound(f"topology {topology.base.name!r} has no worker at {host}:{port}".replace("\n", " "))


def stacks_at(view: ClusterView, port: int, security: Security) -> str:
    """The stacks of every worker of the cluster on that port, as text; :class:`KeyNotFound` when there is none."""
    blocks: list[str] = []
    for topology in view.topologies.values():
        for worker in topology.workers:
            if worker.port != port:
                continue
            live = topology.live_workers.get(worker.slot)
            header = f"topology {topology.id} worker {worker.host}:{port} pid {live.pid if live else '-'}"
            try:
                blocks.append(stacks_text(header, stacks_of_worker(topology, worker.host, port, security)))
            except StormDagsterError as error:
                blocks.append(stacks_text(header, None, error.message))
    if not blocks:
        raise KeyNotFound(f"no worker has port {port}: see /api/v1/supervisor/summary")
    return "\n".join(blocks)
