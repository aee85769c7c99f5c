"""Functions behind the methods of Storm's Nimbus service."""

import json
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

from storm_dagster.core.submission.tasks import with_system_components
from storm_dagster.model.conf import mask
from storm_dagster.model.errors import (
    InvalidRequest,
    InvalidTopology,
    NotAlive,
    StormDagsterError,
    error_from_document,
)
from storm_dagster.model.names import check_topology_name
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.model.wire import LevelChange
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.running_workers import WorkerLevels
from storm_dagster.nimbus.thrift.blobs import Blobs
from storm_dagster.nimbus.thrift.idl import RefusedCall, load_idl
from storm_dagster.nimbus.thrift.pages import Pages
from storm_dagster.nimbus.thrift.pending import PendingSubmissions, within
from storm_dagster.nimbus.thrift.structures import topology_struct
from storm_dagster.nimbus.thrift.submission import TopologySubmission, answer_deadline
from storm_dagster.nimbus.thrift.summaries import Summaries
from storm_dagster.nimbus.thrift.transfers import Downloads, UploadSessions
from storm_dagster.operations.context import topology_by_name
from storm_dagster.operations.live.log_levels import level_change
from storm_dagster.operations.submit.open_tokens import StartingTopology

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.@-]{0,63}\$?")
"""Names of users, as Linux permits them."""
_MARGIN_SECS = 1.0
"""Time before the deadline of a call at which it no longer waits for its run."""
_POLL_SECS = 1.0
"""Interval at which a call polls its run."""


