"""The methods of the service, by the names that clients call."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from storm_dagster.core.submission.system import with_system_components
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, NotAlive, StormDagsterError, error_from_document
from storm_dagster.model.masking import public_conf
from storm_dagster.model.names import check_topology_name
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import TopologyView
from storm_dagster.model.wire import LevelChange
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.worker_levels import WorkerLevels
from storm_dagster.nimbus.thrift.blobs import Blobs
from storm_dagster.nimbus.thrift.errors import RefusedCall
from storm_dagster.nimbus.thrift.idl import load_idl
from storm_dagster.nimbus.thrift.pages import Pages
from storm_dagster.nimbus.thrift.pending import PendingSubmissions
from storm_dagster.nimbus.thrift.structures import topology_struct
from storm_dagster.nimbus.thrift.submission import ANSWER_SECS, Late, TopologySubmission, within
from storm_dagster.nimbus.thrift.summaries import Summaries
from storm_dagster.nimbus.thrift.transfers import Downloads, UploadSessions
from storm_dagster.operations.context import topology_by_name
from storm_dagster.operations.live.log_levels import level_change

_SUPERVISORS = "supervisors and workers speak to ZooKeeper here, and not to nimbus"
REFUSED: Mapping[str, str] = {
    "setWorkerProfiler": "workers here are no JVMs: dump their stacks with the `workers` resource in Dagster",
    "uploadNewCredentials": "credentials are not kept: put them where the workers find them, and `storm-dagster restart`",
    "debug": "tuples are not sampled: set topology.debug with an update of the topology",
    "getSupervisorAssignments": _SUPERVISORS,
    "sendSupervisorWorkerHeartbeats": _SUPERVISORS,
    "sendSupervisorWorkerHeartbeat": _SUPERVISORS,
    "processWorkerMetrics": _SUPERVISORS,
}
"""Storm's methods that have no meaning here, and why. The answer is an error: silence would promise something."""

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.@-]{0,63}\$?")
_MARGIN_SECS = 1.0
_POLL_SECS = 0.1


def _change(name: str, entry: Any) -> LevelChange | None:
    action = load_idl().LogLevelAction
    if entry.action == action.REMOVE:
        return level_change(name, None, 0, None)
    if entry.action != action.UPDATE:
        return None
    if not entry.target_log_level:
        raise InvalidRequest(f"no level is given for logger {name!r:.80}: set target_log_level")
    return level_change(
        name, entry.target_log_level, entry.reset_log_level_timeout_secs or 0, entry.reset_log_level or None
    )


