"""A data pipeline on Spark: a streaming file source, a Python bolt, micro-batches written as
Parquet.

    storm-dagster submit examples/spark_pipeline.py:pipeline -- /tmp/keywords

The spout is a Structured Streaming query over the source files of Python's own standard library;
its checkpoint advances only after every line is acked. A Python bolt counts Python's keywords in
each line. The last bolt turns micro-batches of those counts into DataFrames and writes their totals
as Parquet.

Two more bolts count how far lines are indented. All that they read is Spark's, so they are fused:
their functions run in the spout's own query, and no line passes a worker for them.
`topology.spark.fuse: false` runs them as bolts of their own. All Spark jobs run on the cluster's
Spark: by default the embedded server, or whatever ``topology.spark.remote``, ``spark.remote`` or
``spark.master`` names.

Delivery is at least once: after a crash a micro-batch may be written twice.

    storm-dagster submit examples/spark_pipeline.py:ages -- /tmp/ages

This topology is one query that runs on Spark alone: it counts the lines of the same files in
event-time windows of an hour, where the time of a line is when its file was changed. Each
micro-batch is written below its id, so that one that is repeated replaces its own output.
"""

from __future__ import annotations

import keyword
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storm_dagster.api import Bolt, SparkBolt, SparkQuery, SparkSpout, TopologyBuilder, Tuple

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WORD = re.compile(r"[A-Za-z_]+")
KEYWORDS = frozenset(keyword.kwlist)
# Spark's file sources skip names that begin with an underscore, so the pattern does too.
PATTERN = "[a-c]*.py"


def source_files() -> list[Path]:
    """The files that the pipeline reads."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob(PATTERN))


def keywords_of(line: str) -> Counter[str]:
    """Python keyword -> how often it stands in the line."""
    return Counter(word for word in WORD.findall(line) if word in KEYWORDS)


def read_lines(spark: SparkSession, pattern: str, files_per_batch: int) -> DataFrame:
    """A streaming DataFrame of the lines of all files that match ``pattern``."""
    return (
        spark.readStream.format("text")
        .option("maxFilesPerTrigger", files_per_batch)
        .load(pattern)
        .withColumnRenamed("value", "line")
    )


def write_totals(frame: DataFrame, out: str) -> None:
    """Add the micro-batch's totals to the Parquet folder ``out``."""
    from pyspark.sql import functions as f

    totals = frame.groupBy("keyword").agg(f.sum("times").alias("times"))
    totals.coalesce(1).write.mode("append").parquet(out)


def indents_of(frame: DataFrame) -> DataFrame:
    """The number of spaces that each line begins with."""
    from pyspark.sql import functions as f

    return frame.select(f.length(f.regexp_extract("line", "^( *)", 1)).alias("spaces"))


def write_indents(frame: DataFrame, out: str) -> None:
    """Add the micro-batch's number of lines with each indent to the Parquet folder ``out``."""
    frame.groupBy("spaces").count().coalesce(1).write.mode("append").parquet(out)


class KeywordBolt(Bolt):
    """One tuple for each different keyword of a line."""

    outputs = ["keyword", "times"]

    def process(self, tup: Tuple) -> None:
        for word, times in keywords_of(tup.values[0]).items():
            self.emit([word, times])


def pipeline(
    out: str, checkpoint: str | None = None, pattern: str | None = None
) -> TopologyBuilder:
    """The topology. ``out`` is a folder that the Spark server can write; the checkpoint lies beside
    it.
    """
    files = pattern or str(Path(sysconfig.get_path("stdlib")) / PATTERN)
    reading: dict[str, Any] = {"pattern": files, "files_per_batch": 12}
    builder = TopologyBuilder("keywords")
    builder.set_spout(
        "lines",
        SparkSpout,
        args={
            "source": "spark_pipeline:read_lines",
            "args": reading,
            "checkpoint": checkpoint or f"{out}.checkpoint",
            "trigger": "200 milliseconds",
        },
        outputs=["line"],
    )
    builder.set_bolt("keywords", KeywordBolt, inputs="lines", par=2)
    builder.set_bolt(
        "totals",
        SparkBolt,
        inputs="keywords",
        args={
            "function": "spark_pipeline:write_totals",
            "args": {"out": out},
            "schema": "keyword string, times long",
            "batch_secs": 2.0,
        },
    )
    builder.set_bolt(
        "indents",
        SparkBolt,
        inputs="lines",
        args={"function": "spark_pipeline:indents_of"},
        outputs=["spaces"],
    )
    builder.set_bolt(
        "indent_totals",
        SparkBolt,
        inputs="indents",
        args={"function": "spark_pipeline:write_indents", "args": {"out": f"{out}.indents"}},
    )
    return builder


def count_by_hour(spark: SparkSession, pattern: str, files_per_batch: int) -> DataFrame:
    """A streaming DataFrame of hours, with the lines of the files that were changed in each."""
    from pyspark.sql import functions as f

    lines = (
        spark.readStream.format("text").option("maxFilesPerTrigger", files_per_batch).load(pattern)
    )
    changed = lines.select(f.col("_metadata.file_modification_time").alias("changed"))
    hours = changed.withWatermark("changed", "1 hour").groupBy(f.window("changed", "1 hour"))
    return hours.agg(f.count("*").alias("lines")).select(
        f.col("window.start").alias("hour"), "lines"
    )


def write_hours(frame: DataFrame, batch_id: int, out: str) -> None:
    """Write the hours whose count the micro-batch has changed; the newest batch that has an hour
    counts.
    """
    frame.coalesce(1).write.mode("overwrite").parquet(f"{out}/batch={batch_id}")


def ages(out: str, checkpoint: str | None = None, pattern: str | None = None) -> TopologyBuilder:
    """A topology of one query. ``out`` is a folder that the Spark server can write; the checkpoint
    lies beside it.
    """
    builder = TopologyBuilder("ages")
    builder.set_spout(
        "hours",
        SparkQuery,
        args={
            "query": "spark_pipeline:count_by_hour",
            "args": {
                "pattern": pattern or str(Path(sysconfig.get_path("stdlib")) / PATTERN),
                "files_per_batch": 12,
            },
            "each_batch": "spark_pipeline:write_hours",
            "batch_args": {"out": out},
            "output_mode": "update",
            "checkpoint": checkpoint or f"{out}.checkpoint",
            "trigger": "200 milliseconds",
        },
    )
    return builder
