"""A topology that a leading nimbus shows: real workers, and records in place of its supervisor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storm_dagster.supervisor.log_service import LogService
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.servers.ports import free_ports
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.worker_processes import WorkerRig


@dataclass
class ServedTopology:
    """A nimbus and the HTTP service of the supervisor ``s1`` in this process, and the workers as
    processes.
    """

    stage: Stage
    nimbus: NimbusThread
    """The one that leads."""
    rig: WorkerRig
    service: LogService
    ports: tuple[int, ...]
    """One for each worker."""

    @property
    def id(self) -> str:
        """The topology's id."""
        return self.rig.topology_id

    @property
    def cluster(self) -> StormClusterState:
        """The cluster in the session of the test."""
        return self.stage.cluster


def serve_topology(
    stage: Stage,
    rig: WorkerRig,
    workers: Sequence[str],
    blobs: Mapping[str, bytes] | None = None,
) -> ServedTopology:
    """Run the topology of ``rig`` on one worker for each of the task ranges, and wait for them.

    Its code and ``blobs`` (name behind its id -> content) are in the blob store of the nimbus.
    """
    nimbus = stage.nimbus().await_leading()
    ports = tuple(free_ports(len(workers)))
    # One slot is free.
    service = stage.log_service("s1", ports=(*ports, 1), cpu=400, memory_mb=4096)
    contents = {
        "stormconf.ser": (rig.code_dir / "stormconf.ser").read_bytes(),
        "stormcode.ser": (rig.code_dir / "stormcode.ser").read_bytes(),
        "stormjar.jar": b"jar",
        **(blobs or {}),
    }
    with nimbus.client(timeout=30.0) as client:
        for name, content in contents.items():
            client.put(f"/v1/blobs/{rig.topology_id}-{name}", content=content).raise_for_status()
    rig.assign({("s1", port): tasks for port, tasks in zip(ports, workers, strict=True)})
    for port in ports:
        rig.start("s1", port)
    eventually(rig.running, timeout=60, what="the workers")
    return ServedTopology(stage, nimbus, rig, service, ports)
