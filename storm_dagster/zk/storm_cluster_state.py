"""The cluster's state as the daemons, the runs and the tests use it."""

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from typing_extensions import Self

from storm_dagster.host.resolve import load_plugin
from storm_dagster.model import paths, records
from storm_dagster.model.conf import ClusterConf, default_conf
from storm_dagster.model.errors import Conflict, InvalidRequest, Unavailable, UnknownSubtree
from storm_dagster.model.records import Assignment, Record, decode_record, encode_record
from storm_dagster.model.view import ClusterView, UpgradeState, Versioned
from storm_dagster.security.settings import zookeeper_payload, zookeeper_tls
from storm_dagster.security.zookeeper_access import SUPER_ACL
from storm_dagster.zk import root, shards, view_loading
from storm_dagster.zk.cluster_state import ClusterState, ZooKeeperClusterState
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.task_errors import TaskErrors
from storm_dagster.zk.transaction import Transaction
from storm_dagster.zk.watches import Wake, WatchSlots
from storm_dagster.zk.worker_nodes import WorkerNodes

_log = logging.getLogger(__name__)

RecordT = TypeVar("RecordT", bound=Record)


def zookeeper_hosts(conf: Mapping[str, Any]) -> str:
    """``storm.zookeeper.servers`` as ``host:port,host:port``; servers without a port get the
    conf's.
    """
    servers, port = conf["storm.zookeeper.servers"], conf["storm.zookeeper.port"]
    if not servers:
        raise InvalidRequest("storm.zookeeper.servers is empty: name at least one server")
    return ",".join(_with_port(server, port) for server in servers)


def _with_port(server: str, port: int) -> str:
    if server.count(":") > 1 and not server.startswith("["):
        server = f"[{server}]"
    return server if ":" in server.rpartition("]")[2] else f"{server}:{port}"


def open_session(full: Mapping[str, Any]) -> ZkSession:
    """A session by the ``storm.zookeeper.*`` keys of a complete conf, whoever may write its
    root.
    """
    return ZkSession(
        zookeeper_hosts(full),
        root=full["storm.zookeeper.root"],
        session_timeout_ms=full["storm.zookeeper.session.timeout"],
        connection_timeout_ms=full["storm.zookeeper.connection.timeout"],
        retry_times=full["storm.zookeeper.retry.times"],
        retry_interval_ms=full["storm.zookeeper.retry.interval"],
        auth=zookeeper_payload(full),
        super_acl=full.get(SUPER_ACL) or "",
        tls=zookeeper_tls(full),
    )


def connect_session(conf: Mapping[str, Any] | ClusterConf) -> ZkSession:
    """A session by the ``storm.zookeeper.*`` keys of the conf; absent ones have their defaults.

    With ``storm.zookeeper.auth.payload`` or a secret, a root that everybody may write is
    :class:`Conflict`. Workers, which cannot read its ACL, trust their supervisor.
    """
    full = {**default_conf(), **(conf.values if isinstance(conf, ClusterConf) else conf)}
    session = open_session(full)
    if zookeeper_payload(full) and not full.get(SUPER_ACL):
        try:
            root.refuse_open_root(session)
        except BaseException:
            session.close()
            raise
    return session


def _open_state(conf: Mapping[str, Any] | ClusterConf) -> ClusterState:
    """ZooKeeper's, or what ``storm.cluster.state.store`` (``module:factory``) makes of the conf
    map.
    """
    given = conf.values if isinstance(conf, ClusterConf) else conf
    named = given.get("storm.cluster.state.store")
    if not named:
        return ZooKeeperClusterState(connect_session(given))
    state = load_plugin("storm.cluster.state.store", named)({**default_conf(), **given})
    if not isinstance(state, ClusterState):
        raise InvalidRequest(
            f"storm.cluster.state.store {named!r} made a {type(state).__name__}, which is not a ClusterState: "
            "it must offer every method of storm_dagster.zk.state_protocol.ClusterState"
        )
    return state


