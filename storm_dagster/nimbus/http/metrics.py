"""``/metrics`` for Prometheus.

Labels come from fixed sets (route patterns, statuses) and from running topologies (their
components, and the at most 100 metrics of a task), never from requests.
"""

import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.responses import Response

from storm_dagster.core.snapshot.demand import SlotDemand, slot_demands
from storm_dagster.core.snapshot.stream_metrics import STREAM_METRICS
from storm_dagster.core.snapshot.topology import ComponentSnapshot, TopologySnapshot
from storm_dagster.core.snapshot.windows import ALL_TIME
from storm_dagster.host.disk import disk_room
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.json_values import NON_FINITE
from storm_dagster.model.latency import prometheus_buckets
from storm_dagster.model.tables import load_table
from storm_dagster.model.view import ClusterView
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader

_MIB = 2**20
_TOPOLOGIES_SECS = 2.0
"""Longest wait for topology masters in one scrape."""
_TABLE: Mapping[str, Mapping[str, Any]] = load_table(__name__, "metrics")
"""Group of metrics -> name of a metric -> its text, and the attribute that it is ``of``."""


class Metrics:
    """Metrics of one nimbus, in their own registry."""

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "storm_nimbus_http_requests",
            "HTTP requests by method, route and status",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "storm_nimbus_http_request_seconds",
            "Time to answer",
            ["method", "route"],
            registry=self._registry,
        )
        self._registry.register(_ClusterMetrics(nimbus, reader))

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(method, route).observe(seconds)

    def response(self) -> Response:
        """Response with all metrics, in the text format of Prometheus."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class _ClusterMetrics(Collector):
    """Gauges that are read when Prometheus scrapes them.

    Without ZooKeeper only those of the process.
    """

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; at the leader also the metrics of topologies."""
        health = self._reader.health()
        yield from self._process_metrics(health)
        try:
            view = self._reader.view()
            healing = self._reader.healing()
        except StormDagsterError:
            return
        yield _gauge("storm_nimbus_epoch", "Leadership epoch of the cluster", view.epoch)
        is_armed = healing["by"] == "sensor"
        yield _gauge("storm_healing_sensor_armed", "1 while a sensor of Dagster heals", is_armed)
        pause = healing["pause"]
        yield _gauge("storm_healing_paused", "1 while operators have paused healing", bool(pause))
        demands = slot_demands(view)
        yield from _view_metrics(view, demands)
        yield from _supervisor_metrics(view)
        if health["leader"]:
            # Only the leader reports them, so that sums over all nimbuses are right.
            yield from self._topologies()
            yield from _demand_metrics(demands)
            try:
                yield from self._events()
            except StormDagsterError:
                return

    def _process_metrics(self, health: Mapping[str, Any]) -> Iterator[Metric]:
        """Yield the gauges of this process, which need no ZooKeeper."""
        nimbus = self._nimbus
        yield _gauge("storm_nimbus_leader", "1 while this nimbus leads", health["leader"])
        yield _gauge("storm_nimbus_uptime_seconds", "Seconds since start", health["uptime_secs"])
        yield _gauge(
            "storm_nimbus_missing_blobs", "Needed blobs that this nimbus lacks", health["missing"]
        )
        yield _gauge(
            "storm_nimbus_open_uploads", "Upload sessions in progress", len(nimbus.uploads)
        )
        yield _gauge(
            "storm_nimbus_unreported_deeds", "Events to report to Dagster", len(nimbus.unreported)
        )
        yield _gauge(
            "storm_nimbus_blobs", "Blobs that this nimbus holds", len(nimbus.blobs.base.keys())
        )
        disk = disk_room(nimbus.inbox)
        if disk.free_mb is not None and disk.total_mb is not None:
            yield _gauge(
                "storm_nimbus_disk_free_bytes",
                "Free room on the disk of this nimbus",
                disk.free_mb * _MIB,
            )
            yield _gauge(
                "storm_nimbus_disk_bytes",
                "Size of the disk of this nimbus",
                disk.total_mb * _MIB,
            )
        connected = nimbus.cluster.session.connected
        yield _gauge("storm_nimbus_zookeeper_connected", "1 while ZooKeeper answers", connected)
        if nimbus.reads is not None:
            levels = ("memory", "disk", "zookeeper", "invalidated")
            reads = {(level,): getattr(nimbus.reads.metrics, level) for level in levels}
            yield _gauges(
                "storm_nimbus_cached_reads",
                "Reads of rarely changing nodes by the level that served them",
                "level",
                reads,
            )

    def _events(self) -> Iterator[Metric]:
        """Yield the numbers of events for Dagster, also of topologies that are gone."""
        summaries = self._nimbus.cluster.event_logs()
        now = time.time()
        waiting: dict[tuple[str, ...], float] = {}
        ages: dict[tuple[str, ...], float] = {}
        dropped: dict[tuple[str, ...], float] = {}
        for name, summary in summaries.items():
            waiting[name,] = summary.waiting
            ages[name,] = max(0.0, now - (summary.since or now))
            dropped[name,] = summary.dropped
        for name, values in (
            ("storm_topology_events_waiting", waiting),
            ("storm_topology_events_oldest_seconds", ages),
            ("storm_topology_events_dropped", dropped),
        ):
            yield _gauges(name, _TABLE["events"][name]["text"], "topology", values)

    def _topologies(self) -> Iterator[Metric]:
        """Yield the metrics of topologies.

        Counts, latencies and loads of a topology are left out if its topology master does not
        respond in time.
        """
        topologies = self._reader.snapshots(_TOPOLOGIES_SECS)
        reported = [topology for topology in topologies if topology.reported]
        for name, row in _TABLE["counts"].items():
            family = CounterMetricFamily(name, row["text"], labels=["topology"])
            for topology in reported:
                count = getattr(topology.totals(ALL_TIME), row["of"])
                family.add_metric([topology.name], count)
            yield family
        yield _gauges(
            "storm_topology_complete_latency_seconds",
            "Mean time to complete a tuple tree, over ten minutes",
            "topology",
            {(topology.name,): topology.totals("600").complete_ms / 1000 for topology in reported},
        )
        yield from component_metrics(reported)
        yield _gauges(
            "storm_topology_user_metric",
            "Newest number that a task gave to report_metric",
            "topology component task metric",
            _user_metrics(topologies),
        )
        for name, row in _TABLE["sizes"].items():
            yield _gauges(
                name,
                row["text"],
                "topology",
                {(topology.name,): getattr(topology, row["of"]) for topology in topologies},
            )


