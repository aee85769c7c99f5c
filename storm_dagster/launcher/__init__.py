"""Warm runs: a Dagster run starts in a fork of a process that has loaded everything already.

Stock Dagster starts a new interpreter for each run, which takes one to three seconds before the
first step. ``storm-dagster daemon warm-runs`` (``dev`` starts it) keeps a process with dagster, the
storage and the definitions loaded; :class:`WarmRunLauncher`, named in ``dagster.yaml``, makes it
fork a process for each run. Where that is not possible, the stock launcher launches the run::

    run_launcher:
      module: storm_dagster.launcher
      class: WarmRunLauncher
"""

from storm_dagster.launcher.run_launcher import WarmRunLauncher

__all__ = ["WarmRunLauncher"]
