"""Test tools for topologies: a harness in process, and clusters of real daemons."""

from typing import TYPE_CHECKING

from storm_dagster.host.resolve import lazy_names

if TYPE_CHECKING:
    from storm_dagster.testing.cluster import LocalCluster
    from storm_dagster.testing.topology_harness import HarnessResult, TopologyHarness, run_topology
    from storm_dagster.testing.waiting import eventually

__all__ = ["HarnessResult", "LocalCluster", "TopologyHarness", "eventually", "run_topology"]

_MODULES = {
    "HarnessResult": "storm_dagster.testing.topology_harness",
    "LocalCluster": "storm_dagster.testing.cluster",
    "TopologyHarness": "storm_dagster.testing.topology_harness",
    "eventually": "storm_dagster.testing.waiting",
    "run_topology": "storm_dagster.testing.topology_harness",
}

if not TYPE_CHECKING:  # Else a type checker accepts every name.
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
