"""Storm in Dagster: the definitions of one cluster.

They are assets, jobs, sensors, schedules, checks and resources. ``defs`` is a complete code
location (``definitions.py`` re-exports it, `storm-dagster dev` loads it); :func:`build_storm_defs`
is for your own project.
"""

from storm_dagster.host.requirements import needs, require_release

with needs("storm_dagster.defs"):
    import dagster as dg

    require_release("dagster", "storm_dagster.defs")
    from storm_dagster.defs.build import build_storm_defs

__all__ = ["build_storm_defs", "defs"]


@dg.definitions
def defs() -> dg.Definitions:
    """Definitions of the cluster of ``STORM_DAGSTER_HOME``."""
    cluster_defs = build_storm_defs(resource_prefix="")
    executor_defs = dg.Definitions(executor=dg.in_process_executor)
    return dg.Definitions.merge(cluster_defs, executor_defs)
