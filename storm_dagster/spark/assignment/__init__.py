"""The PySpark assignment: placement of many topologies as one DataFrame computation.

Supervisors, topologies, executors and present assignments are DataFrames. Free slots are ranked by a window;
slots are allocated to topologies in order in one Arrow group over workers and supervisors; tasks are assigned
per topology, in parallel. The groups call the rules of ``core.scheduling``, as the local planner does. What
runs in Spark's Python workers (``request_slots``, ``allocate_slots``, ``assign_tasks`` and what they import) needs
only the standard library, pyarrow and constants of ``model``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storm_dagster.spark.assignment.pipeline import plan_many_with_spark, plan_with_spark

__all__ = ["plan_many_with_spark", "plan_with_spark"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        # Loaded at first use, so that Spark's Python workers never import the driver's side.
        from storm_dagster.spark.assignment import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
