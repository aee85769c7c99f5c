"""A real cluster state, a local blob store and a real Dagster instance; supervisors and workers are
records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.defs import build_storm_defs
from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.defs.resources.spark import SparkResource
from storm_dagster.model import paths
from storm_dagster.model.dagster_names import TOKEN_TAG, DagsterNames
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.records import EpochRecord, SupervisorInfo, WorkerNode, encode_record
from storm_dagster.operations.context import Planner
from storm_dagster.operations.submit.staging import upload_key
from storm_dagster.zk.sensor_memory import load_memory, store_memory
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.archives import pack_archive
from storm_rigs.nimbuses import Nimbuses, RunningNimbus

WORD_COUNT: dict[str, Any] = {
    "spouts": {
        "lines": {"object": {"python": "wc:Lines"}, "outputs": {"default": {"fields": ["line"]}}}
    },
    "bolts": {
        "split": {
            "object": {"python": "wc:Split"},
            "parallelism": 2,
            "inputs": [{"component": "lines", "grouping": {"type": "shuffle"}}],
            "outputs": {"default": {"fields": ["word"]}},
        },
        "count": {
            "object": {"python": "wc:Count"},
            "parallelism": 2,
            "inputs": [{"component": "split", "grouping": {"type": "fields", "fields": ["word"]}}],
        },
    },
}


class PlainPlanner(SparkResource):
    """Plans without Spark: for tests of everything but the planner."""

    def planner(self, cluster: StormClusterState) -> Planner:
        return plan_placement


@dataclass
class DagsterWorld:
    """One cluster as the code location sees it, and what a test does to it."""

    home: Path
    cluster: StormClusterState
    blobs: LocalBlobStore
    instance: dg.DagsterInstance
    defs: dg.Definitions
    names: DagsterNames = field(default_factory=DagsterNames)

    def lead(self) -> int:
        record = EpochRecord(leader="127.0.0.1:6627", http="http://127.0.0.1:7621")
        return self.cluster.state.set_data(paths.EPOCH, encode_record(record))

    def supervisor(
        self, supervisor_id: str, ports: tuple[int, ...] = (6900, 6901, 6902, 6903)
    ) -> None:
        info = SupervisorInfo(
            host=f"host-{supervisor_id}", ports=ports, started=0, count=1, version="t"
        )
        self.cluster.state.set_ephemeral_node(paths.supervisor(supervisor_id), encode_record(info))

    def lose_supervisor(self, supervisor_id: str) -> None:
        self.cluster.state.delete_node(paths.supervisor(supervisor_id))

    def upload(self, handle: str, topology: Any = WORD_COUNT, conf: Any = None) -> str:
        self.blobs.put(upload_key(handle, "topology"), json.dumps(topology).encode())
        self.blobs.put(upload_key(handle, "conf"), json.dumps(conf or {}).encode())
        self.blobs.put(upload_key(handle, "archive"), pack_archive(modules=["wc"]))
        return handle

    def run(
        self,
        job: str,
        *,
        partition: str | None = None,
        config: dict[str, Any] | None = None,
        tags: dict[str, str] | None = None,
    ) -> dg.ExecuteInProcessResult:
        return self.defs.resolve_job_def(self.names.name(job)).execute_in_process(
            instance=self.instance,
            partition_key=partition,
            run_config=config or {},
            tags=tags,
            raise_on_error=False,
        )

    def submit(
        self,
        name: str,
        *,
        conf: Any = None,
        topology: Any = WORD_COUNT,
        register: bool = True,
        **form: Any,
    ) -> dg.ExecuteInProcessResult:
        """A submission as nimbus launches it."""
        if register:
            self.instance.add_dynamic_partitions(self.names.partitions, [name])
        handle = self.upload(f"handle-{name}", topology, conf)
        config = {
            "ops": {self.names.stage_op("topology_conf"): {"config": {"handle": handle, **form}}}
        }
        return self.run(
            "submit_topology", partition=name, config=config, tags={TOKEN_TAG: f"token-{name}"}
        )

    def topology(self, name: str) -> Any:
        return self.cluster.load_view().topology_named(name)

    def run_workers(self, name: str, *, token: str = "start-token") -> None:
        """Every worker that the assignment names lives, and no other."""
        topology = self.topology(name)
        wanted = {worker.slot: worker for worker in topology.assignment.workers}
        for node, port in topology.live_workers.keys() - wanted.keys():
            self.cluster.state.delete_node(paths.worker(topology.id, node, port))
        for (node, port), worker in wanted.items():
            record = WorkerNode(
                pid=1000 + port,
                token=f"{token}-{node}-{port}",
                version=topology.assignment_at.version,
                tasks=worker.tasks,
                started_ms=0,
                status="running",
            )
            self.cluster.state.set_ephemeral_node(
                paths.worker(topology.id, node, port), encode_record(record)
            )

    def stored_memory(self, cursor: str, sensor: str = "heartbeat_sensor") -> Any:
        """Memory of a sensor in ZooKeeper, by its cursor."""
        raw = load_memory(self.cluster, sensor, json.loads(cursor)["memory"])
        assert raw is not None
        return json.loads(raw)

    def with_memory(self, cursor: str, memory: Any) -> str:
        """The heartbeat sensor's cursor, leading to another memory."""
        document = json.loads(cursor)
        raw = json.dumps(memory).encode()
        name = store_memory(
            self.cluster,
            "heartbeat_sensor",
            raw,
            document["memory"],
            epoch=self.cluster.load_view().epoch,
        )
        return json.dumps({**document, "memory": name})

    def materializations(self, key: dg.AssetKey) -> list[dg.AssetMaterialization]:
        """Newest first."""
        records = self.instance.fetch_materializations(key, limit=50).records
        return [record.asset_materialization for record in records if record.asset_materialization]


