"""Link of a supervisor to ZooKeeper: desired work, heartbeat, error reports.

It has its own thread, so that a slow server or an outage never blocks the slots. While the cluster
cannot be read, or its root is missing or another cluster's, the last desired work stays in force:
nothing is ended because a node is absent.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from storm_dagster.core.slots.model import DesiredSlots, desired_slots
from storm_dagster.model import paths
from storm_dagster.model.conf import ClusterConf, seed_urls
from storm_dagster.model.errors import Conflict, Corrupt, StormDagsterError, Unavailable
from storm_dagster.model.names import SYSTEM
from storm_dagster.model.records import Assignment, SupervisorInfo, decode_record
from storm_dagster.operations.transactions import changes_since
from storm_dagster.supervisor.upgrades import Upgrades
from storm_dagster.zk.leadership import read_followers
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)

_READ_SECS = 10.0
"""Interval of comparing the assignments version, since watches are only hints."""
_OWN_READ_SECS = 120.0
"""Interval of reading again what has workers here, and its upgrades."""
_VANISHED_TWICE_SECS = 0.3
_MOST_REPORTS = 100
_LOST_RETRY_SECS = 0.5
_UPGRADE_SECS = 0.2
"""Poll interval of this supervisor's processes during an upgrade of their topology."""


@dataclass(eq=False)
class ClusterLink:
    """Session, newest :class:`DesiredSlots` and ephemeral record of a supervisor."""

    conf: ClusterConf
    id: str
    cluster_id: str | None
    """This supervisor's only cluster; ``None`` until the first connection, which calls
    :attr:`save_cluster_id`.
    """
    save_cluster_id: Callable[[str], None]
    info: Callable[[int], SupervisorInfo]
    """The heartbeat record with that count."""
    passes: Callable[[], int]
    """Completed passes of the loop."""
    wake: Callable[[], None]
    """Wakes the loop when :attr:`claims` changed."""
    upgrades: Upgrades

    def __post_init__(self) -> None:
        self.claims: DesiredSlots | None = None
        """Desired work of the last read; ``None`` before the first."""
        self._cluster: StormClusterState | None = None
        self._assignments: dict[str, Assignment] = {}
        """Those that name this supervisor."""
        self._version: int | None = None
        """Assignments version up to which everything is read."""
        self._changed: set[str] = set()
        self._damaged: set[str] = set()
        self._wakes: dict[str, Callable[[], None]] = {}
        self._moved = threading.Event()
        self._read_at = -_READ_SECS
        self._read_own_at = time.monotonic()
        self._urls: tuple[str, ...] = ()
        self._reports: deque[tuple[str, int, str, int]] = deque(maxlen=_MOST_REPORTS)
        self._count = 0
        self._beat_secs = float(self.conf["supervisor.heartbeat.frequency.secs"])
        self._beat_at: float | None = None
        self._beat_passes = 0
        self._beat_session = 0
        self._beat: SupervisorInfo | None = None
        self._problem = ""
        self._event = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster-link", daemon=True)

    def start(self) -> None:
        """Start the thread. Does not wait for ZooKeeper."""
        self._thread.start()

    def close(self, deadline_secs: float = 5.0) -> None:
        """End the session (the heartbeat node goes with it), within the deadline."""
        self._stopped.set()
        self._event.set()
        self._thread.join(timeout=deadline_secs)

    def request_heartbeat(self) -> None:
        """Write a changed heartbeat record before it is due."""
        self._event.set()

    def report(self, topology_id: str, port: int, text: str) -> None:
        """Record an error of the topology when ZooKeeper is reachable; the oldest of too many are
        dropped.
        """
        self._reports.append((topology_id, port, text, int(time.time())))
        self._event.set()

    def nimbus_urls(self) -> tuple[str, ...]:
        """HTTP base URLs of the nimbuses: the leader, the others, those of ``nimbus.seeds``. From
        any thread.
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
        """SHA-256 of that blob by the leader's records; ``None`` where they have none. From any
        thread.
        """
        upgrades = [state.record for state in list(self.upgrades.states.values())]
        for record in (*list(self._assignments.values()), *upgrades):
            if record is not None and key in record.code:
                return record.code[key]
        return None

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._event.clear()
            try:
                self._sync()
                self._log_problem("")
                pause = self._until_due()
            except StormDagsterError as error:
                self._log_problem(error.message)
                self._moved.set()
                pause = _LOST_RETRY_SECS
            except Exception:
                _log.exception("reading the cluster failed: it is tried again")
                self._moved.set()
                pause = _LOST_RETRY_SECS
            self._event.wait(pause)
        if self._cluster is not None:
            self._cluster.disconnect()

    def _log_problem(self, problem: str) -> None:
        """Log a problem once, and its end."""
        if problem != self._problem:
            if problem:
                _log.error("%s (the workers here continue meanwhile)", problem)
            else:
                _log.info("the cluster can be read again")
            self._problem = problem

    def _sync(self) -> None:
        cluster = self._cluster
        if cluster is None:
            cluster = StormClusterState.open(self.conf, cluster_id=self.cluster_id)
            cluster.state.awaits_all = False  # The nodes of a topology are made with it.
            cluster.state.add_listener(
                lambda state: (self._on_assignments if state == "CONNECTED" else self._event.set)()
            )
            self._cluster = cluster
            if self.cluster_id is None:
                self.cluster_id = cluster.cluster_id()
                self.save_cluster_id(self.cluster_id)
                _log.info("this supervisor belongs to cluster %s", self.cluster_id)
        if not cluster.session.connected:
            raise Unavailable(f"ZooKeeper at {cluster.session.hosts} is out of reach")
        self._refuse_second(cluster)
        info = self.info(self._count + 1)
        reading = (
            self._moved.is_set()
            or bool(self._changed)
            or time.monotonic() - self._read_at >= _READ_SECS
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
        while self._reports:
            self._write_report(cluster, *self._reports[0])
            self._reports.popleft()

    def _until_due(self) -> float:
        longest = float(self.conf["supervisor.monitor.frequency.secs"])
        if self.upgrades.states:
            # Something may soon have to be written that nobody wakes this thread for.
            longest = min(longest, _UPGRADE_SECS)
        if self._beat_at is None:
            return 0.1
        return max(0.05, min(longest, self._beat_at + self._beat_secs - time.monotonic()))

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, cluster: StormClusterState) -> None:
        """Read what changed: one read when nothing did, however many topologies and supervisors
        there are.
        """
        self._moved.clear()
        version, record = cluster.assignment_changes(self._on_assignments)
        changed = None if self._version is None else changes_since(record, version, self._version)
        if changed is None:
            ids = cluster.state.find_children(paths.ASSIGNMENTS) or ()
            changed = dict.fromkeys([*ids, *self._assignments])
        self._changed.update(
            topology_id
            for topology_id, nodes in changed.items()
            if nodes is None or self.id in nodes or topology_id in self._assignments
        )
        self._changed |= self._damaged
        if time.monotonic() - self._read_own_at >= _OWN_READ_SECS:
            self._changed.update(self._assignments)
            self._read_own_at = time.monotonic()
        while self._changed:
            self._read_one(cluster, self._changed.pop())
        self._version, self._read_at = version, time.monotonic()
        claims = desired_slots(self._assignments, self.id, self.upgrades.states)
        if claims != self.claims:
            self.claims = claims
            self.wake()

    def _read_one(self, cluster: StormClusterState, topology_id: str) -> None:
        try:
            # Watched only while it has workers here: what others run, and what is gone, leaves no
            # watch.
            found = self._read_mine(cluster, topology_id)
            if found is not None:
                wake = self._wake_of(topology_id)
                self.upgrades.read(cluster, topology_id, wake)
                found = self._read_mine(cluster, topology_id, wake)
            if found is None and topology_id in self._assignments:
                # A root that is being wiped loses its nodes one by one, which must not look like
                # kills.
                self._stopped.wait(_VANISHED_TWICE_SECS)
                cluster.check_cluster_id()
                found = self._read_mine(cluster, topology_id)
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
        if found is not None:
            self._assignments[topology_id] = found
        else:
            self._assignments.pop(topology_id, None)
            self._wakes.pop(topology_id, None)
            self.upgrades.forget(topology_id)

    def _read_mine(
        self, cluster: StormClusterState, topology_id: str, wake: Callable[[], None] | None = None
    ) -> Assignment | None:
        """The assignment if it names this supervisor."""
        found = cluster.read_assignment(topology_id, wake)
        mine = found is not None and any(worker.node == self.id for worker in found[0].workers)
        return found[0] if found is not None and mine else None

    def _wake_of(self, topology_id: str) -> Callable[[], None]:
        def changed() -> None:
            self._changed.add(topology_id)
            self._event.set()

        # One for each topology, so that reading again does not pile them up.
        return self._wakes.setdefault(topology_id, changed)

    def _on_assignments(self) -> None:
        self._moved.set()
        self._event.set()

    # -- writing -----------------------------------------------------------------------------------

    def _refuse_second(self, cluster: StormClusterState) -> None:
        """:class:`Conflict` while a supervisor elsewhere lives under the same id, for a session
        without a record yet.

        Nothing is read then, so that no work is begun twice. A former process of the same folder
        has ended: one lock admits one at a time.
        """
        if self._beat_session == cluster.session.session_id:
            return
        path, other, mine = paths.supervisor(self.id), None, self.info(0)
        if cluster.state.owned(path):
            return
        with suppress(Corrupt):
            other = decode_record(SupervisorInfo, cluster.state.get_data(path) or b"", path)
        if other is not None and other.place not in ("", mine.place):
            raise Conflict(
                f"a supervisor with id {self.id!r} lives already, on {other.host} in {other.place}: this one, on "
                f"{mine.host} in {mine.place}, starts no worker; stop one of them, or give this one another --id"
            )

    def _beat_due(self, cluster: StormClusterState, info: SupervisorInfo) -> bool:
        # Without a completed pass, no heartbeat: a hung loop must not look alive.
        if self.passes() == self._beat_passes:
            return False
        changed = (
            self._beat is None or info.model_copy(update={"count": self._beat.count}) != self._beat
        )
        expired = self._beat_session != cluster.session.session_id
        overdue = self._beat_at is None or time.monotonic() - self._beat_at >= self._beat_secs
        return changed or expired or overdue

    def _write_heartbeat(self, cluster: StormClusterState, info: SupervisorInfo) -> None:
        passes, self._beat_session = self.passes(), cluster.session.session_id
        cluster.supervisor_heartbeat(self.id, info)
        self._beat, self._beat_at, self._beat_passes = info, time.monotonic(), passes
        self._count += 1

    def _write_report(
        self, cluster: StormClusterState, topology_id: str, port: int, text: str, when: int
    ) -> None:
        assignment = self._assignments.get(topology_id)
        if assignment is None:
            return
        here = (
            worker.ids
            for worker in assignment.workers
            if worker.slot == (self.id, port) and worker.tasks
        )
        task = next(here, (0,))[0]
        host = str(self.conf["storm.local.hostname"])
        try:
            cluster.report_error(
                topology_id, task, text, component=SYSTEM, host=host, port=port, time=when
            )
        except Unavailable:
            raise
        except StormDagsterError as error:
            _log.warning("the error of slot %d could not be stored: %s", port, error.message)


def _read_urls(cluster: StormClusterState) -> tuple[str, ...]:
    epoch = cluster.epoch()
    urls = [
        epoch[1].http if epoch is not None else "",
        *(row.get("http") for row in read_followers(cluster).values()),
    ]
    return tuple(
        dict.fromkeys(
            url.rstrip("/") for url in urls if str(url).startswith(("http://", "https://"))
        )
    )
