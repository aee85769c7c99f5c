"""Materializations of the parts of a declared topology: components, targets, sources.

Dagster counts an asset without a materialization as missing, and requests no asset below it. So
each deployed version materializes the parts together with the topology, once: in the run that
deploys it, or by the sensor if another code location deployed it. A topic or folder that a source
reads is materialized only if it has no materialization yet.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from storm_dagster.defs.declared.declaration import RunningTopology
from storm_dagster.defs.declared.topology import DeclaredSnapshot, DeclaredTopology


def part_keys(topology: DeclaredTopology) -> list[dg.AssetKey]:
    """Keys of the components and of their targets."""
    return [*topology.components.values(), *topology.targets.values()]


def source_keys(topology: DeclaredTopology) -> list[dg.AssetKey]:
    """Keys of the topics and folders that the spouts read.

    Without those that a translator has renamed or removed: another tool knows such an asset.
    """
    spec = topology.described.spec
    if spec is None:
        return []
    upstream = {dep.asset_key for asset in topology.specs[1:] for dep in asset.deps}
    sources: dict[dg.AssetKey, None] = {}
    for _, kind, part in spec.components():
        if kind != "spout":
            continue
        for path in part.conf.get("topology.component.assets") or ():
            key = dg.AssetKey(path.split("/"))
            if key in upstream:
                sources[key] = None
    return list(sources)


def part_materializations(
    topology: DeclaredTopology,
    actual: RunningTopology,
    keys: Iterable[dg.AssetKey] | None = None,
    details: Mapping[str, Any] | None = None,
) -> list[dg.AssetMaterialization]:
    """Materializations of the parts, or of those with ``keys``.

    They have the data version of the topology's own materialization, and the link to its page that
    is among the ``details`` of a snapshot.
    """
    metadata: dict[str, Any] = {"topology_id": actual.topology_id}
    if details and "page" in details:
        metadata["page"] = details["page"]
    return [
        dg.AssetMaterialization(
            key,
            description=f"deployed with {topology.name}",
            metadata=metadata,
            tags=actual.version_tags,
        )
        for key in (part_keys(topology) if keys is None else keys)
    ]


def never_materialized(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetKey]
) -> list[dg.AssetKey]:
    """Those of ``keys`` that have no materialization."""
    entries = {record.asset_entry.asset_key: record for record in instance.get_asset_records(keys)}
    missing: list[dg.AssetKey] = []
    for key in keys:
        record = entries.get(key)
        if record is None or record.asset_entry.last_materialization is None:
            missing.append(key)
    return missing


class CompleteParts:
    """Topologies whose parts all have a materialization, as far as this process has seen.

    The storage is asked once for each version of a topology. A topology that the release before
    deployed has none of its parts.
    """

    def __init__(self) -> None:
        self._versions: dict[str, str] = {}
        """Topology -> data version for which all parts were found."""

    def missing(
        self,
        context: dg.SensorEvaluationContext,
        topology: DeclaredTopology,
        snapshot: DeclaredSnapshot,
    ) -> list[dg.AssetMaterialization]:
        """Materializations of the parts and sources that have none.

        An asset that a run of this code location materializes is left to that run.
        """
        actual = snapshot.actual
        if actual is None:
            return []
        version = actual.data_version
        if self._versions.get(topology.name) == version:
            return []
        keys = part_keys(topology)
        keys += [key for key in source_keys(topology) if not _is_executable(context, key)]
        missing = never_materialized(context.instance, keys)
        if not missing:
            self._versions[topology.name] = version
        return part_materializations(topology, actual, missing, snapshot.details)


def _is_executable(context: dg.SensorEvaluationContext, key: dg.AssetKey) -> bool:
    """True if a run of the sensor's code location can materialize the asset."""
    repository = context.repository_def
    definition = repository.assets_defs_by_key.get(key) if repository is not None else None
    return definition is not None and definition.is_executable
