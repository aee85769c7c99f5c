"""Storm in Dagster: assets, jobs, sensors, schedules, checks and resources of one cluster.

``defs`` is what a code location loads (``definitions.py`` re-exports it); :func:`build_storm_defs` builds the
same for a cluster of your choice.
"""

from __future__ import annotations

import dagster as dg

from storm_dagster.defs.build import build_storm_defs

__all__ = ["build_storm_defs", "defs"]


@dg.definitions
def defs() -> dg.Definitions:
    """Definitions of the cluster of ``STORM_DAGSTER_HOME``."""
    return build_storm_defs()
