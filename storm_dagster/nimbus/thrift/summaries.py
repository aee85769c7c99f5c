"""Storm's structures of cluster, topologies, supervisors and workers."""

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
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.thrift.idl import STORM_VERSION, load_idl
from storm_dagster.operations.submit.open_tokens import STARTING, StartingTopology

_MAX_I32 = 2**31 - 1


def i32(value: float | None) -> int:
    """Truncate and limit a number to a field of 32 bits; ``None`` becomes 0."""
    return max(-_MAX_I32, min(_MAX_I32, int(value or 0)))


def version_number(meta: BlobMeta) -> int:
    """Storm's version of a blob: a number that changes with the content."""
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
    """Make a WorkerSummary.

    Components of the system are counted only with ``include_sys``.
    """
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
    """Structures that need no statistics; every nimbus returns the same ones."""

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader

    def cluster(self) -> Any:
        """Return a ClusterSummary."""
        supervisors = supervisors_of(self._reader.view(), now_secs=int(time.time()))
        nimbuses = self.nimbuses()
        leader_uptime_secs = 0
        if nimbuses and nimbuses[0].isLeader:
            leader_uptime_secs = nimbuses[0].uptime_secs
        return load_idl().ClusterSummary(
            supervisors=[self.supervisor(snapshot) for snapshot in supervisors],
            nimbus_uptime_secs=leader_uptime_secs,
            topologies=self.topologies(),
            nimbuses=nimbuses,
        )

    def topologies(self) -> list[Any]:
        """Return a TopologySummary of each topology, in the order of their names.

        Those that are being submitted come last. Topologies whose records are damaged are left out.
        """
        view, starting = self._reader.view_and_starting()
        summaries = self._running(view)
        summaries += [self.starting(topology) for topology in starting]
        return summaries

    def _running(self, view: ClusterView) -> list[Any]:
        """Return a TopologySummary of each topology that is published."""
        topologies = sorted(
            view.topologies.values(), key=lambda topology: (topology.base.name, topology.id)
        )
        if self._nimbus.blobs.shared:
            return [self.topology(topology, 1) for topology in topologies]
        # The reader shares the numbers with other pages for a moment: counting the copies of 300
        # topologies takes as long as all the other fields.
        copies_by_id = self._reader.replication(topology.id for topology in topologies)
        summaries: list[Any] = []
        for topology in topologies:
            copies = copies_by_id.get(topology.id)
            if not copies:
                copies = int(self._nimbus.blobs.exists(code_key(topology.code_dir)))
            summaries.append(self.topology(topology, copies))
        return summaries

    def topology(self, topology: TopologyView, copies: int | None = None) -> Any:
        """Return the TopologySummary of one topology.

        ``copies`` is the number of nimbuses that hold its code; ``None``: it is counted here.
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

    def starting(self, topology: StartingTopology) -> Any:
        """Return the TopologySummary of a topology that is being submitted: it has no tasks."""
        return load_idl().TopologySummary(
            id=topology.id,
            name=topology.name,
            status=STARTING,
            owner=topology.owner,
            num_tasks=0,
            num_executors=0,
            num_workers=0,
            uptime_secs=i32(topology.uptime_secs(int(time.time()))),
            storm_version=STORM_VERSION,
            topology_version="",
            sched_status="being submitted",
            replication_count=0,
            **resources(TopologySize.of()),
        )

    def owners(self, owner: str | None) -> list[Any]:
        """Return an OwnerResourceSummary of each owner, or of this one.

        ``None`` and an empty name stand for all.

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
        """Description of the result of the placement."""
        if topology.assignment is None:
            return "not placed yet"
        placed_tasks = len(topology.assignment.task_slots())
        tasks = len(topology.tasks.component_of()) if topology.tasks else placed_tasks
        if placed_tasks >= tasks:
            return "Fully Scheduled"
        return f"{tasks - placed_tasks} of {tasks} tasks are not placed"

    def topology_version(self, topology: TopologyView) -> str:
        """First 16 digits of the hash of the topology's archive.

        Empty if this nimbus does not hold the archive.
        """
        key = jar_key(topology.code_dir)
        if not self._nimbus.blobs.exists(key):
            return ""
        return self._nimbus.blobs.meta(key).sha256[:16]

    def copies(self, key: str) -> int:
        """Number of nimbuses that hold the newest content of a blob.

        A blob without a registered holder counts as held by this nimbus if it is stored here. With
        a shared store it is 1.
        """
        if self._nimbus.blobs.shared:
            return 1
        record = self._nimbus.registry.read([key])[key]
        holders = len(record.newest_holders())
        if holders == 0:
            return int(self._nimbus.blobs.exists(key))
        return holders

    def supervisor(self, snapshot: SupervisorSnapshot) -> Any:
        """Return the SupervisorSummary of one supervisor."""
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
        """Return a NimbusSummary of each nimbus that is alive, the leader first."""
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
        """Return the leader's NimbusSummary; :class:`Unavailable` without a leader."""
        own = self._nimbus.identity
        for summary in self.nimbuses():
            if not summary.isLeader:
                continue
            is_own = (summary.host, summary.port) == (own.host, own.thrift_port)
            if is_own and self._nimbus.status.epoch is None:
                continue  # It was just elected and still initializes: it accepts no changes yet.
            return summary
        raise Unavailable(
            f"no nimbus leads at the moment ({own.address} follows): try again in a few seconds"
        )
