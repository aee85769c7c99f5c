"""Sources and sinks: connections of a topology to other systems.

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
    from storm_dagster.connectors.sources import Lag, LostPosition, Source, SourceRecovered
    from storm_dagster.connectors.tracking import PartitionEnd, Retries, SourceRecord

__all__ = [
    "FileSink",
    "FileSource",
    "KafkaSink",
    "KafkaSource",
    "Lag",
    "LostPosition",
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
    "SourceRecovered",
    "SourceSpout",
    "client_settings",
]

_MODULES = {
    "FileSink": "storm_dagster.connectors.file_sink",
    "FileSource": "storm_dagster.connectors.file_source",
    "KafkaSink": "storm_dagster.connectors.kafka_sink",
    "KafkaSource": "storm_dagster.connectors.kafka_source",
    "Lag": "storm_dagster.connectors.sources",
    "LostPosition": "storm_dagster.connectors.sources",
    "PartitionEnd": "storm_dagster.connectors.tracking",
    "PostgresSink": "storm_dagster.connectors.postgres_sink",
    "Rejected": "storm_dagster.connectors.sinks",
    "Retries": "storm_dagster.connectors.tracking",
    "Retry": "storm_dagster.connectors.sinks",
    "Row": "storm_dagster.connectors.sinks",
    "Sink": "storm_dagster.connectors.sinks",
    "SinkBolt": "storm_dagster.connectors.sinks",
    "Source": "storm_dagster.connectors.sources",
    "SourceRecord": "storm_dagster.connectors.tracking",
    "SourceRecovered": "storm_dagster.connectors.sources",
    "SourceSpout": "storm_dagster.connectors.source_spout",
    "client_settings": "storm_dagster.connectors.settings",
}

if not TYPE_CHECKING:  # Else a type checker accepts every name.
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
