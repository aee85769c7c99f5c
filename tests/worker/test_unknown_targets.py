"""Frames of a peer that names tasks without inputs, and streams, tasks and slots that nobody has:
nothing is left of them.
"""

from __future__ import annotations

import pytest

from storm_dagster.api import TopologyBuilder
from storm_dagster.model.names import ACKER
from storm_dagster.model.slot import Slot
from storm_dagster.model.wire import Frame, TaskReport, WorkerReport
from storm_dagster.worker.dataplane.routes import Placement
from storm_dagster.worker.engine.history import TopologyHistory
from storm_dagster.worker.engine.pressure import Loads
from storm_dagster.worker.engine.system import TopologyMasterTable
from storm_rigs.components import DiscardBolt, InputSpout
from storm_rigs.stage.local_workers import LocalWorkers

MANY = 5_000


def test_what_they_name_does_not_fill_the_memory() -> None:
    builder = TopologyBuilder("untrue")
    builder.set_spout("quiet", InputSpout, outputs=["x"])
    builder.set_bolt("taking", DiscardBolt, inputs="quiet")
    workers = LocalWorkers(
        builder, {"quiet": 0, "taking": 0, ACKER: 0}, {"topology.message.timeout.secs": 60}
    )
    try:
        workers.turn()
        (engine,) = workers.engines
        tasks = {runner.component: runner for runner in engine.runners.values()}
        assert set(tasks) == {"quiet", "taking", ACKER}
        for number in range(MANY):
            for runner in tasks.values():
                engine.deliver(
                    Frame(
                        "a peer", [(runner.task_id, 99, f"made up {number}", [(0, 0, [["value"]])])]
                    )
                )
            workers.turn()
        assert {name: len(runner.queue) for name, runner in tasks.items()} == dict.fromkeys(
            tasks, 0
        )
        stats = tasks["taking"].stats
        assert stats.executed == sum(stats.executed_by.values()) == MANY
        assert len(stats.executed_by) < MANY / 2
        assert workers.errors == []
    finally:
        workers.close()


@pytest.mark.parametrize("disabled", [True, False])
def test_loads_of_made_up_tasks_end(disabled: bool) -> None:
    loads = Loads({"topology.disable.loadaware.messaging": disabled}, None)
    for task in range(MANY):
        loads.on_report([(task, 1.0)], 0.0)
    loads.refresh(100.0, [])
    assert loads._peer_loads == {}


def test_reports_of_made_up_slots_are_not_kept() -> None:
    def report(port: int) -> WorkerReport:
        return WorkerReport(
            node="s1", host="h", port=port, pid=7, count=1, uptime_secs=0, version=0, status="running",
            tasks={"1": TaskReport(component="b", status="running")}, system={},
        )  # fmt: skip

    table = TopologyMasterTable("t-1-1", 9)
    table.follow(
        Placement(0, {1: Slot("s1", 1)}, {}, {}, frozenset(), frozenset(), {"a": Slot("s1", 1)})
    )
    for port in range(MANY):
        table.receive(report(port), 0.0)
    assert list(table.document()["workers"]) == ["s1:1"] == list(table.history._marks)


def test_workers_that_a_peer_makes_up_cost_nothing() -> None:
    builder = TopologyBuilder("untrue")
    builder.set_spout("quiet", InputSpout, outputs=["x"])
    builder.set_bolt("taking", DiscardBolt, inputs="quiet")
    workers = LocalWorkers(builder, {"quiet": 0, "taking": 0, ACKER: 0}, {})
    try:
        workers.turn()
        (engine,) = workers.engines
        (acker,) = (task for task, name in workers.components.items() if name == ACKER)
        for number in range(100):
            named = [(acker, f"{number}-{each}", []) for each in range(1_000)]
            engine.deliver(Frame("a peer", touched=named))
        assert len(engine.exchange.workers._bits) < 100
        engine.deliver(Frame("a peer", reasons=[(1, 1, "x" * 1_000_000, "y" * 1_000_000)]))
        assert sum(len(part) for part in engine.shared.ledger.reasons[1][1:]) < 10_000
    finally:
        workers.close()


def test_a_history_of_made_up_components_is_bounded() -> None:
    history = TopologyHistory()
    for number in range(300):
        tasks = {
            str(at): TaskReport(component=f"{number}-{at}", status="running") for at in range(50)
        }
        for uptime in (100, 100 + 10 * number):
            report = WorkerReport(
                node="s1", host="h", port=1, pid=7, count=1, uptime_secs=uptime, version=0, status="running",
                tasks=tasks, system={},
            )  # fmt: skip
            history.receive("s1:1", report, 10.0 * number)
        history.advance(10.0 * number, 1e9 + 10 * number, ["s"])
    assert len(history._rows) < 1_000 and len(history._marks["s1:1"]) <= 100
