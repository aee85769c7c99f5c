"""What could be better in a Dagster instance: rows that a reader can weigh, and none where nothing
could.
"""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.model.instance_advice import instance_advice, sensors_use_threads

THREADS = {"sensors": {"use_threads": True}}


def advised(settings: Any) -> dict[str, str]:
    return {row.setting: row.better for row in instance_advice(settings)}


def test_a_stock_instance_is_advised_on_sensor_threads_and_queue_interval() -> None:
    assert advised({}) == {"sensors.use_threads": "true", "run_queue.dequeue_interval_seconds": "1"}
    for row in instance_advice({}):
        assert row.now and row.gain and row.cost


def test_nothing_is_advised_where_nothing_could_be_better() -> None:
    assert advised({**THREADS, "run_queue": {"dequeue_interval_seconds": 1}}) == {}


def test_the_owner_of_another_coordinator_keeps_it() -> None:
    for name in ("DefaultRunCoordinator", "MyCoordinator"):
        assert advised({**THREADS, "run_coordinator": {"class": name}}) == {}


@pytest.mark.parametrize(
    "queue",
    [
        {"concurrency": {"runs": {"max_concurrent_runs": 1}}},
        {"run_queue": {"max_concurrent_runs": 1}},
        {
            "run_coordinator": {
                "class": "QueuedRunCoordinator",
                "config": {"max_concurrent_runs": 1},
            }
        },
    ],
)
def test_a_queue_of_one_run_is_named_wherever_it_is_set(queue: dict[str, Any]) -> None:
    assert advised({**THREADS, **queue})["concurrency.runs.max_concurrent_runs"] == "2 or more"


def test_the_queue_interval_is_read_from_dagsters_coordinator() -> None:
    coordinator = {"class": "QueuedRunCoordinator", "config": {"dequeue_interval_seconds": 10}}
    (row,) = instance_advice({**THREADS, "run_coordinator": coordinator})
    assert (row.setting, row.now) == ("run_queue.dequeue_interval_seconds", "10")


@pytest.mark.parametrize(
    "settings", [{"sensors": None}, {"sensors": []}, {"run_coordinator": "NoneType"}]
)
def test_settings_of_another_form_count_as_stock(settings: dict[str, Any]) -> None:
    assert "sensors.use_threads" in advised(settings)
    assert not sensors_use_threads(settings)
