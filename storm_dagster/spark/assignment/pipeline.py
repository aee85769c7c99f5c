"""Assignment as a DataFrame computation: one plan, one job, for all topologies of an event."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from storm_dagster.core.scheduling.outcome import placement_of
from storm_dagster.core.scheduling.units import Row, service_order
from storm_dagster.model.placement import PlacementBatch, PlacementResult, TopologyPlacement
from storm_dagster.model.placement_reasons import MASTER_ALONE_FROM
from storm_dagster.spark.assignment.frames import Frames, batch_frames
from storm_dagster.spark.assignment.groups import allocate_slots, assign_tasks, request_slots
from storm_dagster.spark.assignment.schema import ALLOCATED, PLACED, SLOT_REQUEST, SLOT_REQUESTS, ddl, ddl_type

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_MOST_PARTITIONS = 32
_TOPOLOGY = ("cluster", "topology")


def plan_with_spark(session: SparkSession, batch: PlacementBatch) -> PlacementResult:
    """Place the batch on Spark; ``assign_secs`` is the time of the job and of the reading of its result."""
    return plan_many_with_spark(session, [batch])[0]


def plan_many_with_spark(session: SparkSession, batches: Sequence[PlacementBatch]) -> list[PlacementResult]:
    """Place several independent clusters in one job; each result carries the time of the whole job."""
    started = time.monotonic()
    frames = batch_frames(batches)
    placed = PLACED.empty_table()
    if frames.topologies.num_rows:
        placed = _placed(session, frames, _partitions(batches)).toArrow()
    results = _read_results(batches, placed)
    seconds = time.monotonic() - started
    return [PlacementResult(placements=placements, planner="pyspark", assign_secs=seconds) for placements in results]


def _read_results(batches: Sequence[PlacementBatch], placed: pa.Table) -> list[tuple[TopologyPlacement, ...]]:
    """Placements of each batch, in the order of service."""
    rows: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in placed.to_pylist():
        rows[row["cluster"], row["topology"]].append(row)
    return [
        tuple(
            placement_of(topology, rows[cluster, place])
            for place, topology in enumerate(service_order(batch.topologies))
        )
        for cluster, batch in enumerate(batches)
    ]


def _partitions(batches: Sequence[PlacementBatch]) -> int:
    """Number of partitions, at least two; one costs about as much as two hundred topologies."""
    topologies = sum(len(batch.topologies) for batch in batches)
    return max(2, min(_MOST_PARTITIONS, topologies // 250))


def _placed(session: SparkSession, frames: Frames, partitions: int) -> DataFrame:
    supervisors = _frame(session, frames.supervisors)
    topologies = _frame(session, frames.topologies)
    runs = _frame(session, frames.runs)
    history = _frame(session, frames.history) if frames.history is not None else None
    topologies = topologies.withColumn("text", F.to_json("about", {"ignoreNullFields": "false"}))
    executors = _executors(runs, ("size", "members") if frames.several else ())
    facts = topologies.select(*_TOPOLOGY, F.lit("about").alias("kind"), "text")
    if history is None:
        requests = _plain_requests(topologies)
    else:
        with_history = _requests_with_history(
            topologies.where("history"), executors.where("history").drop("history"), history, partitions
        )
        requests = _plain_requests(topologies.where(~F.col("history"))).unionByName(with_history)
        facts = facts.unionByName(history, allowMissingColumns=True)
    allocated = (
        _ranked_slots(supervisors, history)
        .groupBy("cluster")
        .cogroup(requests.groupBy("cluster"))
        .applyInArrow(allocate_slots, ddl(ALLOCATED))
    )
    facts = facts.unionByName(allocated, allowMissingColumns=True)
    return (
        executors.drop("history")
        .repartition(partitions, *_TOPOLOGY)
        .groupBy(*_TOPOLOGY)
        .cogroup(facts.repartition(partitions, *_TOPOLOGY).groupBy(*_TOPOLOGY))
        .applyInArrow(assign_tasks, ddl(PLACED))
    )


def _frame(session: SparkSession, table: pa.Table) -> DataFrame:
    # Of an empty table Spark does not read the columns.
    return session.createDataFrame(table if table.num_rows else [], schema=from_arrow_schema(table.schema))


def _executors(runs: DataFrame, more: Sequence[str]) -> DataFrame:
    """One row for each executor, ``more`` columns only when some have several tasks."""
    last = F.col("first") + (F.col("count") - 1) * F.col("size")
    unit = F.explode(F.sequence(F.col("first"), last, F.col("size")))
    return runs.select(*_TOPOLOGY, "history", "component", unit.alias("unit"), *more)


def _plain_requests(topologies: DataFrame) -> DataFrame:
    """Slot requests of topologies without history: arithmetic on columns."""
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
        known.get(field.name, F.array()).cast(ddl_type(field.type)).alias(field.name)
        for field in (SLOT_REQUEST.field(index) for index in range(SLOT_REQUEST.num_fields))
    ]
    return topologies.select(*_TOPOLOGY, "text", F.struct(*fields).alias("request"))


def _requests_with_history(
    topologies: DataFrame, executors: DataFrame, history: DataFrame, partitions: int
) -> DataFrame:
    """Slot requests of topologies with a history: one Arrow group for each, in parallel."""
    about = topologies.select(*_TOPOLOGY, F.lit("about").alias("kind"), "text")
    facts = about.unionByName(history, allowMissingColumns=True)
    return (
        executors.repartition(partitions, *_TOPOLOGY)
        .groupBy(*_TOPOLOGY)
        .cogroup(facts.repartition(partitions, *_TOPOLOGY).groupBy(*_TOPOLOGY))
        .applyInArrow(request_slots, ddl(SLOT_REQUESTS))
    )


def _ranked_slots(supervisors: DataFrame, history: DataFrame | None) -> DataFrame:
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
    if history is None:
        return slots.select("*", rank, F.lit(0).alias("holders"))
    held = (
        history.where(F.col("kind") == "old")
        .groupBy("cluster", "node", "port")
        .agg(F.count_distinct("topology").cast("int").alias("holders"))
    )
    joined = slots.join(F.broadcast(held), ["cluster", "node", "port"], "left")
    return joined.select(
        "cluster", "node", "host", "total", "port", rank, F.coalesce("holders", F.lit(0)).alias("holders")
    )
