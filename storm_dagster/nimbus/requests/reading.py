"""Documents of the HTTP service, from views that many requests share."""

import json
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import httpx

from storm_dagster.core.authorization import LIMITED_USER
from storm_dagster.core.diagnosis import diagnose
from storm_dagster.core.reassignment import Runnable
from storm_dagster.core.snapshot.cluster import supervisors_of
from storm_dagster.core.snapshot.topology import TopologySnapshot, snapshot_topology
from storm_dagster.core.upgrade.selection import UpgradeSnapshot
from storm_dagster.model import paths
from storm_dagster.model.conf import CONF_KEYS, mask
from storm_dagster.model.errors import Corrupt, KeyNotFound, NotAlive, StormDagsterError
from storm_dagster.model.names import conf_key, id_of_blob_key, jar_key, placement_key
from storm_dagster.model.operation_text import operation_text
from storm_dagster.model.records import TaskError
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.model.wire import HistoryQuery
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.cluster_rows import (
    alarm_of,
    healing_document,
    health_document,
    nimbus_row,
    pause_fields,
    read_peer_health,
    supervisor_row,
)
from storm_dagster.nimbus.requests.event_pulls import authorization_conf_of_events
from storm_dagster.nimbus.requests.running_workers import dead_letters, read_state
from storm_dagster.nimbus.requests.starting import StartingTopologies
from storm_dagster.nimbus.requests.topology_stats import SharedValues, TopologyStats
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
from storm_dagster.operations.live.worker_requests import WorkerLinks
from storm_dagster.operations.read import status
from storm_dagster.operations.read.explaining import (
    explain_document,
    problems,
    reasons_of_tasks,
    slow_call_problems,
    state_problems,
)
from storm_dagster.operations.read.under_way import OperationStatus, operations_under_way
from storm_dagster.operations.submit.open_tokens import OpenTokenReader, StartingTopology
from storm_dagster.security.settings import Security

_VIEW_SECS = 0.2
"""Maximum age of the view and of the operations under way."""
_STATS_SECS = 1.0
"""Maximum age of a topology's statistics where the caller waits for newer ones."""
_HISTORY_SECS = 5.0
"""Age from which the rows of a chart, and the submitted code on a page, are read again."""
_ERRORS_SECS = 2.0
"""Maximum age of the errors of a topology."""
_PATIENCE_SECS = 0.1
"""Maximum time that a page waits for each of its parts; then it has the former value."""
_COPIES_SECS = 2.0
"""Maximum age of the numbers of nimbuses that hold the code of topologies."""


