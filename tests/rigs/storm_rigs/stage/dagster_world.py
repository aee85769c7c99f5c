"""The code location: a real Dagster instance on a cluster at the level of records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import dagster as dg
import pytest
import yaml

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.defs import build_storm_defs
from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.defs.resources.spark import SparkResource
from storm_dagster.model.dagster_names import TOKEN_TAG, DagsterNames
from storm_dagster.model.errors import Unavailable
from storm_dagster.operations.context import Planner
from storm_dagster.zk.sensor_memory import load_memory, store_memory
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.records import WORD_COUNT, Records


class PlainPlanner(SparkResource):
    """Plans without Spark: for tests of everything but the planner."""

    def planner(self, cluster: StormClusterState) -> Planner:
        return plan_placement


@dataclass
class DagsterWorld(Records):
    """One cluster as the code location sees it: daemons are records, Dagster is real."""

    home: Path
    instance: dg.DagsterInstance
    defs: dg.Definitions
    names: DagsterNames = field(default_factory=DagsterNames)

    def supervisor(
        self, supervisor_id: str, ports: tuple[int, ...] = (6900, 6901, 6902, 6903), **more: Any
    ) -> None:
        """A live supervisor, on a host of its own."""
        super().supervisor(supervisor_id, ports, **{"host": f"host-{supervisor_id}", **more})

    def run_workers(
        self,
        topology: str,
        *,
        status: Literal["starting", "running", "paused"] = "running",
        token: str = "start-token",
    ) -> None:
        """Every worker that the assignment names has a live node; ``topology`` is a name."""
        super().run_workers(self.topology(topology).id, status=status, token=token)

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
        """The topology of that name; ``None`` without one."""
        return self.cluster.load_view().topology_named(name)

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


def dagster_world(
    stage: Stage,
    instance: dg.DagsterInstance,
    resources: Mapping[str, Any],
    cluster: str | None = None,
) -> DagsterWorld:
    """The cluster of ``stage`` with a leader's epoch and two supervisors of four slots, and the
    definitions of a code location called ``cluster``.
    """
    home = stage.home
    home.mkdir(parents=True)
    conf = {**stage.conf, "task.cleanup.timeout.sec": 0, "topology.message.timeout.secs": 1}
    (home / "storm.yaml").write_text(yaml.safe_dump(conf), encoding="utf-8")
    blob_dir = home / "blobs"
    world = DagsterWorld(
        home=home,
        cluster=stage.cluster,
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
def leading_nimbus(world: DagsterWorld) -> Iterator[NimbusThread]:
    """A real nimbus that leads the cluster and that the code location finds; it has no Dagster."""
    path = world.home / "storm.yaml"
    conf = yaml.safe_load(path.read_text(encoding="utf-8"))
    conf.pop("nimbus.seeds", None)
    with Stage(world.home.parent, conf, home=world.home) as stage:
        nimbus = stage.nimbus().await_leading()
        seeds = [nimbus.url.removeprefix("http://")]
        path.write_text(yaml.safe_dump({**conf, "nimbus.seeds": seeds}), encoding="utf-8")
        yield nimbus


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
