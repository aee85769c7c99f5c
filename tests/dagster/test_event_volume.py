"""Volume of what sensors write into Dagster: bytes of a day, and of cursors in the largest
clusters.
"""

from __future__ import annotations

import json

import dagster as dg
import pytest

from storm_dagster.defs.declared.checks import (
    FreshnessAttributes,
    ScheduleAttributes,
    TopologyAlerts,
)
from storm_dagster.defs.declared.declaration import (
    Declaration,
    LoadedFiles,
    RunningTopology,
    TargetDescription,
)
from storm_dagster.defs.declared.parts import part_materializations
from storm_dagster.defs.declared.targets import merge_reports, translated_event
from storm_dagster.defs.declared.topology import DeclaredTopology
from storm_dagster.defs.healing.memory import HealingMemory
from storm_dagster.defs.keys import SUPERVISORS, TOPOLOGIES, WORKERS
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.model.dagster_events import DagsterEvent, target_key
from storm_dagster.zk.sensor_memory import decode_memory, load_memory
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.dagster.dagster_results import shown, tick_sensor
from storm_rigs.dagster.event_volume import (
    DAY,
    HTTP,
    POLL_SECS,
    add_topologies,
    cluster,
    day_of_crashes,
    events_of,
    healing_cursors,
    healthy_hours,
    stored_bytes,
    supervisor_cursor,
    without_a_worker,
)
from storm_rigs.stage.dagster_world import DagsterWorld

pytestmark = pytest.mark.dagster


@pytest.mark.parametrize("hours", [4, pytest.param(24, marks=pytest.mark.long)])
def test_a_healthy_day_of_300_tasks_is_what_is_seen_at_first(hours: int) -> None:
    events = events_of(healthy_hours(hours, tasks=300))
    observations = [event for event in events if isinstance(event, dg.AssetObservation)]
    assert [event.asset_key for event in observations] == [SUPERVISORS, WORKERS, TOPOLOGIES]
    assert stored_bytes(events) < 100_000
    assert len(events) == len(events_of([cluster(300)])), (
        "the first poll adds all of it, so the next days nothing"
    )
    links = shown(observations[2])
    assert links["metrics"] == f"{HTTP}/metrics" and links["statistics"] == f"{HTTP}/v1/topologies"


@pytest.mark.long  # some healthy hours are in every run
def test_a_day_of_hourly_crashes_and_rebalances_stays_below_a_megabyte() -> None:
    events = events_of(day_of_crashes(300))
    assert {event.asset_key for event in events if isinstance(event, dg.AssetObservation)} >= {
        WORKERS
    }
    assert stored_bytes(events) < 1_000_000


