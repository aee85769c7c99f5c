"""Public API for topology authors: components, groupings, topologies."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from storm_dagster.host.resolve import lazy_names

if TYPE_CHECKING:
    from storm_dagster.api.batching import BatchingBolt, TicklessBatchingBolt
    from storm_dagster.api.bolts import Bolt, DagsterReports, KeyValueState, StatefulBolt
    from storm_dagster.api.builder import Topology, TopologyBuilder
    from storm_dagster.api.component import Component, ShellBolt, ShellSpout, log, logger
    from storm_dagster.api.context import TopologyContext
    from storm_dagster.api.functions import Emit, bolt, spout
    from storm_dagster.api.joins import Join, JoinBolt
    from storm_dagster.api.spark import SparkBolt, SparkSpout
    from storm_dagster.api.spark.query import SparkQuery
    from storm_dagster.api.specs import Grouping, Spec, Stream
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

__getattr__: Callable[[str], Any]
__dir__: Callable[[], list[str]]
__getattr__, __dir__ = lazy_names(__name__)
