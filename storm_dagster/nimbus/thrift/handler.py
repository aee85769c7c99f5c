"""The methods of the service, by the names that clients call."""

import json
import re
import time
from collections.abc import Callable, Mapping
from functools import partialmethod
from operator import attrgetter
from typing import Any, NoReturn

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
from storm_dagster.nimbus.thrift.idl import METHODS, RefusedCall, load_idl
from storm_dagster.nimbus.thrift.pages import Pages
from storm_dagster.nimbus.thrift.pending import PendingSubmissions, within
from storm_dagster.nimbus.thrift.structures import topology_struct
from storm_dagster.nimbus.thrift.submission import ANSWER_SECS, TopologySubmission
from storm_dagster.nimbus.thrift.summaries import Summaries
from storm_dagster.nimbus.thrift.transfers import Downloads, UploadSessions
from storm_dagster.operations.context import topology_by_name
from storm_dagster.operations.live.log_levels import level_change

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.@-]{0,63}\$?")
_MARGIN_SECS = 1.0
_POLL_SECS = 1.0


def _change(name: str, entry: Any) -> LevelChange | None:
    action = load_idl().LogLevelAction
    if entry.action == action.REMOVE:
        return level_change(name, None, 0, None)
    if entry.action != action.UPDATE:
        return None
    if not entry.target_log_level:
        raise InvalidRequest(f"no level is given for logger {name!r:.80}: set target_log_level")
    return level_change(
        name,
        entry.target_log_level,
        entry.reset_log_level_timeout_secs or 0,
        entry.reset_log_level or None,
    )