class StormClusterState(WorkerNodes, TaskErrors, AbstractContextManager["StormClusterState"]):
    """Everything that Storm keeps in ZooKeeper, as daemons read and write it.

    A write is guarded by the leadership epoch, by this session, or by the version of the
    assignment. Storm's own operations, some of them unguarded, are those of
    :class:`~storm_dagster.zk.storm_operations.StormOperations`.

    ``wake`` arguments are one-shot: called once without arguments, from ZooKeeper's thread, at the
    next change of what is read or when changes may have been missed (every reconnection issues all
    of them). They may only set an event, and must be given again with the next read. They are
    hints: read everything again from time to time as well.
    """

    def __init__(self, state: ClusterState, cluster_id: str, *, owns_state: bool) -> None:
        self.state = state
        self.watches: WatchSlots = WatchSlots()
        self._cluster_id = cluster_id
        self._owns_state = owns_state
        self._interrupted = threading.Event()
        self._registration = state.register(self._on_event)
        state.add_listener(self._on_connection)

    @classmethod
    def open(
        cls,
        conf_or_state: Mapping[str, Any] | ClusterConf | ClusterState,
        *,
        create_root: bool = False,
        cluster_id: str | None = None,
    ) -> Self:
        """The state of the cluster below the root, with the cluster id checked.

        A ``ClusterState`` is used and left open by :meth:`disconnect`; a conf gets a client of its
        own, which that closes. ``cluster_id`` is the id that the caller remembers: another one is
        ``Conflict``. With the root absent, nothing is created and ``Unavailable`` raised, unless
        ``create_root`` (which makes the first-level nodes, and an id when none is given).
        """
        owns = isinstance(conf_or_state, ClusterConf | Mapping)
        state = _open_state(conf_or_state) if owns else conf_or_state
        try:
            return cls(state, cls._identify(state, create_root, cluster_id), owns_state=owns)
        except BaseException:
            if owns:
                state.close()
            raise

    @staticmethod
    def _identify(state: ClusterState, create_root: bool, expected: str | None) -> str:
        if create_root and root.find_cluster_id(state) is None:
            try:
                root.create_cluster_root(state, expected or uuid.uuid4().hex)
            except Conflict:
                # Another was faster: its id is as good as the one made up here, but not as one
                # given.
                if expected is not None:
                    raise
        return root.check_cluster_id(state, expected)

    def cluster_id(self) -> str:
        """The id of the cluster that this object was opened for."""
        return self._cluster_id

    def check_cluster_id(self) -> None:
        """Ask ZooKeeper again: ``Unavailable`` when the root is gone, ``Conflict`` when it is
        another's.
        """
        root.check_cluster_id(self.state, self._cluster_id)

    @property
    def session(self) -> ZkSession:
        """The session below: leases, requests. ``InvalidRequest`` when the state has none."""
        found = getattr(self.state, "session", None)
        if not isinstance(found, ZkSession):
            raise InvalidRequest(
                f"{type(self.state).__name__} is not on a ZooKeeper session: ask the state itself"
            )
        return found

    def disconnect(self) -> None:
        """Unregister the callbacks; close the client if it was made by :meth:`open` from a conf."""
        self.state.unregister(self._registration)
        self.state.remove_listener(self._on_connection)
        self.watches.clear()
        if self._owns_state:
            self.state.close()

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    # -- events ------------------------------------------------------------------------------------

    def _on_event(self, kind: str, path: str) -> None:
        try:
            self.watches.dispatch(kind, path)
        except UnknownSubtree as error:
            # Storm ends its process here. The loops read everything again instead, and go on.
            _log.error("%s", error.message)
            self.watches.wake_all()

    def _on_connection(self, connection: str) -> None:
        if connection != "CONNECTED":
            self._interrupted.set()
        elif self._interrupted.is_set():
            self._interrupted.clear()
            # Watches die with the connection: their events may have been lost.
            self.session.dispatch(self.watches.wake_all)

    # -- reading -----------------------------------------------------------------------------------

    def _callback(self, path: str, callback: Callable[..., object] | None) -> bool:
        """Register before reading, so that no change falls between the two."""
        if callback is not None:
            self.watches.set_callback(path, callback)
        return callback is not None

    def _record(
        self, cls: type[RecordT], path: str, watch: bool = False
    ) -> tuple[RecordT, Versioned] | None:
        found = self.state.get_data_with_version(path, watch)
        if found is None or not found[0]:
            return None
        return decode_record(cls, found[0], path), found[1]

    def _read(self, cls: type[RecordT], path: str, watch: bool = False) -> RecordT | None:
        found = self._record(cls, path, watch)
        return None if found is None else found[0]

    def assignment_info(
        self, topology_id: str, callback: Callable[..., object] | None = None
    ) -> Assignment | None:
        """``/assignments/<id>``: which slots run which tasks; ``None`` without one."""
        path = paths.assignment(topology_id)
        found = shards.read_sharded(self.state, path, self._callback(path, callback))
        return None if found is None else decode_record(Assignment, found[0], path)

    def active_storms(self) -> list[str]:
        """``/topology``: ids of the topologies that exist, in whatever status, sorted."""
        return self.state.find_children(paths.TOPOLOGY) or []

    def storm_base(
        self, topology_id: str, callback: Callable[..., object] | None = None
    ) -> records.StormBase | None:
        """``/topology/<id>``: what the topology is and should be doing; ``None`` when it does not
        exist.
        """
        path = paths.topology(topology_id)
        return self._read(records.StormBase, path, self._callback(path, callback))

    def load_view(self, wake: Wake | None = None) -> ClusterView:
        """Everything at (nearly) one moment; see :func:`~storm_dagster.zk.view_loading.load_view`.

        The epoch is -1 before the first leader. Damaged records are in ``ClusterView.corrupt``.
        ``wake`` is called when supervisors come or go, and at changes of topologies, assignments,
        heartbeat records and live workers, and when the leader changes; not when a supervisor's
        record is rewritten.
        """
        before = None if wake is None else lambda path: self.watches.add_wake(path, wake)
        return view_loading.load_view(self.state, self._cluster_id, before)

    def epoch(self) -> tuple[int, records.EpochRecord] | None:
        """The leadership epoch (data version of ``/epoch``) and who holds it; ``None`` before any
        leader.
        """
        found = self._record(records.EpochRecord, paths.EPOCH)
        return None if found is None else (found[1].version, found[0])

    def leader_http(self) -> str:
        """Base URL of the leading nimbus; :class:`Unavailable` when there was never a leader."""
        current = self.epoch()
        if current is None:
            raise Unavailable(
                "no nimbus has led this cluster yet: start one with `storm-dagster daemon nimbus` or `storm-dagster dev`"
            )
        return current[1].http

    def assignment_changes(self, wake: Wake | None = None) -> tuple[int, bytes]:
        """Version and data of ``/assignments``: every change of an assignment raises it. See
        ``append_change`` of operations.
        """
        found = self.state.get_data_with_version(
            paths.ASSIGNMENTS, self.watch(paths.ASSIGNMENTS, wake)
        )
        if found is None:
            raise Unavailable(
                f"the root of cluster {self._cluster_id} lacks {paths.ASSIGNMENTS}: nothing was read"
            )
        return found[1].version, found[0]

    def read_assignment(
        self, topology_id: str, wake: Wake | None = None
    ) -> tuple[Assignment, Versioned] | None:
        """The assignment and its version; ``None`` without one. ``wake`` also fires when it is
        removed.
        """
        path = paths.assignment(topology_id)
        found = shards.read_sharded(self.state, path, self.watch(path, wake))
        return None if found is None else (decode_record(Assignment, found[0], path), found[1])

    def read_tasks(self, topology_id: str) -> records.TaskTable | None:
        """``/tasks/<id>``: which task belongs to which component."""
        return self._read(records.TaskTable, paths.tasks(topology_id))

    def read_log_levels(self, topology_id: str) -> records.KeptLevels:
        """``/topology/<id>/log_levels``; empty without one."""
        return self._read(records.KeptLevels, paths.log_levels(topology_id)) or records.KeptLevels()

    def read_state_home(self, topology_id: str) -> records.StateHome:
        """``/topology/<id>/state``; empty without one."""
        return self._read(records.StateHome, paths.state_home(topology_id)) or records.StateHome(
            marker=""
        )

    def read_upgrade(self, topology_id: str, wake: Wake | None = None) -> UpgradeState:
        """Everything below ``/gray_upgrade/<id>``. ``wake`` is called when the record comes,
        changes or goes.
        """
        from storm_dagster.zk.gray_upgrades import (
            read_upgrade,
        )  # A worker has no use for its rules.

        return read_upgrade(
            self.state, topology_id, self.watch(paths.gray_upgrade(topology_id), wake)
        )

    def blacklist(self) -> frozenset[str]:
        """Hosts that get no new work."""
        found = self._read(records.Blacklist, paths.BLACKLIST)
        return frozenset(found.hosts if found is not None else ())

    # -- writing -----------------------------------------------------------------------------------

    def supervisor_heartbeat(self, supervisor_id: str, info: records.SupervisorInfo) -> None:
        """``/supervisors/<id>``: write the supervisor's ephemeral record, in this session."""
        self.state.set_ephemeral_node(paths.supervisor(supervisor_id), encode_record(info))

    def write_beats(
        self, topology_id: str, beats: records.TaskBeats, *, assignment_version: int
    ) -> int:
        """Replace ``/taskbeats/<id>`` if the assignment still has that version; returns the new
        version.

        The record is never created: ``Conflict`` when it is gone, because the topology is, and when
        the assignment moved on.
        """
        transaction = self._assigned(topology_id, assignment_version)
        landed = transaction.set(paths.taskbeats(topology_id), encode_record(beats), -1).commit()[
            -1
        ]
        assert isinstance(landed, int)
        return landed

    def change_state_home(
        self,
        topology_id: str,
        changed: Callable[[records.StateHome], records.StateHome],
        *,
        assignment_version: int,
    ) -> records.StateHome:
        """Write what ``changed`` makes of :meth:`read_state_home`, and return it; ``Conflict`` as
        :meth:`write_beats`.
        """
        path = paths.state_home(topology_id)
        while True:
            found = self._record(records.StateHome, path)
            before = records.StateHome(marker="") if found is None else found[0]
            after = changed(before)
            if after == before:
                return before
            transaction = self._assigned(topology_id, assignment_version)
            try:
                transaction.put(
                    path, encode_record(after), None if found is None else found[1].version
                ).commit()
            except Conflict as error:
                # Another worker wrote it, unless the topology is gone.
                if error.path != path or not self.state.exists(paths.topology(topology_id)):
                    raise
            else:
                return after

    def _assigned(self, topology_id: str, version: int) -> Transaction:
        return self.state.transaction().check(paths.assignment(topology_id), version)

    def fenced(self, epoch: int) -> Transaction:
        """A transaction that lands only while ``epoch`` is the leadership epoch."""
        return self.state.transaction().check(paths.EPOCH, epoch)

    def register_metrics(
        self, topology_id: str, sample_rate: float, names: Iterable[str], *, assignment_version: int
    ) -> records.MetricIds | None:
        """Give ids to the names that have none, in ``/metrics/<id>``, by compare and set.

        ``Conflict`` when the assignment no longer has that version. ``None`` when the node is gone,
        because the topology is; nothing is written when nothing changes.
        """
        path = paths.metrics(topology_id)
        raw = self.state.get_data_with_version(path)
        if raw is None:
            return None
        # Empty from its creation until the topology is active.
        known = (
            decode_record(records.MetricIds, raw[0], path)
            if raw[0]
            else records.MetricIds(sample_rate=sample_rate)
        )
        ids = dict(known.ids)
        for name in names:
            ids.setdefault(name, len(ids) + 1)
        record = known.model_copy(update={"sample_rate": sample_rate, "ids": ids})
        if not raw[0] or ids != known.ids:
            self._assigned(topology_id, assignment_version).set(
                path, encode_record(record), raw[1].version
            ).commit()
        return record