class NimbusHandler:
    """Functions behind Storm's methods.

    They take the arguments of a call in their order; an argument that the client left out is
    ``None``. The table :data:`~storm_dagster.nimbus.thrift.methods.METHODS` names the function of
    each method.
    """

    def __init__(
        self,
        nimbus: Nimbus,
        reader: ClusterReader,
        pending: PendingSubmissions,
        lifecycle: LifecycleRequests,
    ) -> None:
        self._nimbus = nimbus
        self._reader = reader
        self._lifecycle = lifecycle
        self._submission = TopologySubmission(nimbus, pending, self._lifecycle)
        self._levels = WorkerLevels(nimbus)
        self.summaries = Summaries(nimbus, reader)
        self.pages = Pages(reader, self.summaries)
        self.archives = UploadSessions(nimbus, "file upload")
        self.downloads = Downloads(nimbus)
        self.blobs = Blobs(nimbus, self.summaries, self.downloads)

    def find_by_id(self, topology_id: str | None) -> TopologyView:
        """Find a topology; :class:`NotAlive` if no topology has this id."""
        view = self._reader.view()
        topology = view.topologies.get(topology_id or "")
        if topology is None:
            # A damaged topology is reported as damaged, not as absent.
            raise _not_alive(view, topology_id)
        return topology

    def find_by_name(self, name: str | None) -> TopologyView:
        """Find a topology; :class:`NotAlive` if no topology has this name."""
        view = self._reader.view()
        topology = view.topology_named(_text(name))
        if topology is None:
            raise _not_alive(view, name)
        return topology

    def find_starting(
        self, name: str | None, by: Literal["id", "name"] | None
    ) -> StartingTopology | None:
        """Find a topology that is being submitted; ``None`` if none has this id or name."""
        for topology in self._reader.starting(name):
            if name == (topology.id if by == "id" else topology.name):
                return topology
        return None

    def _find_by_id_or_name(self, name: str | None) -> TopologyView:
        return topology_by_name(self._reader.view(), _text(name))

    def begin_file_download(self, key: str | None) -> str:
        """Begin the download of a blob, which Storm 1.x calls a file; return the session."""
        return self.blobs.begin_download(key).session

    # -- changes -----------------------------------------------------------------------------------

    def submit_topology(
        self,
        name: str | None,
        location: str | None,
        conf: str | None,
        topology: Any,
        options: Any = None,
    ) -> None:
        """Submit a topology, active (the default) or inactive."""
        try:
            self._submission.submit(name, location, conf, topology, options)
        finally:
            self._reader.forget()

    def kill_topology(self, name: str | None, options: Any = None) -> None:
        """Kill a topology after ``wait_secs``.

        Without a number, or with a negative one, after the message timeout, as in Storm.
        """
        self._change(name, "kill", {"wait_secs": _wait_secs(options)})

    def activate(self, name: str | None) -> None:
        """Start the spouts of a topology."""
        self._change(name, "activate", {})

    def deactivate(self, name: str | None) -> None:
        """Stop the spouts of a topology."""
        self._change(name, "deactivate", {})

    def rebalance(self, name: str | None, options: Any) -> None:
        """Rebalance a topology: workers, executors and delay.

        Storm 2.x also overrides conf and resources; that is refused, and the error names the keys.
        """
        document: dict[str, Any] = {}
        if options is not None:
            _refuse_overrides(options)
            document = {
                "wait_secs": _wait_secs(options),
                "workers": options.num_workers,
                "executors": options.num_executors or None,
            }
        self._change(name, "rebalance", document)

    def _change(self, name: str | None, verb: str, document: Mapping[str, Any]) -> None:
        """Execute a verb, or launch its run and wait for it within the time of a response.

        :class:`NotAlive` without a name or for an unknown one, :class:`Late` if the run is not
        launched in time. A run that was launched continues after the call.
        """
        if not isinstance(name, str) or not name:
            raise NotAlive(f"no topology was named: give the name of the one to {verb}")
        if VERBS[verb].executed_by == "leader":
            self._lifecycle.act(name, verb, document)
        else:
            deadline = answer_deadline(self._nimbus.conf)
            response = within(
                deadline, lambda: self._lifecycle.act(name, verb, document), f"{verb} of {name!r}"
            )
            self._wait_for_run(response["run_id"], deadline - _MARGIN_SECS)
        self._reader.forget()

    def _wait_for_run(self, run_id: str, deadline: float) -> None:
        """Wait a moment for the run.

        The client's next read then shows the change, or the call raises the failure.
        """
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
            try:
                run = self._nimbus.dagster.run(run_id)
            except StormDagsterError:
                return  # The run was launched, but its state cannot be read now.
            if run["error"] is not None:
                raise error_from_document(run)
            if run["finished"]:
                return

    # -- reading -----------------------------------------------------------------------------------

    def nimbus_conf(self) -> str:
        """Return the cluster's conf as JSON, without secrets."""
        return json.dumps(mask(self._nimbus.conf.values), default=str)

    def is_topology_name_allowed(self, name: str | None) -> bool:
        """Return True if the name is free; :class:`RefusedCall` for an invalid one."""
        try:
            check_topology_name(name)
        except InvalidTopology as error:
            raise RefusedCall(error.message) from None
        return self._reader.view().topology_named(str(name)) is None

    def running_topology(self, topology: TopologyView) -> Any:
        """Return the topology as it runs, with the components of the system."""
        runnable = self._reader.runnable(topology.id)
        return topology_struct(with_system_components(runnable.spec, runnable.conf))

    def submitted_topology(self, topology: TopologyView) -> Any:
        """Return the topology as it was submitted, normalized."""
        return topology_struct(self._reader.runnable(topology.id).spec)

    def topology_history(self, user: str | None) -> Any:
        """Return the ids of the topologies that a user may see, which are all.

        The user's name is only checked (CVE-2021-38294).
        """
        if user and not _USER.fullmatch(user):
            raise RefusedCall(f"{user!r:.80} is not a user name: letters, digits and any of _.@-")
        return load_idl().TopologyHistoryInfo(topo_ids=sorted(self._reader.view().topologies))

    # -- running workers ---------------------------------------------------------------------------

    def set_log_config(self, name: str | None, config: Any) -> None:
        """Change levels of loggers in the workers of a topology, by id or name.

        :class:`InvalidRequest` for a level that does not exist.
        """
        entries = (config.named_logger_level if config is not None else None) or {}
        changes: dict[str, LevelChange] = {}
        for logger, entry in entries.items():
            change = _level_change(logger, entry)
            if change is not None:
                changes[logger] = change
        self._levels.change(self._find_by_id_or_name(name), changes)

    def log_config(self, name: str | None) -> Any:
        """Return a LogConfig: the changed levels in all workers that respond.

        Each has the seconds that it stays changed.
        """
        idl = load_idl()
        changes = self._levels.current(self._find_by_id_or_name(name))
        levels: dict[str, Any] = {}
        for logger, change in changes.items():
            secs = int(change.get("secs") or 0)
            levels[logger] = idl.LogLevel(
                action=idl.LogLevelAction.UNCHANGED,
                target_log_level=change.get("level"),
                reset_log_level_timeout_secs=secs,
                reset_log_level_timeout_epoch=int(time.time()) + secs if secs else None,
                reset_log_level=change.get("reset"),
            )
        return idl.LogConfig(named_logger_level=levels)

    def profile_actions(
        self, topology: TopologyView, component_id: str | None, action: int | None
    ) -> list[Any]:
        """Return no action.

        Workers are not JVMs, and a request for their stacks is answered at once.
        """
        return []


