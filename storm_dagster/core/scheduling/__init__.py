"""Placement rules in plain Python: which slot runs which tasks. Pure functions of values."""

from storm_dagster.core.scheduling.build import topology_to_place
from storm_dagster.core.scheduling.plan import plan_placement

__all__ = ["plan_placement", "topology_to_place"]
