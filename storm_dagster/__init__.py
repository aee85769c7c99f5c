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
        Grouping,
        ReliableSpout,
        ShellBolt,
        ShellSpout,
        SparkBolt,
        SparkSpout,
        Spout,
        Stream,
        TicklessBatchingBolt,
        Topology,
        TopologyBuilder,
        Tuple,
    )
    from storm_dagster.client import submit_topology
    from storm_dagster.defs import build_storm_defs
    from storm_dagster.defs.component import StormTopologyComponent

_PUBLIC = {
    "BatchingBolt": "storm_dagster.api",
    "Bolt": "storm_dagster.api",
    "Grouping": "storm_dagster.api",
    "ReliableSpout": "storm_dagster.api",
    "ShellBolt": "storm_dagster.api",
    "ShellSpout": "storm_dagster.api",
    "SparkBolt": "storm_dagster.api",
    "SparkSpout": "storm_dagster.api",
    "Spout": "storm_dagster.api",
    "Stream": "storm_dagster.api",
    "StormTopologyComponent": "storm_dagster.defs.component",
    "TicklessBatchingBolt": "storm_dagster.api",
    "Topology": "storm_dagster.api",
    "TopologyBuilder": "storm_dagster.api",
    "Tuple": "storm_dagster.api",
    "build_storm_defs": "storm_dagster.defs",
    "submit_topology": "storm_dagster.client",
}

__all__ = [
    "BatchingBolt",
    "Bolt",
    "Grouping",
    "ReliableSpout",
    "ShellBolt",
    "ShellSpout",
    "SparkBolt",
    "SparkSpout",
    "Spout",
    "StormTopologyComponent",
    "Stream",
    "TicklessBatchingBolt",
    "Topology",
    "TopologyBuilder",
    "Tuple",
    "__version__",
    "build_storm_defs",
    "submit_topology",
]


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