def _view_metrics(view: ClusterView, demands: Sequence[SlotDemand]) -> Iterator[Metric]:
    """Yield the numbers of topologies, supervisors, slots and workers of the cluster."""
    statuses = sorted(Tally((part.base.status,) for part in view.topologies.values()).items())
    yield _gauges("storm_topologies", "Topologies by status", "status", dict(statuses))
    yield _gauge("storm_supervisors", "Live supervisors", len(view.supervisors))
    used = sum(len(ports) for node, ports in view.used_ports().items() if node in view.supervisors)
    yield _gauge("storm_slots_used", "Slots in use on live supervisors", used)
    slots = sum(len(info.ports) for info in view.supervisors.values())
    yield _gauge("storm_slots_total", "Slots of live supervisors", slots)
    requested = sum(demand.requested for demand in demands)
    yield _gauge("storm_slots_wanted", "Slots that topologies ask for", requested)
    unplaced = sum(demand.has_unplaced for demand in demands)
    yield _gauge("storm_topologies_unplaced", "Topologies with a task without a slot", unplaced)
    draining = {info.host for info in view.supervisors.values() if info.draining}
    yield _gauge("storm_hosts_draining", "Hosts whose supervisor drains", len(draining))
    live = sum(len(part.live_workers) for part in view.topologies.values())
    yield _gauge("storm_workers_live", "Workers whose session lives", live)


def _supervisor_metrics(view: ClusterView) -> Iterator[Metric]:
    """Disks and clocks of supervisors, as far as they measure them."""
    for name, row in _TABLE["supervisors"].items():
        numbers: dict[tuple[str, ...], float] = {}
        for supervisor_id, info in sorted(view.supervisors.items()):
            number = getattr(info, row["of"])
            if number is not None:
                numbers[supervisor_id, info.host] = number * row.get("times", 1)
        yield _gauges(name, row["text"], "supervisor host", numbers)