class NimbusHandler:
    """One method for each of Storm's; arguments in their order, any of them ``None`` when the client left it out."""

    def __init__(self, nimbus: Nimbus, reader: ClusterReader, pending: PendingSubmissions) -> None:
        self._nimbus = nimbus
        self._reader = reader
        self._lifecycle = LifecycleRequests(nimbus)
        self._submission = TopologySubmission(nimbus, pending, self._lifecycle)
        self._summaries = Summaries(nimbus, reader)
        self._levels = WorkerLevels(nimbus)
        self._pages = Pages(reader, self._summaries)
        expiry = float(nimbus.conf["nimbus.file.copy.expiration.secs"])
        self._archives = UploadSessions(nimbus, expiry_secs=expiry, what="file upload")
        self._downloads = Downloads(nimbus, expiry_secs=expiry)
        self._blobs = Blobs(nimbus, self._summaries, self._downloads, expiry_secs=expiry)
        self._name_pages(self._summaries, self._pages)
        self._name_blob_methods()
        for verb in ("activate", "deactivate"):
            setattr(self, verb, partial(self._act, verb=verb))

    def advance(self, now: float) -> None:
        """Expire idle transfers; called by the upkeep thread."""
        self._archives.advance(now)
        self._downloads.advance(now)
        self._blobs.uploads.advance(now)

    def close(self) -> None:
        """Close what downloads hold open."""
        self._downloads.close()

    def _name_pages(self, summaries: Summaries, pages: Pages) -> None:
        """What is read; a topology is given by its id, or in methods ``ByName`` by its name."""

        def of(
            page: Callable[..., Any], find: Callable[[str | None], TopologyView] = self._by_id
        ) -> Callable[..., Any]:
            return lambda given, *more: page(find(given), *more)

        def info(topology: TopologyView, options: Any = None) -> Any:
            """All errors of each component (the default), one or none."""
            return pages.topology_info(topology, options.num_err_choice if options is not None else None)

        self.getClusterInfo = summaries.cluster
        self.getLeader = summaries.leader
        self.getSupervisorPageInfo = pages.supervisor_page
        self.getOwnerResourceSummaries = summaries.owners
        self.getTopologySummaries = lambda: summaries.topologies(self._reader.view())
        self.getTopologySummary = of(summaries.topology)
        self.getTopologySummaryByName = of(summaries.topology, self._by_name)
        self.getTopologyInfo = self.getTopologyInfoWithOpts = of(info)
        self.getTopologyInfoByName = self.getTopologyInfoByNameWithOpts = of(info, self._by_name)
        self.getTopologyPageInfo = of(lambda topology, window, sys: pages.topology_page(topology, window, bool(sys)))
        self.getComponentPageInfo = of(
            lambda topology, component, window, sys: pages.component_page(topology, component, window, bool(sys))
        )
        self.getTopologyConf = of(lambda topology: pages.conf_text(topology.id))

    def _name_blob_methods(self) -> None:
        blobs, archives, downloads = self._blobs, self._archives, self._downloads
        self.beginCreateBlob = blobs.begin_create
        self.beginUpdateBlob = blobs.begin_update
        self.uploadBlobChunk = blobs.uploads.append
        self.finishBlobUpload = blobs.uploads.finish
        self.cancelBlobUpload = blobs.uploads.cancel
        self.getBlobMeta = blobs.meta
        self.setBlobMeta = blobs.set_meta
        self.beginBlobDownload = blobs.begin_download
        self.downloadBlobChunk = downloads.read
        self.deleteBlob = blobs.delete
        self.listBlobs = blobs.list
        self.getBlobReplication = blobs.replication
        self.updateBlobReplication = blobs.update_replication
        self.createStateInZookeeper = blobs.register
        self.isRemoteBlobExists = blobs.exists
        self.beginFileUpload = archives.begin
        self.uploadChunk = archives.append
        self.finishFileUpload = archives.finish
        self.downloadChunk = downloads.read

    def beginFileDownload(self, key: str | None) -> str:
        """The session of a download, whose key Storm 1.x calls a file."""
        return self._blobs.begin_download(key).session

    # -- changes -------------------------------------------------------------------------------------------

    def submitTopology(
        self, name: str | None, location: str | None, conf: str | None, topology: Any, options: Any = None
    ) -> None:
        """Submit, active (the default) or inactive."""
        self._submission.submit(name, location, conf, topology, options)
        self._reader.forget()

    submitTopologyWithOpts = submitTopology

    def killTopology(self, name: str | None, options: Any = None) -> None:
        """Kill after ``wait_secs``; none, or a negative number, means the message timeout, as in Storm."""
        self._act(name, "kill", {"wait_secs": _wait_secs(options)})

    killTopologyWithOpts = killTopology

    def rebalance(self, name: str | None, options: Any) -> None:
        """Rebalance: workers, executors and delay. What Storm 2.x lays over conf and resources is refused by key."""
        document: dict[str, Any] = {}
        if options is not None:
            _refuse_overrides(options)
            executors = options.num_executors or None
            document = {"wait_secs": _wait_secs(options), "workers": options.num_workers, "executors": executors}
        self._act(name, "rebalance", document)

    def _act(self, name: str | None, verb: str, document: Mapping[str, Any] = {}) -> None:
        if not isinstance(name, str) or not name:
            raise NotAlive(f"no topology was named: give the name of the one to {verb}")
        deadline = time.monotonic() + ANSWER_SECS - 0.5
        answers: list[dict[str, Any]] = []
        try:
            within(deadline, lambda: answers.append(self._lifecycle.act(name, verb, document)), f"{verb} of {name!r}")
        except Late:
            if verb == "rebalance":
                raise
            return  # What Dagster does not take, the leader does itself a moment later.
        self._confirm(answers[0], verb, deadline - _MARGIN_SECS)
        self._reader.forget()

    def _confirm(self, answer: Mapping[str, Any], verb: str, deadline: float) -> None:
        """Wait a moment for the run, so that the client's next read shows the change, or the call raises the failure."""
        run_id = answer["run_id"]
        next_poll = time.monotonic() + 1.0
        while run_id is not None and time.monotonic() < deadline:
            if self._has_happened(str(answer["id"]), verb):
                return
            if time.monotonic() >= next_poll:
                next_poll = time.monotonic() + 1.0
                try:
                    run = self._nimbus.dagster.run(str(run_id))
                except StormDagsterError:
                    return  # It was launched; how it goes cannot be seen now.
                if run["error"] is not None:
                    raise error_from_document(run)
                if run["finished"]:
                    return
            time.sleep(_POLL_SECS)

    def _has_happened(self, topology_id: str, verb: str) -> bool:
        base, until = self._nimbus.cluster.storm_base(topology_id), VERBS[verb].until
        if verb == "kill":
            return base is None or base.status == "KILLED"
        return base is not None and until == (base.status,)

    # -- reading -------------------------------------------------------------------------------------------

    def getNimbusConf(self) -> str:
        """The cluster's conf as JSON, without secrets."""
        return json.dumps(public_conf(self._nimbus.conf.values), default=str)

    def isTopologyNameAllowed(self, name: str | None) -> bool:
        """Whether the name is free; :class:`RefusedCall` for an invalid one."""
        try:
            check_topology_name(name)
        except InvalidTopology as error:
            raise RefusedCall(error.message) from None
        return self._reader.view().topology_named(str(name)) is None

    def getTopology(self, topology_id: str | None) -> Any:
        """The topology that runs, with the components of the system."""
        runnable = self._reader.runnable(self._by_id(topology_id).id)
        return topology_struct(with_system_components(runnable.spec, runnable.conf))

    def getUserTopology(self, topology_id: str | None) -> Any:
        """The topology as it was submitted, normalized."""
        return topology_struct(self._reader.runnable(self._by_id(topology_id).id).spec)

    def getTopologyHistory(self, user: str | None) -> Any:
        """Ids of the topologies that a user may see, which is all of them; the name is only checked (CVE-2021-38294)."""
        if user and not _USER.fullmatch(user):
            raise RefusedCall(f"{user!r:.80} is not a user name: letters, digits and any of _.@-")
        return load_idl().TopologyHistoryInfo(topo_ids=sorted(self._reader.view().topologies))

    # -- running workers -----------------------------------------------------------------------------------

    def setLogConfig(self, name: str | None, config: Any) -> None:
        """Change levels of loggers in the workers of a topology, by id or name; :class:`InvalidRequest` for a level that
        is none."""
        entries = (config.named_logger_level if config is not None else None) or {}
        changes = {each: change for each, entry in entries.items() if (change := _change(each, entry)) is not None}
        self._levels.change(topology_by_name(self._reader.view(), _text(name)), changes)

    def getLogConfig(self, name: str | None) -> Any:
        """A LogConfig: what is changed in any worker that answers, and for how long."""
        idl = load_idl()
        found: dict[str, Any] = {}
        for logger, change in self._levels.current(topology_by_name(self._reader.view(), _text(name))).items():
            secs = int(change.get("secs") or 0)
            found[logger] = idl.LogLevel(
                action=idl.LogLevelAction.UNCHANGED,
                target_log_level=change.get("level"),
                reset_log_level_timeout_secs=secs,
                reset_log_level_timeout_epoch=int(time.time()) + secs if secs else None,
                reset_log_level=change.get("reset"),
            )
        return idl.LogConfig(named_logger_level=found)

    def getComponentPendingProfileActions(
        self, topology_id: str | None, component_id: str | None, action: int | None
    ) -> list[Any]:
        """None: workers are no JVMs, and what can be asked of them is answered at once."""
        self._by_id(topology_id)
        return []

    def _by_id(self, topology_id: str | None) -> TopologyView:
        view = self._reader.view()
        found = view.topologies.get(topology_id or "")
        # A damaged one is reported as damaged, not as absent.
        return found or _only(topology_by_name(view, _text(topology_id)), topology_id)

    def _by_name(self, name: str | None) -> TopologyView:
        view = self._reader.view()
        found = view.topology_named(_text(name))
        return found or _only(topology_by_name(view, _text(name)), name)


