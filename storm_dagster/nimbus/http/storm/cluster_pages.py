"""Pages of the cluster: summary, conf, supervisors, nimbuses, owners."""

import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar
from urllib.parse import quote_plus

from storm_dagster.core.snapshot.cluster import (
    SupervisorSnapshot,
    TopologySize,
    supervisors_of,
    topologies_by_owner,
)
from storm_dagster.core.snapshot.workers import WorkerSnapshot
from storm_dagster.http.documents import READ_ERRORS
from storm_dagster.http.router import Parameter, Router
from storm_dagster.model.conf import mask
from storm_dagster.model.errors import InvalidRequest, KeyNotFound
from storm_dagster.model.records import SupervisorInfo
from storm_dagster.model.view import TopologyView
from storm_dagster.nimbus.http.storm.cluster_documents import (
    ClusterSummary,
    HistorySummary,
    NimbusSummary,
    OwnerSummary,
    SupervisorPage,
    SupervisorSummary,
    TopologyList,
    TopologyWorkers,
)
from storm_dagster.nimbus.http.storm.formats import Links, daemon_log, pretty_secs
from storm_dagster.nimbus.http.storm.parameters import IncludeSystem, TopologyId
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.operations.submit.open_tokens import STARTING, StartingTopology

_GUARANTEES = (
    "memoryGuarantee",
    "cpuGuarantee",
    "isolatedNodes",
    "memoryGuaranteeRemaining",
    "cpuGuaranteeRemaining",
)
"""Fields of an owner in Storm's REST that have no value here: owners have no guarantees."""


