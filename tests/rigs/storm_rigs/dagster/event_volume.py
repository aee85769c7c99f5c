"""Clusters as sensors see them over a day, and the size of what Dagster then stores: events and
cursors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import dagster as dg

from storm_dagster.core.liveness.detection import observe
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.defs.healing.memory import HealingCursor, HealingMemory, recoveries, restarts
from storm_dagster.defs.observe.sensors import cluster_events
from storm_dagster.model import paths
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    SupervisorInfo,
    TaskBeats,
    TaskTable,
    WorkerNode,
    WorkerSlot,
    encode_record,
)
from storm_dagster.model.view import ClusterView, TopologyView, Versioned
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.dagster.dagster_results import AssetEvent

DAY = 24 * 3600
POLL_SECS = 30
"""Between two polls of `supervisor_sensor`."""
HTTP = "http://127.0.0.1:7621"


def cluster(tasks: int, topologies: int = 1, supervisors: int = 10, beat: int = 0) -> ClusterView:
    """A healthy cluster: each topology has its share of the tasks, four to a worker; counters stand
    at ``beat``.
    """
    ports = tuple(
        range(6700, 6700 + max(4, -(-tasks // (4 * supervisors)) + topologies // supervisors + 1))
    )
    slots = [(f"supervisor-{n:04d}", port) for port in ports for n in range(supervisors)]
    found: dict[str, TopologyView] = {}
    each = tasks // topologies
    for number in range(topologies):
        name = f"topology-{number:03d}"
        mine = [slots.pop() for _ in range(-(-each // 4))]
        workers = tuple(
            WorkerSlot(
                node=node,
                host=f"host-of-{node}",
                port=port,
                tasks=f"{4 * n + 1}-{min(4 * n + 4, each)}",
            )
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
                    pid=1,
                    token=f"{number:04d}{n:08d}",
                    version=0,
                    tasks=worker.tasks,
                    started_ms=0,
                    status="running",
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
    """The same after a crash of a worker of its first topology."""
    (name, topology), *_ = view.topologies.items()
    live = dict(list(topology.live_workers.items())[1:])
    return replace(view, topologies={**view.topologies, name: replace(topology, live_workers=live)})


def healthy_hours(hours: int, tasks: int) -> Iterator[ClusterView]:
    """Each poll of a time in which only counters of heartbeats move."""
    beats = [cluster(tasks, beat=beat) for beat in range(3)]
    return (beats[poll % 3] for poll in range(hours * 3600 // POLL_SECS))


def day_of_crashes(tasks: int) -> Iterator[ClusterView]:
    """Each poll of a day with a crash of a worker and a rebalance in every hour."""
    healthy = cluster(tasks)
    for _ in range(24):
        yield from [healthy] * 58 + [without_a_worker(healthy)] * 2
        healthy = moved(healthy)
        yield from [healthy] * 60


def events_of(views: Iterable[ClusterView]) -> list[AssetEvent]:
    """The events of `supervisor_sensor`, to which each poll shows the next view."""
    cursor: dict[str, Any] = {}
    found: list[AssetEvent] = []
    for now, view in zip(range(0, DAY, POLL_SECS), views, strict=False):
        cursor = json.loads(json.dumps(cursor))
        events, cursor = cluster_events(view, HTTP, cursor, float(now))
        found += events
    return found


def stored_bytes(events: Sequence[AssetEvent]) -> int:
    """Bytes of the entries of the event log that Dagster stores for them."""
    checks = {
        event.asset_check_key for event in events if isinstance(event, dg.AssetCheckEvaluation)
    }
    keys = {event.asset_key for event in events if isinstance(event, dg.AssetObservation)}
    materialized = {
        event.asset_key for event in events if isinstance(event, dg.AssetMaterialization)
    }
    entries: list[dg.EventLogEntry] = []
    with dg.DagsterInstance.ephemeral() as instance:
        for event in events:
            instance.report_runless_asset_event(event)
        for key in keys:
            entries += [
                record.event_log_entry
                for record in instance.fetch_observations(key, limit=5000).records
            ]
        for key in materialized:
            entries += [
                record.event_log_entry
                for record in instance.fetch_materializations(key, limit=5000).records
            ]
        for check in checks:
            history = instance.event_log_storage.get_asset_check_execution_history(
                check, limit=5000
            )
            entries += [record.event for record in history if record.event is not None]
    assert len(entries) == len(events)
    return sum(len(dg.serialize_value(entry)) for entry in entries)


def supervisor_cursor(view: ClusterView) -> str:
    """Cursor of `supervisor_sensor` after it has seen ``view``."""
    return json.dumps(cluster_events(view, HTTP, {}, 1.0)[1])


def healing_cursors(
    state: StormClusterState, views: Iterable[ClusterView]
) -> Iterator[tuple[str, HealingMemory]]:
    """Cursor and memory of `heartbeat_sensor` after each of ``views``, a second apart."""
    memory = HealingMemory()
    text: str | None = None
    for now, view in enumerate(views, 100):
        seen = observe(view, memory.liveness, LivenessLimits(), boot_id="b", boot_now=float(now))
        memory = HealingMemory(
            liveness=seen.memory,
            polled_at=float(now),
            workers=restarts(view, memory.workers)[1],
            recovering=recoveries(view, memory.recovering, float(now))[1],
        )
        held = HealingCursor("heartbeat_sensor", text)
        held.store(state, memory, -1)
        text = held.after(memory)
        yield text, memory


def add_topologies(state: StormClusterState, number: int) -> None:
    """Active topologies without tasks in ZooKeeper, each with a name of its own."""
    for index in range(number):
        base = StormBase(
            name=f"topology-{index:03d}",
            launch_time_secs=0,
            status="ACTIVE",
            workers=1,
            executors={},
            token=f"t{index}",
        )
        state.state.create_node(paths.topology(f"{base.name}-1-1"), encode_record(base))
