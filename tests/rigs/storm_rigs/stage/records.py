"""The level of records: a real cluster state and a blob store, in which a leader, supervisors and
workers are what they write there.

A process of another release runs this module too: it imports nothing of the levels above.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model import paths
from storm_dagster.model.conf import ClusterConf, default_conf
from storm_dagster.model.records import (
    Assignment,
    EpochRecord,
    SupervisorInfo,
    TaskBeats,
    TaskTable,
    WorkerNode,
    encode_record,
)
from storm_dagster.model.view import TopologyView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.submit.staging import read_record, upload_key
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.operations.acting import submit
from storm_rigs.operations.archives import pack_archive

WORD_COUNT: dict[str, Any] = {
    "spouts": {
        "lines": {
            "object": {"python": "wc.spouts:Lines"},
            "outputs": {"default": {"fields": ["line"]}},
        }
    },
    "bolts": {
        "split": {
            "object": {"python": "wc.bolts:Split"},
            "parallelism": 2,
            "inputs": [{"component": "lines", "grouping": {"type": "shuffle"}}],
            "outputs": {"default": {"fields": ["word"]}},
        },
        "count": {
            "object": {"python": "wc.bolts:Count"},
            "parallelism": 2,
            "inputs": [{"component": "split", "grouping": {"type": "fields", "fields": ["word"]}}],
        },
    },
}


ARCHIVE = pack_archive("archive")


class Crash(BaseException):
    """The process ended here: no code may catch it."""


@dataclass
class Records:
    """What daemons write, written by a test."""

    cluster: StormClusterState
    blobs: LocalBlobStore
    time: int = field(default=1_700_000_000, kw_only=True)
    """Seconds, for records and operations."""

    def lead(self, leader: str = "127.0.0.1:6627") -> int:
        """A new leader: the epoch rises."""
        record = EpochRecord(leader=leader, http="http://127.0.0.1:7621")
        return self.cluster.state.set_data(paths.EPOCH, encode_record(record))

    def supervisor(
        self, supervisor_id: str, ports: tuple[int, ...] = (6900, 6901, 6902, 6903), **more: Any
    ) -> None:
        """A live supervisor with free slots; ``more``: fields of its record."""
        fields: dict[str, Any] = {
            "host": supervisor_id,
            "ports": ports,
            "started": 0,
            "count": 1,
            "version": "t",
            **more,
        }
        self.cluster.state.set_ephemeral_node(
            paths.supervisor(supervisor_id), encode_record(SupervisorInfo(**fields))
        )

    def lose_supervisor(self, supervisor_id: str) -> None:
        """The supervisor is gone."""
        self.cluster.state.delete_node(paths.supervisor(supervisor_id))

    def lose_host(self, supervisor_id: str) -> None:
        """The host is gone: its workers and its supervisor."""
        for topology in self.cluster.load_view().topologies.values():
            for worker in topology.assignment.workers if topology.assignment else ():
                if worker.node == supervisor_id:
                    path = paths.worker(topology.id, supervisor_id, worker.port)
                    self.cluster.state.delete_node(path)
        self.lose_supervisor(supervisor_id)

    def upload(
        self,
        handle: str,
        topology: Any = WORD_COUNT,
        conf: Any = None,
        archive: bytes | None = ARCHIVE,
    ) -> str:
        """The parts of a submission; the handle."""
        self.blobs.put(upload_key(handle, "topology"), json.dumps(topology).encode())
        self.blobs.put(
            upload_key(handle, "conf"), json.dumps(conf if conf is not None else {}).encode()
        )
        if archive is not None:
            self.blobs.put(upload_key(handle, "archive"), archive)
        return handle

    def run_workers(
        self,
        topology: str,
        *,
        status: Literal["starting", "running", "paused"] = "running",
        token: str = "start-token",
    ) -> None:
        """Every worker that the assignment of the topology's id names has a live node, and no
        other.
        """
        entry = self.cluster.read_assignment(topology)
        assert entry is not None, f"{topology} is not assigned"
        assignment, at = entry
        workers = {worker.slot: worker for worker in assignment.workers}
        for node, port in self.cluster.live_workers(topology).keys() - workers.keys():
            self.stop_worker(topology, node, port)
        for (node, port), worker in workers.items():
            record = WorkerNode(
                pid=1000 + port,
                token=f"{token}-{node}-{port}",
                version=at.version,
                tasks=worker.tasks,
                started_ms=self.time * 1000,
                status=status,
                code="0123456789abcdef",
            )
            self.cluster.state.set_ephemeral_node(
                paths.worker(topology, node, port), encode_record(record)
            )

    def stop_worker(self, topology_id: str, node: str, port: int) -> None:
        """The worker's node is gone."""
        self.cluster.state.delete_node(paths.worker(topology_id, node, port))


@dataclass
class World(Records):
    """One cluster at the level of records, and the operations on it."""

    conf: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    """Further fields of each context."""

    def context(self, **changes: Any) -> OperationsContext:
        """The context of an operation: the local planner, and the time of this world."""
        values = {**default_conf(), **self.conf}
        options: dict[str, Any] = {
            "cluster": self.cluster,
            "blobs": self.blobs,
            "conf": ClusterConf(values, dict.fromkeys(values, "test")),
            "planner": plan_placement,
            "now_secs": lambda: self.time,
            **self.settings,
            **changes,
        }
        return OperationsContext(**options)

    def submit(
        self,
        name: str,
        token: str | None = None,
        *,
        topology: Any = WORD_COUNT,
        conf: Any = None,
        ctx: OperationsContext | None = None,
        **options: Any,
    ) -> str:
        """The six stages; the topology's id."""
        token = token or f"token-{name}"
        ctx = ctx or self.context()
        handle = self.upload(f"handle-{token}", topology, conf)
        submit(ctx, name=name, token=token, handle=handle, **options)
        return read_record(ctx, token).topology_id

    def find(self, name: str = "wc") -> TopologyView | None:
        """The topology of that name."""
        return self.cluster.load_view().topology_named(name)

    def named(self, name: str = "wc") -> TopologyView:
        """The topology of that name, which is there."""
        topology = self.find(name)
        assert topology is not None, f"no topology is called {name}"
        return topology

    def assignment(self, name: str = "wc") -> Assignment:
        """Its assignment, which is there."""
        assignment = self.named(name).assignment
        assert assignment is not None, f"{name} is not assigned"
        return assignment

    def tasks(self, name: str = "wc") -> TaskTable:
        """Its tasks, which are there."""
        tasks = self.named(name).tasks
        assert tasks is not None, f"{name} has no tasks"
        return tasks

    def beats(self, name: str = "wc") -> TaskBeats:
        """The record of its topology master, which is there."""
        beats = self.named(name).beats
        assert beats is not None, f"{name} has no beats"
        return beats

    def epoch(self) -> int:
        """Number of the leader's epoch."""
        epoch = self.cluster.epoch()
        assert epoch is not None, "no leader"
        return epoch[0]
