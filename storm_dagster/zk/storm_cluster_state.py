"""State of the cluster, as the daemons, the runs and the tests use it."""

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from typing_extensions import Self

from storm_dagster.host.resolve import load_plugin
from storm_dagster.model import paths, records
from storm_dagster.model.conf import ClusterConf, default_conf
from storm_dagster.model.errors import Conflict, InvalidRequest, Unavailable, UnknownSubtree
from storm_dagster.model.healing_pause import HealingPause
from storm_dagster.model.log_levels import KeptLevels
from storm_dagster.model.metric_ids import MetricIds
from storm_dagster.model.records import Assignment, RecordT, decode_record, encode_record
from storm_dagster.model.view import ClusterView, UpgradeState, Versioned
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.security.settings import zookeeper_payload, zookeeper_tls
from storm_dagster.security.zookeeper_access import SUPER_ACL
from storm_dagster.zk import root, shards, view_loading
from storm_dagster.zk.cluster_state import ClusterState, ZooKeeperClusterState
from storm_dagster.zk.event_logs import EventLogs
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.task_errors import TaskErrors
from storm_dagster.zk.transaction import Transaction
from storm_dagster.zk.watches import Wake, WatchSlots
from storm_dagster.zk.worker_nodes import WorkerNodes

_log = logging.getLogger(__name__)


def zookeeper_hosts(conf: Mapping[str, Any]) -> str:
    """``storm.zookeeper.servers`` as ``host:port,host:port``.

    Servers without a port have ``storm.zookeeper.port``.
    """
    servers = conf["storm.zookeeper.servers"]
    port = conf["storm.zookeeper.port"]
    if not servers:
        raise InvalidRequest("storm.zookeeper.servers is empty: name at least one server")
    return ",".join(_with_port(server, port) for server in servers)


def _with_port(server: str, port: int) -> str:
    """``host:port`` of a server; an IPv6 address gets brackets, and then the port."""
    is_ipv6 = server.count(":") > 1
    if is_ipv6 and not server.startswith("["):
        server = f"[{server}]"
    after_brackets = server.rpartition("]")[2]
    return server if ":" in after_brackets else f"{server}:{port}"


def open_session(full_conf: Mapping[str, Any]) -> ZkSession:
    """Open a session by the ``storm.zookeeper.*`` keys of a complete conf.

    The ACL of the root is not checked.
    """
    return ZkSession(
        zookeeper_hosts(full_conf),
        root=full_conf["storm.zookeeper.root"],
        session_timeout_ms=full_conf["storm.zookeeper.session.timeout"],
        connection_timeout_ms=full_conf["storm.zookeeper.connection.timeout"],
        retry_times=full_conf["storm.zookeeper.retry.times"],
        retry_interval_ms=full_conf["storm.zookeeper.retry.interval"],
        auth=zookeeper_payload(full_conf),
        super_acl=full_conf.get(SUPER_ACL) or "",
        tls=zookeeper_tls(full_conf),
        trusted=TrustedServers.of(full_conf),
    )


def _conf_values(conf: Mapping[str, Any] | ClusterConf) -> Mapping[str, Any]:
    return conf.values if isinstance(conf, ClusterConf) else conf


def connect_session(conf: Mapping[str, Any] | ClusterConf) -> ZkSession:
    """Open a session by the ``storm.zookeeper.*`` keys, and check its root.

    Absent keys have their defaults. With ``storm.zookeeper.auth.payload`` or a secret, a root that
    all clients may write is :class:`Conflict`. Workers, which cannot read its ACL, trust their
    supervisor.
    """
    full_conf = {**default_conf(), **_conf_values(conf)}
    session = open_session(full_conf)
    if zookeeper_payload(full_conf) and not full_conf.get(SUPER_ACL):
        try:
            root.refuse_open_root(session)
        except BaseException:
            session.close()
            raise
    return session


def open_cluster_state(conf: Mapping[str, Any] | ClusterConf) -> ClusterState:
    """Open ZooKeeper's store, or the one of ``storm.cluster.state.store``.

    The key is ``module:factory``; the factory is called with the conf map.
    """
    values = _conf_values(conf)
    factory_name = values.get("storm.cluster.state.store")
    if not factory_name:
        return ZooKeeperClusterState(connect_session(values))
    factory = load_plugin("storm.cluster.state.store", factory_name)
    state = factory({**default_conf(), **values})
    if not isinstance(state, ClusterState):
        raise InvalidRequest(
            f"storm.cluster.state.store {factory_name!r} made a {type(state).__name__}, which is "
            "not a ClusterState: it must offer every method of "
            "storm_dagster.zk.state_protocol.ClusterState"
        )
    return state


