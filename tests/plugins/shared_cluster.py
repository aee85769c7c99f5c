"""One whole local cluster for all modules that need no other: starting one takes longer than most
of what is tested.

A module that uses ``shared_cluster`` finds it without topologies and with all of its daemons, and
may do to it whatever it likes: what it leaves running is killed, and a cluster that lacks a daemon
afterwards is replaced by a new one. It ends with the last module of its group (:mod:`work_order`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from work_order import scope

from storm_dagster.model.errors import Conflict, NotAlive, StormDagsterError
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually

SUPERVISORS = 4
# Quick enough for tests that wait for it, and slow enough for a machine that runs other tests at
# the same time.
CONF = {"nimbus.monitor.backstop.secs": 20, "supervisor.worker.timeout.secs": 8}


class SharedCluster:
    """Lends one cluster to one module after the other."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._cluster: LocalCluster | None = None
        self._daemons: set[tuple[str, str]] = set()

    def lend(self) -> LocalCluster:
        """A cluster without topologies in which every daemon runs."""
        if self._cluster is None:
            home: Path = self._factory.mktemp("shared") / "home"
            made = LocalCluster(
                home, supervisors=SUPERVISORS, slots=2, nimbuses=2, conf=CONF, timeout=400
            )
            try:
                made.start()
            except BaseException:
                made.stop()
                raise
            self._cluster, self._daemons = made, self._running(made)
        return self._cluster

    def take_back(self) -> None:
        """Leave it as it was lent, or end it where that cannot be."""
        cluster = self._cluster
        assert cluster is not None
        try:
            for row in cluster.topologies():
                try:
                    cluster.cli("kill", row["name"], "-w", "0")
                except (NotAlive, Conflict):
                    continue  # It is on its way out.
            eventually(
                lambda: not cluster.topologies(), 60, "the end of what the module left running"
            )
            eventually(lambda: self._whole(cluster), 20, "every daemon")
        except (StormDagsterError, AssertionError):
            self.end()

    def end(self) -> None:
        """End every process of it."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()

    def _whole(self, cluster: LocalCluster) -> bool:
        with cluster.nimbus() as nimbus:
            registered = len(nimbus.get("/v1/cluster")["supervisors"])
        return registered == SUPERVISORS and self._running(cluster) >= self._daemons

    @staticmethod
    def _running(cluster: LocalCluster) -> set[tuple[str, str]]:
        return {
            (record.role, record.id) for record in cluster.processes() if record.role != "worker"
        }


@pytest.fixture(scope="session")
def _shared_clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    pool = SharedCluster(tmp_path_factory)
    yield pool
    pool.end()


_NEXT = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Note whether another module of the group follows."""
    item.session.stash[_NEXT] = nextitem is not None and scope(nextitem.nodeid) == scope(
        item.nodeid
    )


@pytest.fixture(scope="module")
def shared_cluster(
    _shared_clusters: SharedCluster, request: pytest.FixtureRequest
) -> Iterator[LocalCluster]:
    """Four supervisors of two slots, two nimbuses, Spark and Dagster; nothing runs on it yet."""
    yield _shared_clusters.lend()
    # Its twenty processes, doing nothing, would slow down every test that follows.
    if request.session.stash.get(_NEXT, False):
        _shared_clusters.take_back()
    else:
        _shared_clusters.end()