@pytest.mark.long
def test_what_never_rests_is_observed_less_and_less() -> None:
    healthy = cluster(300)
    broken = without_a_worker(healthy)
    events = events_of((healthy, broken)[poll // 2 % 2] for poll in range(DAY // POLL_SECS))
    assert 10 < len(events) < 80
    assert stored_bytes(events) < 1_000_000
    # After a quiet time a change is seen within its minute again.
    events = events_of([healthy, *[broken, healthy] * 100, *[healthy] * 600, broken])
    assert [event.asset_key for event in events[-1:]] == [WORKERS]


@pytest.mark.zookeeper
def test_cursors_stay_small_in_the_largest_cluster(zk_cluster: StormClusterState) -> None:
    views = [cluster(10_000, topologies=300, supervisors=1_000, beat=beat) for beat in range(3)]
    assert len(supervisor_cursor(views[0])) < 2_000
    views[2] = without_a_worker(views[2])
    written: list[str] = []
    memory = HealingMemory()
    for text, seen in healing_cursors(zk_cluster, views):
        assert len(text) < 2_000
        written.append(json.loads(text)["memory"])
        memory = seen
    # Beats alone write nothing; a missing worker does.
    assert written[0] == written[1] != written[2]
    raw = load_memory(zk_cluster, "heartbeat_sensor", written[2])
    assert raw is not None and len(raw) > 2_000
    again = decode_memory(HealingMemory, raw)
    assert again.workers == memory.workers and again.recovering == memory.recovering
    (missing,) = [part.missing for part in again.liveness.topologies.values() if part.missing]
    assert len(missing) == 1


@pytest.mark.zookeeper
def test_the_lifecycle_sensors_cursor_stays_small_with_many_names(
    world: DagsterWorld,
) -> None:
    add_topologies(world.cluster, 400)
    tick = tick_sensor("lifecycle_sensor", world.instance, defs=world.defs)
    (request,) = tick.partition_requests
    assert len(request.partition_keys) == 400
    marks = json.loads(tick.cursor)["alive"]
    # Two names may have one mark of four digits.
    assert 395 * 4 <= len(marks) <= 400 * 4
    assert len(tick.cursor) < 2_000


def test_a_day_of_a_topology_with_three_sinks_stays_below_the_budget() -> None:
    """A deploy in every hour, and the reports of sinks in every ten minutes."""
    names = [f"component_with_a_long_name_{number}" for number in range(12)]
    key = dg.AssetKey(["topologies", "a-topology-with-a-long-name"])
    tables = {
        (name, "postgres", f"warehouse.a_table_with_a_long_name_{name}"): dg.AssetKey(
            [*key.path, name, "postgres", f"warehouse.a_table_with_a_long_name_{name}"]
        )
        for name in names[:3]
    }
    topology = declared_parts(key, {name: dg.AssetKey([*key.path, name]) for name in names}, tables)
    events: list[dg.AssetMaterialization] = []
    for hour in range(24):
        actual = RunningTopology(f"{key.path[-1]}-{hour}-0123456789", "ACTIVE", 4, {}, "c" * 16)
        events += part_materializations(topology, actual)
        events += [report for _ in range(6) for report in day_reports(topology, actual)]
    assert len(events) == 24 * (12 + 3) + 3 * 144
    assert stored_bytes(events) < 1_500_000


def day_reports(
    topology: DeclaredTopology, actual: RunningTopology
) -> list[dg.AssetMaterialization]:
    """The events that one interval stores: two tasks of each of three sinks, merged by the tick."""
    reports: list[DagsterEvent] = []
    for component, *path in topology.targets:
        for task in (123, 124):
            metadata = {
                "rows": 12_345_678,
                "since": "2026-11-29T10:10:00.000+00:00",
                "tasks": 1,
                "task": task,
                "newest_event_time": "2026-11-29T10:10:00.000+00:00",
            }
            reports.append(
                DagsterEvent.make(
                    f"{topology.name}/{component}",
                    "materialization",
                    target_key(component, "/".join(path)),
                    metadata=metadata,
                )
            )
    stored: list[dg.AssetMaterialization] = []
    for event in merge_reports(reports).values():
        translated = translated_event(topology, event)
        assert translated is not None
        metadata = {
            **translated.metadata,
            "storm/topology": actual.topology_id,
            "storm/event": translated.id,
        }
        stored.append(dg.AssetMaterialization(list(translated.key), metadata=metadata))
    return stored


def declared_parts(
    key: dg.AssetKey,
    components: dict[str, dg.AssetKey],
    targets: dict[tuple[str, ...], dg.AssetKey],
) -> DeclaredTopology:
    """A declared topology of which only the keys matter."""
    declaration = Declaration(key.path[-1], "x.py")
    described = TargetDescription()
    return DeclaredTopology(
        declaration=declaration,
        described=described,
        files=LoadedFiles(declaration, described),
        identifier="x",
        specs=[dg.AssetSpec(key)],
        components=components,
        targets=targets,
        policy="manual",
        batch={},
        alerts=TopologyAlerts(),
        freshness=FreshnessAttributes(),
        schedule=ScheduleAttributes(),
        zookeeper=ZooKeeperResource(),
        blobstore=BlobStoreResource(),
        nimbus=NimbusResource(),
    )
