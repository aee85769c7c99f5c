"""``storm_dagster.StormTopologyComponent``: a topology declared in ``defs.yaml``.

.. code-block:: yaml

    type: storm_dagster.StormTopologyComponent
    attributes:
      name: word-count
      target: word_count.py:WordCount
      conf:
        topology.workers: 2
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import dagster as dg
from dagster.components import ComponentTypeSpec
from pydantic import Field

from storm_dagster.client import NimbusClient, submit_target
from storm_dagster.defs.failures import step_errors
from storm_dagster.defs.keys import OWNER, topology_tags
from storm_dagster.defs.metadata import masked, table
from storm_dagster.model.conf import validate_conf
from storm_dagster.model.endpoints import home_dir
from storm_dagster.model.errors import NotAlive
from storm_dagster.model.home_conf import cluster_conf
from storm_dagster.model.names import check_topology_name

__all__ = ["StormTopologyComponent"]


class StormTopologyComponent(dg.Component, dg.Model, dg.Resolvable):
    """A topology that is to run: materializing its asset submits it, or shows it when it runs already.

    Yields the asset ``topologies/<name>``, the job ``submit_<name>`` and a check that all tasks run. The
    submission itself is a run of ``submit_topology`` in the code location of the cluster.
    """

    name: str = Field(description="Name of the topology.", examples=["word-count"])
    target: str = Field(
        description="What to submit: 'file.py[:Name]' (relative to this defs.yaml), 'package.module[:Name]' or "
        "'archive.zip::module[:Name]'.",
        examples=["word_count.py:WordCount"],
    )
    conf: dict[str, Any] = Field(
        default_factory=dict,
        description="Topology conf that overrides the topology's own.",
        examples=[{"topology.workers": 2}],
    )
    inactive: bool = Field(default=False, description="Submit it INACTIVE: its spouts stay silent.")
    home: str | None = Field(
        default=None, description="State folder of the local cluster. Empty: STORM_DAGSTER_HOME."
    )
    conf_dir: str | None = Field(default=None, description="Folder whose storm.yaml names the cluster.")
    description: str | None = Field(default=None, description="What the topology does.")
    owners: list[str] = Field(default_factory=lambda: [OWNER], description="Owners of the asset.")
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of the asset.")

    @classmethod
    def get_spec(cls) -> ComponentTypeSpec:
        """What `dg docs` and `dg list components` say."""
        return ComponentTypeSpec(
            description="A Storm topology that is to run: submitted by materializing its asset.",
            owners=[OWNER],
            tags=["storm", "streaming"],
        )

    def get_asset_spec(self) -> dg.AssetSpec:
        """The asset that stands for the topology. Override it to rename or annotate."""
        return dg.AssetSpec(
            key=["topologies", self.name],
            description=self.description or f"The topology {self.name}: a job that never ends, run by Storm.",
            group_name="topologies",
            owners=self.owners,
            tags={**self.tags},
            kinds={"storm", "python"},
            metadata={"target": self.target, "conf": dg.MetadataValue.json(masked(self.conf))},
        )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The definitions; wrong names and conf keys are errors at load, with the nearest known key."""
        check_topology_name(self.name)
        validate_conf(self.conf, source=f"conf of {self.name} in {context.path}/defs.yaml")
        spec = self.get_asset_spec()
        identifier = _identifier(self.name)
        target = _absolute_target(self.target, context.path)

        @dg.multi_asset(name=f"submit_{identifier}_op", specs=[spec])
        def submit(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
            with step_errors(), self._nimbus() as nimbus:
                try:
                    document = nimbus.get(f"/v1/topologies/{self.name}")
                    context.log.info(f"{self.name} runs already as {document['id']}: nothing was submitted")
                    run_id = None
                except NotAlive:
                    submission = submit_target(
                        nimbus,
                        target,
                        name=self.name,
                        conf=self.conf,
                        home=home_dir(self.home),
                        token=f"{context.run.run_id}-{identifier}"[:200],
                        inactive=self.inactive,
                        progress=lambda step, state: context.log.info(f"{step}: {state}"),
                    )
                    run_id = submission.run_id
                    document = nimbus.get(f"/v1/topologies/{self.name}")
            return dg.MaterializeResult(
                asset_key=spec.key, metadata={**_shown(document), "submission_run": run_id or "none"}
            )

        running = dg.AssetCheckSpec(
            "all_tasks_run", asset=spec.key, description="Every task of the topology runs."
        )

        @dg.multi_asset_check(name=f"check_{identifier}_op", specs=[running])
        def all_tasks_run() -> Iterable[dg.AssetCheckResult]:
            yield self._check(spec.key)

        return dg.Definitions(
            assets=[submit],
            asset_checks=[all_tasks_run],
            jobs=[
                dg.define_asset_job(
                    f"submit_{identifier}",
                    selection=dg.AssetSelection.assets(spec.key).without_checks(),
                    executor_def=dg.in_process_executor,
                    description=f"Submits {self.name} as declared.",
                    tags=topology_tags(self.name),
                )
            ],
        )

    def _check(self, key: dg.AssetKey) -> dg.AssetCheckResult:
        metadata: dict[str, Any]
        with step_errors(), self._nimbus() as nimbus:
            try:
                document = nimbus.get(f"/v1/topologies/{self.name}")
            except NotAlive as error:
                passed, metadata = False, {"reason": error.message}
            else:
                waiting = [task["id"] for task in document["tasks"] if task["status"] != "running"]
                passed, metadata = not waiting, {**_shown(document), "not_running": str(waiting or "none")}
        return dg.AssetCheckResult(
            passed=passed, asset_key=key, check_name="all_tasks_run", metadata=metadata
        )

    def _nimbus(self) -> NimbusClient:
        conf_dir = Path(self.conf_dir) if self.conf_dir else None
        home = home_dir(self.home)
        return NimbusClient.of_cluster(cluster_conf(home, conf_dir), home, conf_dir=conf_dir, patience=10.0)


def _identifier(name: str) -> str:
    """The name as a Dagster identifier; a short hash keeps ``a-b`` and ``a.b`` apart."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return plain if plain == name else f"{plain}_{zlib.crc32(name.encode()):08x}"


def _absolute_target(target: str, folder: Path) -> str:
    """A file beside the ``defs.yaml`` by its absolute path; anything else as it is."""
    for separator in ("::", ":"):
        file, found, rest = target.partition(separator)
        if (folder / file).is_file():
            return f"{(folder / file).absolute()}{found}{rest}"
    return target


def _shown(document: dict[str, Any]) -> dict[str, Any]:
    return {
        "topology_id": str(document["id"]),
        "status": str(document["status"]),
        "uptime_secs": int(document.get("uptime_secs") or 0),
        "workers": len(document["workers"]),
        "tasks": len(document["tasks"]),
        "slots": table(
            [("host", "string"), ("port", "int"), ("pid", "int"), ("tasks", "string")],
            [
                {
                    "host": worker["host"],
                    "port": worker["port"],
                    "pid": worker.get("pid"),
                    "tasks": str(worker["tasks"]),
                }
                for worker in document["workers"]
            ],
        ),
    }