def _text(value: str | None) -> str:
    if not isinstance(value, str):
        raise InvalidRequest("the topology is not named: give its id (or name, where the method asks for one)")
    return value


def _only(found: TopologyView, asked: str | None) -> TopologyView:
    """An id where a name is asked for, or the other way round, is a client's mistake that Storm reports."""
    raise NotAlive(
        f"no topology {asked!r:.200} is alive under that id or name: {found.base.name!r} has the id {found.id!r}"
    )


def _refuse_overrides(options: Any) -> None:
    """:class:`InvalidTopology` names the keys of conf and the components with resources that a rebalance would change.

    Storm's command line always sends both, mostly empty. Its conf holds the options of the client itself, which no
    topology reads.
    """
    try:
        conf = json.loads(options.topology_conf_overrides or "{}") or {}
    except ValueError:
        conf = None
    if not isinstance(conf, dict):
        raise InvalidTopology("topology_conf_overrides is no JSON object: send one, or leave it out")
    wrong = [key for key in sorted(conf) if not key.startswith(("nimbus.", "storm."))]
    given = (options.topology_resources_overrides or {}).items()
    wrong += [f"the resources of {component}" for component, resources in sorted(given) if resources]
    if wrong:
        raise InvalidTopology(
            f"a rebalance changes workers and executors, not {', '.join(wrong):.200}: update the topology for those"
        )


def _wait_secs(options: Any) -> int | None:
    secs = options.wait_secs if options is not None else None
    return None if secs is None or secs < 0 else secs
