"""Sync of a worker with ZooKeeper in its own thread: lease, assignment, status, errors, heartbeats.

The loop never waits for ZooKeeper: it gets immutable :class:`Placement` values. This thread waits
for the loop only to close tasks before it gives them up in ZooKeeper, where their new owner sees
it.
"""

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.model.errors import Conflict, Misconfigured, StormDagsterError, Unavailable
from storm_dagster.model.names import topology_name_of
from storm_dagster.model.ranges import decode_ranges, encode_ranges
from storm_dagster.model.records import Assignment, StateHome, StormBase, WorkerNode
from storm_dagster.model.slot import Slot
from storm_dagster.worker.dataplane.routes import Placement
from storm_dagster.worker.runtime.lease import WorkerLease
from storm_dagster.worker.runtime.loop import Loop
from storm_dagster.worker.state.storage import marker_path
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)

_RUNNING = ("ACTIVE", "UPGRADING", "ROLLBACK")
"""Statuses in which spouts emit."""
_BLOCKED_SECS = 0.5
"""Pause between reads while another worker still owns tasks of this one."""
_CLOSE_SECS = 30.0
_REFUSED_SECS = 5.0
"""Time for which ZooKeeper refuses everything after which the worker ends: ``zookeeper secure`` may
be under way.
"""
_ERRORS_SECS = 1.0
_MOST_NAMES = 1000
"""Names beyond these get no id, so that the node stays small."""


