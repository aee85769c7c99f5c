"""Fused chains: SparkBolts that run in the query of their SparkSpout.

Placement does not depend on it. A worker rewrites the topology that it loads: the spout runs the
functions of the chain for each micro-batch, in the order of the graph, and the tasks of the fused
bolts emit the rows that components outside of the chain read.
"""

from collections.abc import Iterable, Mapping
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
"""Conf key of a topology or component; false: its bolts run in their own tasks."""
COUNTS_KEY = "topology.spark.fuse.counts"
"""Conf key of a topology or component; false: the rows between bolts need not be counted."""
CHAIN_KEY = "topology.spark.chain"
"""In the conf of a spout as workers load it: the chain of its query."""
FUSED = "__fused_"
"""Prefix of streams that carry no tuples of the topology: statistics leave them out."""
FUSED_ROWS = FUSED + "rows_"
"""Prefix of the stream from the spout to a fused bolt with the rows that other components read."""
FUSED_COUNTS = FUSED + "counts_"
"""Prefix of the stream from the spout to a fused bolt with the counts of batches."""
# Reason of a tuple that fails while a spout and a bolt disagree whether the bolt is fused.
OTHER_WAY = (
    "its spout's worker runs the chain the other way (topology.spark.fuse): it is sent again until"
    " both are updated"
)
SPARK_CLASS_KEY = "spark.component"
"""Key that the authoring API sets in the conf of a component of a user's class that is derived from
a Spark component: only a process with the user's code can see that.
"""
_SPARK_CLASSES = ("SparkSpout", "SparkQuery", "SparkBolt")
# Groupings that send each tuple to one task.
_GROUPINGS = ("shuffle", "local_or_shuffle", "none", "fields", "partial_key", "global")


def _class_of(part: ComponentSpec) -> str:
    """Name of the component's class in the API; empty for another class."""
    module, _, name = (part.object.python or "").partition(":")
    if module == "storm_dagster.api" or module.startswith("storm_dagster.api.spark"):
        return name
    return ""


def is_spark_component(part: ComponentSpec) -> bool:
    """True if the component is a SparkSpout, SparkQuery or SparkBolt, or of a class of these."""
    return _class_of(part) in _SPARK_CLASSES or part.conf.get(SPARK_CLASS_KEY) is True


def fused_components(spec: TopologySpec, conf: Mapping[str, Any]) -> dict[str, str]:
    """Fused bolt -> the spout whose query runs it, in the order of the graph.

    A SparkBolt is fused if it reads one SparkSpout, or one SparkQuery without a sink, and bolts
    that are fused with it, and no other component. Each grouping must send each tuple once.
    ``topology.spark.fuse`` must not be false for one of them.
    """
    chain = {
        name: name
        for name, part in spec.spouts.items()
        if _class_of(part) in ("SparkSpout", "SparkQuery")
        and DEFAULT_STREAM in part.outputs
        and _may_fuse(part, conf)
    }
    candidates = {
        name: part
        for name, part in spec.bolts.items()
        if _class_of(part) == "SparkBolt" and _may_fuse(part, conf)
    }
    # A bolt may be declared before the bolts that it reads: repeated until none can join a chain.
    has_grown = True
    while has_grown:
        has_grown = False
        for name, part in list(candidates.items()):
            root = _root_of(part, chain)
            if root is not None:
                chain[name] = root
                del candidates[name]
                has_grown = True
    return {name: root for name, root in chain.items() if name not in spec.spouts}


def _root_of(part: ComponentSpec, chain: Mapping[str, str]) -> str | None:
    """The spout of the chain that a bolt can join.

    ``None`` if it can join none yet. ``chain`` has the spout of each component that is in a chain.
    """
    inputs = [item for item in part.inputs if not item.component.startswith("__")]
    if not all(_sends_once(item, part) for item in inputs):
        return None
    roots = {chain.get(item.component) for item in inputs}
    return roots.pop() if len(roots) == 1 else None


def _sends_once(item: InputSpec, reader: ComponentSpec) -> bool:
    """True if each tuple of the default stream reaches one task."""
    if item.stream != DEFAULT_STREAM:
        return False
    if item.grouping.type == "all":
        return reader.parallelism == 1
    return item.grouping.type in _GROUPINGS


def _may_fuse(part: ComponentSpec, conf: Mapping[str, Any]) -> bool:
    return merged_value({"total": conf, "component": part.conf}, FUSE_KEY) is not False


def _fused_bolt(bolt: ComponentSpec, root: str, streams: Iterable[str]) -> ComponentSpec:
    """The bolt as workers run it: it reads these streams of the spout ``root``."""
    inputs = [
        InputSpec(component=root, stream=stream, grouping=Grouping.SHUFFLE) for stream in streams
    ]
    # Its inputs are not tuples of the topology.
    conf = {
        **bolt.conf,
        "topology.metric.sample.rate": 0,
        "topology.tick.tuple.freq.secs": None,
    }
    component = ComponentObject(python="storm_dagster.api.spark.fused:FusedBolt")
    return bolt.model_copy(update={"object": component, "inputs": tuple(inputs), "conf": conf})


def fuse(spec: TopologySpec, conf: Mapping[str, Any]) -> TopologySpec:
    """Return the topology as workers run it: unchanged if no component is fused.

    The conf of a spout then has the chain of its query (``CHAIN_KEY``): ``root``, the spout;
    ``fields``, its output fields; ``emits``, true if components outside of the chain read its rows;
    ``parts``, the bolts in their order (``_part``). A fused bolt reads the spout's streams with its
    rows, if it has readers outside of the chain, and with its counts.
    """
    fused = fused_components(spec, conf)
    if not fused:
        return spec
    read_outside: set[str] = set()
    for name, _, part in spec.components():
        if name not in fused:
            read_outside |= {
                item.component for item in part.inputs if item.stream == DEFAULT_STREAM
            }
    spouts = dict(spec.spouts)
    bolts = dict(spec.bolts)
    for root in dict.fromkeys(fused.values()):
        names = [name for name, spout in fused.items() if spout == root]
        parts = [
            _part(spec.bolts[name], name, conf, outside=name in read_outside) for name in names
        ]
        streams = dict(spouts[root].outputs)
        for name in names:
            bolt = spec.bolts[name]
            bolt_streams = {FUSED_COUNTS + name: StreamSpec(fields=("counts",))}
            if name in read_outside:
                rows = StreamSpec(fields=bolt.outputs[DEFAULT_STREAM].fields)
                bolt_streams[FUSED_ROWS + name] = rows
            streams |= bolt_streams
            bolts[name] = _fused_bolt(bolt, root, bolt_streams)
        chain = {
            "root": root,
            "fields": streams[DEFAULT_STREAM].fields,
            "emits": root in read_outside,
            "parts": parts,
        }
        update = {"outputs": streams, "conf": {**spouts[root].conf, CHAIN_KEY: chain}}
        spouts[root] = spouts[root].model_copy(update=update)
    return spec.model_copy(update={"spouts": spouts, "bolts": bolts})


def _part(
    bolt: ComponentSpec, name: str, conf: Mapping[str, Any], *, outside: bool
) -> dict[str, Any]:
    """A bolt of a chain as the spout's conf has it.

    ``outside``: components outside of the chain read it; ``stream`` is then the stream for its
    rows, and otherwise empty. ``function``, ``args`` and ``schema`` are those of the
    :class:`SparkBolt`. ``counted`` is false if its rows need not be counted.
    """
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
