"""``storm_dagster.StormTopologyComponent``: a topology declared in ``defs.yaml``.

.. code-block:: yaml

    type: storm_dagster.StormTopologyComponent
    attributes:
      name: word-count
      target: word_count.py:WordCount
      workers: 2
      parallelism: {count: 4}
      deploy: hot
      alerts: {complete_ms: 500}
"""

import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import dagster as dg
from dagster.components import ComponentTypeSpec, Scaffolder, ScaffoldRequest, scaffold_with
from dagster.components.component_scaffolding import scaffold_component
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import ConfigDict, Field

from storm_dagster.defs.declared.assets import topology_assets
from storm_dagster.defs.declared.checks import (
    FreshnessAttributes,
    GrayAttributes,
    ScheduleAttributes,
    TopologyAlerts,
)
from storm_dagster.defs.declared.declaration import (
    Declaration,
    LoadedFiles,
    TargetDescription,
    describe_declared,
)
from storm_dagster.defs.declared.op_settings import OpAttributes, encode_tags
from storm_dagster.defs.declared.owner import declared_owner, definitions_module
from storm_dagster.defs.declared.runs import topology_definitions
from storm_dagster.defs.declared.sensor import DECLARED_TAG, shared_definitions
from storm_dagster.defs.declared.targets import target_path
from storm_dagster.defs.declared.topology import DeclaredTopology
from storm_dagster.defs.keys import OWNER, catalog_field
from storm_dagster.defs.observe.history import DECLARED, remember_own
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.defs.translator import StormAsset, StormTranslator, translate
from storm_dagster.model.conf import validate_conf
from storm_dagster.model.errors import Conflict, InvalidRequest
from storm_dagster.model.names import check_topology_name

_MAX_WITH_OWN_JOBS = 20
"""Maximum of declared topologies of a project for which each has its own jobs.

A list of hundreds of jobs would not be usable.
"""
_SCAFFOLDED = Path(__file__).with_name("scaffolded_topology.txt")
"""Code of the scaffolded topology, with ``@CLASS@`` in place of its name."""

_loaded: tuple[Any, dict[str, DeclaredTopology]] = (None, {})
"""Component tree of the newest load, and its topologies by name."""


def _topologies_of(tree: Any) -> dict[str, DeclaredTopology]:
    """The topologies that the project has declared up to now in this load.

    Each load has its own component tree. The caller adds its topology to the result.
    """
    global _loaded
    loaded_tree, topologies = _loaded
    if loaded_tree is not tree:
        topologies = {}
        _loaded = (tree, topologies)
    return topologies


class StormTopologyScaffolder(Scaffolder):
    """Scaffolder of ``dg``: a word count, and the ``defs.yaml`` that declares it.

    The topology has the name of the folder.
    """

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        """Write both files; existing files are not overwritten."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", request.target_path.name)
        words = [word for word in re.split(r"[^A-Za-z0-9]+", name) if word]
        class_name = "".join(word[:1].upper() + word[1:] for word in words) or "Words"
        if class_name[0].isdigit():
            class_name = f"Topology{class_name}"
        # Imported under its stem, so that it must not have the name of an installed module.
        module = re.sub(r"\W", "_", f"{name}_topology").lower()
        if module[0].isdigit():
            module = f"topology_{module}"
        path = request.target_path / f"{module}.py"
        if not path.exists():
            request.target_path.mkdir(parents=True, exist_ok=True)
            path.write_text(
                _SCAFFOLDED.read_text(encoding="utf-8").replace("@CLASS@", class_name),
                encoding="utf-8",
            )
        scaffold_component(
            request,
            {"name": name, "target": f"{module}.py:{class_name}", "workers": 2, "deploy": "manual"},
        )


def _translation_variables(asset: StormAsset) -> dict[str, Any]:
    """Variables of the YAML's ``translation``, beside ``spec``."""
    return {
        "kind": asset.kind,
        "topology": asset.topology,
        "component": asset.component,
        "target": asset.target,
    }


