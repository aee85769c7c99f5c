"""`roll_up_metrics` and its schedule: what the components did, over time, with PySpark.

Workers count for as long as a topology lives. Each run appends one sample of those counters for every
component to ``samples/`` and computes from all samples what happened between them: ``hourly/`` has one row
for each topology, component and hour. Both are Parquet below ``HOME/metrics``, seen by the Spark server. The
materialization draws throughput and latency of the last 24 hours.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from storm_dagster.defs.failures import step_errors
from storm_dagster.defs.keys import TOPOLOGY_STATS
from storm_dagster.defs.metadata import table
from storm_dagster.defs.nimbus_resource import NimbusResource
from storm_dagster.defs.spark_resource import SparkResource
from storm_dagster.defs.stats_picture import Point, stats_picture
from storm_dagster.defs.svg import data_uri
from storm_dagster.model.errors import StormDagsterError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["metrics_rollup_schedule", "roll_up", "roll_up_metrics", "samples_of"]

ROLLUP_JOB = "roll_up_metrics"
_TEXT = "Append a sample of every component's counters and roll all samples up by the hour, with PySpark."
COUNTERS = ("emitted", "transferred", "executed", "acked", "failed")
_SCHEMA = (
    "topology_id string, name string, component string, tasks int, sampled_at timestamp, "
    "emitted long, transferred long, executed long, acked long, failed long, execute_ms double, complete_ms double"
)


def samples_of(documents: Iterable[Mapping[str, Any]], now: float) -> list[tuple[Any, ...]]:
    """One row for each component that runs, in the order of the schema; latencies are means over its tasks."""
    from datetime import datetime, timezone

    at = datetime.fromtimestamp(int(now), tz=timezone.utc)
    rows: list[tuple[Any, ...]] = []
    for document in documents:
        by_component: dict[str, list[Mapping[str, Any]]] = {}
        for task in document.get("tasks", ()):
            if isinstance(task.get("stats"), Mapping):
                by_component.setdefault(str(task["component"]), []).append(task["stats"])
        for component, stats in sorted(by_component.items()):
            sums = [sum(int(part.get(name) or 0) for part in stats) for name in COUNTERS]
            means = [
                sum(float(part.get(name) or 0.0) for part in stats) / len(stats)
                for name in ("execute_ms", "complete_ms")
            ]
            rows.append((document["id"], document["name"], component, len(stats), at, *sums, *means))
    return rows


def roll_up(session: "SparkSession", samples: "DataFrame") -> "DataFrame":
    """What happened in each hour: differences of neighbouring samples, a counter that fell having begun anew."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    order = Window.partitionBy("topology_id", "component").orderBy("sampled_at")

    def growth(name: str) -> Any:
        # A restarted worker counts from zero: what it has now is then all that is known to be new.
        before = F.coalesce(F.lag(name).over(order), F.lit(0))
        return F.when(F.col(name) >= before, F.col(name) - before).otherwise(F.col(name)).alias(name)

    steps = samples.select(
        "topology_id",
        "name",
        "component",
        F.date_trunc("hour", "sampled_at").alias("hour"),
        "tasks",
        "execute_ms",
        "complete_ms",
        *(growth(name) for name in COUNTERS),
    )
    return (
        steps.groupBy("topology_id", "name", "component", "hour")
        .agg(
            *(F.sum(name).alias(name) for name in COUNTERS),
            F.max("tasks").alias("tasks"),
            F.avg("execute_ms").alias("execute_ms"),
            F.avg("complete_ms").alias("complete_ms"),
            F.count("*").alias("samples"),
        )
        .orderBy("hour", "name", "component")
    )


