"""Link of a supervisor to ZooKeeper: desired work, heartbeat, error reports.

It has its own thread, so that a slow server or an outage never blocks the slots. While the cluster
cannot be read, or its root is missing or another cluster's, the last desired work stays in force:
no worker is ended because a node is absent.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from storm_dagster.core.drain_obstacles import drain_obstacles
from storm_dagster.core.slots.model import DesiredSlots, desired_slots
from storm_dagster.model import paths
from storm_dagster.model.conf import ClusterConf, seed_urls
from storm_dagster.model.errors import Conflict, Corrupt, StormDagsterError, Unavailable
from storm_dagster.model.names import SYSTEM
from storm_dagster.model.records import Assignment, SupervisorInfo, decode_record
from storm_dagster.operations.transactions import changes_since
from storm_dagster.supervisor.upgrades import Upgrades
from storm_dagster.zk.draining import read_draining
from storm_dagster.zk.leadership import read_followers
from storm_dagster.zk.state_protocol import ClusterState
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)

_READ_SECS = 10.0
"""Interval of comparing the assignments version, since watches are only hints."""
_OWN_READ_SECS = 120.0
"""Interval of rereading the topologies that have workers here, and their upgrades."""
_VANISHED_TWICE_SECS = 0.3
"""Time between two reads of an assignment before it counts as removed."""
_MAX_REPORTS = 100
"""Maximum number of pending errors."""
_LOST_RETRY_SECS = 0.5
"""Pause before the cluster is read once more after an error."""
_LATE_BEAT_SECS = 60.0
"""Time after a heartbeat was due in which a supervisor without it is still ready."""
_OBSTACLES_SECS = 10.0
"""Time from the begin of a drain to the first read of its obstacles, and between two reads."""
_UPGRADE_SECS = 0.2
"""Poll interval of this supervisor's processes during an upgrade of their topology."""


