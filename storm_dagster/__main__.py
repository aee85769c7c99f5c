"""``python -m storm_dagster`` is the ``storm-dagster`` command."""

from storm_dagster.cli import main

main()