def _level_change(logger: str, entry: Any) -> LevelChange | None:
    """Change of one logger; ``None`` if the entry does not change it."""
    action = load_idl().LogLevelAction
    if entry.action == action.REMOVE:
        return level_change(logger, None, 0, None)
    if entry.action != action.UPDATE:
        return None
    if not entry.target_log_level:
        raise InvalidRequest(f"no level is given for logger {logger!r:.80}: set target_log_level")
    return level_change(
        logger,
        entry.target_log_level,
        entry.reset_log_level_timeout_secs or 0,
        entry.reset_log_level or None,
    )


def _text(value: str | None) -> str:
    """Name or id of a topology; :class:`InvalidRequest` without one."""
    if not isinstance(value, str):
        raise InvalidRequest(
            "the topology is not named: give its id (or name, if the method takes one)"
        )
    return value


def _not_alive(view: ClusterView, name: str | None) -> NotAlive:
    """Error for an id in place of a name, or the reverse.

    Storm reports this mistake of a client as well. If no topology has this name or id at all, the
    error of :func:`topology_by_name` is raised.
    """
    topology = topology_by_name(view, _text(name))
    return NotAlive(
        f"no topology {name!r:.200} is alive under that id or name: "
        f"{topology.base.name!r} has the id {topology.id!r}"
    )


def _refuse_overrides(options: Any) -> None:
    """Raise :class:`InvalidTopology` if a rebalance would change conf or resources.

    The error names the keys of the conf and the components. Storm's command line always sends both,
    mostly empty. Its conf holds the options of the client itself, which no topology reads.
    """
    try:
        conf = json.loads(options.topology_conf_overrides or "{}") or {}
    except ValueError:
        conf = None
    if not isinstance(conf, dict):
        raise InvalidTopology(
            "topology_conf_overrides is not a JSON object: send one, or leave it out"
        )
    overrides = [key for key in sorted(conf) if not key.startswith(("nimbus.", "storm."))]
    resources_by_component = options.topology_resources_overrides or {}
    for component, resources in sorted(resources_by_component.items()):
        if resources:
            overrides.append(f"the resources of {component}")
    if overrides:
        raise InvalidTopology(
            f"a rebalance changes workers and executors, not {', '.join(overrides):.200}: "
            "update the topology for those"
        )


def _wait_secs(options: Any) -> int | None:
    """Delay of a kill or rebalance; ``None``, the default, also for a negative number."""
    secs = options.wait_secs if options is not None else None
    if secs is None or secs < 0:
        return None
    return secs
