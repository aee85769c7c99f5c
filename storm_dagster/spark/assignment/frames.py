"""Arrow tables of a batch of events, built by the driver column by column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from storm_dagster.model.names import ACKER, TOPOLOGY_MASTER
from storm_dagster.model.placement import PlacementBatch, TopologyToPlace
from storm_dagster.spark.assignment.schema import HISTORY, RUNS, SUPERVISORS, TOPOLOGIES


@dataclass(frozen=True)
class Frames:
    """The input of one job."""

    supervisors: pa.Table
    topologies: pa.Table
    runs: pa.Table
    history: pa.Table | None
    """``None`` when no topology has an assignment or user-defined workers."""
    several: bool
    """Whether some executor has several tasks."""


def service_order(batch: PlacementBatch) -> list[TopologyToPlace]:
    """The topologies as they are served: by priority, lower first, then by name."""
    return sorted(batch.topologies, key=lambda topology: (topology.priority, topology.name))


Run = tuple[int, int, int, int, list[int] | None]
"""(component, first task, executors, tasks in each, tasks of an irregular one)."""


class _Codes(dict[str, int]):
    """Numbers for component names, in order of appearance."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def batch_frames(batches: Sequence[PlacementBatch]) -> Frames:
    """The tables of several clusters, one ``cluster`` number for each."""
    supervisors: dict[str, list[Any]] = {name: [] for name in SUPERVISORS.names}
    topologies: dict[str, list[Any]] = {name: [] for name in TOPOLOGIES.names}
    runs: dict[str, list[Any]] = {name: [] for name in RUNS.names}
    history: dict[str, list[Any]] = {name: [] for name in HISTORY.names}
    for cluster, batch in enumerate(batches):
        for node in batch.supervisors:
            values = (cluster, node.id, node.host, node.ports, node.used)
            for name, value in zip(SUPERVISORS.names, values, strict=True):
                supervisors[name].append(value)
        for place, topology in enumerate(service_order(batch)):
            codes = _Codes()
            mine = list(executor_runs(topology, codes))
            has_history = _add_history(history, cluster, place, topology, codes)
            about = _about(topology, codes, mine)
            for run in mine:
                for name, value in zip(RUNS.names, (cluster, place, has_history, *run), strict=True):
                    runs[name].append(value)
            for name, value in zip(TOPOLOGIES.names, (cluster, place, has_history, about), strict=True):
                topologies[name].append(value)
    return Frames(
        pa.table(supervisors, schema=SUPERVISORS),
        pa.table(topologies, schema=TOPOLOGIES),
        pa.table(runs, schema=RUNS),
        pa.table(history, schema=HISTORY) if history["cluster"] else None,
        any(size > 1 for size in runs["size"]),
    )


def executor_runs(topology: TopologyToPlace, codes: _Codes) -> Iterator[Run]:
    """Runs of equal executors: a component of a thousand tasks is one row."""
    grouped: set[int] = set()
    for group in topology.executors:
        tasks = sorted(group)
        if not tasks or tasks[0] not in topology.tasks:
            continue
        if len(tasks) > 1:
            grouped.update(tasks)
            regular = tasks[-1] - tasks[0] + 1 == len(tasks)
            component = codes[topology.tasks[tasks[0]]]
            yield component, tasks[0], 1, len(tasks), None if regular else tasks
    count = len(topology.tasks) - len(grouped)
    if not count:
        return
    single = (item for item in topology.tasks.items() if item[0] not in grouped)
    pairs = np.fromiter(
        ((task, codes[component]) for task, component in single), dtype=np.dtype((np.int64, 2)), count=count
    )
    pairs = pairs[np.argsort(pairs[:, 0])]
    ids, owners = pairs[:, 0], pairs[:, 1]
    starts = np.flatnonzero(np.r_[True, (np.diff(ids) != 1) | (np.diff(owners) != 0)])
    lengths = np.diff(np.r_[starts, count])
    for component, first, length in zip(owners[starts].tolist(), ids[starts].tolist(), lengths.tolist(), strict=True):
        yield component, first, length, 1, None


def _about(topology: TopologyToPlace, codes: _Codes, runs: Iterable[Run]) -> dict[str, Any]:
    names = list(codes)
    counts = [0] * len(names)
    for component, _, count, _, _ in runs:
        counts[component] += count
    readers: dict[str, list[str]] = {}
    for reader, sources in topology.inputs.items():
        for source in sources:
            readers.setdefault(source, []).append(reader)
    related = [
        sorted({codes.get(other, -1) for other in topology.inputs.get(name) or readers.get(name, ())} - {-1})
        for name in names
    ]
    differ = sorted(name for name in set(topology.differ_node) if name in codes)
    return {
        "name": topology.name,
        "strategy": topology.strategy,
        "event": topology.event,
        "reassign": topology.reassign,
        "use_old": topology.use_old,
        "user_workers": bool(topology.user_workers),
        "workers": topology.workers,
        "executors": sum(topology.parallelism.values()),
        "single_master": topology.single_master,
        "isolation": topology.isolation,
        "reserve": topology.reserve,
        "memory": topology.memory_bytes,
        "master_memory": topology.master_memory_bytes,
        "cpu": topology.cpu,
        "acker": codes.get(ACKER, -2),
        "master": codes.get(TOPOLOGY_MASTER, -2),
        "related": related,
        "units": counts,
        "differ": [codes[name] for name in differ],
        "differ_names": differ,
    }


def _add_history(
    history: dict[str, list[Any]], cluster: int, place: int, topology: TopologyToPlace, codes: _Codes
) -> bool:
    """Append rows of a topology's assignment, dead tasks and user-defined workers; whether it has any."""
    rows: list[dict[str, Any]] = [
        {
            "kind": "old",
            "node": worker.node,
            "host": worker.host,
            "port": worker.port,
            "memory": worker.memory_bytes,
            "cpu": worker.cpu,
            "tasks": worker.tasks,
        }
        for worker in topology.old
    ]
    rows.extend(
        {
            "kind": "user",
            "number": number,
            "host": entry.host,
            "port": entry.port,
            "memory": entry.memory_bytes or 0,
            "cpu": entry.cpu or 0,
            "components": [codes[name] for name in entry.components],
            "counts": list(entry.components.values()),
        }
        for number, entry in enumerate(topology.user_workers)
    )
    rows.extend(
        {"kind": kind, "tasks": tasks}
        for kind, tasks in (("dead", topology.dead), ("unstopped", topology.unstopped))
        if tasks
    )
    for row in rows:
        row.update(cluster=cluster, topology=place)
        for name, values in history.items():
            values.append(row.get(name))
    return bool(rows)