class ClusterPages:
    """Pages of the cluster, and the slots of a topology's workers."""

    router: ClassVar = Router("storm", storm_errors=True)

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader

    @router.route(
        "GET",
        "/api/v1/cluster/configuration",
        summary="The cluster's conf",
        responses={200: dict[str, Any]},
        errors=READ_ERRORS,
    )
    def configuration(self) -> dict[str, Any]:
        """The cluster's conf; secrets are hidden."""
        return mask(self._nimbus.conf.values)

    @router.route(
        "GET",
        "/api/v1/cluster/summary",
        summary="Metrics of the cluster",
        responses={200: ClusterSummary},
        errors=READ_ERRORS,
    )
    def summary(self) -> dict[str, Any]:
        """Metrics of the whole cluster."""
        view, starting = self._reader.view_and_starting()
        supervisors = supervisors_of(view, now_secs=int(time.time()))
        size = TopologySize.of(*view.topologies.values())
        total = sum(len(supervisor.info.ports) for supervisor in supervisors)
        used = sum(len(supervisor.used) for supervisor in supervisors)
        memory = float(sum(supervisor.info.memory_mb for supervisor in supervisors))
        cpu = float(sum(supervisor.info.cpu for supervisor in supervisors))
        used_memory = sum(supervisor.used_memory_mb for supervisor in supervisors)
        used_cpu = sum(supervisor.used_cpu for supervisor in supervisors)
        return {
            "stormVersion": self._nimbus.identity.version,
            "supervisors": len(supervisors),
            "topologies": len(view.topologies) + len(starting),
            "slotsTotal": total,
            "slotsUsed": used,
            "slotsFree": max(0, total - used),
            "executorsTotal": size.executors,
            "tasksTotal": size.tasks,
            "schedulerDisplayResource": _displays(view.supervisors.values()),
            "totalMem": memory,
            "totalCpu": cpu,
            "availMem": max(0.0, memory - used_memory),
            "availCpu": max(0.0, cpu - used_cpu),
            "memAssignedPercentUtil": _percent(used_memory, memory),
            "cpuAssignedPercentUtil": _percent(used_cpu, cpu),
        }

    @router.route(
        "GET",
        "/api/v1/supervisor/summary",
        summary="Supervisors",
        responses={200: SupervisorSummary},
        errors=READ_ERRORS,
    )
    def supervisors(self) -> dict[str, Any]:
        """Every supervisor."""
        view = self._reader.view()
        supervisors = supervisors_of(view, now_secs=int(time.time()))
        links = Links(view)
        return {
            "supervisors": [_supervisor_row(supervisor, links) for supervisor in supervisors],
            "schedulerDisplayResource": _displays(view.supervisors.values()),
        }

    @router.route(
        "GET",
        "/api/v1/supervisor",
        summary="A supervisor by id, or those of a host, and their workers",
        responses={200: SupervisorPage},
        errors=READ_ERRORS,
    )
    def supervisor(
        self,
        id: Annotated[str | None, Parameter("query", "id", "Supervisor id")],
        host: Annotated[str | None, Parameter("query", "host", "Host; ignored with an id")],
        sys: IncludeSystem,
    ) -> dict[str, Any]:
        """Supervisors by id or host, with their workers.

        :class:`KeyNotFound` when no live supervisor has the id or host.
        """
        if id is None and host is None:
            raise InvalidRequest("no supervisor is named: give ?id= or ?host=")
        view = self._reader.view()
        links = Links(view)
        snapshots = supervisors_of(view, now_secs=int(time.time()), workers=True)
        if id is not None:
            supervisors = [snapshot for snapshot in snapshots if snapshot.id == id]
        else:
            supervisors = [snapshot for snapshot in snapshots if snapshot.info.host == host]
        if not supervisors:
            raise KeyNotFound(
                f"no supervisor {(id or host)!r:.80} is alive: see /api/v1/supervisor/summary"
            )
        workers: list[dict[str, Any]] = []
        for supervisor in supervisors:
            workers.extend(worker_row(worker, links) for worker in supervisor.workers)
        return {
            "supervisors": [_supervisor_row(supervisor, links) for supervisor in supervisors],
            "workers": workers,
            "schedulerDisplayResource": _displays(supervisor.info for supervisor in supervisors),
        }

    @router.route(
        "GET",
        "/api/v1/nimbus/summary",
        summary="Nimbuses",
        responses={200: NimbusSummary},
        errors=READ_ERRORS,
    )
    def nimbuses(self) -> dict[str, Any]:
        """Every nimbus that is alive."""
        nimbuses = self._reader.cluster()["nimbuses"]
        return {"nimbuses": [self._nimbus_row(nimbus) for nimbus in nimbuses]}

    @router.route(
        "GET",
        "/api/v1/history/summary",
        summary="Ids of running topologies",
        responses={200: HistorySummary},
        errors=READ_ERRORS,
    )
    def history(self) -> dict[str, Any]:
        """Ids of the topologies that run."""
        return {"topo-history": sorted(self._reader.view().topologies)}

    @router.route(
        "GET",
        "/api/v1/owner-resources",
        summary="Resources by owner",
        responses={200: OwnerSummary},
        errors=READ_ERRORS,
    )
    def owners(self) -> dict[str, Any]:
        """Every owner of a topology."""
        return self._owners(None)

    @router.route(
        "GET",
        "/api/v1/owner-resources/{owner}",
        summary="Resources of one owner",
        responses={200: OwnerSummary},
        errors=READ_ERRORS,
    )
    def owner(self, owner: Annotated[str, Parameter("path", "owner", "Owner")]) -> dict[str, Any]:
        """One owner; :class:`KeyNotFound` for an owner without topologies."""
        return self._owners(owner)

    @router.route(
        "GET",
        "/api/v1/topology/summary",
        summary="Topologies",
        responses={200: TopologyList},
        errors=READ_ERRORS,
    )
    def topologies(self) -> dict[str, Any]:
        """Every topology, in order of its name; those that are being submitted come last."""
        view, starting = self._reader.view_and_starting()
        copies = self._reader.replication(view.topologies)
        topologies = sorted(
            view.topologies.values(), key=lambda topology: (topology.base.name, topology.id)
        )
        version = self._nimbus.identity.version
        rows = [
            topology_row(topology, copies.get(topology.id, 0), version) for topology in topologies
        ]
        rows += [starting_row(topology, version) for topology in starting]
        return {
            "topologies": rows,
            "schedulerDisplayResource": _displays(view.supervisors.values()),
        }

    @router.route(
        "GET",
        "/api/v1/topology-workers/{id}",
        summary="Hosts and ports of a topology's workers",
        responses={200: TopologyWorkers},
        errors=READ_ERRORS,
    )
    def topology_workers(self, name: TopologyId) -> dict[str, Any]:
        """The slots of a topology, each once.

        :class:`NotAlive` when no topology has the id or name.
        """
        workers = self._reader.snapshot(name).workers
        slots = sorted({(worker.host, worker.port) for worker in workers})
        return {
            "hostPortList": [{"host": host, "port": port} for host, port in slots],
            # Storm has one port for all hosts. Here supervisors can have other ports than the
            # configured one.
            "logviewerPort": int(self._nimbus.conf["supervisor.http.port"]),
            "logviewerScheme": self._nimbus.identity.http.partition(":")[0],
        }

    def _nimbus_row(self, nimbus: Mapping[str, Any]) -> dict[str, Any]:
        """Row of a nimbus, from one of :meth:`ClusterReader.cluster`."""
        uptime = "Not applicable"
        uptime_secs = "Not applicable"
        if nimbus["uptime_secs"] is not None:
            uptime = pretty_secs(nimbus["uptime_secs"])
            uptime_secs = str(nimbus["uptime_secs"])
        return {
            "host": nimbus["host"],
            "port": nimbus["port"] or 0,
            "status": "Leader" if nimbus["leader"] else "Not a Leader",
            "version": nimbus["version"] or "Not applicable",
            "nimbusUpTime": uptime,
            "nimbusUpTimeSeconds": uptime_secs,
            "nimbusLogLink": self._log_link(nimbus["http"]),
        }

    def _log_link(self, http: str | None) -> str:
        """Link to the log of this nimbus, or to the logs of another; empty without a URL."""
        own = self._nimbus.identity
        if http == own.http:
            return daemon_log(own.http, "nimbus", own.id)
        return f"{http}/logview?cmd=listDir" if http else ""

    def _owners(self, owner: str | None) -> dict[str, Any]:
        """Rows of all owners, or of one; :class:`KeyNotFound` for one without topologies."""
        view = self._reader.view()
        topologies_of = topologies_by_owner(view, owner)
        if owner is not None and not topologies_of:
            raise KeyNotFound(f"no user {owner!r:.80} owns a topology")
        rows: list[dict[str, Any]] = []
        for name, topologies in topologies_of.items():
            size = TopologySize.of(*topologies)
            row: dict[str, Any] = {
                "owner": name,
                "totalTopologies": len(topologies),
                "totalExecutors": size.executors,
                "totalWorkers": size.workers,
                "totalTasks": size.tasks,
                "totalMemoryUsage": size.memory_mb,
                "totalReqOnHeapMem": size.memory_mb,
                "totalReqMem": size.memory_mb,
                "totalAssignedOnHeapMem": size.memory_mb,
                "totalCpuUsage": size.cpu,
                "totalReqCpu": size.cpu,
                "totalReqOffHeapMem": 0.0,
                "totalAssignedOffHeapMem": 0.0,
            }
            row.update(dict.fromkeys(_GUARANTEES, "N/A"))
            rows.append(row)
        return {"owners": rows, "schedulerDisplayResource": _displays(view.supervisors.values())}


