"""The assets of one declared topology: itself, its spouts and its bolts."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import dagster as dg

from storm_dagster.defs.declared.asset_metadata import fill_templates
from storm_dagster.defs.declared.declaration import Declaration, TargetDescription, edges
from storm_dagster.defs.metadata import components_table, table
from storm_dagster.defs.translator import StormAsset
from storm_dagster.model.conf import mask
from storm_dagster.model.dagster_events import ASSET_METADATA_KEY, written_assets
from storm_dagster.model.topology import ComponentSpec
from storm_dagster.packaging.target import parse_target


def topology_assets(
    declaration: Declaration,
    described: TargetDescription,
    *,
    prefix: Sequence[str],
    description: str | None,
    kinds: Sequence[str],
    deps: Sequence[str],
    automation_condition: dg.AutomationCondition | None,
    target_freshness: dg.FreshnessPolicy | None = None,
    **common: Any,
) -> list[StormAsset]:
    """The assets of the topology, and of its components.

    The topology is first; it is alone if its target cannot be described. ``deps`` are keys of the
    assets that the topology depends on. ``common`` are attributes of all assets: group name, owners
    and tags. ``target_freshness`` is the policy of the assets that bolts write. Spouts depend on
    the topology, bolts on the components whose streams they read. The conf key
    ``topology.component.assets`` names assets that a spout reads (more dependencies), or that a
    bolt writes (each is one more asset, of kind ``target``, unless it is defined elsewhere).
    """
    name = declaration.name
    key = dg.AssetKey([*prefix, name])
    text = description or f"The topology {name}: a job that never ends, run by Storm."
    metadata = _declaration_metadata(declaration)
    if described.problem is not None:
        text += f"\n\n**Its target cannot be deployed**: {described.problem}"
        metadata["missing"] = described.problem
    if described.spec is not None:
        metadata["components"] = components_table(described.spec)
        target = parse_target(declaration.target)
        metadata |= _code_reference(described, f"{target.module}:{target.attribute or ''}")
    topology = dg.AssetSpec(
        key=key,
        description=text,
        kinds=set(kinds),
        deps=[dg.AssetKey.from_user_string(dep) for dep in deps],
        automation_condition=automation_condition,
        code_version=described.code_version,
        # A run without a change materializes no asset.
        skippable=True,
        metadata=metadata,
        **common,
    )
    assets = [StormAsset("topology", topology, topology=name)]
    if described.spec is None:
        return assets
    inputs_of = edges(described.spec)
    for component, kind, part in described.spec.components():
        assets += _component_assets(
            declaration, described, key, component, kind, part, inputs_of[component], common
        )
        if kind == "bolt":
            conf = {**described.spec.conf, **declaration.conf, **part.conf}
            assets += _target_assets(name, key, component, conf, target_freshness, common)
    return assets


def _component_assets(
    declaration: Declaration,
    described: TargetDescription,
    topology_key: dg.AssetKey,
    component: str,
    kind: Literal["spout", "bolt"],
    part: ComponentSpec,
    inputs: Sequence[tuple[str, str, str]],
    common: Mapping[str, Any],
) -> list[StormAsset]:
    """The asset of one component.

    ``inputs`` are (source component, stream, grouping in words).
    """
    name = declaration.name
    component_key = dg.AssetKey([*topology_key.path, component])
    paths = part.conf.get("topology.component.assets") or ()
    external_keys = [dg.AssetKey(path.split("/")) for path in paths]
    sources = dict.fromkeys(source for source, _, _ in inputs)
    upstream = [dg.AssetKey([*topology_key.path, source]) for source in sources] or [topology_key]
    outputs = [(stream, ", ".join(out.fields)) for stream, out in part.outputs.items()]
    spec = dg.AssetSpec(
        key=component_key,
        deps=[*upstream, *external_keys] if kind == "spout" else upstream,
        description=f"The {kind} {component} of topology {name}: {_code(part)}.",
        kinds={"storm", _kind(part)},
        metadata={
            "executors": declaration.parallelism.get(component, part.parallelism),
            "inputs": table("from stream grouping", inputs),
            "outputs": table("stream fields", outputs),
            "dagster/column_schema": _columns(part),
            **_code_reference(described, part.object.python),
        },
        **common,
    )
    return [StormAsset(kind, spec, topology=name, component=component)]


def _declaration_metadata(declaration: Declaration) -> dict[str, Any]:
    """Metadata of the topology's asset: target, conf and parallelism."""
    conf_rows: list[tuple[str, str]] = []
    for key, value in sorted(mask(declaration.submitted_conf).items()):
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        conf_rows.append((key, text))
    owner = {} if declaration.owner is None else {"owner": declaration.owner}
    return {
        "target": declaration.target,
        **owner,
        "conf": table("key value", conf_rows),
        "parallelism": table("component executors:int", sorted(declaration.parallelism.items())),
    }


