"""Warm runs: a run of Dagster starts in a fork of a process that has loaded everything already.

Stock Dagster starts a fresh interpreter for each run, which takes one to three seconds before the first step.
``storm-dagster warm-runs`` (``dev`` starts it) keeps a process with dagster, the storage and the definitions
loaded; :class:`WarmRunLauncher`, named in ``dagster.yaml``, asks it to fork one process for each run. Wherever
that is not possible, the run is launched by the stock launcher::

    run_launcher:
      module: storm_dagster.launcher
      class: WarmRunLauncher
"""

from __future__ import annotations

from storm_dagster.launcher.run_launcher import WarmRunLauncher

__all__ = ["WarmRunLauncher"]