def recent_points(session: "SparkSession", folder: Path, hours: int = 24) -> list[Point]:
    """What each component of a user did between neighbouring samples of the last hours, by throughput and latency."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    samples = session.read.schema(_SCHEMA).parquet(str(folder / "samples"))
    order = Window.partitionBy("topology_id", "component").orderBy("sampled_at")
    # A spout executes nothing: what it emitted is what it did.
    done = F.greatest("executed", F.when(F.col("executed") == 0, F.col("emitted")).otherwise(F.lit(0)))
    newest = F.max("sampled_at").over(Window.partitionBy())
    steps = (
        samples.where(~F.col("component").startswith("__"))
        .withColumn("done", done)
        .withColumn("newest", newest)
        .withColumn("before", F.coalesce(F.lag("done").over(order), F.lit(0)))
        .withColumn(
            "secs", F.col("sampled_at").cast("double") - F.lag("sampled_at").over(order).cast("double")
        )
        .where(
            (F.col("secs") > 0) & (F.col("sampled_at") >= F.col("newest") - F.expr(f"INTERVAL {hours} HOURS"))
        )
    )
    # A restarted worker counts from zero: what it has now is then all that is known to be new.
    grown = F.when(F.col("done") >= F.col("before"), F.col("done") - F.col("before")).otherwise(F.col("done"))
    latency = F.when(F.col("complete_ms") > 0, F.col("complete_ms")).otherwise(F.col("execute_ms"))
    rows = steps.select(
        "name", "component", "sampled_at", (grown / F.col("secs")).alias("rate"), latency.alias("ms")
    ).collect()
    return [
        Point(f"{row['name']} / {row['component']}", row["sampled_at"], float(row["rate"]), float(row["ms"]))
        for row in rows
    ]


def write_rollup(
    session: "SparkSession", rows: list[tuple[Any, ...]], folder: Path
) -> list[dict[str, str | int | float | bool | None]]:
    """Append ``rows`` to the samples, roll up, and return the newest hour as rows for a table."""
    samples, hourly = str(folder / "samples"), str(folder / "hourly")
    session.createDataFrame(rows, schema=_SCHEMA).coalesce(1).write.mode("append").parquet(samples)
    rolled = roll_up(session, session.read.schema(_SCHEMA).parquet(samples))
    rolled.coalesce(1).write.mode("overwrite").parquet(hourly)
    found = session.read.parquet(hourly).collect()
    newest = max((row["hour"] for row in found), default=None)
    return [
        {
            "topology": row["name"],
            "component": row["component"],
            "hour": row["hour"].isoformat(),
            "tasks": int(row["tasks"]),
            **{name: int(row[name]) for name in COUNTERS},
            "execute_ms": round(float(row["execute_ms"]), 3),
        }
        for row in found
        if row["hour"] == newest
    ]


@dg.op(name=f"{ROLLUP_JOB}_op", description=_TEXT, out=dg.Out(dg.Nothing))
def roll_up_metrics_op(context: dg.OpExecutionContext, nimbus: NimbusResource, spark: SparkResource) -> None:
    """Sample, append, roll up."""
    began = time.monotonic()
    with step_errors():
        names = [document["name"] for document in nimbus.topologies()]
        rows = samples_of([nimbus.topology(name) for name in names], time.time())
        if not rows:
            context.log.info("no component has reported statistics yet: nothing is written")
            return
        folder = nimbus.home_path() / "metrics"
        session = spark.pyspark().spark_session
        newest = write_rollup(session, rows, folder)
        drawn = stats_picture(recent_points(session, folder), "Throughput and latency, last 24 hours")
    context.log_event(
        dg.AssetMaterialization(
            asset_key=nimbus.asset_key(TOPOLOGY_STATS),
            metadata={
                "newest_hour": table(
                    [
                        ("topology", "string"),
                        ("component", "string"),
                        ("hour", "string"),
                        ("tasks", "int"),
                        *((name, "int") for name in COUNTERS),
                        ("execute_ms", "float"),
                    ],
                    newest,
                ),
                "over_time": dg.MetadataValue.md(
                    f"![Throughput and latency of each component over time]({data_uri(drawn)})"
                ),
                "samples": len(rows),
                "executed_in_newest_hour": sum(int(row["executed"] or 0) for row in newest),
                "folder": dg.MetadataValue.path(str(folder)),
                "seconds": round(time.monotonic() - began, 3),
            },
        )
    )


@dg.job(name=ROLLUP_JOB, description=_TEXT, executor_def=dg.in_process_executor)
def roll_up_metrics() -> None:
    """The job of one op."""
    roll_up_metrics_op()


@dg.schedule(
    name="metrics_rollup_schedule",
    job_name=ROLLUP_JOB,
    cron_schedule="*/15 * * * *",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Every 15 minutes: rolls statistics up while a topology is active, else launches nothing.",
)
def metrics_rollup_schedule(nimbus: NimbusResource) -> dg.RunRequest | dg.SkipReason:
    """Ask for a roll-up when some topology is active."""
    try:
        active = [document["name"] for document in nimbus.topologies() if document["status"] == "ACTIVE"]
    except StormDagsterError as error:
        return dg.SkipReason(error.message)
    return dg.RunRequest() if active else dg.SkipReason("no topology is active")
