"""Assignment as a DataFrame computation.

It is one plan and one job for all topologies of an event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from storm_dagster.core.scheduling.history import history_rows
from storm_dagster.core.scheduling.plan import placement_of
from storm_dagster.core.scheduling.units import Codes, Row, service_order, summary_of
from storm_dagster.model.placement import (
    PlacementBatch,
    PlacementResult,
    SupervisorSlots,
    TopologyPlacement,
    TopologyToPlace,
)
from storm_dagster.spark.assignment import exchange
from storm_dagster.spark.assignment.executor_runs import executor_runs
from storm_dagster.spark.assignment.groups import (
    allocate_in_cluster,
    assign_in_part,
    request_in_part,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MAX_PARTITIONS = 32
"""Maximum number of partitions of a job."""
_TASKS_OF_PARTITION = 50_000
"""Tasks of one partition, of a job that has several."""
TASKS_OF_GROUP = 10_000
"""Tasks of one Arrow group; a job with fewer has one partition."""


def plan_with_spark(session: SparkSession, batch: PlacementBatch) -> PlacementResult:
    """Place the batch on Spark.

    ``assign_secs`` is the time of the job, including the transfer of its result.
    """
    return plan_many_with_spark(session, [batch])[0]


def plan_many_with_spark(
    session: SparkSession, batches: Sequence[PlacementBatch], tasks_of_group: int = TASKS_OF_GROUP
) -> list[PlacementResult]:
    """Place several independent clusters in one job.

    Each result has the time of the complete job. Up to ``tasks_of_group`` tasks are one partition:
    no rows are exchanged, and the job is one stage.
    """
    started = time.monotonic()
    frames = batch_frames(batches)
    placed = exchange.VALUES.empty_table()
    if any(batch.topologies for batch in batches):
        placed = _placement_frame(session, frames, _cut(batches, tasks_of_group)).toArrow()
    results = _read_results(batches, placed)
    seconds = time.monotonic() - started
    return [
        PlacementResult(placements=placements, planner="pyspark", assign_secs=seconds)
        for placements in results
    ]


def _read_results(
    batches: Sequence[PlacementBatch], placed: pa.Table
) -> list[tuple[TopologyPlacement, ...]]:
    """Placements of each batch, in the order of service."""
    rows: dict[tuple[int, int], list[Row]] = {}
    for cluster, place, _, value in exchange.read_values(placed):
        rows[cluster, place] = exchange.decode(value)
    results: list[tuple[TopologyPlacement, ...]] = []
    for cluster, batch in enumerate(batches):
        placements: list[TopologyPlacement] = []
        for place, topology in enumerate(service_order(batch.topologies)):
            placements.append(placement_of(topology, rows[cluster, place]))
        results.append(tuple(placements))
    return results


def _cut(batches: Sequence[PlacementBatch], tasks_of_group: int) -> tuple[int, int]:
    """(number of partitions, number of topologies in one Arrow group).

    Topologies count with their mean number of tasks.
    """
    topologies = 0
    tasks = 0
    for batch in batches:
        topologies += len(batch.topologies)
        tasks += sum(len(topology.tasks) for topology in batch.topologies)
    tasks = max(1, tasks)
    partitions = 1
    if tasks > tasks_of_group:
        partitions = max(2, min(_MAX_PARTITIONS, tasks // _TASKS_OF_PARTITION))
    return partitions, max(1, tasks_of_group * topologies // tasks)


def _in_parts(
    function: Callable[..., pa.Table], values: DataFrame, cut: tuple[int, int]
) -> DataFrame:
    """``function`` of the values of some topologies, in Arrow groups, in parallel."""
    partitions, topologies_of_part = cut
    part = F.floor(F.col("topology") / topologies_of_part).alias("part")
    return (
        _partition(partitions, values.select("*", part), "cluster", "part")
        .groupBy("cluster", "part")
        .applyInArrow(function, from_arrow_schema(exchange.VALUES))
    )


def _partition(partitions: int, frame: DataFrame, *columns: str) -> DataFrame:
    """The frame divided by the columns; a single partition exchanges no rows."""
    if partitions == 1:
        return frame.coalesce(1)
    return frame.repartition(partitions, *columns)


def _placement_frame(session: SparkSession, frames: Frames, cut: tuple[int, int]) -> DataFrame:
    """The frame of the placed rows, not yet computed; ``cut`` is the result of :func:`_cut`."""
    partitions, _ = cut
    supervisors = _frame(session, frames.supervisors)
    values = _frame(session, frames.without_history)
    requests = _frame(session, frames.clusters).union(_summaries(values))
    held_slots = None
    if frames.with_history is not None:
        history_values = _frame(session, frames.with_history)
        requests = requests.union(_summaries(history_values))
        requests = requests.union(_in_parts(request_in_part, history_values, cut))
        values = values.union(history_values)
        held_slots = _frame(session, frames.held_slots)
    supervisors = _partition(partitions, supervisors, "cluster", "node")
    slots_by_cluster = _ranked_slots(supervisors, held_slots, partitions).groupBy("cluster")
    requests_by_cluster = _partition(partitions, requests, "cluster").groupBy("cluster")
    allocated = slots_by_cluster.cogroup(requests_by_cluster).applyInArrow(
        allocate_in_cluster, from_arrow_schema(exchange.VALUES)
    )
    return _in_parts(assign_in_part, values.union(allocated), cut)


def _summaries(values: DataFrame) -> DataFrame:
    return values.where(F.col("kind") == exchange.SUMMARY)


def _frame(session: SparkSession, table: pa.Table) -> DataFrame:
    # Spark does not read the columns of an empty table.
    rows = table if table.num_rows else []
    return session.createDataFrame(rows, schema=from_arrow_schema(table.schema))


def _ranked_slots(
    supervisors: DataFrame, held_slots: DataFrame | None, partitions: int
) -> DataFrame:
    """Every unused port, ranked by port within its supervisor, with its number of holders.

    The holders of a slot are topologies of the batch; without ``held_slots`` no slot has one.
    """
    slots = supervisors.select(
        "cluster", "node", F.explode(F.array_except("ports", "used")).alias("port")
    )
    rank = F.row_number().over(Window.partitionBy("cluster", "node").orderBy("port")).alias("rank")
    if held_slots is None:
        return slots.select("*", rank, F.lit(0).alias("holders"))
    holders = (
        _partition(partitions, held_slots, "cluster", "node", "port")
        .groupBy("cluster", "node", "port")
        .agg(F.count_distinct("topology").cast("int").alias("holders"))
    )
    joined = slots.join(
        holders.hint("merge" if partitions == 1 else "broadcast"),
        ["cluster", "node", "port"],
        "left",
    )
    return joined.select(
        "cluster",
        "node",
        "port",
        rank,
        F.coalesce("holders", F.lit(0)).alias("holders"),
    )


@dataclass(frozen=True)
class Frames:
    """The input of one job: Arrow tables of a batch of events, built by the driver."""

    supervisors: pa.Table
    clusters: pa.Table
    """Values of the clusters."""
    without_history: pa.Table
    """Values of the topologies with neither assignment nor user-defined workers."""
    with_history: pa.Table | None
    """Values of the other topologies; ``None`` without any."""
    held_slots: pa.Table
    """Slots of the current assignments of the topologies to place."""


def batch_frames(batches: Sequence[PlacementBatch]) -> Frames:
    """The tables of several clusters, one ``cluster`` number for each."""
    supervisors: list[tuple[int, str, Sequence[int], Sequence[int]]] = []
    clusters: list[exchange.Value] = []
    held_slots: list[tuple[int, int, str, int]] = []
    without_history: list[exchange.Value] = []
    with_history: list[exchange.Value] = []
    for cluster, batch in enumerate(batches):
        supervisors += [
            (cluster, supervisor.id, supervisor.info.ports, supervisor.used)
            for supervisor in batch.supervisors
        ]
        clusters.append(_value_of_cluster(cluster, batch.supervisors))
        for place, topology in enumerate(service_order(batch.topologies)):
            values = _values_of(topology)
            rows = with_history if exchange.HISTORY in values else without_history
            rows += [(cluster, place, kind, value) for kind, value in values.items()]
            held_slots += [(cluster, place, worker.node, worker.port) for worker in topology.old]
    return Frames(
        exchange.table_of(supervisors, exchange.SUPERVISORS),
        exchange.values_table(clusters),
        exchange.values_table(without_history),
        exchange.values_table(with_history) if with_history else None,
        exchange.table_of(held_slots, exchange.HELD_SLOTS),
    )


def _value_of_cluster(cluster: int, supervisors: Sequence[SupervisorSlots]) -> exchange.Value:
    """The records of a cluster's supervisors."""
    records = [(supervisor.id, supervisor.info) for supervisor in supervisors]
    records.sort(key=lambda record: record[0])
    value = exchange.encode(records)
    return (cluster, exchange.CLUSTER, exchange.SUPERVISOR_RECORDS, value)


def _values_of(topology: TopologyToPlace) -> dict[str, bytes]:
    """Kind -> value of the input of one topology."""
    codes: Codes = {}
    runs = list(executor_runs(topology, codes))
    history = list(history_rows(topology, codes))
    counts = [0] * len(codes)
    for component, _, count, _, _ in runs:
        counts[component] += count
    values = {
        exchange.SUMMARY: exchange.encode(summary_of(topology, codes, counts)),
        exchange.EXECUTORS: exchange.encode(runs),
    }
    if history:
        values[exchange.HISTORY] = exchange.encode(history)
    return values
