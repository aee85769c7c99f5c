"""Topologies in a harness that read from a source, and their turns of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from storm_dagster.api import Topology
from storm_dagster.connectors import Source, SourceSpout
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_rigs.components import CollectBolt


def reading(source: Source, **body: Any) -> type[Topology]:
    """A topology whose spout ``rows`` reads the source; ``body`` are attributes of the spout.

    Its rows are in ``CollectBolt.everything``, which is emptied.
    """
    parts = {"source": source, "outputs": ["row"], "__module__": __name__, **body}
    # Tasks import the class by its name.
    globals()["Rows"] = made = type("Rows", (SourceSpout,), parts)
    CollectBolt.everything.clear()

    class Reading(Topology):
        rows = made.spec()
        uses = CollectBolt.spec(inputs=[rows])

    return Reading


def run_until(harness: TopologyHarness, condition: Callable[[], Any], timeout: float = 60) -> Any:
    """Turn the harness's loop until the condition is true, in seconds; its value."""

    def turn() -> Any:
        harness.engine.run(harness.shared.clock())
        return condition()

    return eventually(turn, timeout, interval=0.001)