class ClusterReader:
    """Documents for the HTTP service.

    A view is at most 0.2 s old, statistics are at most 1 s old.
    """

    def __init__(self, nimbus: Nimbus, masters: TopologyStats) -> None:
        self._nimbus = nimbus
        self.security: Security = Security.of(nimbus.conf)
        self.links: WorkerLinks = WorkerLinks.of(nimbus.conf)
        self._view: tuple[float, float, ClusterView] | None = None
        """Shared view, with the monotonic times at the begin and the end of its reading."""
        self._starting = StartingTopologies(nimbus)
        self._view_lock = threading.Lock()
        self._masters = masters
        self._stats = SharedValues[Mapping[str, Any]](_STATS_SECS)
        """Answers of topology masters, by topology id."""
        self._history = SharedValues[Mapping[str, Any]](_HISTORY_SECS)
        """Rows of charts, by topology id, component and length."""
        self._code = SharedValues[Runnable | str](_HISTORY_SECS)
        """Code of topologies, or the reason why it cannot be read, by code folder."""
        self._errors = SharedValues[list[tuple[str, TaskError]]](_ERRORS_SECS)
        """Errors by topology id."""
        self._operations = SharedValues[list[OperationStatus]](_VIEW_SECS)
        """Operations under way, with one key."""
        self._token_reader = OpenTokenReader()
        """Reader of the records of operations; it spares reads of finished ones."""
        self._copies: tuple[float, dict[str, int]] = (0.0, {})
        """Monotonic time, and the number of copies by topology id that was read then."""
        self._askers = ThreadPoolExecutor(8, thread_name_prefix="topology-stats")
        """Threads of requests, which may take longer than their callers wait."""
        # For the health of the leader, which a page of a follower shows.
        self._http = httpx.Client(timeout=1.0, **self.security.client_options())

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
        self._askers.shutdown(wait=False, cancel_futures=True)

    def view(self, since: float = 0.0) -> ClusterView:
        """View of the cluster, at most 0.2 s old, whose reading began after ``since``.

        ``since`` is a monotonic time.
        """
        with self._view_lock:
            if self._view is not None:
                began_at, read_at, view = self._view
                if began_at >= since and time.monotonic() - read_at <= _VIEW_SECS:
                    return view
            began_at = time.monotonic()
            view = self._nimbus.shown_view()
            # Counted from the end of reading, which in a large cluster takes longer than a view is
            # shared.
            self._view = (began_at, time.monotonic(), view)
            return view

    def view_and_starting(self) -> tuple[ClusterView, list[StartingTopology]]:
        """View of the cluster, and the topologies that are being submitted and not in it.

        No topology is missing in both, because the view is read after the list.
        """
        read_at, starting = self._starting.read()
        view = self.view(since=read_at)
        return view, [topology for topology in starting if topology.id not in view.topologies]

    def starting(self, name: str | None) -> list[StartingTopology]:
        """The topologies of that name or id that are being submitted."""
        _, starting = self.view_and_starting()
        return [topology for topology in starting if name in (topology.name, topology.id)]

    def forget(self) -> None:
        """Drop the view and the lists: a change was made here, and later reads show it."""
        with self._view_lock:
            self._view = None
        self._starting.forget()

    def list_topologies(self) -> dict[str, Any]:
        """``list --json``; ``degraded`` marks topologies whose code this nimbus lacks."""
        document = status.list_document(
            self.view(),
            now_secs=int(time.time()),
            launch_secs=self._nimbus.conf["nimbus.task.launch.secs"],
        )
        degraded = {id_of_blob_key(key) for key in self._nimbus.status.snapshot.lacking}
        for row in document["topologies"]:
            row["degraded"] = row["id"] in degraded
        return {**document, **pause_fields(self.view())}

    def list_operations(self) -> dict[str, Any]:
        """Operations under way, oldest first; at most 0.2 s old."""
        return {"operations": self.operations()}

    def operations(self, topology: str | None = None) -> list[dict[str, Any]]:
        """Rows of ``GET /v1/operations``; with ``topology`` those of one, by its name."""
        operations = self._operations.get("operations", self._read_operations) or []
        now_secs = int(time.time())
        return [
            operation.to_document(now_secs)
            for operation in operations
            if topology in (None, operation.topology)
        ]

    def _read_operations(self) -> list[OperationStatus]:
        """Read the operations under way from ZooKeeper."""
        runs = self._nimbus.launches.runs
        return operations_under_way(
            self._reading_context(), self.view(), self._token_reader, runs.get
        )

    def _topology(self, view: ClusterView, name: str) -> TopologyView:
        """Find a topology by name or id.

        The :class:`NotAlive` of a topology that is being submitted says so.
        """
        try:
            return topology_by_name(view, name)
        except NotAlive as error:
            rows = self.operations(name)
            if not rows:
                raise
            raise NotAlive(
                f"topology {name!r} is not alive yet, it is {operation_text(rows[0])}: "
                "repeat the request when it has finished"
            ) from error

    def show(self, name: str) -> dict[str, Any]:
        """``show --json`` of a topology by name or id; :class:`NotAlive` without one."""
        view = self.view()
        topology = self._topology(view, name)
        snapshot = self.snapshot(topology.id)
        return {
            **status.show_document(snapshot),
            "findings": [finding.to_document() for finding in diagnose(snapshot)],
            "problems": [
                *self._problems(view, topology, snapshot.down),
                *state_problems(self._nimbus.cluster, topology),
                *slow_call_problems(snapshot.errors, int(time.time())),
            ],
            "operations": self.operations(topology.base.name),
            "events": self._nimbus.cluster.event_log_document(topology.base.name),
            **self._upgrade_of(topology),
            **pause_fields(view),
        }

    def state(
        self, name: str, component: str, key: str | None, limit: str | None, after: str | None
    ) -> dict[str, Any]:
        """``state --json``: a page of a component's keyed state (:func:`read_state`)."""
        topology = topology_by_name(self.view(), name)
        return read_state(topology, component, self.links, key=key, limit=limit, after=after)

    def dead_letters(
        self,
        name: str,
        replay: bool = False,
        delete_older_secs: float | None = None,
        **page: str | None,
    ) -> dict[str, Any]:
        """``dead-letters --json``: a page of dead letters (:func:`dead_letters`)."""
        topology = topology_by_name(self.view(), name)
        return dead_letters(
            topology, self.links, replay=replay, delete_older_secs=delete_older_secs, **page
        )

    def _problems(self, view: ClusterView, topology: TopologyView, down: list[int]) -> list[str]:
        """Reasons why the tasks ``down`` do not run, with the remedy."""
        if not down or topology.base.status == "KILLED":
            return []
        try:
            return problems(view, topology, self.runnable(topology.id), down)
        except StormDagsterError as error:
            return [f"{len(down)} tasks do not run, and the reason is not known: {error.message}"]

    def _upgrade_of(self, topology: TopologyView) -> dict[str, Any]:
        """``{"upgrade": ...}`` while workers are upgraded or rolled back, else empty."""
        if topology.base.status not in ("UPGRADING", "ROLLBACK"):
            return {}
        if topology.assignment is None or topology.tasks is None:
            return {}
        state = self._nimbus.cluster.read_upgrade(topology.id)
        return {
            "upgrade": UpgradeSnapshot(state, topology.assignment, topology.tasks).to_document()
        }

    def authorization_conf(self, name: str) -> Mapping[str, Any] | None:
        """Conf by which requests for a topology are authorized.

        ``None`` if the topology does not run or its conf cannot be read: then only administrators
        may change or read it. A topology that is being submitted has the users of its submission,
        and one that is gone the user who submitted it, as long as it has an event log.
        """
        try:
            topology = topology_by_name(self.view(), name)
        except NotAlive:
            try:
                return self._starting.authorization_conf(
                    self.starting(name)
                ) or authorization_conf_of_events(self._nimbus.cluster, name)
            except StormDagsterError:
                return None
        except StormDagsterError:
            return None
        try:
            document = json.loads(self._nimbus.blobs.read(conf_key(topology.code_dir)))
        except (StormDagsterError, ValueError):
            return None
        return document if isinstance(document, Mapping) else None

    def snapshot(self, name: str) -> TopologySnapshot:
        """Snapshot of a topology (by name or id), with statistics at most 1 s old.

        :class:`NotAlive` if there is none.
        """
        view = self.view()
        topology = topology_by_name(view, name)
        stats = self._stats_of(topology)
        errors = status.errors_of(self._reading_context(), topology.id)
        return self._snapshot(view, topology, stats, errors)

    def page_snapshot(
        self,
        view: ClusterView,
        topology: TopologyView,
        errors: Iterable[tuple[str, TaskError]] = (),
    ) -> tuple[TopologySnapshot, float]:
        """Snapshot for a page, and the age of its statistics in seconds.

        It has the submitted code. The statistics are at most a minute old.
        """
        stats, age_secs = self._stats.latest(
            topology.id, lambda: self._masters.ask(topology), self._askers, _PATIENCE_SECS
        )
        return self._snapshot(view, topology, stats, errors, self.code(topology)), age_secs

    def snapshots(self, deadline_secs: float) -> list[TopologySnapshot]:
        """Snapshots of every topology, without errors.

        Those whose topology master responds in time have statistics.
        """
        view = self.view()
        topologies = sorted(view.topologies.values(), key=lambda topology: topology.base.name)
        requests = {
            topology.id: self._askers.submit(self._stats_of, topology) for topology in topologies
        }
        wait(requests.values(), timeout=deadline_secs)
        snapshots: list[TopologySnapshot] = []
        for topology in topologies:
            request = requests[topology.id]
            request.cancel()
            stats = None
            if request.done() and not request.cancelled():
                stats = request.result()
            snapshots.append(self._snapshot(view, topology, stats))
        return snapshots

    def _snapshot(
        self,
        view: ClusterView,
        topology: TopologyView,
        stats: Mapping[str, Any] | None,
        errors: Iterable[tuple[str, TaskError]] = (),
        code: Runnable | None = None,
    ) -> TopologySnapshot:
        """Snapshot with ``stats``, the answer of the topology master; ``None`` without one."""
        return snapshot_topology(
            view,
            topology,
            stats,
            now_secs=int(time.time()),
            errors=errors,
            code=code,
            launch_secs=self._nimbus.conf["nimbus.task.launch.secs"],
        )

    def runnable(self, name: str) -> Runnable:
        """Normalized topology and total conf of a running topology, from its blobs.

        ``name`` is its name or id.
        """
        return load_runnable(self._reading_context(), topology_by_name(self.view(), name))

    def shown_conf(self, topology_id: str) -> dict[str, Any]:
        """Total conf of a running topology, without secrets.

        A limited user gets the topology's part of it.
        """
        conf = mask(self.runnable(topology_id).conf)
        if LIMITED_USER.get() is None:
            return conf
        return {
            key: value
            for key, value in conf.items()
            if key.startswith("topology.") or key not in CONF_KEYS
        }

    def replication(self, topology_ids: Iterable[str]) -> dict[str, int]:
        """Topology id -> number of nimbuses that hold its code; at most 2 s old.

        Topologies that do not run are left out.
        """
        topologies = self.view().topologies
        keys: dict[str, str] = {}
        for topology_id in topology_ids:
            topology = topologies.get(topology_id)
            if topology is not None:
                keys[topology_id] = jar_key(topology.code_dir)
        read_at, copies = self._copies
        if time.monotonic() - read_at < _COPIES_SECS and copies.keys() >= keys.keys():
            return {topology_id: copies[topology_id] for topology_id in keys}
        records = self._nimbus.registry.read(keys.values())
        copies = {
            topology_id: len(records[key].newest_holders()) for topology_id, key in keys.items()
        }
        self._copies = (time.monotonic(), copies)
        return copies

    def placement(self, name: str, task: int | None = None) -> dict[str, Any]:
        """Reasons of the placement of a topology's tasks, and why others do not run.

        The run that published the placement stored them. With ``task`` it also has the workers that
        were not chosen for the task.
        """
        view = self.view()
        topology = topology_by_name(view, name)
        key = placement_key(topology.id)
        try:
            document = json.loads(self._nimbus.blobs.read(key))
        except KeyNotFound:
            raise KeyNotFound(
                f"the reasons for the placement of {topology.base.name!r} are not stored: "
                "rebalance it to get new ones"
            ) from None
        except ValueError:
            raise Corrupt(
                f"blob {key!r} is not valid JSON: rebalance the topology, which writes a new one"
            ) from None
        if not isinstance(document, dict):
            # Not written by this release, but readable: it is shown as it is.
            return {"reasons": document}
        runnable = self.runnable(topology.id)
        snapshot = self.snapshot(topology.id)
        explained = explain_document(view, topology, runnable, document, snapshot.down, task)
        return {**explained, **reasons_of_tasks(snapshot)}

    def cluster(self) -> dict[str, Any]:
        """Nimbuses, supervisors, and the state of healing."""
        view = self.view()
        supervisors = supervisors_of(view, now_secs=int(time.time()))
        supervisors.sort(key=lambda supervisor: supervisor.id)
        healer = self._nimbus.cluster.state.get_data(paths.HEALER)
        return {
            "cluster_id": view.cluster_id,
            "nimbuses": self._nimbuses(),
            "supervisors": [supervisor_row(supervisor) for supervisor in supervisors],
            "healer": healer is not None,
            "alarm": alarm_of(healer) or self._nimbus.alarm,
            "healing": self.healing(healer is not None),
            "corrupt": dict(view.corrupt),
            "events": {
                name: summary.to_document()
                for name, summary in self._nimbus.cluster.event_logs().items()
            },
        }

    def healing(self, is_armed: bool | None = None) -> dict[str, Any]:
        """Healer, and the pause by operators.

        ``is_armed``: ``/healer`` exists; ``None`` if the caller does not know.
        """
        if is_armed is None:
            is_armed = self._nimbus.cluster.state.exists(paths.HEALER)
        pause = self.view().healing_pause
        return healing_document(pause, self._nimbus.paused_causes, is_armed)

    def health(self) -> dict[str, Any]:
        """``/healthz``; it makes no requests, so that it responds also without ZooKeeper."""
        return health_document(self._nimbus)

    def readiness_problems(self) -> list[str]:
        """Reasons why this nimbus cannot serve or lead now; they name no topology or address."""
        nimbus = self._nimbus
        if not nimbus.cluster.session.connected:
            return ["no session with ZooKeeper"]
        leadership = nimbus.status.snapshot
        problems: list[str] = []
        if nimbus.status.epoch is None and leadership.leader_http is None:
            problems.append("no leader is known")
        if leadership.missing:
            problems.append(
                f"{leadership.missing} blobs of active topologies are not copied to this nimbus"
            )
        return problems

    def history(self, topology: TopologyView, component: str, day: bool) -> Mapping[str, Any]:
        """Rows of the topology master's rings, for a page.

        They are ``{"columns", "interval", "rows"}``, or empty without rings.
        """
        query = HistoryQuery(component, day)
        history, _ = self._history.latest(
            (topology.id, component, day),
            lambda: self._masters.ask(topology, query),
            self._askers,
            _PATIENCE_SECS,
        )
        return history or {}

    def errors(self, topology: TopologyView) -> list[tuple[str, TaskError]]:
        """Errors of a topology as (component, error), newest first; at most 2 s old."""
        context = self._reading_context()
        return self._errors.get(topology.id, lambda: status.errors_of(context, topology.id)) or []

    def code(self, topology: TopologyView) -> Runnable | None:
        """Submitted topology, for a page; ``None`` while no nimbus holds its code."""

        def read() -> Runnable | str:
            try:
                return self.runnable(topology.id)
            except StormDagsterError as error:
                # Shared like the code, so that not every page tries to read code that is away.
                return error.message

        code, _ = self._code.latest(topology.code_dir, read, self._askers, _PATIENCE_SECS)
        return code if isinstance(code, Runnable) else None

    def _nimbuses(self) -> list[dict[str, Any]]:
        """Rows of the nimbuses that are alive, the leader first.

        A leader that does not answer has only its address.
        """
        nimbus = self._nimbus
        leader = nimbus.leadership.current()
        rows = [
            nimbus_row(address, False, detail)
            for address, detail in sorted(nimbus.leadership.followers().items())
            if address != leader
        ]
        stored_epoch = nimbus.cluster.epoch()
        if leader is None or stored_epoch is None:
            return rows
        _, record = stored_epoch
        # If the leader changes between the two reads, its URL is not known.
        if record.leader == leader:
            if leader == nimbus.identity.address:
                detail: Mapping[str, Any] = self.health()
            else:
                detail = read_peer_health(self._http, record.http) or {}
            rows.insert(0, nimbus_row(leader, True, {**detail, "http": record.http}))
        return rows

    def _reading_context(self) -> OperationsContext:
        # Reads are not fenced: any epoch is right.
        return self._nimbus.operations(epoch=-1)

    def _stats_of(self, topology: TopologyView) -> Mapping[str, Any] | None:
        return self._stats.get(topology.id, lambda: self._masters.ask(topology))
