"""Summaries of the cluster, its topologies, supervisors and workers as Storm's structures."""

import time
from typing import Any

from storm_dagster.blobstore import BlobMeta
from storm_dagster.core.snapshot.cluster import (
    SupervisorSnapshot,
    TopologySize,
    supervisors_of,
    topologies_by_owner,
)
from storm_dagster.core.snapshot.workers import WorkerSnapshot
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.names import code_key, jar_key
from storm_dagster.model.view import TopologyView
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.thrift.idl import STORM_VERSION, load_idl

_MOST_I32 = 2**31 - 1


def i32(value: float | None) -> int:
    """A number as a field of 32 bits holds it."""
    return max(-_MOST_I32, min(_MOST_I32, int(value or 0)))


def version_number(meta: BlobMeta) -> int:
    """Storm's version of a blob: another number for another content."""
    return int(meta.sha256[:15], 16)


def resources(assigned: TopologySize | WorkerSnapshot) -> dict[str, float]:
    """Fields 521 to 526: resources that the workers of a topology were given.

    Topologies request no resources: those stand in both places.
    """
    return {
        "requested_memonheap": assigned.memory_mb,
        "requested_cpu": assigned.cpu,
        "assigned_memonheap": assigned.memory_mb,
        "assigned_cpu": assigned.cpu,
        "requested_memoffheap": 0.0,
        "assigned_memoffheap": 0.0,
    }


def worker_summary(worker: WorkerSnapshot, *, now_secs: int, include_sys: bool) -> Any:
    """One worker; components of the system are counted only with ``include_sys``."""
    return load_idl().WorkerSummary(
        supervisor_id=worker.node,
        host=worker.host,
        port=worker.port,
        topology_id=worker.topology_id,
        topology_name=worker.topology_name,
        num_executors=worker.executors,
        component_to_num_tasks={
            component: count
            for component, count in worker.tasks_by_component.items()
            if include_sys or not component.startswith("__")
        },
        time_secs=i32(now_secs),
        uptime_secs=i32(worker.uptime_secs),
        **resources(worker),
    )


