"""Sources and sinks: connectors to the systems that a topology reads and writes.

Importing this package imports no client library: each module imports its own when a task opens.
"""

from typing import TYPE_CHECKING

from storm_dagster.host.resolve import lazy_names

if TYPE_CHECKING:
    from storm_dagster.connectors.file_sink import FileSink
    from storm_dagster.connectors.file_source import FileSource
    from storm_dagster.connectors.kafka_sink import KafkaSink
    from storm_dagster.connectors.kafka_source import KafkaSource
    from storm_dagster.connectors.postgres_sink import PostgresSink
    from storm_dagster.connectors.settings import client_settings
    from storm_dagster.connectors.sinks import Rejected, Retry, Row, Sink, SinkBolt
    from storm_dagster.connectors.source_spout import SourceSpout
    from storm_dagster.connectors.sources import Lag, Source
    from storm_dagster.connectors.tracking import PartitionEnd, Retries, SourceRecord

__all__ = [
    "FileSink",
    "FileSource",
    "KafkaSink",
    "KafkaSource",
    "Lag",
    "PartitionEnd",
    "PostgresSink",
    "Rejected",
    "Retries",
    "Retry",
    "Row",
    "Sink",
    "SinkBolt",
    "Source",
    "SourceRecord",
    "SourceSpout",
    "client_settings",
]

__getattr__, __dir__ = lazy_names(__name__)
