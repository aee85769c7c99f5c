"""Placement rules: the choice of a slot for each task. Pure functions of plain values.

Spark's Python workers import these modules, so that none of them imports more than the standard library and
constants of ``model``, except ``build``, ``plan``, ``outcome``, ``explain`` and ``assignment_checks``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storm_dagster.core.scheduling.build import topology_to_place
    from storm_dagster.core.scheduling.plan import plan_placement

__all__ = ["plan_placement", "topology_to_place"]


def __getattr__(name: str) -> Any:
    # Loaded at first use, so that Spark's Python workers never import the value types of requests.
    if name == "plan_placement":
        from storm_dagster.core.scheduling.plan import plan_placement

        return plan_placement
    if name == "topology_to_place":
        from storm_dagster.core.scheduling.build import topology_to_place

        return topology_to_place
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
