"""Public API for topology authors: components, groupings, topologies."""

from typing import TYPE_CHECKING

from storm_dagster.host.resolve import lazy_names

if TYPE_CHECKING:
    from storm_dagster.api.batching import BatchingBolt, TicklessBatchingBolt
    from storm_dagster.api.bolts import Bolt, DagsterReports, KeyValueState, StatefulBolt
    from storm_dagster.api.builder import Topology, TopologyBuilder
    from storm_dagster.api.component import Component, ShellBolt, ShellSpout, log, logger
    from storm_dagster.api.context import TopologyContext
    from storm_dagster.api.functions import Emit, bolt, spout
    from storm_dagster.api.joins import Join, JoinBolt
    from storm_dagster.api.outages import SystemUnavailable
    from storm_dagster.api.spark import SparkBolt, SparkSpout
    from storm_dagster.api.spark.query import SparkQuery
    from storm_dagster.api.specs import GlobalStreamId, Grouping, Spec, Stream
    from storm_dagster.api.spouts import ReliableSpout, Spout
    from storm_dagster.api.state import TaskState
    from storm_dagster.api.tuples import Tuple, is_tick
    from storm_dagster.api.windows import TupleWindow, Window, WindowedBolt

__all__ = [
    "BatchingBolt",
    "Bolt",
    "Component",
    "DagsterReports",
    "Emit",
    "GlobalStreamId",
    "Grouping",
    "Join",
    "JoinBolt",
    "KeyValueState",
    "ReliableSpout",
    "ShellBolt",
    "ShellSpout",
    "SparkBolt",
    "SparkQuery",
    "SparkSpout",
    "Spec",
    "Spout",
    "StatefulBolt",
    "Stream",
    "SystemUnavailable",
    "TaskState",
    "TicklessBatchingBolt",
    "Topology",
    "TopologyBuilder",
    "TopologyContext",
    "Tuple",
    "TupleWindow",
    "Window",
    "WindowedBolt",
    "bolt",
    "is_tick",
    "log",
    "logger",
    "spout",
]

_MODULES = {
    "BatchingBolt": "storm_dagster.api.batching",
    "Bolt": "storm_dagster.api.bolts",
    "Component": "storm_dagster.api.component",
    "DagsterReports": "storm_dagster.api.bolts",
    "Emit": "storm_dagster.api.functions",
    "GlobalStreamId": "storm_dagster.api.specs",
    "Grouping": "storm_dagster.api.specs",
    "Join": "storm_dagster.api.joins",
    "JoinBolt": "storm_dagster.api.joins",
    "KeyValueState": "storm_dagster.api.bolts",
    "ReliableSpout": "storm_dagster.api.spouts",
    "ShellBolt": "storm_dagster.api.component",
    "ShellSpout": "storm_dagster.api.component",
    "SparkBolt": "storm_dagster.api.spark",
    "SparkQuery": "storm_dagster.api.spark.query",
    "SparkSpout": "storm_dagster.api.spark",
    "Spec": "storm_dagster.api.specs",
    "Spout": "storm_dagster.api.spouts",
    "StatefulBolt": "storm_dagster.api.bolts",
    "Stream": "storm_dagster.api.specs",
    "SystemUnavailable": "storm_dagster.api.outages",
    "TaskState": "storm_dagster.api.state",
    "TicklessBatchingBolt": "storm_dagster.api.batching",
    "Topology": "storm_dagster.api.builder",
    "TopologyBuilder": "storm_dagster.api.builder",
    "TopologyContext": "storm_dagster.api.context",
    "Tuple": "storm_dagster.api.tuples",
    "TupleWindow": "storm_dagster.api.windows",
    "Window": "storm_dagster.api.windows",
    "WindowedBolt": "storm_dagster.api.windows",
    "bolt": "storm_dagster.api.functions",
    "is_tick": "storm_dagster.api.tuples",
    "log": "storm_dagster.api.component",
    "logger": "storm_dagster.api.component",
    "spout": "storm_dagster.api.functions",
}

if not TYPE_CHECKING:  # Else a type checker accepts every name.
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
