"""`roll_up_metrics` and its schedule: what the components did in each hour, with PySpark.

Workers count for as long as a topology lives. The run of an hour, right after its end, stores one
sample of those counters for every component in ``samples/hour=…`` and what they grew by since the
sample of the hour before in ``hourly/hour=…``: Parquet below ``HOME/metrics``, for a named cluster
below ``HOME/metrics/<name>``, seen by the Spark server. A run reads two hours, however long the
history is, and drops what is older than ``dagster.metrics.retention.hours``.
"""

import shutil
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from storm_dagster.defs.binding import asset_settings, bind
from storm_dagster.defs.keys import TOPOLOGY_STATS
from storm_dagster.defs.metadata import step_errors, table
from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.defs.resources.spark import SparkResource
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.multimap import multimap

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HOURS = dg.HourlyPartitionsDefinition(start_date="2026-01-01-00:00", timezone="UTC")
"""Hours of UTC; a run of one that is over and was never sampled fails."""
COUNTERS = ("emitted", "transferred", "executed", "acked", "failed")
_MOST_ROWS = 20
_NAMED = "topology_id string, name string, component string, tasks int, "
_NUMBERS = "emitted long, transferred long, executed long, acked long, failed long, execute_ms double, complete_ms double"
_SAMPLES = f"{_NAMED}sampled_at timestamp, {_NUMBERS}"
_HOURLY = f"{_NAMED}seconds double, {_NUMBERS}"


def samples_of(documents: Iterable[Mapping[str, Any]], now: float) -> list[tuple[Any, ...]]:
    """One row for each component that runs, in the order of the schema; latencies are means over
    its tasks.
    """
    at = datetime.fromtimestamp(int(now), tz=timezone.utc)
    rows: list[tuple[Any, ...]] = []
    for document in documents:
        counting = (
            task for task in document.get("tasks", ()) if isinstance(task.get("stats"), Mapping)
        )
        by_component = multimap((str(task["component"]), task["stats"]) for task in counting)
        for component, stats in sorted(by_component.items()):
            sums = [sum(int(part.get(name) or 0) for part in stats) for name in COUNTERS]
            names = ("execute_ms", "complete_ms")
            means = [
                sum(float(part.get(name) or 0.0) for part in stats) / len(stats) for name in names
            ]
            rows.append(
                (document["id"], document["name"], component, len(stats), at, *sums, *means)
            )
    return rows


def _folder(root: Path, kind: str, hour: datetime) -> str:
    return str(root / kind / f"hour={hour:%Y-%m-%d-%H}")


def _samples(session: "SparkSession", root: Path, hour: datetime) -> "DataFrame | None":
    from pyspark.errors import AnalysisException

    try:
        found = session.read.schema(_SAMPLES).parquet(_folder(root, "samples", hour))
        return None if found.isEmpty() else found
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return None