def make_world(
    home: Path,
    instance: dg.DagsterInstance,
    zk_conf: dict[str, object],
    zk_cluster: StormClusterState,
    resources: dict[str, Any],
    cluster: str | None = None,
) -> DagsterWorld:
    """A cluster with a leader's epoch and two supervisors of four slots, and a Dagster that knows
    it.
    """
    home.mkdir()
    conf = {**zk_conf, "task.cleanup.timeout.sec": 0, "topology.message.timeout.secs": 1}
    (home / "storm.yaml").write_text(yaml.safe_dump(conf), encoding="utf-8")
    blob_dir = home / "blobs"
    world = DagsterWorld(
        home=home,
        cluster=zk_cluster,
        blobs=LocalBlobStore(blob_dir),
        instance=instance,
        defs=build_storm_defs(
            cluster=cluster,
            home=str(home),
            blob_dir=str(blob_dir),
            tick_secs=0.0,
            resources={"nimbus": NimbusResource(home=str(home), patience_secs=2.0), **resources},
        ),
        names=DagsterNames(cluster),
    )
    world.lead()
    world.supervisor("s1")
    world.supervisor("s2")
    return world


@contextmanager
def leading_nimbus(world: DagsterWorld) -> Iterator[RunningNimbus]:
    """A real nimbus that leads the cluster and that the code location finds; it has no Dagster."""
    path = world.home / "storm.yaml"
    conf = yaml.safe_load(path.read_text(encoding="utf-8"))
    conf.pop("nimbus.seeds", None)
    nimbus = Nimbuses(conf, world.home).start()
    try:
        nimbus.await_leading()
        seeds = [nimbus.url.removeprefix("http://")]
        path.write_text(yaml.safe_dump({**conf, "nimbus.seeds": seeds}), encoding="utf-8")
        yield nimbus
    finally:
        nimbus.stop()


def connection_waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on no ZooKeeper answers; how long each session waits for one, in milliseconds, as
    they are opened.
    """
    waits: list[int] = []

    def nobody_answers(
        _: ZkSession, hosts: str, *, connection_timeout_ms: int, **more: Any
    ) -> None:
        waits.append(connection_timeout_ms)
        raise Unavailable(f"ZooKeeper at {hosts} does not answer")

    monkeypatch.setattr(ZkSession, "__init__", nobody_answers)
    return waits