class Summaries:
    """Answers that need no statistics; the same at every nimbus."""

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader

    def cluster(self) -> Any:
        """A ClusterSummary."""
        view = self._reader.view()
        now = int(time.time())
        nimbuses = self.nimbuses()
        leader = next((one for one in nimbuses if one.isLeader), None)
        return load_idl().ClusterSummary(
            supervisors=[
                self.supervisor(snapshot) for snapshot in supervisors_of(view, now_secs=now)
            ],
            nimbus_uptime_secs=leader.uptime_secs if leader is not None else 0,
            topologies=self.topologies(),
            nimbuses=nimbuses,
        )

    def topologies(self) -> list[Any]:
        """A TopologySummary for each, by name; those whose records are damaged are left out."""
        ordered = sorted(
            self._reader.view().topologies.values(), key=lambda one: (one.base.name, one.id)
        )
        if self._nimbus.blobs.shared:
            return [self.topology(one, 1) for one in ordered]
        # Shared with other pages for a moment: counting the copies of 300 topologies takes as long
        # as all the rest.
        copies = self._reader.replication(one.id for one in ordered)
        return [
            self.topology(
                one, copies.get(one.id) or int(self._nimbus.blobs.exists(code_key(one.code_dir)))
            )
            for one in ordered
        ]

    def topology(self, topology: TopologyView, copies: int | None = None) -> Any:
        """One TopologySummary; ``copies`` is the number of nimbuses that hold its code, if it is
        known.
        """
        if copies is None:
            copies = self.copies(code_key(topology.code_dir))
        size = TopologySize.of(topology)
        return load_idl().TopologySummary(
            id=topology.id,
            name=topology.base.name,
            status=topology.base.status,
            owner=topology.base.owner,
            num_tasks=size.tasks,
            num_executors=size.executors,
            num_workers=size.workers,
            uptime_secs=i32(max(0, time.time() - topology.base.launch_time_secs)),
            storm_version=STORM_VERSION,
            topology_version=self.topology_version(topology),
            sched_status=self.sched_status(topology),
            replication_count=copies,
            **resources(size),
        )

    def owners(self, owner: str | None) -> list[Any]:
        """An OwnerResourceSummary for each owner, or for this one alone.

        Topologies request no resources: those that their workers were given stand in both places.
        """
        summaries: list[Any] = []
        by_owner = topologies_by_owner(self._reader.view(), owner or None)
        for name, topologies in by_owner.items():
            size = TopologySize.of(*topologies)
            summary = load_idl().OwnerResourceSummary(
                owner=name,
                total_topologies=len(topologies),
                total_executors=size.executors,
                total_workers=size.workers,
                total_tasks=size.tasks,
                memory_usage=size.memory_mb,
                requested_on_heap_memory=size.memory_mb,
                requested_total_memory=size.memory_mb,
                requested_off_heap_memory=0.0,
                assigned_on_heap_memory=size.memory_mb,
                assigned_off_heap_memory=0.0,
                cpu_usage=size.cpu,
                requested_cpu=size.cpu,
            )
            summaries.append(summary)
        return summaries

    def sched_status(self, topology: TopologyView) -> str:
        """Description of the placement's outcome."""
        if topology.assignment is None:
            return "not placed yet"
        placed = len(topology.assignment.task_slots())
        wanted = len(topology.tasks.component_of()) if topology.tasks else placed
        return (
            "Fully Scheduled"
            if placed >= wanted
            else f"{wanted - placed} of {wanted} tasks are not placed"
        )

    def topology_version(self, topology: TopologyView) -> str:
        """The code that it runs: the first digits of the archive's hash, when this nimbus has
        it.
        """
        key = jar_key(topology.code_dir)
        return self._nimbus.blobs.meta(key).sha256[:16] if self._nimbus.blobs.exists(key) else ""

    def copies(self, key: str) -> int:
        """How many nimbuses are known to hold the newest content; a blob that is not announced
        counts as held here.
        """
        if self._nimbus.blobs.shared:
            return 1
        return len(self._nimbus.registry.read([key])[key].newest_holders()) or int(
            self._nimbus.blobs.exists(key)
        )

    def supervisor(self, snapshot: SupervisorSnapshot) -> Any:
        """One SupervisorSummary."""
        return load_idl().SupervisorSummary(
            supervisor_id=snapshot.id,
            host=snapshot.info.host,
            version=snapshot.info.version,
            used_mem=snapshot.used_memory_mb,
            used_cpu=snapshot.used_cpu,
            blacklisted=snapshot.blacklisted,
            uptime_secs=i32(snapshot.uptime_secs),
            num_workers=len(snapshot.info.ports),
            num_used_workers=len(snapshot.used),
            total_resources={
                "cpu.pcore.percent": float(snapshot.info.cpu),
                "memory.mb": float(snapshot.info.memory_mb),
            },
            fragmented_mem=0.0,
            fragmented_cpu=0.0,
        )

    def nimbuses(self) -> list[Any]:
        """A NimbusSummary for each that is alive, the leader first."""
        return [
            load_idl().NimbusSummary(
                host=row["host"],
                port=row["port"] or 0,
                uptime_secs=i32(row["uptime_secs"]),
                isLeader=bool(row["leader"]),
                version=STORM_VERSION,
            )
            for row in self._reader.cluster()["nimbuses"]
        ]

    def leader(self) -> Any:
        """The leader's NimbusSummary; :class:`Unavailable` while there is none."""
        me = self._nimbus.identity
        for summary in self.nimbuses():
            mine = (summary.host, summary.port) == (me.host, me.thrift_port)
            # Elected a moment ago, and still initializing: it takes no changes yet.
            if summary.isLeader and not (mine and self._nimbus.status.epoch is None):
                return summary
        raise Unavailable(
            f"no nimbus leads at the moment ({self._nimbus.identity.address} follows): try again in a few seconds"
        )
