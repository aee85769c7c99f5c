"""``/metrics`` for Prometheus. Labels come from fixed sets only: route patterns, statuses, never callers' words."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.reading import ClusterReader

__all__ = ["Metrics"]


class Metrics:
    """The figures of one nimbus, in a registry of its own."""

    media_type = CONTENT_TYPE_LATEST

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
        self._registry.register(_ClusterFigures(nimbus, reader))

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(method, route).observe(seconds)

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)


class _ClusterFigures(Collector):
    """Gauges that are read at the moment of a scrape; without ZooKeeper only those of the process."""

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader

    def describe(self) -> list[Metric]:
        """Nothing in advance: a scrape decides."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The gauges."""
        nimbus = self._nimbus
        health = self._reader.health()
        yield _gauge("storm_nimbus_leader", "1 while this nimbus leads", health["leader"])
        yield _gauge("storm_nimbus_uptime_seconds", "Seconds since start", health["uptime_secs"])
        yield _gauge("storm_nimbus_missing_blobs", "Needed blobs that this nimbus lacks", health["missing"])
        yield _gauge("storm_nimbus_open_uploads", "Upload sessions in progress", len(nimbus.uploads))
        yield _gauge("storm_nimbus_unreported_deeds", "Deeds to report to Dagster", len(nimbus.unreported))
        connected = nimbus.cluster.session.connected
        yield _gauge("storm_nimbus_zookeeper_connected", "1 while ZooKeeper answers", connected)
        if nimbus.reads is not None:
            figures = GaugeMetricFamily(
                "storm_nimbus_cached_reads",
                "Reads of rarely changing nodes by who answered",
                labels=["level"],
            )
            for level in ("memory", "disk", "zookeeper", "invalidated"):
                figures.add_metric([level], getattr(nimbus.reads.figures, level))
            yield figures
        try:
            view = self._reader.view()
        except StormDagsterError:
            return
        yield _gauge("storm_nimbus_epoch", "Leadership epoch of the cluster", view.epoch)
        statuses = GaugeMetricFamily("storm_topologies", "Topologies by status", labels=["status"])
        for word, count in sorted(Tally(part.base.status for part in view.topologies.values()).items()):
            statuses.add_metric([word], count)
        yield statuses
        yield _gauge("storm_supervisors", "Live supervisors", len(view.supervisors))
        used = sum(len(ports) for node, ports in view.used_ports().items() if node in view.supervisors)
        yield _gauge("storm_slots_used", "Slots in use on live supervisors", used)
        yield _gauge(
            "storm_slots_total",
            "Slots of live supervisors",
            sum(len(i.ports) for i in view.supervisors.values()),
        )
        live = sum(len(part.live_workers) for part in view.topologies.values())
        yield _gauge("storm_workers_live", "Workers whose session lives", live)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))
