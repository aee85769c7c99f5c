"""Assignment as a DataFrame computation: one plan, one job, for all topologies of an event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from storm_dagster.core.scheduling.history import history_rows
from storm_dagster.core.scheduling.plan import placement_of
from storm_dagster.core.scheduling.units import Codes, Row, service_order, several_tasks, summary_of
from storm_dagster.model.multimap import multimap
from storm_dagster.model.placement import (
    PlacementBatch,
    PlacementResult,
    TopologyPlacement,
    TopologyToPlace,
)
from storm_dagster.model.placement_reasons import MASTER_ALONE_FROM
from storm_dagster.spark.assignment import schema
from storm_dagster.spark.assignment.groups import allocate_slots, assign_tasks, request_slots

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MOST_PARTITIONS = 32
_TASKS_OF_PARTITION = 50_000
TASKS_OF_GROUP = 10_000
_TOPOLOGY = ("cluster", "topology")


def plan_with_spark(session: SparkSession, batch: PlacementBatch) -> PlacementResult:
    """Place the batch on Spark; ``assign_secs`` is the time of the job and of the reading of its
    result.
    """
    return plan_many_with_spark(session, [batch])[0]


def plan_many_with_spark(
    session: SparkSession, batches: Sequence[PlacementBatch], tasks_of_group: int = TASKS_OF_GROUP
) -> list[PlacementResult]:
    """Place several independent clusters in one job; each result carries the time of the whole job.

    Up to ``tasks_of_group`` tasks are one partition: nothing is exchanged, and the job is one
    stage.
    """
    started = time.monotonic()
    frames = batch_frames(batches)
    placed = schema.PLACED.empty_table()
    if frames.topologies.num_rows:
        placed = _placed(session, frames, _cut(batches, tasks_of_group)).toArrow()
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
    rows = multimap(((row["cluster"], row["topology"]), row) for row in placed.to_pylist())
    return [
        tuple(
            placement_of(topology, rows.get((cluster, place), []))
            for place, topology in enumerate(service_order(batch.topologies))
        )
        for cluster, batch in enumerate(batches)
    ]


def _cut(batches: Sequence[PlacementBatch], tasks_of_group: int) -> tuple[int, int]:
    """(number of partitions, number of topologies in one Arrow group)."""
    tasks = [len(topology.tasks) for batch in batches for topology in batch.topologies]
    total = max(1, sum(tasks))
    partitions = (
        1
        if total <= tasks_of_group
        else max(2, min(_MOST_PARTITIONS, total // _TASKS_OF_PARTITION))
    )
    return partitions, max(1, tasks_of_group * len(tasks) // total)


def _in_groups(
    function: Callable[..., pa.Table],
    runs: DataFrame,
    rows: DataFrame,
    cut: tuple[int, int],
    result: pa.Schema,
) -> DataFrame:
    """``function`` of the executors of some topologies and of the rows about them: in Arrow groups,
    in parallel.
    """
    partitions, together = cut
    part = F.floor(F.col("topology") / together).alias("part")
    executors, facts = (
        _cut_by(partitions, frame.select("*", part), "cluster", "part").groupBy("cluster", "part")
        for frame in (runs, rows)
    )
    return executors.cogroup(facts).applyInArrow(function, schema.ddl(result))


def _cut_by(partitions: int, frame: DataFrame, *columns: str) -> DataFrame:
    return frame.coalesce(1) if partitions == 1 else frame.repartition(partitions, *columns)


def _placed(session: SparkSession, frames: Frames, cut: tuple[int, int]) -> DataFrame:
    partitions = cut[0]
    tables = (frames.supervisors, frames.topologies, frames.runs)
    supervisors, topologies, runs = (_frame(session, table) for table in tables)
    history = _frame(session, frames.history) if frames.history is not None else None
    topologies = topologies.withColumn("text", F.to_json("about", {"ignoreNullFields": "false"}))
    facts = _about(topologies)
    if history is None:
        requests = _plain_requests(topologies)
    else:
        about = _about(topologies.where("history")).unionByName(history, allowMissingColumns=True)
        executors = runs.where("history").drop("history")
        with_history = _in_groups(request_slots, executors, about, cut, schema.SLOT_REQUESTS)
        requests = _plain_requests(topologies.where(~F.col("history"))).unionByName(with_history)
        facts = facts.unionByName(history, allowMissingColumns=True)
    allocated = (
        _ranked_slots(_cut_by(partitions, supervisors, "cluster", "node"), history, partitions)
        .groupBy("cluster")
        .cogroup(_cut_by(partitions, requests, "cluster").groupBy("cluster"))
        .applyInArrow(allocate_slots, schema.ddl(schema.ALLOCATED))
    )
    facts = facts.unionByName(allocated, allowMissingColumns=True)
    return _in_groups(assign_tasks, runs.drop("history"), facts, cut, schema.PLACED)


def _about(topologies: DataFrame) -> DataFrame:
    return topologies.select(*_TOPOLOGY, F.lit("about").alias("kind"), "text")


def _frame(session: SparkSession, table: pa.Table) -> DataFrame:
    # Of an empty table Spark does not read the columns.
    return session.createDataFrame(
        table if table.num_rows else [], schema=from_arrow_schema(table.schema)
    )


def _plain_requests(topologies: DataFrame) -> DataFrame:
    """Slot requests of topologies without history: arithmetic on columns."""
    about = topologies["about"]
    wanted = F.least(about["workers"], about["executors"])
    alone = F.coalesce(about["single_master"], wanted >= MASTER_ALONE_FROM)
    total = F.aggregate(about["units"], F.lit(0), lambda left, right: left + right)
    masters = F.when(about["master"] >= 0, F.get(about["units"], about["master"])).otherwise(0)
    with_master = alone & (masters > 0)
    # One worker at least; two where the master must be alone beside others; none that would stay
    # empty.
    fewest = F.when(with_master & (total > masters), 2).otherwise(1)
    count = F.least(F.greatest(wanted + alone.cast("int"), fewest), total)
    needs = F.transform(
        about["differ"],
        lambda component: F.struct(
            component.alias("component"),
            F.get(about["units"], component).alias("units"),
            F.array().cast("array<string>").alias("blocked"),
        ),
    )
    known = {
        "unchanged": total == 0,
        "wanted": count,
        "staying": F.lit(0),
        "alone": with_master,
        "needs": F.filter(needs, lambda need: need["units"] > 0),
        "total": total,
        "missing": total,
        "unassigned": total,
    }
    fields = [
        known.get(field.name, F.array()).cast(schema.ddl_type(field.type)).alias(field.name)
        for field in (
            schema.SLOT_REQUEST.field(index) for index in range(schema.SLOT_REQUEST.num_fields)
        )
    ]
    return topologies.select(*_TOPOLOGY, "text", F.struct(*fields).alias("request"))


def _ranked_slots(supervisors: DataFrame, history: DataFrame | None, partitions: int) -> DataFrame:
    """Every port that is not used, ranked within its supervisor, with the number of topologies that
    hold it.

    A supervisor without such a port has one row without one.
    """
    slots = supervisors.select(
        "cluster",
        "node",
        "host",
        F.size(F.array_distinct("ports")).alias("total"),
        F.explode_outer(F.array_except("ports", "used")).alias("port"),
    )
    rank = F.row_number().over(Window.partitionBy("cluster", "node").orderBy("port")).alias("rank")
    if history is None:
        return slots.select("*", rank, F.lit(0).alias("holders"))
    held = (
        _cut_by(partitions, history.where(F.col("kind") == "old"), "cluster", "node", "port")
        .groupBy("cluster", "node", "port")
        .agg(F.count_distinct("topology").cast("int").alias("holders"))
    )
    joined = slots.join(
        held.hint("merge" if partitions == 1 else "broadcast"), ["cluster", "node", "port"], "left"
    )
    return joined.select(
        "cluster",
        "node",
        "host",
        "total",
        "port",
        rank,
        F.coalesce("holders", F.lit(0)).alias("holders"),
    )


@dataclass(frozen=True)
class Frames:
    """The input of one job: Arrow tables of a batch of events, built by the driver column by
    column.
    """

    supervisors: pa.Table
    topologies: pa.Table
    runs: pa.Table
    history: pa.Table | None
    """``None`` when no topology has an assignment or user-defined workers."""


Run = tuple[int, int, int, int, list[int] | None]
"""(component, first task, executors, tasks in each, tasks of an irregular one)."""


def batch_frames(batches: Sequence[PlacementBatch]) -> Frames:
    """The tables of several clusters, one ``cluster`` number for each."""
    supervisors: list[Sequence[Any]] = []
    topologies: list[Sequence[Any]] = []
    runs: list[Sequence[Any]] = []
    history: list[Row] = []
    for cluster, batch in enumerate(batches):
        supervisors += [
            (cluster, node.id, node.host, node.ports, node.used) for node in batch.supervisors
        ]
        for place, topology in enumerate(service_order(batch.topologies)):
            codes: Codes = {}
            mine = list(executor_runs(topology, codes))
            past = [
                {**row, "cluster": cluster, "topology": place}
                for row in history_rows(topology, codes)
            ]
            history += past
            runs += [(cluster, place, bool(past), *run) for run in mine]
            counts = [0] * len(codes)
            for component, _, count, _, _ in mine:
                counts[component] += count
            topologies.append(
                (cluster, place, bool(past), summary_of(topology, codes, counts)._asdict())
            )
    return Frames(
        _table(supervisors, schema.SUPERVISORS),
        _table(topologies, schema.TOPOLOGIES),
        _table(runs, schema.RUNS),
        pa.Table.from_pylist(history, schema=schema.HISTORY) if history else None,
    )


def _table(rows: Sequence[Sequence[Any]], columns: pa.Schema) -> pa.Table:
    return pa.table(list(zip(*rows, strict=True)) or [[]] * len(columns), schema=columns)


def executor_runs(topology: TopologyToPlace, codes: Codes) -> Iterator[Run]:
    """Runs of equal executors: a component of a thousand tasks is one row."""
    several = several_tasks(topology)
    for first, tasks in several.items():
        irregular = list(tasks) if tasks[-1] - first + 1 != len(tasks) else None
        yield codes.setdefault(topology.tasks[first], len(codes)), first, 1, len(tasks), irregular
    grouped = {task for tasks in several.values() for task in tasks}
    first, count, owner = 0, 0, ""
    # One more at the end yields the last run.
    for task, component in [
        *sorted(item for item in topology.tasks.items() if item[0] not in grouped),
        (0, ""),
    ]:
        if count and component == owner and task == first + count:
            count += 1
            continue
        if count:
            yield codes.setdefault(owner, len(codes)), first, count, 1, None
        first, count, owner = task, 1, component