def worker_row(worker: WorkerSnapshot, links: Links) -> dict[str, Any]:
    """One worker, as on every page that lists workers."""
    return {
        "supervisorId": worker.node,
        "host": worker.host,
        "port": worker.port,
        "topologyId": worker.topology_id,
        "topologyName": worker.topology_name,
        "executorsTotal": worker.executors,
        "assignedMemOnHeap": worker.memory_mb,
        "assignedCpu": worker.cpu,
        "uptimeSeconds": worker.uptime_secs,
        "assignedMemOffHeap": 0.0,
        "componentNumTasks": dict(worker.tasks_by_component),
        "uptime": pretty_secs(worker.uptime_secs),
        "workerLogLink": links.worker(worker.topology_id, worker.node, worker.host, worker.port),
    }


def _supervisor_row(supervisor: SupervisorSnapshot, links: Links) -> dict[str, Any]:
    info = supervisor.info
    slots = len(info.ports)
    used_slots = len(supervisor.used)
    return {
        "id": supervisor.id,
        "host": info.host,
        "uptimeSeconds": supervisor.uptime_secs,
        "usedMem": supervisor.used_memory_mb,
        "usedCpu": supervisor.used_cpu,
        "version": info.version,
        "blacklisted": supervisor.blacklisted,
        "uptime": pretty_secs(supervisor.uptime_secs),
        "slotsTotal": slots,
        "slotsUsed": used_slots,
        "slotsFree": max(0, slots - used_slots),
        "totalMem": float(info.memory_mb),
        "totalCpu": float(info.cpu),
        "availMem": max(0.0, info.memory_mb - supervisor.used_memory_mb),
        "availCpu": max(0.0, info.cpu - supervisor.used_cpu),
        "logLink": links.supervisor(supervisor.id),
    }


def topology_row(topology: TopologyView, replication: int, version: str) -> dict[str, Any]:
    """A topology, as the list and its own page show it.

    Topologies request no resources: those that their workers were given stand in both places.
    """
    base = topology.base
    head = {
        "id": topology.id,
        "name": base.name,
        "owner": base.owner,
        "status": base.status,
    }
    uptime_secs = max(0, int(time.time()) - base.launch_time_secs)
    return head | _row_fields(head, TopologySize.of(topology), uptime_secs, replication, version)


def starting_row(topology: StartingTopology, version: str) -> dict[str, Any]:
    """A topology that is being submitted, as the list and its own page show it."""
    head = {
        "id": topology.id,
        "name": topology.name,
        "owner": topology.owner,
        "status": STARTING,
    }
    uptime_secs = topology.uptime_secs(int(time.time()))
    return head | _row_fields(head, TopologySize.of(), uptime_secs, 0, version)


def _row_fields(
    head: Mapping[str, Any], size: TopologySize, uptime_secs: int, replication: int, version: str
) -> dict[str, Any]:
    """The fields of a topology's row after its ``head``, in their order."""
    return {
        "tasksTotal": size.tasks,
        "workersTotal": size.workers,
        "executorsTotal": size.executors,
        "requestedMemOnHeap": size.memory_mb,
        "requestedTotalMem": size.memory_mb,
        "assignedMemOnHeap": size.memory_mb,
        "assignedTotalMem": size.memory_mb,
        "requestedCpu": size.cpu,
        "assignedCpu": size.cpu,
        "encodedId": quote_plus(head["id"]),
        "uptime": pretty_secs(uptime_secs),
        "uptimeSeconds": uptime_secs,
        "replicationCount": replication,
        "schedulerInfo": None,
        "requestedMemOffHeap": 0.0,
        "assignedMemOffHeap": 0.0,
        "stormVersion": version,
    }


def _percent(used: float, total: float) -> float:
    return round(100 * used / total, 1) if total else 0.0


def _displays(supervisors: Iterable[SupervisorInfo]) -> bool:
    """True if a supervisor declares resources, which pages then show."""
    return any(info.memory_mb or info.cpu for info in supervisors)