@scaffold_with(StormTopologyScaffolder)
class StormTopologyComponent(dg.Component, dg.Model, dg.Resolvable):
    """A declared topology.

    It yields the asset ``topologies/<name>`` (its materialization applies the declaration), an
    asset for each spout and bolt, checks that all tasks run and that the running topology is as
    declared, and the jobs ``submit_<name>``, ``deploy_<name>`` and ``kill_<name>``. The first one
    of a project also yields the shared definitions: the sensors ``declared_topologies_sensor`` and
    ``topology_events_sensor``, and the jobs ``deploy_declared``, ``kill_declared`` and
    ``rebalance_declared``. Changes are runs in the code location of the cluster. Loading opens no
    connection; the asset of a target that cannot be imported shows the error.
    """

    # catalog.yaml describes the fields. Defaults are values, because Dagster 1.12 accepts no
    # factories; pydantic copies them for each instance.
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    name: str = catalog_field("topology.name")
    target: str = catalog_field("topology.target")
    args: list[str] = catalog_field("topology.args", default=[])
    conf: dict[str, Any] = catalog_field("topology.conf", default={})
    workers: int | None = catalog_field("topology.workers", default=None, ge=1)
    parallelism: dict[str, int] = catalog_field("topology.parallelism", default={})
    inactive: bool = catalog_field("topology.inactive", default=False)
    deploy: Literal["hot", "gray", "manual"] = catalog_field("topology.deploy", default="manual")
    gray: GrayAttributes = catalog_field("topology.gray", default=GrayAttributes())
    schedule: ScheduleAttributes = catalog_field("topology.schedule", default=ScheduleAttributes())
    alerts: TopologyAlerts = catalog_field("topology.alerts", default=TopologyAlerts())
    freshness: FreshnessAttributes = catalog_field(
        "topology.freshness", default=FreshnessAttributes()
    )
    home: str | None = catalog_field("topology.home", default=None)
    conf_dir: str | None = catalog_field("topology.conf_dir", default=None)
    deployment: str | None = catalog_field("topology.deployment", default=None)
    default_status: Literal["RUNNING", "STOPPED"] = catalog_field(
        "topology.default_status", default="RUNNING"
    )
    key_prefix: list[str] = catalog_field("topology.key_prefix", default=["topologies"])
    group: str = catalog_field("topology.group", default="topologies")
    description: str | None = catalog_field("topology.description", default=None)
    owners: list[str] = catalog_field("topology.owners", default=[OWNER])
    tags: dict[str, str] = catalog_field("topology.tags", default={})
    kinds: list[str] = catalog_field("topology.kinds", default=["storm", "python"])
    deps: list[str] = catalog_field("topology.deps", default=[])
    automation_condition: Annotated[
        dg.AutomationCondition | None, dg.Resolver.default(model_field_type=str | None)
    ] = catalog_field("topology.automation_condition", default=None)
    op: OpAttributes = catalog_field("topology.op", default=OpAttributes())
    job_tags: dict[str, Any] = catalog_field("topology.job_tags", default={})
    translation: Annotated[
        TranslationFn[StormAsset] | None, TranslationFnResolver[StormAsset](_translation_variables)
    ] = catalog_field("topology.translation", default=None)
    own_jobs: bool | None = Field(
        default=None,
        description="True to add the jobs submit_NAME, deploy_NAME and kill_NAME. "
        f"By default they exist if the project declares at most {_MAX_WITH_OWN_JOBS} topologies; "
        "the jobs that all topologies share always exist.",
    )

    @classmethod
    def get_spec(cls) -> ComponentTypeSpec:
        """Specification for `dg docs` and `dg list components`."""
        return ComponentTypeSpec(
            description="A Storm topology that is to run: submitted by materializing its asset.",
            owners=[OWNER],
            tags=["storm", "streaming"],
        )

    def get_translator(self) -> StormTranslator:
        """The translator of the topology's assets, and of those of its spouts and bolts.

        Override it to rename or annotate them.
        """
        return StormTranslator()

    def get_asset_spec(self, asset: StormAsset) -> dg.AssetSpec:
        """The spec of one asset of the topology. Override it, or :meth:`get_translator`.

        The YAML's ``translation`` applies to the result of the translator.
        """
        spec = self.get_translator().get_asset_spec(asset)
        if self.translation is None:
            return spec
        return self.translation(spec, asset)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The definitions of the topology, and those that the project's topologies share.

        A wrong name, an unknown conf key (with the nearest known one), and a name that another
        ``defs.yaml`` of the project declares are errors; a target that cannot be described and an
        unreachable cluster are not.
        """
        path = context.path / "defs.yaml"
        topologies = _topologies_of(context.component_tree)
        declaration = self._declaration(context, topologies)
        described = describe_declared(declaration)
        if described.problem is not None:
            # The location loads all the same. Its log and `dg check defs` show the warning.
            logging.getLogger("dagster.storm_dagster").warning(
                f"topology {self.name!r} of {path} cannot be deployed: {described.problem}"
            )
        assets = topology_assets(
            declaration,
            described,
            prefix=self.key_prefix,
            group_name=self.group,
            owners=self.owners,
            tags=self.tags,
            description=self.description,
            kinds=self.kinds,
            deps=self.deps,
            automation_condition=self.automation_condition,
            target_freshness=self.freshness.tables_policy(),
        )
        topology = self._topology(declaration, described, assets)
        topologies[self.name] = topology
        own_jobs = self.own_jobs
        components = context.component_tree.get_all_components(StormTopologyComponent)
        if own_jobs is None:
            own_jobs = len(components) <= _MAX_WITH_OWN_JOBS
        if topology.identifier == "declared":
            # Its jobs would have the names of the shared ones.
            own_jobs = False
        definitions = topology_definitions(topology, own_jobs=own_jobs)
        # The shared definitions read the topologies that later components add.
        first_name, *_ = topologies
        if first_name == self.name:
            shared = shared_definitions(topologies, _sensor_status(components))
            definitions = dg.Definitions.merge(definitions, shared)
        return remember_own(DECLARED, definitions)

    def _topology(
        self,
        declaration: Declaration,
        described: TargetDescription,
        assets: Sequence[StormAsset],
    ) -> DeclaredTopology:
        """Inputs of the topology's definitions, with the translated keys of its assets."""
        translation = translate(self, assets)
        cluster: dict[str, Any] = {"home": self.home, "conf_dir": self.conf_dir}
        specs = [translation.specs[asset.spec.key] for asset in assets]
        components: dict[str, dg.AssetKey] = {}
        targets: dict[tuple[str, ...], dg.AssetKey] = {}
        for asset in assets:
            if asset.component and asset.target is None:
                components[asset.component] = translation.key(asset.spec.key)
            elif asset.component and asset.target is not None:
                path = target_path(asset.component, asset.target)
                targets[path] = translation.key(asset.spec.key)
        return DeclaredTopology(
            declaration=declaration,
            described=described,
            files=LoadedFiles(declaration, described),
            identifier=_identifier(self.name),
            specs=[specs[0].merge_attributes(tags=DECLARED_TAG), *specs[1:]],
            components=components,
            targets=targets,
            policy=self.deploy,
            batch=self.gray.model_dump(exclude_none=True),
            alerts=self.alerts,
            freshness=self.freshness,
            schedule=self.schedule,
            zookeeper=ZooKeeperResource(**cluster),
            blobstore=BlobStoreResource(**cluster),
            nimbus=NimbusResource(**cluster),
            schedule_status=dg.DefaultScheduleStatus(self.default_status),
            op=self.op,
            job_tags=encode_tags(self.job_tags),
        )

    def _declaration(
        self, context: dg.ComponentLoadContext, topologies: Mapping[str, DeclaredTopology]
    ) -> Declaration:
        """The declaration of the fields in the ``defs.yaml`` of the context.

        ``topologies`` are those that the project has declared up to now. Raises the errors of
        :meth:`build_defs`.
        """
        # A topology of an earlier release keeps its name; nimbus refuses to submit it as a new one.
        check_topology_name(self.name, is_new=False)
        folder = context.path
        path = folder / "defs.yaml"
        conf, _ = validate_conf(self.conf, source=f"conf of {self.name} in {path}")
        namesake = topologies.get(self.name)
        other_path = None if namesake is None else namesake.declaration.declared_in
        if other_path not in (None, path):
            raise Conflict(
                f"topology {self.name!r} is declared twice: in {other_path} and in {path}: "
                "rename one of them, or remove it"
            )
        if self.workers is not None and "topology.workers" in self.conf:
            raise InvalidRequest(
                f"{path} names topology.workers in conf and workers: leave one of them out"
            )
        declared_conf = {
            key: value
            for key, value in conf.items()
            if key in self.conf and key != "topology.workers"
        }
        if self.deploy == "gray":
            # Workers are upgraded one by one under a topology master with its own worker.
            declared_conf.setdefault("topology.master.single.worker", True)
        workers = self.workers
        if workers is None:
            workers = self.conf.get("topology.workers")
        return Declaration(
            name=self.name,
            target=_absolute_target(self.target, folder),
            args=tuple(self.args),
            conf=declared_conf,
            workers=workers,
            parallelism=dict(self.parallelism),
            inactive=self.inactive,
            home=self.home,
            declared_in=path,
            owner=declared_owner(_module_of(context), self.deployment),
        )


