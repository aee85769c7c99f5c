"""Storm's cluster system for Python teams who live in Dagster.

Importing the package imports neither pyspark, pandas nor dagster: public names are loaded at first
use, so that a worker process stays small.
"""

from typing import TYPE_CHECKING

from storm_dagster.host.resolve import lazy_names
from storm_dagster.model.version import __version__

if TYPE_CHECKING:
    from storm_dagster.api import (
        BatchingBolt,
        Bolt,
        Emit,
        Grouping,
        ReliableSpout,
        ShellBolt,
        ShellSpout,
        SparkBolt,
        SparkQuery,
        SparkSpout,
        Spout,
        Stream,
        TicklessBatchingBolt,
        Topology,
        TopologyBuilder,
        Tuple,
        bolt,
        spout,
    )
    from storm_dagster.client import submit_topology
    from storm_dagster.defs import build_storm_defs
    from storm_dagster.defs.build import build_storm_resources
    from storm_dagster.defs.declared.component import StormTopologyComponent
    from storm_dagster.defs.healing.heartbeat_sensor import build_heartbeat_sensor
    from storm_dagster.defs.healing.reassign_job import build_reassign_job
    from storm_dagster.defs.lifecycle.rebalance_schedule import build_rebalance_schedule
    from storm_dagster.defs.observe.alerts import Alert, build_alert_sensor
    from storm_dagster.defs.translator import StormAsset, StormTranslator

__all__ = [
    "Alert",
    "BatchingBolt",
    "Bolt",
    "Emit",
    "Grouping",
    "ReliableSpout",
    "ShellBolt",
    "ShellSpout",
    "SparkBolt",
    "SparkQuery",
    "SparkSpout",
    "Spout",
    "StormAsset",
    "StormTopologyComponent",
    "StormTranslator",
    "Stream",
    "TicklessBatchingBolt",
    "Topology",
    "TopologyBuilder",
    "Tuple",
    "__version__",
    "bolt",
    "build_alert_sensor",
    "build_heartbeat_sensor",
    "build_reassign_job",
    "build_rebalance_schedule",
    "build_storm_defs",
    "build_storm_resources",
    "spout",
    "submit_topology",
]

_MODULES = {
    "Alert": "storm_dagster.defs.observe.alerts",
    "BatchingBolt": "storm_dagster.api",
    "Bolt": "storm_dagster.api",
    "Emit": "storm_dagster.api",
    "Grouping": "storm_dagster.api",
    "ReliableSpout": "storm_dagster.api",
    "ShellBolt": "storm_dagster.api",
    "ShellSpout": "storm_dagster.api",
    "SparkBolt": "storm_dagster.api",
    "SparkQuery": "storm_dagster.api",
    "SparkSpout": "storm_dagster.api",
    "Spout": "storm_dagster.api",
    "StormAsset": "storm_dagster.defs.translator",
    "StormTopologyComponent": "storm_dagster.defs.declared.component",
    "StormTranslator": "storm_dagster.defs.translator",
    "Stream": "storm_dagster.api",
    "TicklessBatchingBolt": "storm_dagster.api",
    "Topology": "storm_dagster.api",
    "TopologyBuilder": "storm_dagster.api",
    "Tuple": "storm_dagster.api",
    "bolt": "storm_dagster.api",
    "build_alert_sensor": "storm_dagster.defs.observe.alerts",
    "build_heartbeat_sensor": "storm_dagster.defs.healing.heartbeat_sensor",
    "build_reassign_job": "storm_dagster.defs.healing.reassign_job",
    "build_rebalance_schedule": "storm_dagster.defs.lifecycle.rebalance_schedule",
    "build_storm_defs": "storm_dagster.defs",
    "build_storm_resources": "storm_dagster.defs.build",
    "spout": "storm_dagster.api",
    "submit_topology": "storm_dagster.client",
}

if not TYPE_CHECKING:  # Else a type checker accepts every name.
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
