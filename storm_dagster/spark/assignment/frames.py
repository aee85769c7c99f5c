"""Arrow tables of a batch of events, built by the driver column by column."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from storm_dagster.model.names import ACKER, TOPOLOGY_MASTER
from storm_dagster.model.placement import PlacementBatch, TopologyToPlace
from storm_dagster.spark.assignment.schema import HISTORY, RUNS, SUPERVISORS, TOPOLOGIES, Row


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


_Codes = defaultdict[str, int]
"""Numbers for component names, in order of appearance."""


def batch_frames(batches: Sequence[PlacementBatch]) -> Frames:
    """The tables of several clusters, one ``cluster`` number for each."""
    supervisors: list[Sequence[Any]] = []
    topologies: list[Sequence[Any]] = []
    runs: list[Sequence[Any]] = []
    history: list[Row] = []
    several = False
    for cluster, batch in enumerate(batches):
        supervisors += [(cluster, node.id, node.host, node.ports, node.used) for node in batch.supervisors]
        for place, topology in enumerate(service_order(batch)):
            codes = _Codes()
            codes.default_factory = codes.__len__
            mine = list(executor_runs(topology, codes))
            past = [{**row, "cluster": cluster, "topology": place} for row in _history(topology, codes)]
            history += past
            runs += [(cluster, place, bool(past), *run) for run in mine]
            several = several or any(run[3] > 1 for run in mine)
            topologies.append((cluster, place, bool(past), _about(topology, codes, mine)))
    return Frames(
        _table(supervisors, SUPERVISORS),
        _table(topologies, TOPOLOGIES),
        _table(runs, RUNS),
        pa.Table.from_pylist(history, schema=HISTORY) if history else None,
        several,
    )


def _table(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    return pa.table(list(zip(*rows, strict=True)) or [[]] * len(schema), schema=schema)


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


def _history(topology: TopologyToPlace, codes: _Codes) -> Iterator[Row]:
    """Rows of a topology's assignment, dead tasks and user-defined workers."""
    for worker in topology.old:
        yield {
            "kind": "old",
            "node": worker.node,
            "host": worker.host,
            "port": worker.port,
            "memory": worker.memory_bytes,
            "cpu": worker.cpu,
            "tasks": worker.tasks,
        }
    for number, entry in enumerate(topology.user_workers):
        yield {
            "kind": "user",
            "number": number,
            "host": entry.host,
            "port": entry.port,
            "memory": entry.memory_bytes or 0,
            "cpu": entry.cpu or 0,
            "components": [codes[name] for name in entry.components],
            "counts": list(entry.components.values()),
        }
    for kind, tasks in (("dead", topology.dead), ("unstopped", topology.unstopped)):
        if tasks:
            yield {"kind": kind, "tasks": tasks}
