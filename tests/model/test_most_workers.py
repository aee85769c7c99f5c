"""The most workers that a topology may ask for fit the record of its heartbeats."""

from __future__ import annotations

import uuid

from storm_dagster.model.conf import check_value
from storm_dagster.model.records import TaskBeats, WorkerBeat, encode_record


def test_the_heartbeats_of_the_most_workers_fit_a_node() -> None:
    most = 5_000
    assert check_value("topology.workers", most) is None
    assert check_value("topology.workers", most + 1) is not None
    beats = {
        f"{uuid.uuid4()}:{6900 + number % 100}": WorkerBeat(
            count=10**6, silent_ms=1000, uptime_secs=10**6
        )
        for number in range(most)
    }
    record = TaskBeats(
        topology_id="a" * 40 + "-1-1700000000",
        topology_master=10**5,
        workers=beats,
        dead="1-9,11-99",
    )
    assert len(encode_record(record)) <= 512 * 1024
