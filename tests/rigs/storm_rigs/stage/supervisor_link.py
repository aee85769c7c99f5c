"""Supervisors that are only their link to ZooKeeper: the real code, without processes of
workers.
"""

from __future__ import annotations

from typing import Any

from storm_dagster.host.clock import boot_clock
from storm_dagster.model.conf import ClusterConf, default_conf
from storm_dagster.model.records import SupervisorInfo
from storm_dagster.supervisor.cluster_link import ClusterLink
from storm_dagster.supervisor.upgrades import Upgrades
from storm_dagster.zk.session import ZkSession


class LinkedSupervisor:
    """One link with its own session."""

    def __init__(
        self, conf: dict[str, Any], name: str, ports: tuple[int, ...] = (6900, 6901, 6902, 6903)
    ) -> None:
        values = {**default_conf(), "supervisor.heartbeat.frequency.secs": 0.2, **conf}
        self.name, self.beats, self._passes = name, 0, 0
        self._ports = ports
        self.link = ClusterLink(
            ClusterConf(values, dict.fromkeys(values, "test")),
            name,
            cluster_id=None,
            save_cluster_id=lambda _: None,
            info=self._info,
            passes=self._pass,
            wake=lambda: None,
            upgrades=Upgrades(name, lambda: (), boot_clock, 120.0),
        )

    def _info(self, count: int) -> SupervisorInfo:
        self.beats = count - 1
        return SupervisorInfo(
            host=self.name, ports=self._ports, started=0, count=count, version="t"
        )

    def _pass(self) -> int:
        self._passes += 1
        return self._passes

    @property
    def session(self) -> ZkSession:
        """Its session, once it has connected."""
        assert self.link._cluster is not None
        return self.link._cluster.session

    def runs(self) -> set[str]:
        """Ids of the topologies that it is to run."""
        return (
            {work.topology_id for work in self.link.desired.work.values()}
            if self.link.desired
            else set()
        )
