"""The topology master's registry of metric ids: ``/metrics/<id>``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from storm_dagster.zk.storm_cluster_state import StormClusterState

__all__ = ["MetricIdsDriver"]

_log = logging.getLogger(__name__)
_MOST_NAMES = 1000
"""Names beyond these get no id: the node stays small."""


class MetricIdsDriver:
    """Pushes the start event when the topology is active, and ids for metrics when new ones are reported."""

    def __init__(self, topology_id: str, conf: Mapping[str, Any], cluster: StormClusterState) -> None:
        rate = conf.get("topology.metric.sample.rate")
        self._rate = 1.0 if rate is None else float(rate)
        self._topology_id = topology_id
        self._cluster = cluster
        self._known: frozenset[str] | None = None

    def drive(self, names: list[str], assignment_version: int) -> None:
        """Bring the registry up to date; nothing is read or written while nothing is new."""
        wanted = names[:_MOST_NAMES]
        if self._known is not None and (self._known.issuperset(wanted) or len(self._known) >= _MOST_NAMES):
            return
        record = self._cluster.register_metrics(
            self._topology_id, self._rate, wanted, assignment_version=assignment_version
        )
        if record is None:
            return
        if self._known is None:
            _log.info("the topology is active; latencies are taken of %g of the tuples", record.sample_rate)
        self._known = frozenset(record.ids)
