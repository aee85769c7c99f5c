"""Topologies of ``spark_chain.py``: source, split, count, Parquet, as a fused chain or as one
query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storm_dagster.api import SparkBolt, SparkQuery, SparkSpout, TopologyBuilder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def lines(spark: SparkSession, folder: str) -> DataFrame:
    """A streaming DataFrame of lines, a file for each batch."""
    return spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(folder)


def split(frame: DataFrame) -> DataFrame:
    """The words of lines."""
    from pyspark.sql import functions as f

    return frame.select(f.explode(f.split("value", " ")).alias("word"))


def count(frame: DataFrame) -> DataFrame:
    """How often each word stands in the batch."""
    return frame.groupBy("word").count()


def write(frame: DataFrame, out: str) -> None:
    """Add the counts to a folder."""
    frame.coalesce(1).write.mode("append").parquet(out)


def whole(frame: DataFrame, batch_id: int, out: str) -> None:
    """All of it for one batch."""
    write(count(split(frame)), out)


def chain(folder: str, out: str) -> TopologyBuilder:
    """The chain of four components."""
    builder = TopologyBuilder("chain")
    args: dict[str, Any] = {
        "args": {"folder": folder},
        "checkpoint": f"{out}.checkpoint",
        "trigger": "0 seconds",
    }
    builder.set_spout(
        "lines", SparkSpout, args={"source": "chain_topology:lines", **args}, outputs=["value"]
    )
    builder.set_bolt(
        "split",
        SparkBolt,
        inputs="lines",
        args={"function": "chain_topology:split"},
        outputs=["word"],
    )
    builder.set_bolt(
        "count",
        SparkBolt,
        inputs="split",
        args={"function": "chain_topology:count"},
        outputs=["word", "count"],
    )
    builder.set_bolt(
        "write",
        SparkBolt,
        inputs="count",
        args={"function": "chain_topology:write", "args": {"out": out}},
    )
    return builder


def query(folder: str, out: str) -> TopologyBuilder:
    """The same as one query."""
    builder = TopologyBuilder("query")
    args: dict[str, Any] = {
        "query": "chain_topology:lines",
        "args": {"folder": folder},
        "checkpoint": f"{out}.checkpoint",
        "trigger": "0 seconds",
        "each_batch": "chain_topology:whole",
        "batch_args": {"out": out},
    }
    builder.set_spout("lines", SparkQuery, args=args)
    return builder