def _demand_metrics(demands: Iterable[SlotDemand]) -> Iterator[Metric]:
    """Slots that each topology asks for and holds."""
    for name, row in _TABLE["demands"].items():
        numbers = {(demand.name,): float(getattr(demand, row["of"])) for demand in demands}
        yield _gauges(name, row["text"], "topology", numbers)


def _user_metrics(
    topologies: Iterable[TopologySnapshot],
) -> dict[tuple[str, str, str, str], float]:
    """Numbers that tasks report, by topology, component, task and metric.

    NaN and infinities, which the topology master reports as text, are numbers of Prometheus.
    """
    numbers: dict[tuple[str, str, str, str], float] = {}
    for topology in topologies:
        for (component, task), values in topology.metrics.items():
            for metric, value in values.items():
                if isinstance(value, str):
                    value = NON_FINITE.get(value)
                if isinstance(value, int | float):
                    numbers[topology.name, component, task, str(metric)] = float(value)
    return numbers


LabeledPart = tuple[tuple[str, str], ComponentSnapshot]
"""(name of the topology, id of the component) and the component."""


def component_metrics(topologies: Iterable[TopologySnapshot]) -> Iterator[Metric]:
    """Latencies, queues, capacity and lag of the components of users."""
    parts: list[LabeledPart] = []
    for topology in topologies:
        for _, part in sorted(topology.components.items()):
            if not part.is_system:
                parts.append(((topology.name, part.id), part))
    yield from _latencies(parts)
    yield from _loads(parts)
    yield from _streams(parts)
    yield from _partitions(parts)


def _latencies(parts: Sequence[LabeledPart]) -> Iterator[Metric]:
    """Histograms of latencies."""
    for name, row in _TABLE["latencies"].items():
        family = HistogramMetricFamily(name, row["text"], labels=["topology", "component"])
        for labels, part in parts:
            buckets = part.windows[ALL_TIME].buckets(row["of"])
            if buckets:
                counts, seconds = prometheus_buckets(buckets)
                family.add_metric(labels, counts, seconds)
        yield family


def _loads(parts: Sequence[LabeledPart]) -> Iterator[Metric]:
    """Queues, capacity and lag; spouts and bolts have their own ones."""
    for name, row in _TABLE["loads"].items():
        numbers: dict[tuple[str, ...], float] = {}
        for labels, part in parts:
            if row.get("kind") in (None, part.kind):
                number = getattr(part, row["of"])
                if number is not None:
                    numbers[labels] = number
        yield _gauges(name, row["text"], "topology component", numbers)


def _streams(parts: Sequence[LabeledPart]) -> Iterator[Metric]:
    """Counters of streams."""
    for metric in STREAM_METRICS:
        family = CounterMetricFamily(
            metric.metric, metric.text, labels=["topology", "component", "stream"]
        )
        for labels, part in parts:
            for stream, number in metric.by_stream(part).items():
                family.add_metric([*labels, stream], number)
        yield family


def _partitions(parts: Sequence[LabeledPart]) -> Iterator[Metric]:
    """Lag of the partitions of sources."""
    # The metrics of partitions are in the order of the numbers of a lag: records, seconds.
    for index, (name, row) in enumerate(_TABLE["partitions"].items()):
        lags: dict[tuple[str, ...], float] = {}
        for labels, part in parts:
            for partition, lag in part.lag_by_partition.items():
                number = lag[index]
                if number is not None:
                    lags[(*labels, partition)] = number
        yield _gauges(name, row["text"], "topology component partition", lags)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _gauges(name: str, text: str, labels: str, numbers: Mapping[tuple[str, ...], float]) -> Metric:
    """A gauge with a number for each tuple of values of its ``labels``.

    The names of the labels are separated by spaces.
    """
    family = GaugeMetricFamily(name, text, labels=labels.split())
    for values, number in numbers.items():
        family.add_metric(values, number)
    return family
