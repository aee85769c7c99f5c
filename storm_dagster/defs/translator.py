"""Translation of assets: their keys, groups, owners and tags.

:class:`StormTranslator` changes them:

.. code-block:: python

    class StreamsTranslator(StormTranslator):
        def get_asset_spec(self, asset: StormAsset) -> dg.AssetSpec:
            key = asset.spec.key.with_prefix("streams")
            return asset.spec.replace_attributes(key=key, owners=["team:data"])

    build_storm_defs(translator=StreamsTranslator())

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
    """One of this package's assets, before the translation."""

    kind: Literal["stage", "cluster", "topology", "spout", "bolt", "target"]
    """Kind of the asset.

    It is a stage of submissions, a part of the cluster, a declared topology, one of its components,
    or the target of a bolt.
    """
    spec: dg.AssetSpec
    topology: str | None = None
    """Name of its declared topology."""
    component: str | None = None
    """Id of the spout or bolt; of a target, that of the bolt that writes it."""
    target: str | None = None
    """Asset that a bolt writes, as its sink names it: ``postgres/orders``."""


class StormTranslator:
    """Keys, groups and owners of the assets.

    A subclass overrides :meth:`get_asset_spec`.
    """

    def get_asset_spec(self, asset: StormAsset) -> dg.AssetSpec:
        """The spec to show in place of ``asset.spec``.

        Key, group, owners, tags, kinds, description, metadata and freshness policy may differ.
        Dependencies among this package's assets are translated automatically.
        """
        return asset.spec


@dataclass(frozen=True)
class Translation:
    """Translated specs of a set of assets."""

    specs: Mapping[dg.AssetKey, dg.AssetSpec] = field(default_factory=dict)
    """Original key -> the spec to show, its dependencies translated."""

    def key(self, original: dg.AssetKey) -> dg.AssetKey:
        """The translated key of ``original``; the same key for another package's asset."""
        spec = self.specs.get(original)
        return original if spec is None else spec.key

    def of_definition(self, definition: dg.AssetsDefinition) -> dg.AssetsDefinition:
        """The definition with the translated specs.

        It contains assets, or checks of them. Op names stay.
        """
        keys = {original: spec.key for original, spec in self.specs.items() if spec.key != original}
        translated = definition
        if keys:
            translated = definition.with_attributes(asset_key_replacements=keys)
        if not translated.keys:
            return translated
        by_new_key = {spec.key: spec for spec in self.specs.values()}
        return translated.map_asset_specs(lambda spec: by_new_key.get(spec.key, spec))


class _Translator(Protocol):
    def get_asset_spec(self, asset: StormAsset) -> dg.AssetSpec: ...


def translate(translator: _Translator, assets: Iterable[StormAsset]) -> Translation:
    """Translate every asset; :class:`InvalidRequest` if two of them get the same key."""
    specs = {asset.spec.key: translator.get_asset_spec(asset) for asset in assets}
    original_of_key: dict[dg.AssetKey, dg.AssetKey] = {}
    for original, spec in specs.items():
        first_original = original_of_key.setdefault(spec.key, original)
        if first_original != original:
            raise InvalidRequest(
                f"{type(translator).__name__} gives {first_original.to_user_string()} and "
                f"{original.to_user_string()} the same key {spec.key.to_user_string()}: "
                "make it depend on asset.spec.key"
            )
    keys = {original: spec.key for original, spec in specs.items()}
    translated: dict[dg.AssetKey, dg.AssetSpec] = {}
    for original, spec in specs.items():
        deps = [dg.AssetDep(keys.get(dep.asset_key, dep.asset_key)) for dep in spec.deps]
        translated[original] = spec.replace_attributes(deps=deps)
    return Translation(translated)
