"""The first error of a topology in a harness, however slowly this machine starts its tasks."""

from __future__ import annotations

from contextlib import suppress

from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually


def first_error(harness: TopologyHarness) -> tuple[str, BaseException]:
    """Component and exception of the first error, which the topology runs until it is reported."""

    def errors() -> list[tuple[str, BaseException]]:
        if not harness.errors:
            with suppress(TimeoutError):
                harness.run(timeout=0.02)
        return harness.errors

    return eventually(errors, 60, "an error of a component", interval=0.001)[0]
