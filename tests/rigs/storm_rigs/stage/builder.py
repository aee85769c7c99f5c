"""The builder of the clusters that tests run on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from typing_extensions import Self

from storm_dagster.api import TopologyBuilder
from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model.topology import TopologySpec
from storm_dagster.supervisor.log_service import LogService
from storm_dagster.testing.waiting import patience
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.servers.blob_server import BlobServer
from storm_rigs.stage.conf import LASTING_SESSION_MS
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.records import Records, World
from storm_rigs.stage.supervisor_processes import SupervisorRig
from storm_rigs.stage.worker_processes import WorkerRig


class Stage:
    """One cluster of a test, with each role at the level that the test needs.

    The roles share ``conf``, which leads to the cluster's root in ZooKeeper
    (:func:`~storm_rigs.stage.conf.zookeeper_conf`), and the folder. ``home`` is HOME of the
    daemons, by default a subfolder. What was started ends in reverse order, also when a later start
    fails. The package's docstring has the table of roles and levels.
    """

    def __init__(self, folder: Path, conf: Mapping[str, Any], *, home: Path | None = None) -> None:
        self.folder = folder
        self.home = home or folder / "home"
        self.conf: dict[str, Any] = dict(conf)
        self.nimbuses: list[NimbusThread] = []
        """In the order of their start."""
        self._ends = ExitStack()
        self._cluster: StormClusterState | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all that was started, the last first. Closing twice does nothing."""
        self._ends.close()

    # -- records -----------------------------------------------------------------------------------
    @property
    def cluster(self) -> StormClusterState:
        """State of the cluster in a session of the test's own; it creates the root."""
        if self._cluster is None:
            lasting = {"storm.zookeeper.session.timeout": patience(LASTING_SESSION_MS)}
            self._cluster = StormClusterState.open({**self.conf, **lasting}, create_root=True)
            self._ends.callback(self._cluster.disconnect)
        return self._cluster

    def world(self) -> World:
        """A leader's epoch and two supervisors of four slots, and the operations on them."""
        conf = {**self.conf, "task.cleanup.timeout.sec": 0}
        world = World(self.cluster, LocalBlobStore(self.folder / "blobs"), conf)
        world.lead()
        world.supervisor("s1")
        world.supervisor("s2")
        return world

    # -- threads of this process -------------------------------------------------------------------
    def nimbus(
        self, nimbus_id: str = "n1", conf: Mapping[str, Any] | None = None, **values: Any
    ) -> NimbusThread:
        """A nimbus with free ports, which may not serve yet. ``conf`` and ``values`` (with "__" for
        ".") are keys of its own.
        """
        keys = {name.replace("__", "."): value for name, value in values.items()}
        ports = {"nimbus.thrift.port": 0, "nimbus.http.port": 0}
        limits = {"dagster.launch.timeout.secs": patience(60)}
        own = load_cluster_conf(None, {**limits, **self.conf, **ports, **(conf or {}), **keys})
        nimbus = NimbusThread(own, self.home, nimbus_id)
        self._ends.callback(nimbus.stop)
        self.nimbuses.append(nimbus)
        return nimbus

    def log_service(self, supervisor_id: str = "s1", **fields: Any) -> LogService:
        """The HTTP service of a supervisor over the folder's logs, and the supervisor's record with
        ``fields``; no supervisor runs.
        """
        conf = load_cluster_conf(None, {**self.conf, "supervisor.http.port": 0})
        service = LogService(conf, self.folder, supervisor_id)
        service.start(lambda: ())
        self._ends.callback(service.stop)
        records = Records(self.cluster, LocalBlobStore(self.folder / "blobs"))
        records.supervisor(supervisor_id, host="127.0.0.1", http=service.url, **fields)
        return service

    # -- processes ---------------------------------------------------------------------------------
    def workers(
        self,
        topology: TopologyBuilder | TopologySpec,
        tasks: Mapping[str, str],
        *,
        code: str | Mapping[str, str],
        conf: Mapping[str, Any] | None = None,
        name: str = "wc",
        launched: int = 1_700_000_000,
        folder: Path | None = None,
    ) -> WorkerRig:
        """Worker processes of a topology, which the test assigns and starts.

        ``tasks``: component -> task ranges, of system components too. ``code``: the module
        ``rig_code``, or file -> text. ``conf`` is the topology's.
        """
        rig = WorkerRig(
            folder or self.folder, self.cluster, self.conf, topology, tasks,
            code=code, conf=conf, name=name, launched=launched,
        )  # fmt: skip
        self._ends.callback(rig.stop)
        return rig

    def supervisors(self, blobs: BlobServer, python: str) -> SupervisorRig:
        """Supervisor processes, which the test starts. They fetch code from ``blobs`` and start
        ``python`` for their workers.
        """
        self.home.mkdir(parents=True, exist_ok=True)
        rig = SupervisorRig(self.home, self.conf, self.cluster, blobs, python)
        self._ends.callback(rig.stop)
        return rig
