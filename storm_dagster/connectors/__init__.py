"""Sources and sinks: what stands between a topology and the systems that it reads from and writes to.

Importing this package imports no client library: each module imports its own when a task opens.
"""

from storm_dagster.connectors.source_spout import SourceSpout
from storm_dagster.connectors.sources import Lag, Source
from storm_dagster.connectors.tracking import PartitionEnd, Retries, SourceRecord

__all__ = ["Lag", "PartitionEnd", "Retries", "Source", "SourceRecord", "SourceSpout"]
