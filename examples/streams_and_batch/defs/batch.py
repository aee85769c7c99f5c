"""Assets on what the stream writes: hourly ones start when the stream has completed an hour, daily
ones by schedule; a stream that does not deliver blocks what depends on them.
"""

import os
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dagster as dg

from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.defs.resources.spark import SparkResource
from storm_dagster.model.errors import StormDagsterError

DAYS = dg.DailyPartitionsDefinition(start_date="2025-01-01", end_offset=1)
LANDED = dg.AssetKey(["topologies", "clicks", "landed"])
CLICKS_DAY = dg.AssetKey(["lake", "clicks_day"])
TOP_PAGES = dg.AssetKey(["lake", "top_pages"])
CLICKS = dg.AssetKey(["lake", "clicks"])
PAGES_BY_HOUR = dg.AssetKey(["lake", "pages_by_hour"])
HOURS = dg.HourlyPartitionsDefinition(start_date="2025-01-01-00:00")
EACH_HOUR = dg.AutomationCondition.eager().without(dg.AutomationCondition.in_latest_time_window())
"""Hours that the stream has completed: the newest one, or one that was reported late."""
LATEST_SECS = 600
DAILY = dg.FreshnessPolicy.time_window(
    fail_window=timedelta(hours=26), warn_window=timedelta(hours=25)
)


def lake() -> Path:
    """The folder that stream and batch share."""
    return Path(os.environ.get("STREAMS_LAKE", "/tmp/lake"))


def newest(folder: Path) -> float | None:
    """Time at which the stream last wrote into the folder (epoch seconds)."""
    return max((path.stat().st_mtime for path in folder.glob("*.parquet")), default=None)


clicks = dg.AssetSpec(
    CLICKS,
    deps=[dg.AssetKey(["topologies", "clicks", "hours"])],
    partitions_def=HOURS,
    group_name="lake",
    kinds={"parquet"},
    description="Hours that the stream has written whole; its bolt `hours` reports them.",
)


@dg.asset(
    key=PAGES_BY_HOUR,
    deps=[CLICKS],
    partitions_def=HOURS,
    automation_condition=EACH_HOUR,
    group_name="lake",
    kinds={"pyspark"},
    description="The hour's page views; made when the hour is complete.",
)
def pages_by_hour(
    context: dg.AssetExecutionContext, storm_spark: SparkResource
) -> dg.MaterializeResult:
    """Count the hour's views, each once."""
    begin, end = (int(at.timestamp() * 1000) for at in context.partition_time_window)
    rows = (
        storm_spark.pyspark()
        .spark_session.read.parquet(str(lake() / "clicks" / f"day={context.partition_key[:10]}"))
        .where(f"at >= {begin} and at < {end}")
        .dropDuplicates(["view"])
        .groupBy("page")
        .count()
        .collect()
    )
    return dg.MaterializeResult(metadata={"views": {row["page"]: row["count"] for row in rows}})


@dg.asset(
    key=CLICKS_DAY,
    deps=[LANDED],
    partitions_def=DAYS,
    group_name="lake",
    kinds={"pyspark", "parquet"},
    freshness_policy=DAILY,
    description="The day's page views, each once.",
)
def clicks_day(
    context: dg.AssetExecutionContext, storm_spark: SparkResource
) -> dg.MaterializeResult:
    """Read what the stream wrote, drop duplicates, write it again: a second run gives the same."""
    source, out = (
        lake() / "clicks" / f"day={context.partition_key}",
        lake() / "clicks_day" / context.partition_key,
    )
    if newest(source) is None:
        raise dg.Failure(f"the stream has written nothing for {context.partition_key} ({source})")
    session = storm_spark.pyspark().spark_session
    raw = session.read.parquet(str(source))
    raw.dropDuplicates(["view"]).coalesce(1).write.mode("overwrite").parquet(str(out))
    views, rows = session.read.parquet(str(out)).count(), raw.count()
    return dg.MaterializeResult(
        metadata={
            "views": views,
            "came_twice": rows - views,
            "folder": dg.MetadataValue.path(str(out)),
        }
    )


@dg.asset_check(
    asset=CLICKS_DAY,
    name="stream_delivers",
    blocking=True,
    description="The topology runs, and its newest file is younger than ten minutes, while the day is not over.",
)
def stream_delivers(
    context: dg.AssetCheckExecutionContext, storm_nimbus: NimbusResource
) -> dg.AssetCheckResult:
    """Check that the stream has finished the day: a result without its newest views would be
    wrong.
    """
    try:
        statuses = {document["name"]: document["status"] for document in storm_nimbus.topologies()}
        status = statuses.get("clicks", "NOT RUNNING")
    except StormDagsterError as error:
        status = f"unknown: {error.message}"
    today = datetime.now(tz=timezone.utc).date().isoformat()
    run = context.op_execution_context
    day = run.partition_key if run.has_partition_key else today
    written = newest(lake() / "clicks" / f"day={day}")
    age = time.time() - written if written is not None else None
    delivers = status == "ACTIVE" and age is not None and age < LATEST_SECS
    metadata: dict[str, Any] = {"status": status, "day_is_over": day < today}
    if age is not None:
        metadata["newest_file_secs"] = round(age, 1)
    return dg.AssetCheckResult(
        passed=day < today or delivers, severity=dg.AssetCheckSeverity.ERROR, metadata=metadata
    )


@dg.asset(
    key=TOP_PAGES,
    deps=[CLICKS_DAY],
    partitions_def=DAYS,
    group_name="lake",
    kinds={"pyspark"},
    freshness_policy=DAILY,
    description="The day's pages by views.",
)
def top_pages(
    context: dg.AssetExecutionContext, storm_spark: SparkResource
) -> dg.MaterializeResult:
    """Count, and show the first ten."""
    folder = lake() / "clicks_day" / context.partition_key
    rows = (
        storm_spark.pyspark()
        .spark_session.read.parquet(str(folder))
        .groupBy("page")
        .count()
        .orderBy("count", ascending=False)
        .limit(10)
        .collect()
    )
    records = [dg.TableRecord({"page": row["page"], "views": row["count"]}) for row in rows]
    schema = dg.TableSchema([dg.TableColumn("page", "string"), dg.TableColumn("views", "int")])
    return dg.MaterializeResult(
        metadata={"top": dg.MetadataValue.table(records, schema), "pages": len(records)}
    )


daily = dg.define_asset_job(
    "daily_report", selection=[CLICKS_DAY, TOP_PAGES], executor_def=dg.in_process_executor
)


@dg.definitions
def defs() -> dg.Definitions:
    """The assets and their check; whole hours as they come, and a run every night for the day
    before.
    """
    return dg.Definitions(
        assets=[clicks, pages_by_hour, clicks_day, top_pages],
        asset_checks=[stream_delivers],
        jobs=[daily],
        schedules=[dg.build_schedule_from_partitioned_job(daily, hour_of_day=1)],
        sensors=[
            dg.AutomationConditionSensorDefinition(
                "whole_hours", target=[PAGES_BY_HOUR], default_status=dg.DefaultSensorStatus.RUNNING
            )
        ],
    )
