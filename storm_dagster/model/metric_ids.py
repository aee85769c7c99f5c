"""Record of the ids of a topology's metrics."""

from storm_dagster.model.records import Record


class MetricIds(Record):
    """``/metrics/<id>``: ids of a topology's metrics.

    Its topology master writes the record once the topology is active (with the sample rate, as
    JStorm's start event), and whenever a metric gets its id.
    """

    sample_rate: float
    """``topology.metric.sample.rate``: the share of tuples whose latency is taken."""
    ids: dict[str, int] = {}
    """``component:metric`` of the user's metrics -> id; an id is not reused."""
