"""A code location with declared topologies of one owner, beside batch assets of a user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from storm_dagster.defs.declared.assets import topology_assets
from storm_dagster.defs.declared.checks import (
    FreshnessAttributes,
    ScheduleAttributes,
    TopologyAlerts,
)
from storm_dagster.defs.declared.declaration import Declaration, LoadedFiles, describe_declared
from storm_dagster.defs.declared.deploy import DeployPolicy
from storm_dagster.defs.declared.runs import topology_definitions
from storm_dagster.defs.declared.sensor import DECLARED_TAG, shared_definitions
from storm_dagster.defs.declared.topology import DeclaredTopology
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.processes import NimbusResource

CODE = """
from storm_dagster.api import Bolt, Spout, Topology


class Lines(Spout):
    outputs = ["line"]


class Count(Bolt):
    outputs = ["word", "count"]


class Wc(Topology):
    lines = Lines.spec()
    count = Count.spec(inputs=[lines])
"""


class DeclaredLocation:
    """The definitions of a project of ``owner`` on the cluster of ``home``.

    Its topologies have the policy hot and a schedule for deploys. ``blob_dir`` is the local blob
    store of a cluster without a nimbus. ``extra`` are the definitions of the user.
    """

    def __init__(
        self,
        folder: Path,
        home: Path,
        instance: dg.DagsterInstance,
        owner: str,
        *,
        names: Sequence[str] = ("wc",),
        code: str = CODE,
        policy: DeployPolicy = "hot",
        blob_dir: Path | None = None,
        extra: dg.Definitions | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "wc_code.py"
        self.file.write_text(code, encoding="utf-8")
        self.home, self.instance, self.owner = home, instance, owner
        self.policy: DeployPolicy = policy
        self.blob_dir = blob_dir
        self.cursors: dict[str, str | None] = {}
        self.topologies = {name: self._declare(name) for name in names}
        parts = [
            topology_definitions(topology, own_jobs=True) for topology in self.topologies.values()
        ]
        self.defs = dg.Definitions.merge(
            *parts, shared_definitions(self.topologies), extra or dg.Definitions()
        )

    def _declare(self, name: str) -> DeclaredTopology:
        declaration = Declaration(name, f"{self.file}:Wc", owner=self.owner)
        described = describe_declared(declaration)
        assets = topology_assets(
            declaration,
            described,
            prefix=["topologies"],
            group_name="g",
            owners=[],
            tags={},
            description=None,
            kinds=["storm"],
            deps=[],
            automation_condition=None,
        )
        first, *others = [asset.spec for asset in assets]
        blobs = str(self.blob_dir) if self.blob_dir else None
        return DeclaredTopology(
            declaration=declaration,
            described=described,
            files=LoadedFiles(declaration, described),
            identifier=name,
            specs=[first.merge_attributes(tags=DECLARED_TAG), *others],
            components={asset.component: asset.spec.key for asset in assets if asset.component},
            policy=self.policy,
            batch={},
            alerts=TopologyAlerts(),
            freshness=FreshnessAttributes(),
            schedule=ScheduleAttributes(deploy="*/10 * * * *", rebalance="0 3 * * *"),
            zookeeper=ZooKeeperResource(home=str(self.home)),
            blobstore=BlobStoreResource(home=str(self.home), local_dir=blobs),
            nimbus=NimbusResource(home=str(self.home), patience_secs=2.0),
        )

    def version(self, name: str = "wc") -> str:
        """The declared code version."""
        return str(self.topologies[name].described.code_version)

    def evaluate(self, sensor: str = "declared_topologies_sensor") -> dg.SensorResult:
        """The result of a tick of which Dagster stores neither events nor cursor."""
        with dg.build_sensor_context(
            instance=self.instance, cursor=self.cursors.get(sensor), definitions=self.defs
        ) as context:
            result = self.defs.resolve_sensor_def(sensor)(context)
        assert isinstance(result, dg.SensorResult)
        return result

    def store(self, result: dg.SensorResult, sensor: str, events: int | None = None) -> None:
        """Store the first ``events`` of a tick; its cursor only after all of them, as Dagster."""
        for event in result.asset_events[:events]:
            self.instance.report_runless_asset_event(event)
        if events is None:
            self.cursors[sensor] = result.cursor

    def tick(self, sensor: str = "declared_topologies_sensor") -> dg.SensorResult:
        """A tick whose events and cursor are stored."""
        result = self.evaluate(sensor)
        self.store(result, sensor)
        return result

    def run(
        self, job: str, config: Any = None, tags: dict[str, str] | None = None
    ) -> dg.ExecuteInProcessResult:
        """A run, launched by hand unless ``tags`` name a sensor or schedule."""
        return self.defs.resolve_job_def(job).execute_in_process(
            instance=self.instance, run_config=config, tags=tags, raise_on_error=False
        )

    def schedule(self, name: str) -> Any:
        """The result of a tick of the schedule."""
        with dg.build_schedule_context(instance=self.instance) as context:
            return self.defs.resolve_schedule_def(name)(context)
