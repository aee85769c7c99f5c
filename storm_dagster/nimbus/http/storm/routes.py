"""The routes of Storm's REST."""

from __future__ import annotations

from functools import partial

from storm_dagster.http.description import HttpApi
from storm_dagster.nimbus.http.storm.actions import LogLevelsRequest, StormRebalance, TopologyActions
from storm_dagster.nimbus.http.storm.cluster_pages import ClusterPages
from storm_dagster.nimbus.http.storm.topology_pages import TopologyPages
from storm_dagster.nimbus.http.storm.visualization import visualization, visualization_table
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.window_stats import check_window
from storm_dagster.nimbus.requests.worker_levels import WorkerLevels


def add_storm_routes(api: HttpApi, nimbus: Nimbus, reader: ClusterReader) -> None:
    """Add everything under ``/api/v1`` that is not about logs."""
    handlers = {
        "cluster": ClusterPages(nimbus, reader),
        "topology": TopologyPages(nimbus, reader),
        "actions": TopologyActions(LifecycleRequests(nimbus), reader, WorkerLevels(nimbus)),
        "graph": partial(visualization, reader),
        "streams": partial(visualization_table, reader),
    }
    types = {"StormRebalance": StormRebalance, "LogLevelsRequest": LogLevelsRequest}
    readers = {"window": check_window, "sys": lambda text: text in ("1", "true")}
    api.add("storm_dagster.nimbus.http.storm", handlers, types, readers)
