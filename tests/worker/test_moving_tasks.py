"""Tuples and tasks between the end of a task here and the placement that names its next place."""

from __future__ import annotations

import time
from typing import Any

import pytest

from storm_dagster.api import Bolt, Spout, TopologyBuilder, Tuple
from storm_dagster.model.names import ACKER
from storm_dagster.testing.waiting import eventually
from storm_rigs.stage.local_workers import LocalWorkers


class Source(Spout):
    def initialize(self, conf: Any, context: Any) -> None:
        self.left, self.verdicts = 0, []

    def next_tuple(self) -> None:
        if self.left:
            self.left -= 1
            self.emit([self.left], tup_id=self.left)

    def ack(self, tup_id: Any) -> None:
        self.verdicts.append(tup_id)

    def fail(self, tup_id: Any) -> None:
        self.verdicts.append(tup_id)


class Taking(Bolt):
    def process(self, tup: Tuple) -> None:
        pass


@pytest.mark.parametrize("back", [False, True])
def test_what_is_sent_to_a_task_that_was_closed_is_told_at_once(back: bool) -> None:
    """``back``: the task is this worker's again before another placement was applied."""
    builder = TopologyBuilder("moves")
    builder.set_spout("source", Source, outputs=["x"])
    builder.set_bolt("taking", Taking, inputs="source")
    builder.set_bolt("other", Taking, inputs="source")
    conf = {"topology.message.timeout.secs": 600}
    workers = LocalWorkers(builder, {"source": 0, "taking": 0, "other": 1, ACKER: 0}, conf)
    try:
        for _ in range(50):
            workers.turn()
        spout: Any = workers.runner("source").instance  # type: ignore[attr-defined]
        task = workers.runner("taking").task_id
        workers.engines[0].close_tasks(frozenset({task}))
        spout.left = 5
        for _ in range(20):  # Passes while the worker writes to ZooKeeper.
            workers.turn()
            time.sleep(0.001)
        workers.place(2, {"source": 0, "taking": 0 if back else 1, "other": 1, ACKER: 0})

        def told() -> bool:
            workers.turn()
            return len(spout.verdicts) == 5

        eventually(told, 30, "what became of the tuples", interval=0.001)
        spout.left = 5
        spout.verdicts.clear()
        eventually(told, 30, "that of tuples sent later", interval=0.001)
        assert workers.errors == []
    finally:
        workers.close()
