"""Registry of the placement strategies (``topology.scheduler.strategy``)."""

STRATEGIES: dict[str, str] = {
    "balanced": "storm_dagster.core.scheduling.balanced:Balanced",
    "even": "storm_dagster.core.scheduling.even:Even",
    "local": "storm_dagster.core.scheduling.local:Local",
}
"""Name -> class, as ``module:name``. Planners load it when the first topology needs it."""