class StormClusterState(
    WorkerNodes, TaskErrors, EventLogs, AbstractContextManager["StormClusterState"]
):
    """All state that Storm keeps in ZooKeeper, as daemons read and write it.

    A write is guarded by the leadership epoch, by this session, or by the version of the
    assignment. Storm's original operations, some of them unguarded, are those of
    :class:`~storm_dagster.zk.storm_operations.StormOperations`.

    ``wake`` arguments are one-shot: called once without arguments, from ZooKeeper's thread, at the
    next change of the nodes that are read, or when changes may have been missed (every reconnection
    issues all of them). They may only set an event, and the next read must pass them once more.
    They are hints: a reader must also reread everything from time to time.
    """

    def __init__(self, state: ClusterState, cluster_id: str, *, owns_state: bool) -> None:
        self.state = state
        self.watches: WatchSlots = WatchSlots()
        self._cluster_id = cluster_id
        self._owns_state = owns_state
        """True if :meth:`disconnect` closes the state."""
        self._interrupted = threading.Event()
        """Set from an interruption of the connection until the reconnection."""
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
        """State of the cluster below the root.

        Its cluster id is checked. :meth:`disconnect` leaves a given ``ClusterState`` open; a conf
        gets a new client, which :meth:`disconnect` closes. ``cluster_id`` is the id that the caller
        remembers: another one is ``Conflict``. If the root is absent, no node is created and
        ``Unavailable`` is raised, unless ``create_root`` is set (it creates the first-level nodes,
        and an id if none is given).
        """
        owns = isinstance(conf_or_state, ClusterConf | Mapping)
        state = open_cluster_state(conf_or_state) if owns else conf_or_state
        try:
            return cls(state, cls._identify(state, create_root, cluster_id), owns_state=owns)
        except BaseException:
            if owns:
                state.close()
            raise

    @staticmethod
    def _identify(state: ClusterState, create_root: bool, expected: str | None) -> str:
        """Checked cluster id of the root, which is created first if it is to be."""
        if create_root and root.find_cluster_id(state) is None:
            try:
                root.create_cluster_root(state, expected or uuid.uuid4().hex)
            except Conflict:
                # Another process was faster: its id replaces a random one, but not a given one.
                if expected is not None:
                    raise
        return root.check_cluster_id(state, expected)

    def cluster_id(self) -> str:
        """Id of the cluster for which this object was opened."""
        return self._cluster_id

    def check_cluster_id(self) -> None:
        """Read the cluster id from ZooKeeper, and compare it.

        Raises ``Unavailable`` if the root is gone, ``Conflict`` if it belongs to another cluster.
        """
        root.check_cluster_id(self.state, self._cluster_id)

    @property
    def session(self) -> ZkSession:
        """Session of the state, for leases and requests.

        Raises ``InvalidRequest`` if the state has none.
        """
        session = getattr(self.state, "session", None)
        if not isinstance(session, ZkSession):
            raise InvalidRequest(
                f"{type(self.state).__name__} is not on a ZooKeeper session: ask the state itself"
            )
        return session

    def disconnect(self) -> None:
        """Unregister the callbacks.

        A client that :meth:`open` made from a conf is closed.
        """
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
            # Storm ends its process here. These loops reread everything instead, and continue.
            _log.error("%s", error.message)
            self.watches.wake_all()

    def _on_connection(self, connection: str) -> None:
        if connection != "CONNECTED":
            self._interrupted.set()
        elif self._interrupted.is_set():
            self._interrupted.clear()
            # Watches die with the connection: their events may have been lost. After those that
            # have arrived, in their thread.
            self.session.dispatch(self.watches.wake_all)

    # -- reading -----------------------------------------------------------------------------------

    def _callback(self, path: str, callback: Callable[..., object] | None) -> bool:
        """Register ``callback`` before reading, so that no change falls between the two.

        Returns true if the read must arm a watch: if there is a callback.
        """
        if callback is not None:
            self.watches.set_callback(path, callback)
        return callback is not None

    def _read_versioned(
        self, cls: type[RecordT], path: str, watch: bool = False
    ) -> tuple[RecordT, Versioned] | None:
        """The record and its version; ``None`` for a missing or empty node."""
        node = self.state.get_data_with_version(path, watch)
        if node is None:
            return None
        raw, version = node
        if not raw:
            return None
        return decode_record(cls, raw, path), version

    def _read(self, cls: type[RecordT], path: str, watch: bool = False) -> RecordT | None:
        versioned = self._read_versioned(cls, path, watch)
        return None if versioned is None else versioned[0]

    def assignment_info(
        self, topology_id: str, callback: Callable[..., object] | None = None
    ) -> Assignment | None:
        """``/assignments/<id>``: slots and their tasks.

        ``None`` without an assignment.
        """
        path = paths.assignment(topology_id)
        node = shards.read_sharded(self.state, path, self._callback(path, callback))
        return None if node is None else decode_record(Assignment, node[0], path)

    def active_storms(self) -> list[str]:
        """``/topology``: ids of all topologies, in any status, sorted."""
        return self.state.find_children(paths.TOPOLOGY) or []

    def storm_base(
        self, topology_id: str, callback: Callable[..., object] | None = None
    ) -> records.StormBase | None:
        """``/topology/<id>``: record of the topology.

        ``None`` if it does not exist.
        """
        path = paths.topology(topology_id)
        return self._read(records.StormBase, path, self._callback(path, callback))

    def load_view(self, wake: Wake | None = None) -> ClusterView:
        """Read the whole cluster, at (nearly) one moment.

        See :func:`~storm_dagster.zk.view_loading.load_view`. The epoch is -1 before the first
        leader. Damaged records are in ``ClusterView.corrupt``. ``wake`` is called when supervisors
        come or go, at changes of topologies, assignments, heartbeat records and live workers, and
        when the leader changes, but not when a supervisor's record is rewritten.
        """
        before_watch = None
        if wake is not None:
            before_watch = partial(self.watches.add_wake, wake=wake)
        return view_loading.load_view(self.state, self._cluster_id, before_watch)

    def epoch(self) -> tuple[int, records.EpochRecord] | None:
        """The leadership epoch (data version of ``/epoch``) and its leader.

        ``None`` before the first leader.
        """
        versioned = self._read_versioned(records.EpochRecord, paths.EPOCH)
        if versioned is None:
            return None
        record, at = versioned
        return at.version, record

    def leader_http(self) -> str:
        """Base URL of the leading nimbus.

        Raises :class:`Unavailable` before the first leader.
        """
        current = self.epoch()
        if current is None:
            raise Unavailable(
                "no nimbus has led this cluster yet: start one with `storm-dagster daemon nimbus` "
                "or `storm-dagster dev`"
            )
        _, leader = current
        return leader.http

    def assignment_changes(self, wake: Wake | None = None) -> tuple[int, bytes]:
        """Version and data of ``/assignments``.

        Every change of an assignment raises the version. See ``append_change`` of operations.
        """
        watch = self.watch(paths.ASSIGNMENTS, wake)
        node = self.state.get_data_with_version(paths.ASSIGNMENTS, watch)
        if node is None:
            raise Unavailable(
                f"the root of cluster {self._cluster_id} lacks {paths.ASSIGNMENTS}: nothing was "
                "read"
            )
        raw, at = node
        return at.version, raw

    def read_assignment(
        self, topology_id: str, wake: Wake | None = None
    ) -> tuple[Assignment, Versioned] | None:
        """The assignment and its version; ``None`` without one.

        ``wake`` is also called when it is removed.
        """
        path = paths.assignment(topology_id)
        node = shards.read_sharded(self.state, path, self.watch(path, wake))
        if node is None:
            return None
        raw, version = node
        return decode_record(Assignment, raw, path), version

    def read_tasks(self, topology_id: str) -> records.TaskTable | None:
        """``/tasks/<id>``: the tasks of each component."""
        return self._read(records.TaskTable, paths.tasks(topology_id))

    def read_log_levels(self, topology_id: str) -> KeptLevels:
        """``/topology/<id>/log_levels``; empty without one."""
        return self._read(KeptLevels, paths.log_levels(topology_id)) or KeptLevels()

    def read_state_home(self, topology_id: str) -> records.StateHome:
        """``/topology/<id>/state``; empty without one."""
        home = self._read(records.StateHome, paths.state_home(topology_id))
        return home or records.StateHome(marker="")

    def read_upgrade(self, topology_id: str, wake: Wake | None = None) -> UpgradeState:
        """All nodes below ``/gray_upgrade/<id>``.

        ``wake`` is called when the record is created, changed or removed.
        """
        # Not at the top: a worker has no use for its rules.
        from storm_dagster.zk.gray_upgrades import read_upgrade

        watch = self.watch(paths.gray_upgrade(topology_id), wake)
        return read_upgrade(self.state, topology_id, watch)

    def blacklist(self) -> frozenset[str]:
        """Hosts that get no new work."""
        record = self._read(records.Blacklist, paths.BLACKLIST)
        return frozenset(record.hosts if record is not None else ())

    def healing_pause(self) -> HealingPause | None:
        """Pause of healing by operators; ``None`` without one."""
        return self._read(HealingPause, paths.HEALING_PAUSE)

    # -- writing -----------------------------------------------------------------------------------

    def supervisor_heartbeat(self, supervisor_id: str, info: records.SupervisorInfo) -> None:
        """``/supervisors/<id>``: write the ephemeral record.

        It belongs to this session.
        """
        self.state.set_ephemeral_node(paths.supervisor(supervisor_id), encode_record(info))

    def write_beats(
        self, topology_id: str, beats: records.TaskBeats, *, assignment_version: int
    ) -> int:
        """Replace ``/taskbeats/<id>``.

        The assignment must still have that version. Returns the new version of the record. The
        record is never created: ``Conflict`` if it is gone with its topology, and if the assignment
        has changed.
        """
        transaction = self._guard_assignment(topology_id, assignment_version)
        transaction.set(paths.taskbeats(topology_id), encode_record(beats), -1)
        _, version = transaction.commit()
        assert isinstance(version, int)
        return version

    def change_state_home(
        self,
        topology_id: str,
        change: Callable[[records.StateHome], records.StateHome],
        *,
        assignment_version: int,
    ) -> records.StateHome:
        """Apply ``change`` to the state home, and return the result.

        The state home is the record of :meth:`read_state_home`. Raises ``Conflict`` as
        :meth:`write_beats` does.
        """
        path = paths.state_home(topology_id)
        while True:
            versioned = self._read_versioned(records.StateHome, path)
            if versioned is None:
                before = records.StateHome(marker="")
                version = None
            else:
                before, at = versioned
                version = at.version
            after = change(before)
            if after == before:
                return before
            transaction = self._guard_assignment(topology_id, assignment_version)
            try:
                transaction.put(path, encode_record(after), version).commit()
            except Conflict as error:
                # Another worker wrote it, unless the topology is gone.
                if error.path != path or not self.state.exists(paths.topology(topology_id)):
                    raise
            else:
                return after

    def _guard_assignment(self, topology_id: str, version: int) -> Transaction:
        """Begin a transaction that lands only if the assignment has that version."""
        return self.state.transaction().check(paths.assignment(topology_id), version)

    def fenced(self, epoch: int) -> Transaction:
        """Begin a transaction that lands only in ``epoch``.

        It must be the leadership epoch at the commit.
        """
        return self.state.transaction().check(paths.EPOCH, epoch)

    def register_metrics(
        self, topology_id: str, sample_rate: float, names: Iterable[str], *, assignment_version: int
    ) -> MetricIds | None:
        """Give ids to the names without one, by compare and set.

        They are in ``/metrics/<id>``. If all names have one, there is no write. ``Conflict`` if the
        assignment no longer has that version. ``None`` if the node is gone, because the topology
        is.
        """
        path = paths.metrics(topology_id)
        node = self.state.get_data_with_version(path)
        if node is None:
            return None
        raw, at = node
        if raw:
            former = decode_record(MetricIds, raw, path)
        else:
            # The node is empty from its creation until the topology is active.
            former = MetricIds(sample_rate=sample_rate)
        ids = dict(former.ids)
        for name in names:
            ids.setdefault(name, len(ids) + 1)
        record = former.model_copy(update={"sample_rate": sample_rate, "ids": ids})
        if not raw or ids != former.ids:
            transaction = self._guard_assignment(topology_id, assignment_version)
            transaction.set(path, encode_record(record), at.version)
            transaction.commit()
        return record