def _sensor_status(components: Sequence[StormTopologyComponent]) -> dg.DefaultSensorStatus:
    """Status of the shared sensors: STOPPED if each topology of the project has it."""
    # A component without a project is in no tree.
    if components and all(component.default_status == "STOPPED" for component in components):
        return dg.DefaultSensorStatus.STOPPED
    return dg.DefaultSensorStatus.RUNNING


def _module_of(context: dg.ComponentLoadContext) -> str:
    """Top-level module of the definitions that are loaded."""
    return definitions_module(
        context.defs_module_name, context.defs_module_path, context.project_root
    )


def _identifier(name: str) -> str:
    """The name as a Dagster identifier.

    A short hash distinguishes ``a-b`` and ``a.b``.
    """
    identifier = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return identifier if identifier == name else f"{identifier}_{zlib.crc32(name.encode()):08x}"


def _absolute_target(target: str, folder: Path) -> str:
    """The target with an absolute path, if it is a file beside the ``defs.yaml``.

    Modules, and files with an absolute path, stay.
    """
    # An archive and the name in it are separated by two colons.
    for separator in ("::", ":"):
        file = target.split(separator, 1)[0]
        is_file = file.endswith((".py", ".zip", ".jar", ".whl", ".tar.gz"))
        if is_file and not Path(file).is_absolute():
            return f"{(folder / file).absolute()}{target[len(file) :]}"
    return target
