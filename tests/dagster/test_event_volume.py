"""Volume of what sensors write into Dagster: bytes of a day, and of cursors in the largest clusters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from storm_dagster.core.liveness.detection import LivenessLimits, observe
from storm_dagster.defs.healing.memory import HealingCursor, HealingMemory, recoveries, restarts
from storm_dagster.defs.keys import SUPERVISORS, TOPOLOGIES, WORKERS
from storm_dagster.defs.observe.sensors import cluster_events
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    SupervisorInfo,
    TaskBeats,
    TaskTable,
    WorkerNode,
    WorkerSlot,
)
from storm_dagster.model.view import ClusterView, TopologyView, Versioned
from storm_dagster.zk.sensor_memory import decode_memory, load_memory
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.dagster_results import AssetEvent, shown

pytestmark = pytest.mark.dagster

DAY = 24 * 3600
HTTP = "http://127.0.0.1:7621"


def cluster(tasks: int, topologies: int = 1, supervisors: int = 10, beat: int = 0) -> ClusterView:
    """A healthy cluster: each topology has its share of the tasks, four to a worker; counters stand at ``beat``."""
    ports = tuple(range(6700, 6700 + max(4, -(-tasks // (4 * supervisors)) + topologies // supervisors + 1)))
    slots = [(f"supervisor-{n:04d}", port) for port in ports for n in range(supervisors)]
    found: dict[str, TopologyView] = {}
    each = tasks // topologies
    for number in range(topologies):
        name = f"topology-{number:03d}"
        mine = [slots.pop() for _ in range(-(-each // 4))]
        workers = tuple(
            WorkerSlot(node=node, host=f"host-of-{node}", port=port, tasks=f"{4 * n + 1}-{min(4 * n + 4, each)}")
            for n, (node, port) in enumerate(mine)
        )
        found[f"{name}-1-1"] = TopologyView(
            id=f"{name}-1-1",
            base=StormBase(
                name=name,
                launch_time_secs=0,
                status="ACTIVE",
                workers=len(workers),
                executors={"count": each},
                token="t",
            ),
            base_at=Versioned(1, 10),
            tasks=TaskTable(components={"count": ComponentTasks(type="bolt", tasks=f"1-{each}")}),
            assignment=Assignment(
                topology_id=f"{name}-1-1",
                code_dir=f"{name}-1-1",
                node_host={},
                workers=workers,
                task_start_secs={f"1-{each}": 0},
                timestamp_ms=0,
            ),
            assignment_at=Versioned(0, 20),
            beats=TaskBeats(topology_id=f"{name}-1-1", topology_master=1),
            beats_at=Versioned(beat, 100 + beat),
            live_workers={
                worker.slot: WorkerNode(
                    pid=1, token=f"{number:04d}{n:08d}", version=0, tasks=worker.tasks, started_ms=0, status="running"
                )
                for n, worker in enumerate(workers)
            },
        )
    return ClusterView(
        cluster_id="c",
        epoch=1,
        assignments_version=1,
        supervisors={
            f"supervisor-{n:04d}": SupervisorInfo(
                host=f"host-of-supervisor-{n:04d}", ports=ports, started=0, count=beat, version="1"
            )
            for n in range(supervisors)
        },
        topologies=found,
    )


def moved(view: ClusterView) -> ClusterView:
    """The same after a rebalance of its first topology."""
    (name, topology), *_ = view.topologies.items()
    assert topology.assignment_at is not None
    at = Versioned(topology.assignment_at.version + 1, 30)
    return replace(view, topologies={**view.topologies, name: replace(topology, assignment_at=at)})


def without_a_worker(view: ClusterView) -> ClusterView:
    (name, topology), *_ = view.topologies.items()
    live = dict(list(topology.live_workers.items())[1:])
    return replace(view, topologies={**view.topologies, name: replace(topology, live_workers=live)})


def stored_bytes(events: Sequence[AssetEvent]) -> int:
    """Bytes that Dagster stores of them."""
    with dg.DagsterInstance.ephemeral() as instance:
        for event in events:
            instance.report_runless_asset_event(event)
        found = 0
        for key in (SUPERVISORS, WORKERS, TOPOLOGIES):
            records = instance.fetch_observations(key, limit=5000).records
            found += sum(len(dg.serialize_value(record.event_log_entry)) for record in records)
        checks = [event for event in events if isinstance(event, dg.AssetCheckEvaluation)]
        return found + sum(2 * len(str(event)) for event in checks)


def a_day(views: Iterable[ClusterView]) -> list[AssetEvent]:
    """The events of `supervisor_sensor`, which looks every 30 seconds."""
    cursor: dict[str, Any] = {}
    found: list[AssetEvent] = []
    for now, view in zip(range(0, DAY, 30), views, strict=False):
        cursor = json.loads(json.dumps(cursor))
        events, cursor = cluster_events(view, HTTP, cursor, float(now))
        found += events
    return found


def test_a_healthy_day_of_300_tasks_is_what_is_seen_at_first() -> None:
    beats = [cluster(300, beat=beat) for beat in range(3)]
    events = a_day(beats[look % 3] for look in range(DAY // 30))
    observations = [event for event in events if isinstance(event, dg.AssetObservation)]
    assert [event.asset_key for event in observations] == [SUPERVISORS, WORKERS, TOPOLOGIES]
    assert stored_bytes(events) < 100_000
    links = shown(observations[2])
    assert links["metrics"] == f"{HTTP}/metrics" and links["statistics"] == f"{HTTP}/v1/topologies"


@pytest.mark.long  # a healthy day is in every run
def test_a_day_with_a_crash_and_a_rebalance_every_hour_stays_below_a_megabyte() -> None:
    healthy = cluster(300)
    views: list[ClusterView] = []
    for _ in range(24):
        broken = without_a_worker(healthy)
        after = moved(healthy)
        views += [healthy] * 58 + [broken] * 2 + [after] * 60
        healthy = after
    events = a_day(views)
    assert {event.asset_key for event in events if isinstance(event, dg.AssetObservation)} >= {WORKERS}
    assert stored_bytes(events) < 1_000_000


def test_what_never_rests_is_observed_less_and_less() -> None:
    healthy = cluster(300)
    broken = without_a_worker(healthy)
    events = a_day((healthy, broken)[look // 2 % 2] for look in range(DAY // 30))
    assert 10 < len(events) < 80
    assert stored_bytes(events) < 1_000_000
    # After a quiet time a change is seen within its minute again.
    events = a_day([healthy, *[broken, healthy] * 100, *[healthy] * 600, broken])
    assert [event.asset_key for event in events[-1:]] == [WORKERS]


@pytest.mark.zookeeper
def test_cursors_stay_small_in_the_largest_cluster(zk_cluster: StormClusterState) -> None:
    view = cluster(10_000, topologies=300, supervisors=1_000)
    _, cursor = cluster_events(view, HTTP, {}, 1.0)
    assert len(json.dumps(cursor)) < 2_000
    memory = HealingMemory()
    text: str | None = None
    written: list[str] = []
    for beat in range(3):
        now = 100.0 + beat
        view = cluster(10_000, topologies=300, supervisors=1_000, beat=beat)
        if beat == 2:
            view = without_a_worker(view)
        seen = observe(view, memory.liveness, LivenessLimits(), boot_id="b", boot_now=now)
        memory = HealingMemory(
            liveness=seen.memory,
            polled_at=now,
            workers=restarts(view, memory.workers)[1],
            recovering=recoveries(view, memory.recovering, now)[1],
        )
        held = HealingCursor("heartbeat_sensor", text)
        held.store(zk_cluster, memory, -1)
        text = held.after(memory)
        assert len(text) < 2_000
        written.append(json.loads(text)["memory"])
    # Beats alone write nothing; a missing worker does.
    assert written[0] == written[1] != written[2]
    raw = load_memory(zk_cluster, "heartbeat_sensor", written[2])
    assert raw is not None and len(raw) > 2_000
    again = decode_memory(HealingMemory, raw)
    assert again.workers == memory.workers and again.recovering == memory.recovering
    (missing,) = [part.missing for part in again.liveness.topologies.values() if part.missing]
    assert len(missing) == 1
