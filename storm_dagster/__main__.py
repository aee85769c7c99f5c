"""``python -m storm_dagster`` is the ``storm-dagster`` command."""

from __future__ import annotations

from storm_dagster.cli import main

main()
