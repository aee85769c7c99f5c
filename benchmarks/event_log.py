"""What sensors write into Dagster: events and bytes of a day at 300 tasks, and the largest
cursors.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
from tables import Row, run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rigs"))

from storm_rigs.dagster.dagster_results import tick_sensor
from storm_rigs.dagster.event_volume import (
    add_topologies,
    cluster,
    day_of_crashes,
    events_of,
    healing_cursors,
    healthy_hours,
    stored_bytes,
    supervisor_cursor,
)
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.conf import zookeeper_conf
from storm_rigs.stage.dagster_world import PlainPlanner, dagster_world

_NAMES = 400
"""So many topologies the cursor of `lifecycle_sensor` marks one by one."""


def report() -> Iterator[Row]:
    """Rows of the benchmark."""
    for day, views, aim in (
        ("a healthy day of 300 tasks", healthy_hours(24, tasks=300), "aim: 100"),
        (
            "a day of 300 tasks, a crash and a rebalance every hour",
            day_of_crashes(300),
            "aim: 1,000",
        ),
    ):
        events = events_of(views)
        size = stored_bytes(events) / 1000
        yield f"{day}: events; kB in the event log", aim, f"{len(events)}; {size:,.1f}"
    cursors = _cursors()
    yield (
        "largest cursor, 10,000 tasks, 1,000 supervisors, bytes",
        "aim: 2,000",
        f"{max(cursors.values()):,}",
    )
    for sensor, size in cursors.items():
        yield f"- {sensor}", "-", f"{size:,}"


def _cursors() -> dict[str, int]:
    """Bytes of the cursor of each sensor that has one of the whole cluster."""
    views = [cluster(10_000, topologies=300, supervisors=1_000, beat=beat) for beat in range(3)]
    with (
        tempfile.TemporaryDirectory(prefix="bench-events-") as folder,
        EmbeddedZooKeeper(Path(folder) / "zookeeper", durable=False) as server,
        dg.DagsterInstance.ephemeral() as instance,
    ):
        with Stage(Path(folder), zookeeper_conf(server.address, "/event-log")) as stage:
            world = dagster_world(stage, instance, {"spark": PlainPlanner()})
            state = stage.cluster
            add_topologies(state, _NAMES)
            lifecycle = tick_sensor("lifecycle_sensor", instance, defs=world.defs).cursor
            return {
                "supervisor_sensor": len(supervisor_cursor(views[0])),
                "heartbeat_sensor": max(len(text) for text, _ in healing_cursors(state, views)),
                f"lifecycle_sensor, {_NAMES} topologies": len(lifecycle),
            }


if __name__ == "__main__":
    # Counted, not measured: fewer samples would be no quicker.
    run("event-log", __doc__, lambda _: report())
