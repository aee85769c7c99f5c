"""The newest upgrade of a topology, if it was rolled back because of a failure. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

from storm_dagster.model.view import ClusterView, TopologyView


@dataclass(frozen=True)
class FailedUpgrade:
    """A gray upgrade that was rolled back, with the reason."""

    code: str
    """Prefix of the blob keys of its code."""
    reason: str
    """Worker, task, exception, file and line, as far as they are known."""
    worker: str
    """``host:port`` of the worker that failed; empty: an earlier release recorded none."""
    log: str
    """URL of that worker's log; empty without an HTTP service there."""
    ended_secs: int
    """Epoch seconds of the end of its rollback; 0: not known."""

    def to_document(self) -> Mapping[str, Any]:
        """The keys of ``failed_upgrade`` in ``show --json``."""
        return asdict(self)


def failed_upgrade(view: ClusterView, topology: TopologyView) -> FailedUpgrade | None:
    """The topology's newest upgrade, if a failure rolled it back.

    ``None`` also while a later one is under way: that one is shown.
    """
    record = topology.base.last_upgrade
    if record is None or not record.rollback or not record.reason:
        return None
    if topology.base.status in ("UPGRADING", "ROLLBACK"):
        return None
    return FailedUpgrade(
        code=record.code_dir,
        reason=record.reason,
        worker=record.failed_worker,
        log=_failed_worker_log_url(view, topology, record.failed_worker),
        ended_secs=record.ended_secs,
    )


def worker_log_url(http: str, topology_id: str, port: int) -> str:
    """URL of a worker's log at the HTTP service ``http`` of its supervisor."""
    file = quote(f"{topology_id}/{port}/worker.log", safe="")
    return f"{http}/api/v1/log?file={file}"


def _failed_worker_log_url(view: ClusterView, topology: TopologyView, address: str) -> str:
    """URL of the log of the worker ``host:port``; empty if no supervisor there serves it.

    The worker may have left its slot since: then any supervisor of the host with that port.
    """
    host, _, port = address.rpartition(":")
    for worker in topology.workers:
        supervisor = view.supervisors.get(worker.node)
        if worker.address == address and supervisor is not None and supervisor.http:
            return worker_log_url(supervisor.http, topology.id, worker.port)
    for supervisor in view.supervisors.values():
        if supervisor.host == host and supervisor.http and port in map(str, supervisor.ports):
            return worker_log_url(supervisor.http, topology.id, int(port))
    return ""
