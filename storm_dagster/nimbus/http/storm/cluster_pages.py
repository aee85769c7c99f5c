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
    TopologySummary,
    TopologyWorkers,
)
from storm_dagster.nimbus.http.storm.formats import Links, daemon_log, pretty_secs
from storm_dagster.nimbus.http.storm.parameters import READ_ERRORS, IncludeSystem, TopologyId
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.document_rows import fields_of
from storm_dagster.nimbus.requests.reading import ClusterReader

_GUARANTEES = (
    "memoryGuarantee",
    "cpuGuarantee",
    "isolatedNodes",
    "memoryGuaranteeRemaining",
    "cpuGuaranteeRemaining",
)


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
        view = self._reader.view()
        supervisors = supervisors_of(view, now_secs=int(time.time()))
        size = TopologySize.of(*view.topologies.values())
        total = sum(len(one.info.ports) for one in supervisors)
        used = sum(len(one.used) for one in supervisors)
        memory = float(sum(one.info.memory_mb for one in supervisors))
        cpu = float(sum(one.info.cpu for one in supervisors))
        used_memory = sum(one.used_memory_mb for one in supervisors)
        used_cpu = sum(one.used_cpu for one in supervisors)
        return {
            "stormVersion": self._nimbus.identity.version,
            "supervisors": len(supervisors),
            "topologies": len(view.topologies),
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
        found = supervisors_of(view, now_secs=int(time.time()))
        links = Links(view)
        return {
            "supervisors": [_supervisor_row(one, links) for one in found],
            "schedulerDisplayResource": _displays(one.info for one in found),
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
        """Supervisors by id or host, with the workers on them; :class:`KeyNotFound` when there is
        none.
        """
        if id is None and host is None:
            raise InvalidRequest("a supervisor is asked for by ?id= or ?host=")
        view = self._reader.view()
        links = Links(view)
        found = [
            one
            for one in supervisors_of(view, now_secs=int(time.time()), workers=True)
            if (one.id == id if id is not None else one.info.host == host)
        ]
        if not found:
            raise KeyNotFound(
                f"no supervisor {(id or host)!r:.80} is alive: see /api/v1/supervisor/summary"
            )
        return {
            "supervisors": [_supervisor_row(one, links) for one in found],
            "workers": [worker_row(worker, links) for one in found for worker in one.workers],
            "schedulerDisplayResource": _displays(one.info for one in found),
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
        rows = [
            {
                "host": one["host"],
                "port": one["port"] or 0,
                "status": "Leader" if one["leader"] else "Not a Leader",
                "version": one["version"] or "Not applicable",
                "nimbusUpTime": "Not applicable"
                if one["uptime_secs"] is None
                else pretty_secs(one["uptime_secs"]),
                "nimbusUpTimeSeconds": "Not applicable"
                if one["uptime_secs"] is None
                else str(one["uptime_secs"]),
                "nimbusLogLink": self._log_link(one),
            }
            for one in self._reader.cluster()["nimbuses"]
        ]
        return {"nimbuses": rows}

    def _log_link(self, row: Mapping[str, Any]) -> str:
        own = self._nimbus.identity
        if row["http"] == own.http:
            return daemon_log(own.http, "nimbus", own.id)
        return f"{row['http']}/logview?cmd=listDir" if row["http"] else ""

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
        """One owner; :class:`KeyNotFound` when no topology is of that owner."""
        return self._owners(owner)

    @router.route(
        "GET",
        "/api/v1/topology/summary",
        summary="Topologies",
        responses={200: TopologySummary},
        errors=READ_ERRORS,
    )
    def topologies(self) -> dict[str, Any]:
        """Every topology, in order of its name."""
        view = self._reader.view()
        held = self._reader.replication(view.topologies)
        rows = [
            topology_row(one, held.get(one.id, 0), self._nimbus.identity.version)
            for one in sorted(view.topologies.values(), key=lambda one: (one.base.name, one.id))
        ]
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
        """The slots of a topology, each once; :class:`NotAlive` when there is no such topology."""
        workers = self._reader.snapshot(name).workers
        slots = sorted({(worker.host, worker.port) for worker in workers})
        return {
            "hostPortList": [{"host": host, "port": port} for host, port in slots],
            # Storm has one port for all hosts; here each supervisor names its own, this is the
            # configured one.
            "logviewerPort": int(self._nimbus.conf["supervisor.http.port"]),
            "logviewerScheme": self._nimbus.identity.http.partition(":")[0],
        }

    def _owners(self, owner: str | None) -> dict[str, Any]:
        view = self._reader.view()
        found = topologies_by_owner(view, owner)
        if owner is not None and not found:
            raise KeyNotFound(f"nobody called {owner!r:.80} owns a topology")
        rows: list[dict[str, Any]] = []
        for name, topologies in found.items():
            size = TopologySize.of(*topologies)
            row = {"owner": name, "totalTopologies": len(topologies)} | fields_of("owner", size)
            row |= {"totalReqOffHeapMem": 0.0, "totalAssignedOffHeapMem": 0.0}
            rows.append(row | dict.fromkeys(_GUARANTEES, "N/A"))
        return {"owners": rows, "schedulerDisplayResource": _displays(view.supervisors.values())}


def worker_row(worker: WorkerSnapshot, links: Links) -> dict[str, Any]:
    """One worker, as on every page that lists workers."""
    return {
        **fields_of("worker", worker),
        "assignedMemOffHeap": 0.0,
        "componentNumTasks": dict(worker.tasks_by_component),
        "uptime": pretty_secs(worker.uptime_secs),
        "workerLogLink": links.worker(worker.topology_id, worker.node, worker.host, worker.port),
    }


def _supervisor_row(one: SupervisorSnapshot, links: Links) -> dict[str, Any]:
    total, used = len(one.info.ports), len(one.used)
    return {
        **fields_of("supervisor", one),
        "uptime": pretty_secs(one.uptime_secs),
        "slotsTotal": total,
        "slotsUsed": used,
        "slotsFree": max(0, total - used),
        "totalMem": float(one.info.memory_mb),
        "totalCpu": float(one.info.cpu),
        "availMem": max(0.0, one.info.memory_mb - one.used_memory_mb),
        "availCpu": max(0.0, one.info.cpu - one.used_cpu),
        "logLink": links.supervisor(one.id),
    }


def topology_row(one: TopologyView, replication: int, version: str) -> dict[str, Any]:
    """A topology, as the list and its own page show it."""
    uptime = max(0, int(time.time()) - one.base.launch_time_secs)
    return {
        **fields_of("topology", one),
        **fields_of("size", TopologySize.of(one)),
        "encodedId": quote_plus(one.id),
        "uptime": pretty_secs(uptime),
        "uptimeSeconds": uptime,
        "replicationCount": replication,
        "schedulerInfo": None,
        **dict.fromkeys(("requestedMemOffHeap", "assignedMemOffHeap"), 0.0),
        "stormVersion": version,
    }


def _percent(used: float, total: float) -> float:
    return round(100 * used / total, 1) if total else 0.0


def _displays(supervisors: Iterable[SupervisorInfo]) -> bool:
    """Whether resources are worth a column: some supervisor declares its own."""
    return any(info.memory_mb or info.cpu for info in supervisors)