@dataclass(eq=False)
class ClusterSync:
    """Synchronizes the worker's node, lease and placement with the assignment until
    :meth:`stop`.
    """

    spec: WorkerSpec
    conf: Mapping[str, Any]
    cluster: StormClusterState
    lease: WorkerLease
    loop: Loop

    def __post_init__(self) -> None:
        self.slot: Slot = Slot(self.spec.node, self.spec.port)
        self._event = threading.Event()
        self._stale = threading.Event()
        """The view must be read again."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="cluster-sync", daemon=True)
        self._openings: deque[tuple[str, tuple[int, int], str, bool, Future[None]]] = deque()
        self._errors: dict[tuple[str, str], tuple[int, str, int, int]] = {}
        """(component, group) -> (task, text, seconds, count) of errors to write."""
        self._errors_lock = threading.Lock()
        self._errors_due = 0.0
        self._started_ms = int(time.time() * 1000)
        self._owned: frozenset[int] = frozenset()
        self._written: tuple[WorkerNode, int] | None = None
        """(last written worker node, its session)."""
        self._view: tuple[Assignment, int, StormBase] | None = None
        self._components: tuple[int, dict[int, str]] | None = None
        """(version of the assignment, task -> component)."""
        self._next_beat = 0.0
        self._dead = ""
        self._metrics: frozenset[str] | None = None
        self._refreshed = 0.0
        self._levels_known = False
        self.cluster.session.add_listener(lambda _: self.request_refresh())

    # -- from other threads ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, deadline: float = 3.0) -> None:
        """Stop, and remove the worker's node, so that its tasks can start elsewhere at once."""
        self._stopping = True
        self._event.set()
        if self._thread.ident is not None:
            self._thread.join(deadline)
        self.lease.revoke()
        try:
            if self.cluster.session.connected:
                self.cluster.remove_worker_node(self.spec.topology_id, *self.slot)
        except StormDagsterError as error:
            _log.warning(
                "the node of this worker was not removed, its session ends with it: %s", error
            )
        self.cluster.session.close(deadline)

    def request_refresh(self) -> None:
        """Read assignment, workers and status again soon; any thread."""
        self._stale.set()
        self._event.set()

    def report_error(self, task: int, component: str, text: str, secs: int, group: str) -> None:
        """Record an error of a task, unless a thousand groups are pending; any thread."""
        key = (component, group)
        with self._errors_lock:
            _, before, _, count = self._errors.get(key, (0, "", 0, 0))
            if count or len(self._errors) < _MOST_NAMES:
                self._errors[key] = (task, text or before, secs, count + 1)
        if not count:
            self._event.set()

    def publish_opening(
        self, key: str, opening: tuple[int, int], host: str, local: bool
    ) -> Future[None]:
        """Record the opening of a task's state; any thread. See :class:`StateStorage`."""
        done: Future[None] = Future()
        self._openings.append((key, opening, host, local, done))
        self._event.set()
        return done

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        session = self.cluster.session
        poll = float(self.conf.get("task.refresh.poll.secs") or 600)
        pause = 0.0
        blocked = False
        refused_at: float | None = None
        while not self._stopping:
            self._event.wait(pause)
            self._event.clear()
            if self._stopping:
                return
            interval = max(0.1, min(1.0, session.lease().negotiated_ms / 5000.0))
            pause = interval
            try:
                # No request while nothing is due: the pings of the session keep the lease.
                due = time.monotonic() - self._refreshed >= (_BLOCKED_SECS if blocked else poll)
                if self._stale.is_set() or due or not self.lease.granted:
                    self._stale.clear()
                    blocked = self._refresh()
                    self._refreshed = time.monotonic()
                if blocked:
                    pause = min(pause, _BLOCKED_SECS)
                self._write_node()
                self._write_openings()
                self._write_errors()
                self._write_beats()
                refused_at = None
            except Misconfigured as error:
                refused_at = time.monotonic() if refused_at is None else refused_at
                self._stale.set()
                pause = 1.0
                if time.monotonic() - refused_at >= _REFUSED_SECS:
                    # The cluster's secret was changed: with its new user, the supervisor's next
                    # worker may do all this.
                    _log.error("this worker ends, its supervisor starts another: %s", error.message)
                    self._stopping = True
                    self.loop.stop()
            except Unavailable as error:
                _log.debug("ZooKeeper: %s", error)
                self._stale.set()
                pause = min(0.2, interval)
            except Conflict as error:
                # Another process was faster: the view is stale.
                _log.info("reading again: %s", error)
                self._stale.set()
                pause = 0.02
            except Exception:
                _log.exception("syncing with ZooKeeper failed and is retried")
                self._stale.set()
                pause = 1.0

    def _refresh(self) -> bool:
        """Reconcile owned tasks, node and placement with the assignment. Whether tasks wait for
        other workers.
        """
        spec, cluster = self.spec, self.cluster
        found = cluster.read_assignment(spec.topology_id, self.request_refresh)
        base = cluster.storm_base(spec.topology_id, self.request_refresh)
        if found is None or base is None:
            # A wiped or replaced ensemble raises here, and the worker pauses instead of exiting.
            cluster.check_cluster_id()
            gone = base is None or base.status == "KILLED"
            self._supersede(
                f"topology {spec.topology_id} {'does not exist any more' if gone else 'has no assignment'}"
            )
            return False
        assignment, at = found[0], found[1]
        mine = next((worker for worker in assignment.workers if worker.slot == self.slot), None)
        if mine is None:
            self._supersede(f"version {at.version} of the assignment does not name {self.slot.key}")
            return False
        wanted = frozenset(mine.ids)
        live = cluster.live_workers(spec.topology_id, self.request_refresh)
        own = live.get(self.slot)
        if own is not None and own.token != spec.token and self._written is not None:
            self._supersede(f"another process (pid {own.pid}) holds {self.slot.key}")
            return False
        held_elsewhere = {
            task
            for slot, node in live.items()
            if slot != self.slot
            for task in decode_ranges(node.tasks)
        }
        # Without its node, whose session has ended, others may have opened what it had.
        kept_tasks = self._owned & wanted if own is not None else frozenset[int]()
        owned = kept_tasks | (wanted - held_elsewhere)
        same = own is not None or (self._view is not None and self._view[1] == at.version)
        lost = self._owned - (owned if same else frozenset())
        if lost:
            self.loop.call(lambda: self.loop.close_tasks(lost), _CLOSE_SECS)
        self._owned = owned
        self._view = (assignment, at.version, base)
        self._write_node()
        if not self.lease.granted:
            assert self._written is not None
            self.lease.grant(self._written[1])
            _log.info("the lease is held by session 0x%x", self._written[1])
        if not self._levels_known:
            # Later changes come as requests; those from before this process started are stored in
            # ZooKeeper.
            kept = cluster.read_log_levels(spec.topology_id)
            self.loop.post(lambda: self.loop.restore_levels(kept))
            self._levels_known = True
        if self._components is None or self._components[0] != at.version:
            table = cluster.read_tasks(spec.topology_id)
            if table is None:
                raise Conflict(f"topology {spec.topology_id} has no task table: read again")
            self._components = (at.version, table.component_of())
        placement = Placement(
            version=at.version,
            slots=assignment.task_slots(),
            addresses={worker.slot: worker.address for worker in assignment.workers},
            components=self._components[1],
            own_tasks=wanted,
            open=owned,
            tokens={node.token: slot for slot, node in live.items()},
            ready=frozenset(slot for slot, node in live.items() if node.status == "running"),
            state=self._read_state_home(assignment, at.version),
        )
        active = base.status in _RUNNING
        self.loop.post(lambda: self.loop.place(placement, active))
        return owned != wanted

    def _write_node(self) -> None:
        """Write the worker's node if it has changed, or another session owns it."""
        if self._view is None:
            return
        statuses = self.loop.statuses()
        running = bool(self._owned) and all(statuses.get(task) == "running" for task in self._owned)
        record = WorkerNode(
            pid=os.getpid(),
            token=self.spec.token,
            version=self._view[1],
            tasks=encode_ranges(self._owned),
            started_ms=self._started_ms,
            status="running" if running else "starting",
            code=self.spec.code,
            dead=self._dead,
        )
        session = self.cluster.session.session_id
        if self._written == (record, session):
            return
        self.cluster.write_worker_node(
            self.spec.topology_id, *self.slot, record, assignment_version=self._view[1]
        )
        if self.cluster.session.session_id != session:
            raise Unavailable(
                "the session changed while the worker's node was written: write it again"
            )
        self._written = (record, session)

    def _supersede(self, reason: str) -> None:
        _log.warning("this worker is superseded: %s", reason)
        self._stopping = True
        self.lease.revoke()
        self.loop.supersede(reason)

    def _read_state_home(self, assignment: Assignment, version: int) -> StateHome:
        """Where the topology's state lies. The first worker of several hosts marks its storage."""
        topology_id, folder = self.spec.topology_id, self.loop.engine.state_dir
        home = self.cluster.read_state_home(topology_id)
        several = len({worker.host for worker in assignment.workers}) > 1
        if home.marker or not several or folder is None or self.conf.get("topology.state.local"):
            return home
        mine = secrets.token_hex(8)
        path = marker_path(
            folder, self.loop.engine.spec.name or topology_name_of(topology_id), mine
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            home = self.cluster.change_state_home(
                topology_id,
                lambda now: now if now.marker else now.model_copy(update={"marker": mine}),
                assignment_version=version,
            )
        except OSError as error:
            _log.warning("topology.state.dir cannot be written: %s", error)
        if home.marker != mine:
            path.unlink(missing_ok=True)
        return home

    def _write_openings(self) -> None:
        pending = list(self._openings)
        if self._view is None or not pending:
            return

        def changed(home: StateHome) -> StateHome:
            local = set(home.local)
            for _, _, host, stays, _ in pending:
                (local.add if stays else local.discard)(host)
            openings = {**home.openings, **{key: opening for key, opening, *_ in pending}}
            return home.model_copy(update={"openings": openings, "local": tuple(sorted(local))})

        self.cluster.change_state_home(
            self.spec.topology_id, changed, assignment_version=self._view[1]
        )
        for *_, done in pending:
            self._openings.popleft()
            done.set_result(None)

    def _write_errors(self) -> None:
        now = time.monotonic()
        if not self._errors or now < self._errors_due:
            return
        # The next ones gather meanwhile: a bolt that fails for every tuple costs one write a
        # second.
        self._errors_due = now + _ERRORS_SECS
        for component, group in list(self._errors)[:20]:
            with self._errors_lock:
                task, text, secs, count = self._errors.pop((component, group))
            place = {"host": self.spec.host, "port": self.spec.port}
            what = {"component": component, "time": secs, "count": count, "group": group}
            self.cluster.report_error(self.spec.topology_id, task, text, **place, **what)

    def _write_beats(self) -> None:
        now = time.monotonic()
        if now < self._next_beat or self._view is None:
            return
        beats = self.loop.beats(frozenset(self._view[0].task_slots()))
        if beats is None or beats.version != self._view[1]:
            # The loop has not come to the newest placement: the table judges one that is over.
            return
        timeout = float(self.conf.get("nimbus.task.timeout.secs") or 30)
        self.cluster.write_beats(self.spec.topology_id, beats, assignment_version=self._view[1])
        self._next_beat = now + min(10.0, timeout / 3)
        if beats.dead != self._dead:
            self._dead = beats.dead
            self._write_node()
        if self._view[2].status in _RUNNING:
            self._register_metrics(self.loop.metric_names()[:_MOST_NAMES], self._view[1])

    def _register_metrics(self, wanted: list[str], version: int) -> None:
        """Register new names of the topology's metrics; the first write is its start event."""
        known = self._metrics
        if known is not None and (known.issuperset(wanted) or len(known) >= _MOST_NAMES):
            return
        rate = self.conf.get("topology.metric.sample.rate")
        record = self.cluster.register_metrics(
            self.spec.topology_id,
            1.0 if rate is None else float(rate),
            wanted,
            assignment_version=version,
        )
        if record is None:
            return
        if known is None:
            _log.info(
                "the topology is active; latencies are taken of %g of the tuples",
                record.sample_rate,
            )
        self._metrics = frozenset(record.ids)