def _target_assets(
    topology: str,
    topology_key: dg.AssetKey,
    bolt: str,
    conf: Mapping[str, Any],
    freshness: dg.FreshnessPolicy | None,
    common: Mapping[str, Any],
) -> list[StormAsset]:
    """The assets that a bolt writes, by its ``conf``.

    Their keys are below the bolt's, because other writers may exist, or another asset for them.
    """
    bolt_key = dg.AssetKey([*topology_key.path, bolt])
    metadata = conf.get(ASSET_METADATA_KEY) or {}
    assets: list[StormAsset] = []
    for path in written_assets(conf):
        parts = path.split("/")
        spec = dg.AssetSpec(
            key=dg.AssetKey([*bolt_key.path, *parts]),
            deps=[bolt_key],
            description=f"{path}, written by {bolt} of topology {topology}.",
            kinds={"storm", parts[0]},
            metadata=fill_templates(metadata.get(path) or {}, conf),
            freshness_policy=freshness,
            **common,
        )
        assets.append(StormAsset("target", spec, topology, bolt, path))
    return assets


def _code(part: ComponentSpec) -> str:
    """Python object or shell command of the component."""
    return part.object.python or " ".join(part.object.shell or ())


def _columns(part: ComponentSpec) -> dg.TableSchema:
    """The declared fields with their types, ``any`` without one.

    A field of a named stream has the stream's name as prefix.
    """
    columns: list[dg.TableColumn] = []
    for stream, out in part.outputs.items():
        types = out.types or ["any"] * len(out.fields)
        for field, kind in zip(out.fields, types, strict=True):
            name = field if stream == "default" else f"{stream}.{field}"
            columns.append(dg.TableColumn(name, type=kind))
    return dg.TableSchema(columns=columns)


def _code_reference(described: TargetDescription, python: str | None) -> dict[str, Any]:
    """Metadata with the location of ``module:Name`` among the files of the target.

    Empty if the module is not among them.
    """
    module, _, name = (python or "").partition(":")
    path_end = f"/{module.replace('.', '/')}.py"
    files = [path for path in described.stamps if path.as_posix().endswith(path_end)]
    if not files:
        return {}
    # A folder below that of the code may have a file of the same name: it is deeper.
    file = min(files, key=lambda path: len(path.parts))
    _, _, own_name = name.rpartition(".")
    line = _definition_line(file, own_name)
    reference = dg.LocalFileCodeReference(file_path=str(file), line_number=line)
    value = dg.CodeReferencesMetadataValue(code_references=[reference])
    return {"dagster/code_references": value}


def _definition_line(path: Path, name: str) -> int:
    """Line of the class or function ``name``, 1 without it."""
    if not name:
        return 1
    pattern = re.compile(rf"\s*(class|def)\s+{re.escape(name)}\b")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if pattern.match(line):
            return number
    return 1


def _kind(part: ComponentSpec) -> str:
    """Dagster's kind of the component: ``shell``, ``pyspark`` or ``python``."""
    if part.object.shell is not None:
        return "shell"
    name = (part.object.python or "").rpartition(":")[2]
    return "pyspark" if name in ("SparkBolt", "SparkQuery", "SparkSpout") else "python"
