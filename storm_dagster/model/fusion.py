"""Fused chains: SparkBolts whose functions run in the query of the SparkSpout that they read.

Placement knows nothing of it. A worker rewrites the topology that it loads: the spout runs the
functions of the chain for each micro-batch, in the order of the graph, and the tasks of the fused
bolts emit what components outside of it read.
"""

from collections.abc import Mapping
from typing import Any

from storm_dagster.model.conf_layers import merged_value
from storm_dagster.model.groupings import Grouping
from storm_dagster.model.topology import (
    DEFAULT_STREAM,
    ComponentObject,
    ComponentSpec,
    InputSpec,
    StreamSpec,
    TopologySpec,
)

FUSE_KEY = "topology.spark.fuse"
COUNTS_KEY = "topology.spark.fuse.counts"
CHAIN_KEY = "topology.spark.chain"
"""In the conf of a spout as workers load it: the chain of its query."""
FUSED = "__fused_"
"""Prefix of streams that carry no tuples of the topology: statistics leave them out."""
FUSED_ROWS, FUSED_COUNTS = FUSED + "rows_", FUSED + "counts_"
"""Streams of the spout to a fused bolt, with its id: rows that others read, and counts of
batches.
"""
OTHER_WAY = "its spout's worker runs the chain the other way (topology.spark.fuse): it is sent again until both are updated"
_GROUPINGS = ("shuffle", "local_or_shuffle", "none", "fields", "partial_key", "global")


def _class_of(part: ComponentSpec) -> str:
    module, _, name = (part.object.python or "").partition(":")
    return (
        name
        if module == "storm_dagster.api" or module.startswith("storm_dagster.api.spark")
        else ""
    )


def fused_components(spec: TopologySpec, conf: Mapping[str, Any]) -> dict[str, str]:
    """Fused bolt -> the spout whose query runs it, in the order of the graph.

    A SparkBolt is fused if all that it reads is one SparkSpout, or one SparkQuery without a sink,
    and bolts that are fused with it, in any grouping that sends each tuple once, unless
    ``topology.spark.fuse`` is false for one of them.
    """
    chain = {
        name: name
        for name, part in spec.spouts.items()
        if _class_of(part) in ("SparkSpout", "SparkQuery")
        and DEFAULT_STREAM in part.outputs
        and _wanted(part, conf)
    }
    waiting = {
        name: part
        for name, part in spec.bolts.items()
        if _class_of(part) == "SparkBolt" and _wanted(part, conf)
    }
    found = True
    while found:
        found = False
        for name, part in list(waiting.items()):
            inputs = [item for item in part.inputs if not item.component.startswith("__")]
            roots = {chain.get(item.component) for item in inputs}
            once = all(
                item.stream == DEFAULT_STREAM
                and (
                    item.grouping.type in _GROUPINGS
                    or (item.grouping.type == "all" and part.parallelism == 1)
                )
                for item in inputs
            )
            if once and len(roots) == 1 and (root := roots.pop()):
                chain[name], found = root, True
                del waiting[name]
    return {name: root for name, root in chain.items() if name not in spec.spouts}


def _wanted(part: ComponentSpec, conf: Mapping[str, Any]) -> bool:
    return merged_value({"total": conf, "component": part.conf}, FUSE_KEY) is not False


def fuse(spec: TopologySpec, conf: Mapping[str, Any]) -> TopologySpec:
    """The topology as workers run it: unchanged if nothing is fused."""
    fused = fused_components(spec, conf)
    if not fused:
        return spec
    outside = {
        item.component
        for name, _, part in spec.components()
        if name not in fused
        for item in part.inputs
        if item.stream == DEFAULT_STREAM
    }
    spouts, bolts = dict(spec.spouts), dict(spec.bolts)
    for root in dict.fromkeys(fused.values()):
        names = [name for name, of in fused.items() if of == root]
        parts = [_part(spec.bolts[name], name, conf, outside=name in outside) for name in names]
        streams = dict(spouts[root].outputs)
        for name in names:
            bolt = spec.bolts[name]
            mine = {FUSED_COUNTS + name: StreamSpec(fields=("counts",))}
            if name in outside:
                mine[FUSED_ROWS + name] = StreamSpec(fields=bolt.outputs[DEFAULT_STREAM].fields)
            streams |= mine
            bolts[name] = bolt.model_copy(
                update={
                    "object": ComponentObject(python="storm_dagster.api.spark.fused:FusedBolt"),
                    "inputs": tuple(
                        InputSpec(component=root, stream=each, grouping=Grouping.SHUFFLE)
                        for each in mine
                    ),
                    # What it is sent is no tuple of the topology.
                    "conf": {
                        **bolt.conf,
                        "topology.metric.sample.rate": 0,
                        "topology.tick.tuple.freq.secs": None,
                    },
                }
            )
        chain = {
            "root": root,
            "fields": streams[DEFAULT_STREAM].fields,
            "emits": root in outside,
            "parts": parts,
        }
        update = {"outputs": streams, "conf": {**spouts[root].conf, CHAIN_KEY: chain}}
        spouts[root] = spouts[root].model_copy(update=update)
    return spec.model_copy(update={"spouts": spouts, "bolts": bolts})


def _part(
    bolt: ComponentSpec, name: str, conf: Mapping[str, Any], *, outside: bool
) -> dict[str, Any]:
    outputs = bolt.outputs.get(DEFAULT_STREAM)
    return {
        "name": name,
        "sources": [item.component for item in bolt.inputs if not item.component.startswith("__")],
        "function": bolt.object.args.get("function"),
        "args": bolt.object.args.get("args") or {},
        "schema": bolt.object.args.get("schema"),
        "outputs": list(outputs.fields) if outputs else [],
        "stream": FUSED_ROWS + name if outside else "",
        "counted": merged_value({"total": conf, "component": bolt.conf}, COUNTS_KEY) is not False,
    }
