"""Tuples and tasks between the end of a task here and the placement that names its next place."""

from __future__ import annotations

import time
from typing import Any

import pytest

from storm_dagster.api import TopologyBuilder
from storm_dagster.model.names import ACKER
from storm_dagster.testing.waiting import eventually
from storm_rigs.components import DiscardBolt, RangeSpout
from storm_rigs.stage.local_workers import LocalWorkers


@pytest.mark.parametrize("back", [False, True])
def test_tuples_for_a_closed_task_get_their_verdict_at_once(back: bool) -> None:
    """``back``: the task is this worker's again before another placement was applied."""
    builder = TopologyBuilder("moves")
    builder.set_spout("source", RangeSpout, args={"total": 0})
    builder.set_bolt("taking", DiscardBolt, inputs="source")
    builder.set_bolt("other", DiscardBolt, inputs="source")
    conf = {"topology.message.timeout.secs": 600}
    workers = LocalWorkers(builder, {"source": 0, "taking": 0, "other": 1, ACKER: 0}, conf)
    try:
        for _ in range(50):
            workers.turn()
        spout: Any = workers.runner("source").instance  # type: ignore[attr-defined]
        task = workers.runner("taking").task_id
        workers.engines[0].close_tasks(frozenset({task}))
        spout.total += 5
        for _ in range(20):  # Passes while the worker writes to ZooKeeper.
            workers.turn()
            time.sleep(0.001)
        workers.place(2, {"source": 0, "taking": 0 if back else 1, "other": 1, ACKER: 0})

        def told() -> bool:
            workers.turn()
            return len(spout.acked) + len(spout.failed) == spout.total

        eventually(told, 30, "what became of the tuples", interval=0.001)
        spout.total += 5
        eventually(told, 30, "that of tuples sent later", interval=0.001)
        assert workers.errors == []
    finally:
        workers.close()
