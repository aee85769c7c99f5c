"""Frames of a peer that names tasks without inputs, and streams that nobody has: they leave nothing behind."""

from __future__ import annotations

from storm_dagster.api import Bolt, Spout, TopologyBuilder, Tuple
from storm_dagster.model.names import ACKER
from storm_dagster.model.wire import Frame
from storm_rigs.local_workers import Workers

MANY = 5_000


class Quiet(Spout):
    def next_tuple(self) -> None:
        pass


class Taking(Bolt):
    def process(self, tup: Tuple) -> None:
        pass


def test_what_they_name_does_not_fill_the_memory() -> None:
    builder = TopologyBuilder("untrue")
    builder.set_spout("quiet", Quiet, outputs=["x"])
    builder.set_bolt("taking", Taking, inputs="quiet")
    workers = Workers(builder, {"quiet": 0, "taking": 0, ACKER: 0}, {"topology.message.timeout.secs": 60})
    try:
        workers.turn()
        (engine,) = workers.engines
        tasks = {runner.component: runner for runner in engine.runners.values()}
        assert set(tasks) == {"quiet", "taking", ACKER}
        for number in range(MANY):
            for runner in tasks.values():
                engine.deliver(Frame("a peer", [(runner.task_id, 99, f"made up {number}", [(0, 0, [["value"]])])]))
            workers.turn()
        assert {name: len(runner.queue) for name, runner in tasks.items()} == dict.fromkeys(tasks, 0)
        stats = tasks["taking"].stats
        assert stats.executed == sum(stats.executed_by.values()) == MANY
        assert len(stats.executed_by) < MANY / 2
        assert workers.errors == []
    finally:
        workers.close()
