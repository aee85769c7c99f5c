"""Test tools for topologies: a harness in this process, and local clusters of real daemons."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storm_dagster.testing.cluster import LocalCluster
    from storm_dagster.testing.topology_harness import HarnessResult, TopologyHarness, run_topology
    from storm_dagster.testing.waiting import eventually

_PUBLIC = {
    "HarnessResult": "topology_harness",
    "LocalCluster": "cluster",
    "TopologyHarness": "topology_harness",
    "eventually": "waiting",
    "run_topology": "topology_harness",
}

__all__ = ["HarnessResult", "LocalCluster", "TopologyHarness", "eventually", "run_topology"]


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
