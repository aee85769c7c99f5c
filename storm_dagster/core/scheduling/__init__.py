"""Placement rules in plain Python: the choice of a slot for each task. Pure functions of values."""

from storm_dagster.core.scheduling.build import topology_to_place
from storm_dagster.core.scheduling.plan import plan_placement

__all__ = ["plan_placement", "topology_to_place"]
