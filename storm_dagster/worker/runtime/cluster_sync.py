"""Sync of a worker with ZooKeeper, in its own thread.

It covers lease, assignment, status, errors and heartbeats. The loop never waits for ZooKeeper: it
gets immutable :class:`Placement` values. This thread waits for the loop only to close tasks before
it gives them up in ZooKeeper, where their new owner sees it.
"""

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

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
"""Longest wait for the loop to close tasks."""
_REFUSED_SECS = 5.0
"""Time for which ZooKeeper refuses all requests before the worker ends. In between, ``zookeeper
secure`` may be running.
"""
_ERRORS_SECS = 1.0
"""Pause between two writes of errors."""
_MAX_NAMES = 1000
"""Names beyond these get no id, so that the node stays small."""


class _View(NamedTuple):
    """State of the topology in ZooKeeper."""

    assignment: Assignment
    version: int
    """Version of the assignment."""
    base: StormBase


class _Written(NamedTuple):
    """Worker node that was written."""

    node: WorkerNode
    session_id: int
    """Session that owns it."""


@dataclass(eq=False)
class ClusterSync:
    """Synchronization of the worker with its assignment.

    It covers the worker's node, lease and placement. It runs until :meth:`stop`.
    """

    spec: WorkerSpec
    conf: Mapping[str, Any]
    cluster: StormClusterState
    lease: WorkerLease
    loop: Loop

    def __post_init__(self) -> None:
        self.slot: Slot = Slot(self.spec.node, self.spec.port)
        self._event = threading.Event()
        """Set to end the pause of the thread."""
        self._stale = threading.Event()
        """Set if the view must be refreshed."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="cluster-sync", daemon=True)
        self._openings: deque[tuple[str, tuple[int, int], str, bool, Future[None]]] = deque()
        """Openings to write: the arguments of :meth:`publish_opening`, and its result."""
        self._errors: dict[tuple[str, str], tuple[int, str, int, int]] = {}
        """(component, group) -> (task, text, seconds, count) of errors to write."""
        self._errors_lock = threading.Lock()
        self._errors_due = 0.0
        """Time before which no errors are written."""
        self._started_ms = int(time.time() * 1000)
        self._owned: frozenset[int] = frozenset()
        """Tasks that this worker owns in ZooKeeper, by its node."""
        self._written: _Written | None = None
        """The last written worker node; ``None`` before the first one."""
        self._view: _View | None = None
        """Result of the last refresh; ``None`` before the first one."""
        self._components: tuple[int, dict[int, str]] | None = None
        """(version of the assignment, task -> component)."""
        self._next_beat = 0.0
        """Time before which no heartbeats of tasks are written."""
        self._dead = ""
        """Dead tasks by the last heartbeats, as in ``WorkerNode.dead``."""
        self._metrics: frozenset[str] | None = None
        """Registered names of metrics; ``None`` before the first registration."""
        self._refreshed = 0.0
        """Time of the last refresh."""
        self._levels_known = False
        """True if the stored log levels are applied."""
        self.cluster.session.add_listener(lambda _: self.request_refresh())

    # -- from other threads ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, deadline: float = 3.0) -> None:
        """Stop, and remove the worker's node.

        Its tasks can start elsewhere at once.
        """
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
        """Refresh assignment, workers and status soon; any thread."""
        self._stale.set()
        self._event.set()

    def report_error(self, task: int, component: str, text: str, secs: int, group: str) -> None:
        """Record an error of a task; any thread.

        Dropped while a thousand groups are pending.
        """
        key = (component, group)
        with self._errors_lock:
            _, former_text, _, count = self._errors.get(key, (0, "", 0, 0))
            if count or len(self._errors) < _MAX_NAMES:
                self._errors[key] = (task, text or former_text, secs, count + 1)
        if not count:
            self._event.set()

    def publish_opening(
        self, key: str, opening: tuple[int, int], host: str, local: bool
    ) -> Future[None]:
        """Record the opening of a task's state; any thread.

        See :class:`StateStorage`.
        """
        written: Future[None] = Future()
        self._openings.append((key, opening, host, local, written))
        self._event.set()
        return written

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        """Refresh and write until :meth:`stop`, or until the worker is superseded."""
        session = self.cluster.session
        poll = float(self.conf.get("task.refresh.poll.secs") or 600)
        pause = 0.0
        # True if other workers still own tasks of this one.
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
                if self._must_refresh(_BLOCKED_SECS if blocked else poll):
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
                self._stale.set()
                pause = 1.0
                if refused_at is None:
                    refused_at = time.monotonic()
                if time.monotonic() - refused_at >= _REFUSED_SECS:
                    self._end_refused(error)
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

    def _must_refresh(self, poll_secs: float) -> bool:
        """True after a change, without a lease, and if the last refresh is ``poll_secs`` old.

        No request is made before: the pings of the session keep the lease.
        """
        is_due = time.monotonic() - self._refreshed >= poll_secs
        return self._stale.is_set() or is_due or not self.lease.granted

    def _end_refused(self, error: Misconfigured) -> None:
        """End this worker, whose requests ZooKeeper refuses since the cluster's secret changed.

        With its new user, the supervisor's next worker may make them.
        """
        _log.error("this worker ends, its supervisor starts another: %s", error.message)
        self._stopping = True
        self.loop.stop()

    def _refresh(self) -> bool:
        """Reconcile owned tasks, node and placement with the assignment.

        Returns True if tasks wait for other workers. A worker that the assignment does not name
        closes its tasks and ends. Tasks are closed before the node is written without them: their
        new owner may open them from then on.
        """
        spec = self.spec
        cluster = self.cluster
        versioned = cluster.read_assignment(spec.topology_id, self.request_refresh)
        base = cluster.storm_base(spec.topology_id, self.request_refresh)
        if versioned is None or base is None:
            # A wiped or replaced ensemble raises here, and the worker pauses instead of exiting.
            cluster.check_cluster_id()
            is_removed = base is None or base.status == "KILLED"
            reason = "no longer exists" if is_removed else "has no assignment"
            self._supersede(f"topology {spec.topology_id} {reason}")
            return False
        assignment, stat = versioned
        version = stat.version
        ids = self._assigned_ids(assignment)
        if ids is None:
            self._retire(f"version {version} of the assignment does not name {self.slot.key}")
            return False
        own_tasks = frozenset(ids)
        live = cluster.live_workers(spec.topology_id, self.request_refresh)
        own_node = live.get(self.slot)
        is_replaced = own_node is not None and own_node.token != spec.token
        if own_node is not None and is_replaced and self._written is not None:
            self._supersede(f"another process (pid {own_node.pid}) holds {self.slot.key}")
            return False
        owned = self._tasks_to_own(own_tasks, live)
        same_version = self._view is not None and self._view.version == version
        if own_node is not None or same_version:
            lost = self._owned - owned
        else:
            # Other workers may have run the tasks since: all of them must reopen.
            lost = self._owned
        if lost:
            self.loop.call(lambda: self.loop.close_tasks(lost), _CLOSE_SECS)
        self._owned = owned
        view = self._view = _View(assignment, version, base)
        self._write_node()
        if not self.lease.granted:
            assert self._written is not None
            self.lease.grant(self._written.session_id)
            _log.info("the lease is held by session 0x%x", self._written.session_id)
        if not self._levels_known:
            self._restore_levels()
        placement = self._placement(view, own_tasks, live)
        active = base.status in _RUNNING
        self.loop.post(lambda: self.loop.place(placement, active))
        return owned != own_tasks

    def _restore_levels(self) -> None:
        """Read the levels of loggers that were set before this process started.

        Later changes come as requests.
        """
        levels = self.cluster.read_log_levels(self.spec.topology_id)
        self.loop.post(lambda: self.loop.restore_levels(levels))
        self._levels_known = True

    def _placement(
        self, view: _View, own_tasks: frozenset[int], live: Mapping[Slot, WorkerNode]
    ) -> Placement:
        """Create the placement for the loop; open are the tasks that this worker owns."""
        assignment = view.assignment
        return Placement(
            version=view.version,
            slots=assignment.task_slots(),
            addresses={worker.slot: worker.address for worker in assignment.workers},
            components=self._read_components(view.version),
            own_tasks=own_tasks,
            open=self._owned,
            tokens={node.token: slot for slot, node in live.items()},
            ready=frozenset(slot for slot, node in live.items() if node.status == "running"),
            state=self._read_state_home(assignment, view.version),
        )

    def _assigned_ids(self, assignment: Assignment) -> list[int] | None:
        """Tasks that the assignment gives to this slot.

        ``None`` if it does not name the slot.
        """
        for worker in assignment.workers:
            if worker.slot == self.slot:
                return list(worker.ids)
        return None

    def _tasks_to_own(
        self, own_tasks: frozenset[int], live: Mapping[Slot, WorkerNode]
    ) -> frozenset[int]:
        """Own tasks that no other worker still owns."""
        held_elsewhere: set[int] = set()
        for slot, node in live.items():
            if slot != self.slot:
                held_elsewhere.update(decode_ranges(node.tasks))
        owned = own_tasks - held_elsewhere
        if self.slot in live:
            return owned | (self._owned & own_tasks)
        # Without its node, whose session has ended, other workers may have opened its tasks.
        return owned

    def _read_components(self, version: int) -> dict[int, str]:
        """Task -> component, read once for each version of the assignment."""
        known_version, components = self._components or (-1, {})
        if known_version != version:
            table = self.cluster.read_tasks(self.spec.topology_id)
            if table is None:
                raise Conflict(f"topology {self.spec.topology_id} has no task table: read again")
            components = table.component_of()
            self._components = (version, components)
        return components

    def _write_node(self) -> None:
        """Write the worker's node, if it has changed.

        Also if another session owns it.
        """
        if self._view is None:
            return
        statuses = self.loop.statuses()
        running = bool(self._owned) and all(statuses.get(task) == "running" for task in self._owned)
        record = WorkerNode(
            pid=os.getpid(),
            token=self.spec.token,
            version=self._view.version,
            tasks=encode_ranges(self._owned),
            started_ms=self._started_ms,
            status="running" if running else "starting",
            code=self.spec.code,
            dead=self._dead,
        )
        session = self.cluster.session.session_id
        if self._written == _Written(record, session):
            return
        self.cluster.write_worker_node(
            self.spec.topology_id, *self.slot, record, assignment_version=self._view.version
        )
        if self.cluster.session.session_id != session:
            raise Unavailable(
                "the session changed while the worker's node was written: write it again"
            )
        self._written = _Written(record, session)

    def _retire(self, reason: str) -> None:
        """End the thread, and the worker as at SIGTERM: its tasks close first.

        Their new owners wait until its node is removed, which is the last step. Without a lease
        the tasks may run elsewhere already, and the worker ends at once.
        """
        if not self.lease.valid():
            self._supersede(reason)
            return
        _log.warning("this worker is superseded: %s", reason)
        self._stopping = True
        self.loop.retire()

    def _supersede(self, reason: str) -> None:
        """End the thread, the lease and the worker's loop."""
        _log.warning("this worker is superseded: %s", reason)
        self._stopping = True
        self.lease.revoke()
        self.loop.supersede(reason)

    def _read_state_home(self, assignment: Assignment, version: int) -> StateHome:
        """Return the home of the topology's state.

        If workers run on several hosts, the first one marks its storage, so that the others can see
        if they share it. ``version``: that of the assignment, which must be the newest.
        """
        topology_id = self.spec.topology_id
        folder = self.loop.engine.state_dir
        home = self.cluster.read_state_home(topology_id)
        hosts = {worker.host for worker in assignment.workers}
        if home.marker or len(hosts) < 2:
            return home
        if folder is None or self.conf.get("topology.state.local"):
            return home
        own_marker = secrets.token_hex(8)
        name = self.loop.engine.spec.name or topology_name_of(topology_id)
        path = marker_path(folder, name, own_marker)

        def set_marker(current: StateHome) -> StateHome:
            if current.marker:
                return current
            return current.model_copy(update={"marker": own_marker})

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            home = self.cluster.change_state_home(
                topology_id, set_marker, assignment_version=version
            )
        except OSError as error:
            _log.warning("topology.state.dir cannot be written: %s", error)
        if home.marker != own_marker:
            # Another worker was first, or the mark could not be written.
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return home

    def _write_openings(self) -> None:
        """Write the pending openings, and set their results."""
        pending = list(self._openings)
        if self._view is None or not pending:
            return

        def add_openings(home: StateHome) -> StateHome:
            openings = dict(home.openings)
            local = set(home.local)
            for key, opening, host, is_local, _ in pending:
                openings[key] = opening
                if is_local:
                    local.add(host)
                else:
                    local.discard(host)
            return home.model_copy(update={"openings": openings, "local": tuple(sorted(local))})

        self.cluster.change_state_home(
            self.spec.topology_id, add_openings, assignment_version=self._view.version
        )
        for *_, written in pending:
            self._openings.popleft()
            written.set_result(None)

    def _write_errors(self) -> None:
        """Write pending errors, at most 20 groups in one turn."""
        now = time.monotonic()
        if not self._errors or now < self._errors_due:
            return
        # Errors gather until then: a bolt that fails for every tuple costs one write a second.
        self._errors_due = now + _ERRORS_SECS
        for component, group in list(self._errors)[:20]:
            with self._errors_lock:
                task, text, secs, count = self._errors.pop((component, group))
            self.cluster.report_error(
                self.spec.topology_id,
                task,
                text,
                host=self.spec.host,
                port=self.spec.port,
                component=component,
                time=secs,
                count=count,
                group=group,
            )

    def _write_beats(self) -> None:
        """Write heartbeats of all tasks and the names of metrics, if that is due.

        Without effect unless the topology master runs here.
        """
        now = time.monotonic()
        if now < self._next_beat or self._view is None:
            return
        beats = self.loop.beats(frozenset(self._view.assignment.task_slots()))
        if beats is None or beats.version != self._view.version:
            # The loop has not applied the newest placement: the table is for a former one.
            return
        timeout = float(self.conf.get("nimbus.task.timeout.secs") or 30)
        self.cluster.write_beats(
            self.spec.topology_id, beats, assignment_version=self._view.version
        )
        self._next_beat = now + min(10.0, timeout / 3)
        if beats.dead != self._dead:
            self._dead = beats.dead
            self._write_node()
        if self._view.base.status in _RUNNING:
            self._register_metrics(self.loop.metric_names()[:_MAX_NAMES], self._view.version)

    def _register_metrics(self, names: list[str], version: int) -> None:
        """Register new names of metrics, while there are fewer than a thousand.

        The first write is the start event of the topology. ``version``: that of the assignment.
        """
        registered = self._metrics
        has_all = registered is not None and registered.issuperset(names)
        is_full = registered is not None and len(registered) >= _MAX_NAMES
        if has_all or is_full:
            return
        rate = self.conf.get("topology.metric.sample.rate")
        record = self.cluster.register_metrics(
            self.spec.topology_id,
            1.0 if rate is None else float(rate),
            names,
            assignment_version=version,
        )
        if record is None:
            return
        if registered is None:
            _log.info(
                "the topology is active; latencies are taken of %g of the tuples",
                record.sample_rate,
            )
        self._metrics = frozenset(record.ids)
