"""Metrics of streams in every format: ``show``, ``/v1``, pages and Prometheus.

A new metric is counted in the worker (``RemoteLink.count``) and has a row here.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from storm_dagster.core.snapshot.topology import ComponentSnapshot
from storm_dagster.core.snapshot.windows import is_system_name


@dataclass(frozen=True)
class StreamMetric:
    """Count by output stream of a component, of all time."""

    key: str
    """Key in documents."""
    title: str
    """Title of the column in a page."""
    metric: str
    """Name of the Prometheus counter."""
    text: str
    """Help of the metric."""
    by_stream: Callable[[ComponentSnapshot], Mapping[str, int]]
    """Function of a component that returns the count of each output stream."""


def sum_of_tasks(name: str) -> Callable[[ComponentSnapshot], Mapping[str, int]]:
    """Function that adds up a count that tasks report by stream under this name.

    Streams of the system are left out.
    """

    def by_stream(part: ComponentSnapshot) -> Mapping[str, int]:
        total = Counter[str]()
        for task in part.tasks:
            total.update(task.stream_counts(name))
        return {stream: total[stream] for stream in sorted(total) if not is_system_name(stream)}

    return by_stream


STREAM_METRICS = (
    StreamMetric(
        key="remote_bytes",
        title="bytes to other workers",
        metric="storm_stream_remote_bytes",
        text="Bytes of encoded tuples for other workers since their tasks were opened",
        by_stream=sum_of_tasks("remote_bytes"),
    ),
    StreamMetric(
        key="remote_tuples",
        title="tuples to other workers",
        metric="storm_stream_remote_tuples",
        text="Tuples sent to other workers since their tasks were opened",
        by_stream=sum_of_tasks("remote_tuples"),
    ),
)


def stream_metrics(part: ComponentSnapshot) -> dict[str, dict[str, int]]:
    """Output stream -> counts by key; without the streams that have none."""
    streams: dict[str, dict[str, int]] = {}
    for row in STREAM_METRICS:
        for stream, count in row.by_stream(part).items():
            streams.setdefault(stream, {})[row.key] = count
    return dict(sorted(streams.items()))
