"""Storm in Dagster: assets, jobs, sensors, schedules, checks and resources of one cluster.

``defs`` is a whole code location (``definitions.py`` re-exports it, `storm-dagster dev` loads it);
:func:`build_storm_defs` is for a project of your own.
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
    own = build_storm_defs(resource_prefix="")
    return dg.Definitions.merge(own, dg.Definitions(executor=dg.in_process_executor))
