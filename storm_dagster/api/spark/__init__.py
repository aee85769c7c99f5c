"""Components that run on Spark, and their link to it.

A worker runs them as any other component. pyspark is imported when one of them opens.
"""

from storm_dagster.api.spark.bolt import SparkBolt
from storm_dagster.api.spark.query import SparkQuery
from storm_dagster.api.spark.spout import SparkSpout

__all__ = ["SparkBolt", "SparkQuery", "SparkSpout"]
