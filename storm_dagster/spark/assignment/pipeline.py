"""The assignment as a DataFrame computation: one plan, one job, for all topologies of an event."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from storm_dagster.model.placement import PlacementBatch, PlacementResult
from storm_dagster.model.placement_reasons import MASTER_ALONE_FROM
from storm_dagster.spark.assignment.allot import allot_slots
from storm_dagster.spark.assignment.demand import demand_of
from storm_dagster.spark.assignment.frames import Frames, batch_frames
from storm_dagster.spark.assignment.place import place_tasks
from storm_dagster.spark.assignment.results import read_results
from storm_dagster.spark.assignment.schema import DEMAND, DEMANDS, PLACED, SEATS, ddl, ddl_type

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["plan_many_with_spark", "plan_with_spark"]

_MOST_PARTITIONS = 32
_TOPOLOGY = ("cluster", "topology")


def plan_with_spark(session: SparkSession, batch: PlacementBatch) -> PlacementResult:
    """Places the batch on Spark; ``assign_secs`` is the time of the job and of the reading of its result."""
    return plan_many_with_spark(session, [batch])[0]


def plan_many_with_spark(session: SparkSession, batches: Sequence[PlacementBatch]) -> list[PlacementResult]:
    """Places several independent clusters in one job; each result carries the time of the whole job."""
    started = time.monotonic()
    frames = batch_frames(batches)
    placed = PLACED.empty_table()
    if frames.topologies.num_rows:
        placed = _placed(session, frames, _partitions(batches)).toArrow()
    results = read_results(batches, placed)
    seconds = time.monotonic() - started
    return [
        PlacementResult(placements=placements, planner="pyspark", assign_secs=seconds)
        for placements in results
    ]


def _partitions(batches: Sequence[PlacementBatch]) -> int:
    """Two at least; a partition costs about as much as two hundred topologies."""
    topologies = sum(len(batch.topologies) for batch in batches)
    return max(2, min(_MOST_PARTITIONS, topologies // 250))


def _placed(session: SparkSession, frames: Frames, partitions: int) -> DataFrame:
    supervisors = _frame(session, frames.supervisors)
    topologies = _frame(session, frames.topologies)
    runs = _frame(session, frames.runs)
    past = _frame(session, frames.past) if frames.past is not None else None
    topologies = topologies.withColumn("text", F.to_json("about", {"ignoreNullFields": "false"}))
    executors = _executors(runs, ("size", "members") if frames.several else ())
    facts = topologies.select(*_TOPOLOGY, F.lit("about").alias("kind"), "text")
    if past is None:
        demands = _plain_demands(topologies)
    else:
        with_past = _demands_with_past(
            topologies.where("past"), executors.where("past").drop("past"), past, partitions
        )
        demands = _plain_demands(topologies.where(~F.col("past"))).unionByName(with_past)
        facts = facts.unionByName(past, allowMissingColumns=True)
    seats = (
        _ranked_slots(supervisors, past)
        .groupBy("cluster")
        .cogroup(demands.groupBy("cluster"))
        .applyInArrow(allot_slots, ddl(SEATS))
    )
    facts = facts.unionByName(seats, allowMissingColumns=True)
    return (
        executors.drop("past")
        .repartition(partitions, *_TOPOLOGY)
        .groupBy(*_TOPOLOGY)
        .cogroup(facts.repartition(partitions, *_TOPOLOGY).groupBy(*_TOPOLOGY))
        .applyInArrow(place_tasks, ddl(PLACED))
    )


def _frame(session: SparkSession, table: pa.Table) -> DataFrame:
    # Of an empty table Spark does not read the columns.
    return session.createDataFrame(table if table.num_rows else [], schema=from_arrow_schema(table.schema))


def _executors(runs: DataFrame, more: Sequence[str]) -> DataFrame:
    """One row for each executor, ``more`` columns only when some have several tasks."""
    last = F.col("first") + (F.col("count") - 1) * F.col("size")
    unit = F.explode(F.sequence(F.col("first"), last, F.col("size")))
    return runs.select(*_TOPOLOGY, "past", "component", unit.alias("unit"), *more)


def _plain_demands(topologies: DataFrame) -> DataFrame:
    """What topologies without assignment and wishes want: arithmetic on columns."""
    about = topologies["about"]
    wanted = F.least(about["workers"], about["executors"])
    alone = F.coalesce(about["single_master"], wanted >= MASTER_ALONE_FROM)
    total = F.aggregate(about["units"], F.lit(0), lambda left, right: left + right)
    masters = F.when(about["master"] >= 0, F.get(about["units"], about["master"])).otherwise(0)
    with_master = alone & (masters > 0)
    # One worker at least; two where the master must be alone beside others; none that would stay empty.
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
        "settled": total == 0,
        "count": count,
        "staying": F.lit(0),
        "alone": with_master,
        "needs": F.filter(needs, lambda need: need["units"] > 0),
        "total": total,
        "missing": total,
        "loose": total,
    }
    fields = [
        known.get(field.name, F.array()).cast(ddl_type(field.type)).alias(field.name)
        for field in (DEMAND.field(index) for index in range(DEMAND.num_fields))
    ]
    return topologies.select(*_TOPOLOGY, "text", F.struct(*fields).alias("demand"))


def _demands_with_past(
    topologies: DataFrame, executors: DataFrame, past: DataFrame, partitions: int
) -> DataFrame:
    """What topologies with an assignment or wishes want: one Arrow group for each, in parallel."""
    about = topologies.select(*_TOPOLOGY, F.lit("about").alias("kind"), "text")
    facts = about.unionByName(past, allowMissingColumns=True)
    return (
        executors.repartition(partitions, *_TOPOLOGY)
        .groupBy(*_TOPOLOGY)
        .cogroup(facts.repartition(partitions, *_TOPOLOGY).groupBy(*_TOPOLOGY))
        .applyInArrow(demand_of, ddl(DEMANDS))
    )


def _ranked_slots(supervisors: DataFrame, past: DataFrame | None) -> DataFrame:
    """Every port that is not used, ranked within its supervisor, with the number of topologies that hold it.

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
    if past is None:
        return slots.select("*", rank, F.lit(0).alias("holders"))
    held = (
        past.where(F.col("kind") == "old")
        .groupBy("cluster", "node", "port")
        .agg(F.count_distinct("topology").cast("int").alias("holders"))
    )
    joined = slots.join(F.broadcast(held), ["cluster", "node", "port"], "left")
    return joined.select(
        "cluster", "node", "host", "total", "port", rank, F.coalesce("holders", F.lit(0)).alias("holders")
    )
