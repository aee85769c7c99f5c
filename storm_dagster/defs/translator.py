"""Names as you want them: :class:`StormTranslator` changes keys, groups, owners and tags of every
asset of ours.

.. code-block:: python

    class Ours(StormTranslator):
        def get_asset_spec(self, asset: StormAsset) -> dg.AssetSpec:
            return asset.spec.replace_attributes(key=asset.spec.key.with_prefix("streams"), owners=["team:data"])

    build_storm_defs(translator=Ours())

Runs, sensors and checks report under the translated keys. Names of jobs, sensors and schedules, and
of the partitions, stay, because nimbus launches by them: ``build_storm_defs(cluster=...)`` changes
those.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import dagster as dg

from storm_dagster.model.errors import InvalidRequest


@dataclass(frozen=True)
class StormAsset:
    """One asset of ours, as it would be without a translator."""

    kind: Literal["stage", "cluster", "topology", "spout", "bolt", "target"]
    """A stage of submissions; something of the cluster; a declared topology, its components, and
    what a bolt writes.
    """
    spec: dg.AssetSpec
    topology: str | None = None
    """Name of the declared topology that it is, or is part of."""
    component: str | None = None
    """Id of the spout or bolt."""


class StormTranslator:
    """Keys, groups and owners of the assets. Derive from it and override :meth:`get_asset_spec`."""

    def get_asset_spec(self, asset: StormAsset) -> dg.AssetSpec:
        """The spec to show in place of ``asset.spec``.

        Key, group, owners, tags, kinds, description, metadata and freshness policy may differ;
        dependencies among our own assets follow their keys by themselves.
        """
        return asset.spec


@dataclass(frozen=True)
class Translation:
    """The outcome for a set of assets."""

    specs: Mapping[dg.AssetKey, dg.AssetSpec] = field(default_factory=dict)
    """Original key -> the spec to show, its dependencies translated."""

    def key(self, original: dg.AssetKey) -> dg.AssetKey:
        """The key to show for ``original``; itself when it is not one of ours."""
        spec = self.specs.get(original)
        return original if spec is None else spec.key

    def of_definition(self, definition: dg.AssetsDefinition) -> dg.AssetsDefinition:
        """The definition (assets, or checks of them) under the translated specs. Op names stay."""
        keys = {original: spec.key for original, spec in self.specs.items() if spec.key != original}
        by_new_key = {spec.key: spec for spec in self.specs.values()}
        moved = definition.with_attributes(asset_key_replacements=keys) if keys else definition
        return (
            moved.map_asset_specs(lambda spec: by_new_key.get(spec.key, spec))
            if moved.keys
            else moved
        )


class _Translator(Protocol):
    def get_asset_spec(self, asset: StormAsset) -> dg.AssetSpec: ...


def translate(translator: _Translator, assets: Iterable[StormAsset]) -> Translation:
    """Every asset through the translator; :class:`InvalidRequest` when two of them get one key."""
    found = {asset.spec.key: translator.get_asset_spec(asset) for asset in assets}
    owner: dict[dg.AssetKey, dg.AssetKey] = {}
    for original, spec in found.items():
        other = owner.setdefault(spec.key, original)
        if other != original:
            raise InvalidRequest(
                f"{type(translator).__name__} gives {other.to_user_string()} and {original.to_user_string()} the same "
                f"key {spec.key.to_user_string()}: make it depend on asset.spec.key"
            )
    keys = {original: spec.key for original, spec in found.items()}
    return Translation(
        {
            original: spec.replace_attributes(
                deps=[dg.AssetDep(keys.get(dep.asset_key, dep.asset_key)) for dep in spec.deps]
            )
            for original, spec in found.items()
        }
    )
