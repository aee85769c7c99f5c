"""Storm's cluster system for Python teams who live in Dagster.

Importing the package imports neither pyspark, pandas nor dagster: public names are loaded at first use,
so that a worker process stays small.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

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
    from storm_dagster.defs.zookeeper_sensor import ZooKeeperChange, build_zookeeper_sensor

_PUBLIC = {
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
    "ZooKeeperChange": "storm_dagster.defs.zookeeper_sensor",
    "bolt": "storm_dagster.api",
    "build_alert_sensor": "storm_dagster.defs.observe.alerts",
    "build_heartbeat_sensor": "storm_dagster.defs.healing.heartbeat_sensor",
    "build_reassign_job": "storm_dagster.defs.healing.reassign_job",
    "build_rebalance_schedule": "storm_dagster.defs.lifecycle.rebalance_schedule",
    "build_storm_defs": "storm_dagster.defs",
    "build_storm_resources": "storm_dagster.defs.build",
    "build_zookeeper_sensor": "storm_dagster.defs.zookeeper_sensor",
    "spout": "storm_dagster.api",
    "submit_topology": "storm_dagster.client",
}

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
    "ZooKeeperChange",
    "__version__",
    "bolt",
    "build_alert_sensor",
    "build_heartbeat_sensor",
    "build_reassign_job",
    "build_rebalance_schedule",
    "build_storm_defs",
    "build_storm_resources",
    "build_zookeeper_sensor",
    "spout",
    "submit_topology",
]


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    from storm_dagster.model.host import needs

    with needs(f"storm_dagster.{name}"):
        value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