class NimbusHandler:
    """What serves Storm's methods; arguments in their order, any of them ``None`` when the client
    left it out.
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
        self.summaries = Summaries(nimbus, reader)
        self._levels = WorkerLevels(nimbus)
        self.pages = Pages(reader, self.summaries)
        self.archives = UploadSessions(nimbus, "file upload")
        self.downloads = Downloads(nimbus)
        self.blobs = Blobs(nimbus, self.summaries, self.downloads)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """What serves a method, by its row in ``methods.yaml``."""
        row = METHODS.get(name)
        if row is None:
            raise AttributeError(name)
        call = attrgetter(row["call"])(self)
        if "find" not in row:
            return call
        find = self._by_id if row["find"] == "id" else self._by_name
        return lambda given, *more: call(find(given), *more)

    def beginFileDownload(self, key: str | None) -> str:
        """The session of a download, whose key Storm 1.x calls a file."""
        return self.blobs.begin_download(key).session

    # -- changes -----------------------------------------------------------------------------------

    def submitTopology(
        self,
        name: str | None,
        location: str | None,
        conf: str | None,
        topology: Any,
        options: Any = None,
    ) -> None:
        """Submit, active (the default) or inactive."""
        self._submission.submit(name, location, conf, topology, options)
        self._reader.forget()

    def killTopology(self, name: str | None, options: Any = None) -> None:
        """Kill after ``wait_secs``; none, or a negative number, means the message timeout, as in
        Storm.
        """
        self._act(name, "kill", {"wait_secs": _wait_secs(options)})

    def rebalance(self, name: str | None, options: Any) -> None:
        """Rebalance: workers, executors and delay. What Storm 2.x lays over conf and resources is
        refused by key.
        """
        document: dict[str, Any] = {}
        if options is not None:
            _refuse_overrides(options)
            executors = options.num_executors or None
            document = {
                "wait_secs": _wait_secs(options),
                "workers": options.num_workers,
                "executors": executors,
            }
        self._act(name, "rebalance", document)

    def _act(self, name: str | None, verb: str, document: Mapping[str, Any] = {}) -> None:
        if not isinstance(name, str) or not name:
            raise NotAlive(f"no topology was named: give the name of the one to {verb}")
        if VERBS[verb].executed_by == "leader":
            self._lifecycle.act(name, verb, document)
        else:
            deadline = time.monotonic() + ANSWER_SECS - 0.5
            answer = within(
                deadline, lambda: self._lifecycle.act(name, verb, document), f"{verb} of {name!r}"
            )
            self._await_run(answer["run_id"], deadline - _MARGIN_SECS)
        self._reader.forget()

    activate = partialmethod(_act, verb="activate")
    deactivate = partialmethod(_act, verb="deactivate")

    def _await_run(self, run_id: str, deadline: float) -> None:
        """Wait a moment for the run, so that the client's next read shows the change, or the call
        raises the failure.
        """
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
            try:
                run = self._nimbus.dagster.run(run_id)
            except StormDagsterError:
                return  # It was launched; how it goes cannot be seen now.
            if run["error"] is not None:
                raise error_from_document(run)
            if run["finished"]:
                return

    # -- reading -----------------------------------------------------------------------------------

    def getNimbusConf(self) -> str:
        """The cluster's conf as JSON, without secrets."""
        return json.dumps(mask(self._nimbus.conf.values), default=str)

    def isTopologyNameAllowed(self, name: str | None) -> bool:
        """Whether the name is free; :class:`RefusedCall` for an invalid one."""
        try:
            check_topology_name(name)
        except InvalidTopology as error:
            raise RefusedCall(error.message) from None
        return self._reader.view().topology_named(str(name)) is None

    def running_topology(self, topology: TopologyView) -> Any:
        """The topology that runs, with the components of the system."""
        runnable = self._reader.runnable(topology.id)
        return topology_struct(with_system_components(runnable.spec, runnable.conf))

    def submitted_topology(self, topology: TopologyView) -> Any:
        """The topology as it was submitted, normalized."""
        return topology_struct(self._reader.runnable(topology.id).spec)

    def getTopologyHistory(self, user: str | None) -> Any:
        """Ids of the topologies that a user may see, which is all of them; the name is only checked
        (CVE-2021-38294).
        """
        if user and not _USER.fullmatch(user):
            raise RefusedCall(f"{user!r:.80} is not a user name: letters, digits and any of _.@-")
        return load_idl().TopologyHistoryInfo(topo_ids=sorted(self._reader.view().topologies))

    # -- running workers ---------------------------------------------------------------------------

    def setLogConfig(self, name: str | None, config: Any) -> None:
        """Change levels of loggers in the workers of a topology, by id or name;
        :class:`InvalidRequest` for a level that is none.
        """
        entries = (config.named_logger_level if config is not None else None) or {}
        changes = {
            each: change
            for each, entry in entries.items()
            if (change := _change(each, entry)) is not None
        }
        self._levels.change(topology_by_name(self._reader.view(), _text(name)), changes)

    def getLogConfig(self, name: str | None) -> Any:
        """A LogConfig: what is changed in any worker that answers, and for how long."""
        idl = load_idl()
        found: dict[str, Any] = {}
        for logger, change in self._levels.current(
            topology_by_name(self._reader.view(), _text(name))
        ).items():
            secs = int(change.get("secs") or 0)
            found[logger] = idl.LogLevel(
                action=idl.LogLevelAction.UNCHANGED,
                target_log_level=change.get("level"),
                reset_log_level_timeout_secs=secs,
                reset_log_level_timeout_epoch=int(time.time()) + secs if secs else None,
                reset_log_level=change.get("reset"),
            )
        return idl.LogConfig(named_logger_level=found)

    def profile_actions(
        self, topology: TopologyView, component_id: str | None, action: int | None
    ) -> list[Any]:
        """None: workers are no JVMs, and what can be asked of them is answered at once."""
        return []

    def _by_id(self, topology_id: str | None) -> TopologyView:
        view = self._reader.view()
        # A damaged one is reported as damaged, not as absent.
        return view.topologies.get(topology_id or "") or _mistaken(view, topology_id)

    def _by_name(self, name: str | None) -> TopologyView:
        view = self._reader.view()
        return view.topology_named(_text(name)) or _mistaken(view, name)


def _text(value: str | None) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(
            "the topology is not named: give its id (or name, where the method asks for one)"
        )
    return value


def _mistaken(view: ClusterView, asked: str | None) -> NoReturn:
    """An id where a name is asked for, or the other way round, is a client's mistake that Storm
    reports.
    """
    found = topology_by_name(view, _text(asked))
    raise NotAlive(
        f"no topology {asked!r:.200} is alive under that id or name: {found.base.name!r} has the id {found.id!r}"
    )


def _refuse_overrides(options: Any) -> None:
    """:class:`InvalidTopology` names the keys of conf and the components with resources that a
    rebalance would change.

    Storm's command line always sends both, mostly empty. Its conf holds the options of the client
    itself, which no topology reads.
    """
    try:
        conf = json.loads(options.topology_conf_overrides or "{}") or {}
    except ValueError:
        conf = None
    if not isinstance(conf, dict):
        raise InvalidTopology(
            "topology_conf_overrides is no JSON object: send one, or leave it out"
        )
    wrong = [key for key in sorted(conf) if not key.startswith(("nimbus.", "storm."))]
    given = (options.topology_resources_overrides or {}).items()
    wrong += [
        f"the resources of {component}" for component, resources in sorted(given) if resources
    ]
    if wrong:
        raise InvalidTopology(
            f"a rebalance changes workers and executors, not {', '.join(wrong):.200}: update the topology for those"
        )


def _wait_secs(options: Any) -> int | None:
    secs = options.wait_secs if options is not None else None
    return None if secs is None or secs < 0 else secs
