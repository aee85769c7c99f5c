"""Arrow tables of a batch of events, built by the driver column by column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from storm_dagster.core.scheduling.history import history_rows
from storm_dagster.core.scheduling.units import Codes, Row, service_order, several_tasks, summary_of
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


Run = tuple[int, int, int, int, list[int] | None]
"""(component, first task, executors, tasks in each, tasks of an irregular one)."""


def batch_frames(batches: Sequence[PlacementBatch]) -> Frames:
    """The tables of several clusters, one ``cluster`` number for each."""
    supervisors: list[Sequence[Any]] = []
    topologies: list[Sequence[Any]] = []
    runs: list[Sequence[Any]] = []
    history: list[Row] = []
    several = False
    for cluster, batch in enumerate(batches):
        supervisors += [(cluster, node.id, node.host, node.ports, node.used) for node in batch.supervisors]
        for place, topology in enumerate(service_order(batch.topologies)):
            codes: Codes = {}
            mine = list(executor_runs(topology, codes))
            past = [{**row, "cluster": cluster, "topology": place} for row in history_rows(topology, codes)]
            history += past
            runs += [(cluster, place, bool(past), *run) for run in mine]
            several = several or any(run[3] > 1 for run in mine)
            counts = [0] * len(codes)
            for component, _, count, _, _ in mine:
                counts[component] += count
            topologies.append((cluster, place, bool(past), summary_of(topology, codes, counts)._asdict()))
    return Frames(
        _table(supervisors, SUPERVISORS),
        _table(topologies, TOPOLOGIES),
        _table(runs, RUNS),
        pa.Table.from_pylist(history, schema=HISTORY) if history else None,
        several,
    )


def _table(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    return pa.table(list(zip(*rows, strict=True)) or [[]] * len(schema), schema=schema)


def executor_runs(topology: TopologyToPlace, codes: Codes) -> Iterator[Run]:
    """Runs of equal executors: a component of a thousand tasks is one row."""
    several = several_tasks(topology)
    for first, tasks in several.items():
        irregular = list(tasks) if tasks[-1] - first + 1 != len(tasks) else None
        yield codes.setdefault(topology.tasks[first], len(codes)), first, 1, len(tasks), irregular
    grouped = {task for tasks in several.values() for task in tasks}
    count = len(topology.tasks) - len(grouped)
    if not count:
        return
    single = (item for item in topology.tasks.items() if item[0] not in grouped)
    pairs = np.fromiter(
        ((task, codes.setdefault(component, len(codes))) for task, component in single),
        dtype=np.dtype((np.int64, 2)),
        count=count,
    )
    pairs = pairs[np.argsort(pairs[:, 0])]
    ids, owners = pairs[:, 0], pairs[:, 1]
    starts = np.flatnonzero(np.r_[True, (np.diff(ids) != 1) | (np.diff(owners) != 0)])
    lengths = np.diff(np.r_[starts, count])
    for component, first, length in zip(owners[starts].tolist(), ids[starts].tolist(), lengths.tolist(), strict=True):
        yield component, first, length, 1, None
