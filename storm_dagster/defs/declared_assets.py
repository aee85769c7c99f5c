"""The assets of one declared topology: the topology itself, and its spouts and bolts in the lineage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import dagster as dg

from storm_dagster.defs.component_attributes import FreshnessAttributes
from storm_dagster.defs.declared import Declaration, Described, edges
from storm_dagster.defs.metadata import components_table, masked, table
from storm_dagster.defs.translator import StormAsset
from storm_dagster.model.topology import ComponentSpec

__all__ = ["topology_assets"]


def topology_assets(
    declaration: Declaration,
    described: Described,
    *,
    prefix: Sequence[str],
    group: str,
    owners: Sequence[str],
    tags: Mapping[str, str],
    description: str | None,
    freshness: FreshnessAttributes,
) -> list[StormAsset]:
    """The topology first, then its components; only the topology when its target cannot be described.

    Spouts depend on the topology, bolts on the components whose streams they read.
    """
    name = declaration.name
    key = dg.AssetKey([*prefix, name])
    text = description or f"The topology {name}: a job that never ends, run by Storm."
    metadata: dict[str, Any] = {
        "target": declaration.target,
        "conf": table(
            [("key", "string"), ("value", "string")],
            [
                {"key": key, "value": value if isinstance(value, str) else json.dumps(value, default=str)}
                for key, value in sorted(masked(declaration.submitted_conf).items())
            ],
        ),
        "parallelism": table(
            [("component", "string"), ("executors", "int")],
            [{"component": name, "executors": n} for name, n in sorted(declaration.parallelism.items())],
        ),
    }
    if described.problem is not None:
        text += f"\n\n**Its target cannot be deployed**: {described.problem}"
        metadata["missing"] = described.problem
    if described.spec is not None:
        metadata["components"] = components_table(described.spec)
    common: dict[str, Any] = {"group_name": group, "owners": list(owners), "tags": dict(tags)}
    topology = dg.AssetSpec(
        key=key,
        description=text,
        kinds={"storm", "python"},
        code_version=described.code_version,
        freshness_policy=dg.FreshnessPolicy.time_window(
            fail_window=timedelta(minutes=freshness.fail_minutes),
            warn_window=timedelta(minutes=freshness.warn_minutes),
        ),
        metadata=metadata,
        **common,
    )
    found = [StormAsset("topology", topology, topology=name)]
    if described.spec is None:
        return found
    reads = edges(described.spec)
    for component, kind, part in described.spec.components():
        inputs = reads[component]
        spec = dg.AssetSpec(
            key=dg.AssetKey([*prefix, name, component]),
            deps=[dg.AssetKey([*prefix, name, source]) for source in dict.fromkeys(i[0] for i in inputs)]
            or [key],
            description=f"The {kind} {component} of topology {name}: {_code(part)}.",
            kinds={"storm", _kind(part)},
            metadata={
                "executors": declaration.parallelism.get(component, part.parallelism),
                "inputs": table(
                    [("from", "string"), ("stream", "string"), ("grouping", "string")],
                    [{"from": source, "stream": stream, "grouping": how} for source, stream, how in inputs],
                ),
                "outputs": table(
                    [("stream", "string"), ("fields", "string")],
                    [{"stream": s, "fields": ", ".join(out.fields)} for s, out in part.outputs.items()],
                ),
            },
            **common,
        )
        found.append(StormAsset(kind, spec, topology=name, component=component))
    return found


def _code(part: ComponentSpec) -> str:
    return part.object.python or " ".join(part.object.shell or ())


def _kind(part: ComponentSpec) -> str:
    if part.object.shell is not None:
        return "shell"
    return (
        "pyspark"
        if (part.object.python or "").rpartition(":")[2] in ("SparkBolt", "SparkSpout")
        else "python"
    )