def roll_up_hour(
    session: "SparkSession", root: Path, hour: datetime, rows: list[tuple[Any, ...]] | None
) -> "DataFrame":
    """Roll up ``hour`` from its sample and that of the hour before; repeated, the result is the
    same.

    ``rows`` are stored as the hour's sample unless it has one. A component that the hour before
    does not know, and a counter that fell was reset: all that it counts is new.
    :class:`Unavailable` without a sample.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    now = _samples(session, root, hour)
    if now is None and rows:
        made = session.createDataFrame(rows, schema=_SAMPLES).coalesce(1)
        made.write.mode("overwrite").parquet(_folder(root, "samples", hour))
        now = _samples(session, root, hour)
    if now is None:
        raise Unavailable(
            f"no sample was taken at the end of hour {hour:%Y-%m-%d %H}:00 UTC, and what was not counted cannot be "
            "rolled up: only the hour that has just ended can be sampled, while a topology runs"
        )
    both = now.withColumn("hour", F.lit(1))
    if (before := _samples(session, root, hour - timedelta(hours=1))) is not None:
        both = both.unionByName(before.withColumn("hour", F.lit(0)))
    order = Window.partitionBy("topology_id", "component").orderBy("hour")

    def growth(name: str) -> Any:
        # A restarted worker counts from zero: what it has now is then all that is known to be new.
        last = F.coalesce(F.lag(name).over(order), F.lit(0))
        return F.when(F.col(name) >= last, F.col(name) - last).otherwise(F.col(name)).alias(name)

    at = F.col("sampled_at").cast("double")
    grown = (
        both.select(
            "hour",
            *("topology_id", "name", "component", "tasks"),
            (at - F.lag(at).over(order)).alias("seconds"),
            *(growth(name) for name in COUNTERS),
            "execute_ms",
            "complete_ms",
        )
        .where("hour = 1")
        .drop("hour")
    )
    target = _folder(root, "hourly", hour)
    grown.coalesce(1).write.mode("overwrite").parquet(target)
    return session.read.schema(_HOURLY).parquet(target)


def drop_older(session: "SparkSession", root: Path, oldest: datetime) -> None:
    """Remove every hour before ``oldest``; where only the Spark server sees the folder, empty the
    newest of them.
    """
    kinds = {"samples": _SAMPLES, "hourly": _HOURLY}
    gone = oldest - timedelta(hours=1)
    if root.is_dir():
        for part in (part for kind in kinds for part in (root / kind).glob("hour=*")):
            if part.name <= f"hour={gone:%Y-%m-%d-%H}":
                shutil.rmtree(part, ignore_errors=True)
    elif _samples(session, root, gone) is not None:
        for kind, schema in kinds.items():
            session.createDataFrame([], schema).write.mode("overwrite").parquet(
                _folder(root, kind, gone)
            )


def topology_stats(
    context: dg.AssetExecutionContext,
    nimbus: NimbusResource,
    spark: SparkResource,
    names: DagsterNames,
) -> dg.MaterializeResult:
    """Sample the hour that has just ended, roll it up, drop what is old."""
    began = time.monotonic()
    hour = context.partition_time_window.start.astimezone(timezone.utc)
    with step_errors():
        conf = nimbus.conf()
        rows = None
        if 3600 <= time.time() - hour.timestamp() < 7200:
            running = [document["name"] for document in nimbus.topologies()]
            rows = samples_of([nimbus.topology(name) for name in running], time.time())
        root = nimbus.home_path() / "metrics" / (names.cluster or "")
        session = spark.pyspark().spark_session
        found = (
            roll_up_hour(session, root, hour, rows).orderBy("executed", ascending=False).collect()
        )
        drop_older(
            session, root, hour - timedelta(hours=int(conf["dagster.metrics.retention.hours"]))
        )
    own = [row for row in found if not row["component"].startswith("__")]
    columns = ("topology_id", "component", "tasks", *COUNTERS, "execute_ms", "complete_ms")
    kinds = {
        **dict.fromkeys(("tasks", *COUNTERS), "int"),
        **dict.fromkeys(("execute_ms", "complete_ms"), "float"),
    }
    return dg.MaterializeResult(
        metadata={
            "busiest": table(
                " ".join(f"{name}:{kinds.get(name, '')}" for name in columns),
                [[row[name] for name in columns] for row in own[:_MOST_ROWS]],
            ),
            "components": len(own),
            "executed": sum(row["executed"] for row in own),
            "failed": sum(row["failed"] for row in own),
            "executed_per_sec": round(
                sum(row["executed"] / (row["seconds"] or 3600.0) for row in own), 3
            ),
            "complete_ms_max": max((row["complete_ms"] for row in own), default=0.0),
            "folder": dg.MetadataValue.path(str(root)),
            "seconds": round(time.monotonic() - began, 3),
        }
    )


def metrics_rollup_schedule(
    context: dg.ScheduleEvaluationContext, nimbus: NimbusResource
) -> dg.RunRequest | dg.SkipReason:
    """Ask for the hour that has just ended when some topology is active."""
    try:
        active = [
            document["name"] for document in nimbus.topologies() if document["status"] == "ACTIVE"
        ]
    except StormDagsterError as error:
        return dg.SkipReason(error.message)
    if not active:
        return dg.SkipReason("no topology is active")
    ended = context.scheduled_execution_time.astimezone(timezone.utc) - timedelta(hours=1)
    return dg.RunRequest(partition_key=f"{ended:%Y-%m-%d-%H}:00")


def build_topology_stats(names: DagsterNames) -> dg.AssetsDefinition:
    """The asset."""
    return dg.asset(partitions_def=HOURS, **asset_settings(names, TOPOLOGY_STATS))(
        bind(topology_stats, names)
    )
