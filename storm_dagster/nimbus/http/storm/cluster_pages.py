"""Pages of the cluster: summary, conf, supervisors, nimbuses, owners."""

import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote_plus

from storm_dagster.core.snapshot.cluster import (
    SupervisorSnapshot,
    TopologySize,
    supervisors_of,
    topologies_by_owner,
)
from storm_dagster.core.snapshot.workers import WorkerSnapshot
from storm_dagster.model.conf import mask
from storm_dagster.model.errors import InvalidRequest, KeyNotFound
from storm_dagster.model.records import SupervisorInfo
from storm_dagster.model.view import TopologyView
from storm_dagster.nimbus.http.storm.formats import Links, daemon_log, pretty_secs
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader

_GUARANTEES = (
    "memoryGuarantee",
    "cpuGuarantee",
    "isolatedNodes",
    "memoryGuaranteeRemaining",
    "cpuGuaranteeRemaining",
)


class ClusterPages:
    """Pages that concern no single topology."""

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader

    def configuration(self) -> dict[str, Any]:
        """The cluster's conf; secrets are hidden."""
        return mask(self._nimbus.conf.values)

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

    def supervisors(self) -> dict[str, Any]:
        """Every supervisor."""
        view = self._reader.view()
        found = supervisors_of(view, now_secs=int(time.time()))
        links = Links(view)
        return {
            "supervisors": [_supervisor_row(one, links) for one in found],
            "schedulerDisplayResource": _displays(one.info for one in found),
        }

    def supervisor(self, id: str | None, host: str | None, sys: bool) -> dict[str, Any]:
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

    def history(self) -> dict[str, Any]:
        """Ids of the topologies that run."""
        return {"topo-history": sorted(self._reader.view().topologies)}

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

    def owners(self, owner: str | None = None) -> dict[str, Any]:
        """What runs, by owner; of one that owns nothing :class:`KeyNotFound`."""
        view = self._reader.view()
        found = topologies_by_owner(view, owner)
        if owner is not None and not found:
            raise KeyNotFound(f"nobody called {owner!r:.80} owns a topology")
        rows: list[dict[str, Any]] = []
        for name, topologies in found.items():
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
    size = TopologySize.of(topology)
    uptime_secs = max(0, int(time.time()) - topology.base.launch_time_secs)
    return {
        "id": topology.id,
        "name": topology.base.name,
        "owner": topology.base.owner,
        "status": topology.base.status,
        "tasksTotal": size.tasks,
        "workersTotal": size.workers,
        "executorsTotal": size.executors,
        "requestedMemOnHeap": size.memory_mb,
        "requestedTotalMem": size.memory_mb,
        "assignedMemOnHeap": size.memory_mb,
        "assignedTotalMem": size.memory_mb,
        "requestedCpu": size.cpu,
        "assignedCpu": size.cpu,
        "encodedId": quote_plus(topology.id),
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
    """Whether resources are worth a column: some supervisor declares its own."""
    return any(info.memory_mb or info.cpu for info in supervisors)
