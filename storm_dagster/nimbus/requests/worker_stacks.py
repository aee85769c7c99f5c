"""Stacks of the threads of running workers, read from the workers themselves."""

from __future__ import annotations

from typing import Any

from storm_dagster.http.logs.stacks import stacks_text
from storm_dagster.model.errors import KeyNotFound, StormDagsterError, Unavailable
from storm_dagster.model.security import Security
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.live.worker_requests import ask_worker, link_key_of

_ANSWER_SECS = 2.0


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
