"""Test tools for topologies: a harness in this process, and local clusters."""

from typing import TYPE_CHECKING

from storm_dagster.host.resolve import lazy_names

if TYPE_CHECKING:
    from storm_dagster.testing.cluster import LocalCluster
    from storm_dagster.testing.topology_harness import HarnessResult, TopologyHarness, run_topology
    from storm_dagster.testing.waiting import eventually

__all__ = ["HarnessResult", "LocalCluster", "TopologyHarness", "eventually", "run_topology"]

__getattr__, __dir__ = lazy_names(__name__)
