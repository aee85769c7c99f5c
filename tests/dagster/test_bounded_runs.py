"""What goes on for ever leaves no run and no event for each minute of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from storm_dagster.core.liveness.detection import LivenessLimits
from storm_dagster.core.liveness.step import HealingSettings, healing_step
from storm_dagster.defs.healing.memory import HealingMemory, Restart, limit_observations, limit_runs
from storm_dagster.model.records import Assignment, StormBase, SupervisorInfo, WorkerSlot
from storm_dagster.model.view import ClusterView, TopologyView, Versioned

DAY = 86_400
SETTINGS = HealingSettings(LivenessLimits(), "b")


def one_of_two_hosts_is_lost(
    beat: int, *, epoch: int = 1, ports: tuple[int, ...] = (1,)
) -> ClusterView:
    slots = tuple(
        WorkerSlot(node=node, host=node, port=1, tasks=str(n))
        for n, node in enumerate(("s1", "s2"), 1)
    )
    topology = TopologyView(
        id="t-1-1",
        base=StormBase(
            name="t", launch_time_secs=0, status="ACTIVE", workers=2, executors={}, token="k"
        ),
        base_at=Versioned(1, 1),
        assignment=Assignment(
            topology_id="t-1-1",
            code_dir="t-1-1",
            node_host={"s1": "s1", "s2": "s2"},
            workers=slots,
            task_start_secs={},
            timestamp_ms=0,
        ),
        assignment_at=Versioned(3, 10),
    )
    info = SupervisorInfo(host="s1", ports=ports, started=0, count=beat, version="t")
    return ClusterView("c", epoch, 1, {"s1": info}, {"t-1-1": topology})


class Sensor:
    """The decisions of the sensor about runs, every five seconds."""

    def __init__(self) -> None:
        self.memory = HealingMemory()
        self.beat = 0

    def at(self, now: float, view: ClusterView) -> list[str]:
        self.beat += 1
        infos = {
            node: info.model_copy(update={"count": self.beat})
            for node, info in view.supervisors.items()
        }
        view = replace(view, supervisors=infos)
        step = healing_step(view, self.memory, now, SETTINGS)
        attempts, asked = limit_runs(view, step.attempts, step.memory, now)
        self.memory = changed(step.memory, asked=asked)
        return [attempt.cause.key for attempt in attempts]


@pytest.mark.long
def test_an_unplaceable_cause_gets_at_most_ten_runs_a_day() -> None:
    sensor, view = Sensor(), one_of_two_hosts_is_lost(1)
    asked: dict[str, list[int]] = {}
    for now in range(0, 3 * DAY, 5):
        for key in sensor.at(float(now), view):
            asked.setdefault(key, []).append(now)
    assert asked
    for times in asked.values():
        assert len([now for now in times if now - times[0] < DAY]) <= 10
        assert all(
            len([now for now in times if begin <= now < begin + DAY]) <= 10 for begin in times
        )
        assert times[4] - times[0] <= 120, "at once and with back-off at first"


def test_what_could_place_it_is_tried_at_once() -> None:
    sensor = Sensor()
    for now in range(0, 7200, 5):
        sensor.at(float(now), one_of_two_hosts_is_lost(1))
    quiet = [sensor.at(float(now), one_of_two_hosts_is_lost(1)) for now in range(7200, 10_800, 5)]
    assert not any(quiet)
    more = [
        sensor.at(float(now), one_of_two_hosts_is_lost(1, ports=(1, 2)))
        for now in range(10_800, 10_925, 5)
    ]
    assert any(more), "a slot came"
    led = [
        sensor.at(float(now), one_of_two_hosts_is_lost(1, epoch=2, ports=(1, 2)))
        for now in range(10_925, 11_050, 5)
    ]
    assert any(led), "another leader"


def test_a_crash_loop_is_observed_less_and_less() -> None:
    observed: dict[str, tuple[int, float]] = {}
    seen = {"loops": 0, "once": 0}
    for now in range(0, DAY, 60):
        found = [Restart("t", "loops", "s1", "h", port, 1) for port in (1, 2)]
        found += [Restart("u", "once", "s1", "h", 1, 1)] if now == 60 * 700 else []
        kept, observed = limit_observations(found, observed, float(now))
        for name in seen:
            seen[name] += any(each.topology_id == name for each in kept)
        assert len([each for each in kept if each.topology_id == "loops"]) in (0, 2)
    assert seen["once"] == 1 and 24 <= seen["loops"] <= 40