@dataclass(eq=False)
class ClusterLink:
    """Session, desired work and ephemeral record of a supervisor."""

    conf: ClusterConf
    id: str
    """Id of the supervisor."""
    cluster_id: str | None
    """This supervisor's only cluster; ``None`` until the first connection, which calls
    :attr:`save_cluster_id`.
    """
    save_cluster_id: Callable[[str], None]
    """Stores the id, so that a restarted supervisor joins no other cluster."""
    info: Callable[[int], SupervisorInfo]
    """The heartbeat record with that count."""
    passes: Callable[[], int]
    """Completed passes of the loop."""
    wake: Callable[[], None]
    """Wakes the loop when :attr:`desired` has changed."""
    upgrades: Upgrades

    def __post_init__(self) -> None:
        self.desired: DesiredSlots | None = None
        """Desired work of the last read; ``None`` before the first."""
        self.all_drain = False
        """True while this supervisor drains and so does every other one."""
        self.drain_obstacles = ""
        """Reasons why workers cannot leave this supervisor, which drains; empty without any."""
        self._drain_written_at: float | None = None
        """Monotonic time of the first record that names the drain; ``None`` before."""
        self._obstacles_read_at: float | None = None
        """Monotonic time of their last read, at first of the begin of the drain."""
        self._cluster: StormClusterState | None = None
        """State of the cluster; ``None`` before the first connection."""
        self._assignments: dict[str, Assignment] = {}
        """Topology id -> its assignment, if that names this supervisor."""
        self._version: int | None = None
        """Assignments version up to which everything is read."""
        self._changed: set[str] = set()
        """Ids of the topologies to read next."""
        self._damaged: set[str] = set()
        """Ids of the topologies whose assignment could not be decoded."""
        self._wakes: dict[str, Callable[[], None]] = {}
        """Topology id -> function that its watches call."""
        self._assignments_changed = threading.Event()
        """Set if the assignments version must be compared in the next pass."""
        self._read_at = -_READ_SECS
        """Monotonic time at which the assignments version was last compared."""
        self._read_own_at = time.monotonic()
        """Monotonic time at which all topologies with workers here were last marked as changed."""
        self._urls: tuple[str, ...] = ()
        """URLs of the nimbuses at the last successful read."""
        self._reports: deque[tuple[str, int, str, int]] = deque(maxlen=_MAX_REPORTS)
        """Pending errors: (topology id, port, text, epoch seconds)."""
        self._count = 0
        """Number of heartbeats written; it is the counter in the record."""
        self._registered_at = 0.0
        """Clock of the first heartbeat of the session that wrote the last one."""
        self._beat_secs = float(self.conf["supervisor.heartbeat.frequency.secs"])
        self._beat_at: float | None = None
        """Monotonic time of the last heartbeat; ``None`` before the first."""
        self._beat_passes = 0
        """Completed passes of the loop before the last heartbeat."""
        self._beat_session = 0
        """Id of the session when the last heartbeat was written; 0 before the first."""
        self._beat: SupervisorInfo | None = None
        """Record of the last heartbeat."""
        self._problem = ""
        """Problem that was logged last; empty without one."""
        self._event = threading.Event()
        """Wakes the thread of the link."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster-link", daemon=True)

    def start(self) -> None:
        """Start the thread. Does not wait for ZooKeeper."""
        self._thread.start()

    def close(self, deadline_secs: float = 5.0) -> None:
        """End the session, within the deadline.

        The heartbeat node vanishes with it.
        """
        self._stopped.set()
        self._event.set()
        self._thread.join(timeout=deadline_secs)

    def state(self) -> ClusterState | None:
        """State of the cluster; ``None`` before the first connection."""
        cluster = self._cluster
        return None if cluster is None else cluster.state

    def readiness_problems(self) -> list[str]:
        """Reasons why the cluster does not see this supervisor now. From any thread."""
        cluster = self._cluster
        if cluster is None or not cluster.session.connected:
            return ["no session with ZooKeeper"]
        if self._beat_at is None or self._beat_session != cluster.session.session_id:
            return ["the record of this supervisor is not written in its present session"]
        silent_secs = time.monotonic() - self._beat_at
        if silent_secs > self._beat_secs + _LATE_BEAT_SECS:
            return [f"the record of this supervisor was not written for {silent_secs:.0f} s"]
        return []

    @property
    def drain_known_secs(self) -> float | None:
        """Seconds from the first record that names the drain to the newest read of assignments.

        ``None`` before that record. From any thread.
        """
        if self._drain_written_at is None:
            return None
        return self._read_at - self._drain_written_at

    def request_heartbeat(self) -> None:
        """Write a changed heartbeat record before it is due."""
        self._event.set()

    def report(self, topology_id: str, port: int, text: str) -> None:
        """Record an error of the topology as soon as ZooKeeper is reachable.

        At most 100 errors are pending: the oldest ones are dropped.
        """
        self._reports.append((topology_id, port, text, int(time.time())))
        self._event.set()

    def nimbus_urls(self) -> tuple[str, ...]:
        """HTTP base URLs of the nimbuses. From any thread.

        The leader is first, then the other nimbuses, then those of ``nimbus.seeds``.
        """
        cluster = self._cluster
        if cluster is not None and cluster.session.connected:
            try:
                self._urls = _read_urls(cluster)
            except StormDagsterError as error:
                _log.warning(
                    "the nimbuses cannot be listed, the last known ones are used: %s", error.message
                )
        return tuple(dict.fromkeys((*self._urls, *seed_urls(self.conf))))

    def code_hash(self, key: str) -> str | None:
        """SHA-256 of that blob by the leader's records. From any thread.

        ``None`` if no record names the blob.
        """
        # Copies, since the thread of this link changes both.
        assignments = list(self._assignments.values())
        upgrades = list(self.upgrades.states.values())
        for assignment in assignments:
            if key in assignment.code:
                return assignment.code[key]
        for upgrade in upgrades:
            if upgrade.record is not None and key in upgrade.record.code:
                return upgrade.record.code[key]
        return None

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        """Synchronize with the cluster until the link is closed.

        After an error, whatever was not read is read in the next pass.
        """
        while not self._stopped.is_set():
            self._event.clear()
            try:
                self._sync()
                self._log_problem("")
                pause = self._until_due()
            except StormDagsterError as error:
                self._log_problem(error.message)
                self._assignments_changed.set()
                pause = _LOST_RETRY_SECS
            except Exception:
                _log.exception("reading the cluster failed: it is retried")
                self._assignments_changed.set()
                pause = _LOST_RETRY_SECS
            self._event.wait(pause)
        if self._cluster is not None:
            self._cluster.disconnect()

    def _log_problem(self, problem: str) -> None:
        """Log a problem once, and that it has ended; ``""``: none."""
        if problem != self._problem:
            if problem:
                _log.error("%s (the workers here continue)", problem)
            else:
                _log.info("the cluster can be read again")
            self._problem = problem

    def _sync(self) -> None:
        """Read the changes, and write the heartbeat and the pending errors.

        Each is done only if it is due. The first call connects. Raises :class:`Unavailable` if
        ZooKeeper is out of reach, and :class:`Conflict` for a second supervisor of the same id or
        another cluster.
        """
        cluster = self._cluster
        if cluster is None:
            cluster = self._connect()
        if not cluster.session.connected:
            raise Unavailable(f"ZooKeeper at {cluster.session.hosts} is out of reach")
        self._refuse_second(cluster)
        info = self.info(self._count + 1)
        reading = (
            self._assignments_changed.is_set()
            or bool(self._changed)
            or time.monotonic() - self._read_at >= _READ_SECS
            # The end of a drain depends on a read that is newer than its record.
            or info.draining
        )
        beating = self._beat_due(cluster, info)
        if reading or beating:
            # Before anything is read, and before this supervisor offers its slots.
            cluster.check_cluster_id()
        if reading:
            self._read(cluster)
        stale = self.upgrades.advance(cluster, self._assignments)
        self._changed.update(stale)
        if stale:
            self._read(cluster)
        if beating:
            self._write_heartbeat(cluster, info)
        if info.draining:
            self._watch_drain(cluster)
        while self._reports:
            # Dropped after the write, so that a report is kept if ZooKeeper is out of reach.
            self._write_report(cluster, *self._reports[0])
            self._reports.popleft()

    def _watch_drain(self, cluster: StormClusterState) -> None:
        """Read if the other supervisors drain as well, and what keeps the workers here."""
        draining = read_draining(cluster.state)
        self.all_drain = self.id in draining and all(draining.values())
        now = time.monotonic()
        if self._obstacles_read_at is None:
            self._obstacles_read_at = now
        # The whole cluster is read: not before the leader had time to move the tasks.
        if now - self._obstacles_read_at >= _OBSTACLES_SECS:
            self.drain_obstacles = drain_obstacles(cluster.load_view(), self.id)
            self._obstacles_read_at = now

    def _connect(self) -> StormClusterState:
        """Open the state of the cluster; the first connection of this supervisor fixes its id."""
        cluster = StormClusterState.open(self.conf, cluster_id=self.cluster_id)
        cluster.state.awaits_all = False  # The nodes of a topology are made with it.
        cluster.state.add_listener(self._on_connection_state)
        self._cluster = cluster
        if self.cluster_id is None:
            self.cluster_id = cluster.cluster_id()
            self.save_cluster_id(self.cluster_id)
            _log.info("this supervisor belongs to cluster %s", self.cluster_id)
        return cluster

    def _on_connection_state(self, state: str) -> None:
        if state == "CONNECTED":
            # Watches were lost with the former connection, and with them the changes.
            self._on_assignments()
        else:
            self._event.set()

    def _until_due(self) -> float:
        """Seconds until the next read or heartbeat is due, within the bounds of a pause."""
        max_pause = float(self.conf["supervisor.monitor.frequency.secs"])
        if self.upgrades.states:
            # A change of a local process may have to be written, which wakes no thread.
            max_pause = min(max_pause, _UPGRADE_SECS)
        if self._beat_at is None:
            # The first heartbeat waits for the first pass of the loop, which wakes no thread.
            return 0.1
        until_beat = self._beat_at + self._beat_secs - time.monotonic()
        return max(0.05, min(max_pause, until_beat))

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, cluster: StormClusterState) -> None:
        """Read the assignments and upgrades that have changed, and wake the loop if work changed.

        If none has changed, this is one read, however many topologies and supervisors there are.
        """
        self._assignments_changed.clear()
        version, record = cluster.assignment_changes(self._on_assignments)
        changes = None
        if self._version is not None:
            changes = changes_since(record, version, self._version)
        # Without a complete list of the changes, every assignment is read (supervisors ``None``).
        if changes is None:
            ids = cluster.state.find_children(paths.ASSIGNMENTS) or ()
            changes = dict.fromkeys([*ids, *self._assignments])
        for topology_id, nodes in changes.items():
            if nodes is None or self.id in nodes or topology_id in self._assignments:
                self._changed.add(topology_id)
        # A damaged assignment may have been repaired without a change of the version.
        self._changed |= self._damaged
        if time.monotonic() - self._read_own_at >= _OWN_READ_SECS:
            self._changed.update(self._assignments)
            self._read_own_at = time.monotonic()
        while self._changed:
            self._read_topology(cluster, self._changed.pop())
        # After all reads: an error leaves the former version, and the changes are read again.
        self._version = version
        self._read_at = time.monotonic()
        desired = desired_slots(self._assignments, self.id, self.upgrades.states)
        if desired != self.desired:
            self.desired = desired
            self.wake()

    def _read_topology(self, cluster: StormClusterState, topology_id: str) -> None:
        """Read the assignment and the upgrade of a topology, and replace the former ones.

        If the assignment is damaged, the former one stays, and the next read tries again. After any
        other error, which is raised, the topology is still to be read.
        """
        try:
            # Watched only while it has workers here: a topology of other supervisors or a removed
            # one leaves no watch.
            assignment = self._read_assignment(cluster, topology_id)
            if assignment is not None:
                wake = self._wake_of(topology_id)
                self.upgrades.read(cluster, topology_id, wake)
                assignment = self._read_assignment(cluster, topology_id, wake)
            if assignment is None and topology_id in self._assignments:
                # A root that is being wiped loses its nodes one by one, which must not look like
                # kills.
                self._stopped.wait(_VANISHED_TWICE_SECS)
                cluster.check_cluster_id()
                assignment = self._read_assignment(cluster, topology_id)
                cluster.check_cluster_id()
            self._damaged.discard(topology_id)
        except Corrupt as error:
            # The last valid assignment stays in force.
            _log.error("%s", error.message)
            self._damaged.add(topology_id)
            return
        except StormDagsterError:
            self._changed.add(topology_id)
            raise
        if assignment is not None:
            self._assignments[topology_id] = assignment
        else:
            self._assignments.pop(topology_id, None)
            self._wakes.pop(topology_id, None)
            self.upgrades.forget(topology_id)

    def _read_assignment(
        self, cluster: StormClusterState, topology_id: str, wake: Callable[[], None] | None = None
    ) -> Assignment | None:
        """The assignment, if it names this supervisor."""
        versioned = cluster.read_assignment(topology_id, wake)
        if versioned is None:
            return None
        assignment, _ = versioned
        if any(worker.node == self.id for worker in assignment.workers):
            return assignment
        return None

    def _wake_of(self, topology_id: str) -> Callable[[], None]:
        """Function for the watches of a topology: it is read in the next pass."""

        def on_change() -> None:
            self._changed.add(topology_id)
            self._event.set()

        # One for each topology, so that repeated reads do not accumulate watches.
        return self._wakes.setdefault(topology_id, on_change)

    def _on_assignments(self) -> None:
        self._assignments_changed.set()
        self._event.set()

    # -- writing -----------------------------------------------------------------------------------

    def _refuse_second(self, cluster: StormClusterState) -> None:
        """Refuse to start while another supervisor has the same id.

        Raises :class:`Conflict`. Only a session without a record of this supervisor is checked. The
        cluster is not read then, so that no work is started twice. A former process of the same
        folder has ended: one lock admits one at a time.
        """
        if self._beat_session == cluster.session.session_id:
            return  # This session has written the record, or replaced the one of the other process.
        path = paths.supervisor(self.id)
        if cluster.state.owned(path):
            return
        own_info = self.info(0)
        other_info = None
        with suppress(Corrupt):
            other_info = decode_record(SupervisorInfo, cluster.state.get_data(path) or b"", path)
        if other_info is not None and other_info.place not in ("", own_info.place):
            raise Conflict(
                f"a supervisor with id {self.id!r} lives already, on {other_info.host} in "
                f"{other_info.place}: this one, on {own_info.host} in {own_info.place}, starts no "
                "worker; stop one of them, or give this one another --id"
            )

    def _beat_due(self, cluster: StormClusterState, info: SupervisorInfo) -> bool:
        """True if the heartbeat record must be written now.

        It changed, its session is new, or the last write is too long ago.
        """
        # Without a completed pass, no heartbeat: a hung loop must not look alive.
        if self.passes() == self._beat_passes:
            return False
        changed = self._beat is None or _without_measurements(info) != _without_measurements(
            self._beat
        )
        expired = self._beat_session != cluster.session.session_id
        overdue = self._beat_at is None or time.monotonic() - self._beat_at >= self._beat_secs
        return changed or expired or overdue

    def _write_heartbeat(self, cluster: StormClusterState, info: SupervisorInfo) -> None:
        """Write the heartbeat record, and note when and with which pass of the loop."""
        # Both are read before the write: a pass that completes during it lets the next heartbeat
        # be written, and so does a session that begins during it.
        passes = self.passes()
        session_id = cluster.session.session_id
        now = time.monotonic()
        registered_at = self._registered_at if session_id == self._beat_session else now
        present_secs = int(now - registered_at)
        cluster.supervisor_heartbeat(
            self.id, info.model_copy(update={"present_secs": present_secs})
        )
        # After the write: the first one of a session is retried at once if it fails.
        self._beat_session = session_id
        self._registered_at = registered_at
        self._beat = info
        self._beat_at = time.monotonic()
        self._beat_passes = passes
        self._count += 1
        if info.draining and self._drain_written_at is None:
            self._drain_written_at = time.monotonic()

    def _write_report(
        self, cluster: StormClusterState, topology_id: str, port: int, text: str, when: int
    ) -> None:
        """Store an error of a topology, for the first task of the slot.

        It is dropped if the topology has no assignment here or the error cannot be stored. Raises
        :class:`Unavailable`: it is stored later.
        """
        assignment = self._assignments.get(topology_id)
        if assignment is None:
            return
        task = _first_task(assignment, self.id, port)
        host = str(self.conf["storm.local.hostname"])
        try:
            cluster.report_error(
                topology_id, task, text, component=SYSTEM, host=host, port=port, time=when
            )
        except Unavailable:
            raise
        except StormDagsterError as error:
            _log.warning("the error of slot %d could not be stored: %s", port, error.message)


def _without_measurements(info: SupervisorInfo) -> SupervisorInfo:
    """Record without the values that always change: they do not cause a write."""
    cleared = {"count": 0, "clock_ahead_secs": None, "disk_free_mb": None, "disk_mb": None}
    return info.model_copy(update=cleared)


def _first_task(assignment: Assignment, supervisor_id: str, port: int) -> int:
    """First task of the worker in that slot; 0 if the slot has no task."""
    for worker in assignment.workers:
        if worker.slot == (supervisor_id, port) and worker.tasks:
            return worker.ids[0]
    return 0


def _read_urls(cluster: StormClusterState) -> tuple[str, ...]:
    """HTTP base URLs in the records of the nimbuses, the leader's first."""
    urls: list[Any] = []
    epoch = cluster.epoch()
    if epoch is not None:
        _, leader = epoch
        urls.append(leader.http)
    urls.extend(row.get("http") for row in read_followers(cluster).values())
    valid = [url.rstrip("/") for url in urls if str(url).startswith(("http://", "https://"))]
    return tuple(dict.fromkeys(valid))
