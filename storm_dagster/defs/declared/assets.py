"""The assets of one declared topology: the topology itself, and its spouts and bolts in the
lineage.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import dagster as dg

from storm_dagster.defs.declared.declaration import Declaration, Described, edges
from storm_dagster.defs.metadata import components_table, table
from storm_dagster.defs.translator import StormAsset
from storm_dagster.model.conf import mask
from storm_dagster.model.topology import ComponentSpec
from storm_dagster.packaging.target import parse_target


def topology_assets(
    declaration: Declaration,
    described: Described,
    *,
    prefix: Sequence[str],
    description: str | None,
    kinds: Sequence[str],
    deps: Sequence[str],
    automation_condition: dg.AutomationCondition | None,
    **common: Any,
) -> list[StormAsset]:
    """The topology first, then its components; only the topology when its target cannot be
    described.

    ``common`` are attributes of all: group name, owners and tags. Spouts depend on the topology,
    bolts on the components whose streams they read.
    """
    name = declaration.name
    key = dg.AssetKey([*prefix, name])
    text = description or f"The topology {name}: a job that never ends, run by Storm."
    metadata: dict[str, Any] = {
        "target": declaration.target,
        "conf": table(
            "key value",
            [
                (key, value if isinstance(value, str) else json.dumps(value, default=str))
                for key, value in sorted(mask(declaration.submitted_conf).items())
            ],
        ),
        "parallelism": table("component executors:int", sorted(declaration.parallelism.items())),
    }
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
        # A run that changes nothing materializes nothing.
        skippable=True,
        metadata=metadata,
        **common,
    )
    found = [StormAsset("topology", topology, topology=name)]
    if described.spec is None:
        return found
    reads = edges(described.spec)
    for component, kind, part in described.spec.components():
        inputs = reads[component]
        own = dg.AssetKey([*prefix, name, component])
        outside = [
            dg.AssetKey(each.split("/"))
            for each in part.conf.get("topology.component.assets") or ()
        ]
        upstream = [
            dg.AssetKey([*prefix, name, source]) for source in dict.fromkeys(i[0] for i in inputs)
        ] or [key]
        spec = dg.AssetSpec(
            key=own,
            deps=[*upstream, *outside] if kind == "spout" else upstream,
            description=f"The {kind} {component} of topology {name}: {_code(part)}.",
            kinds={"storm", _kind(part)},
            metadata={
                "executors": declaration.parallelism.get(component, part.parallelism),
                "inputs": table("from stream grouping", inputs),
                "outputs": table(
                    "stream fields", [(s, ", ".join(out.fields)) for s, out in part.outputs.items()]
                ),
                "dagster/column_schema": _columns(part),
                **_code_reference(described, part.object.python),
            },
            **common,
        )
        found.append(StormAsset(kind, spec, topology=name, component=component))
        for written in outside if kind == "bolt" else ():
            # Below the bolt: others may write it, too, or have an asset for it.
            target = dg.AssetSpec(
                key=dg.AssetKey([*own.path, *written.path]),
                deps=[own],
                description=f"{written.to_user_string()}, written by {component} of topology {name}.",
                kinds={"storm", written.path[0]},
                **common,
            )
            found.append(StormAsset("target", target, topology=name))
    return found


def _code(part: ComponentSpec) -> str:
    return part.object.python or " ".join(part.object.shell or ())


def _columns(part: ComponentSpec) -> dg.TableSchema:
    """The declared fields; those of streams other than the default one under the stream's name."""
    return dg.TableSchema(
        columns=[
            dg.TableColumn(field if stream == "default" else f"{stream}.{field}", type=kind)
            for stream, out in part.outputs.items()
            for field, kind in zip(out.fields, out.types or ["any"] * len(out.fields), strict=True)
        ]
    )


def _code_reference(described: Described, python: str | None) -> dict[str, Any]:
    """Location of ``module:Name`` among the files of the target; nothing when it is elsewhere."""
    module, _, name = (python or "").partition(":")
    end = f"/{module.replace('.', '/')}.py"
    path = next((path for path in sorted(described.stamps) if path.as_posix().endswith(end)), None)
    if path is None:
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    head = re.compile(rf"\s*(class|def)\s+{re.escape(name.rpartition('.')[2])}\b")
    line = next((number for number, text in enumerate(lines, 1) if name and head.match(text)), 1)
    reference = dg.LocalFileCodeReference(file_path=str(path), line_number=line)
    return {"dagster/code_references": dg.CodeReferencesMetadataValue(code_references=[reference])}


def _kind(part: ComponentSpec) -> str:
    if part.object.shell is not None:
        return "shell"
    name = (part.object.python or "").rpartition(":")[2]
    return "pyspark" if name in ("SparkBolt", "SparkQuery", "SparkSpout") else "python"
