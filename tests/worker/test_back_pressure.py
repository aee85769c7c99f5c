"""A slow bolt slows its spouts; queues stay short."""

from __future__ import annotations

import time

import pytest

from storm_dagster.api import Topology
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_rigs.components import BlockingSleepBolt, RangeSpout, SleepBolt


class ThreadTopology(Topology):
    flood = RangeSpout.spec(args={"tracked": False})
    slow = BlockingSleepBolt.spec(inputs=[flood], args={"secs": 0.001})


class LoopTopology(Topology):
    flood = RangeSpout.spec(args={"tracked": False})
    slow = SleepBolt.spec(inputs=[flood], args={"secs": 0.002})


@pytest.mark.parametrize(("topology", "most"), [(ThreadTopology, 400), (LoopTopology, 1200)])
def test_a_slow_bolt_stops_the_spout(topology: type[Topology], most: int) -> None:
    with TopologyHarness(topology, conf={"topology.executor.queue.size": 400}) as harness:
        slow = next(one for one in harness.engine.runners.values() if one.component == "slow")
        waiting: list[int] = []

        def enough_executed() -> bool:
            harness.engine.run(time.monotonic())
            waiting.append(slow.waiting())
            return slow.stats.executed > 500

        eventually(enough_executed, 60, "five hundred tuples executed", interval=0.0005)
        assert 0 < max(waiting) <= most


def test_without_a_limit_on_trees_the_time_that_waits_is_limited() -> None:
    with TopologyHarness(LoopTopology) as harness:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            harness.engine.run(time.monotonic())
        slow = next(one for one in harness.engine.runners.values() if one.component == "slow")
        # Far below the default of 32768 tuples, which would take over a minute.
        assert slow.waiting() < 5000
