"""Actions of Storm's UI on a topology, and views into a worker."""

import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel

from storm_dagster.http.documents import CHANGE_ERRORS, READ_ERRORS, JsonMap, Number
from storm_dagster.http.router import Parameter, Router
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.requests import RequestModel, check_request
from storm_dagster.nimbus.http.storm.cluster_documents import StormDocument
from storm_dagster.nimbus.http.storm.formats import Links
from storm_dagster.nimbus.http.storm.parameters import (
    TopologyId,
    WorkerSlot,
)
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.running_workers import WorkerLevels, stacks_of_worker
from storm_dagster.operations.context import topology_by_name
from storm_dagster.operations.live.log_levels import level_change

_WAIT = re.compile(r"[0-9]{1,9}")
_SLOT = re.compile(r"(?P<host>[A-Za-z0-9._:\[\]-]{1,255}):(?P<port>[0-9]{1,5})")

WaitSecs = Annotated[str, Parameter("path", "wait", "Seconds", schema=Number)]
DebugComponent = Annotated[str, Parameter("path", "component", "Component id")]
DebugAction = Annotated[str, Parameter("path", "action", "enable or disable")]
DebugPercent = Annotated[str, Parameter("path", "percent", "Share of tuples")]
_RequestedNumber = int | Annotated[Number, AfterValidator(int)] | None
"""Number as JSON or, from Storm's UI, as text."""


class RebalanceOptions(RequestModel):
    """Options of a rebalance."""

    numWorkers: _RequestedNumber = None
    executors: dict[str, _RequestedNumber] | None = None


class StormRebalance(RequestModel):
    """Body of a rebalance, as Storm's UI sends it."""

    rebalanceOptions: RebalanceOptions | None = None
    callback: Any = None


class LoggerLevel(RequestModel):
    """Level of a logger, for ``timeout`` seconds.

    Without a target level the logger gets the level of the conf.
    """

    target_level: str | None = None
    reset_level: str | None = None
    timeout: int | None = None
    timeout_epoch: Any = None
    """Ignored: ``timeout`` counts."""


class LogLevelsRequest(BaseModel):
    """Body of a change of log levels, as Storm's UI sends it."""

    namedLoggerLevels: dict[str, LoggerLevel]


class TopologyOperation(StormDocument):
    """Response to a change of a topology."""

    topologyOperation: str
    topologyId: str
    status: Literal["success"]


class StacksPage(StormDocument):
    """Stacks of a worker's threads, and a link to them."""

    id: str
    dumplink: str
    stacks: dict[str, list[str]]
    status: Literal["ok"]


class DisabledAction(StormDocument):
    """Response to an action that workers do not support."""

    status: str
    message: str


class LogLevelsPage(StormDocument):
    """Changed levels by logger."""

    namedLoggerLevels: dict[str, Any]


class TopologyActions:
    """Routes of actions, each by the leader itself or as a Dagster run."""

    router: ClassVar = Router("storm", storm_errors=True)

    def __init__(
        self, lifecycle: LifecycleRequests, reader: ClusterReader, levels: WorkerLevels
    ) -> None:
        self._levels = levels
        self._lifecycle = lifecycle
        self._reader = reader

    @router.route(
        "POST",
        "/api/v1/topology/{id}/activate",
        summary="Activate a topology",
        responses={200: TopologyOperation},
        errors=CHANGE_ERRORS,
    )
    def activate(self, name: TopologyId) -> dict[str, Any]:
        """Start the spouts."""
        return self._act(name, "activate", {})

    @router.route(
        "POST",
        "/api/v1/topology/{id}/deactivate",
        summary="Deactivate a topology",
        responses={200: TopologyOperation},
        errors=CHANGE_ERRORS,
    )
    def deactivate(self, name: TopologyId) -> dict[str, Any]:
        """Stop the spouts."""
        return self._act(name, "deactivate", {})

    @router.route(
        "POST",
        "/api/v1/topology/{id}/rebalance/{wait}",
        summary="Rebalance a topology",
        body=StormRebalance,
        responses={200: TopologyOperation},
        errors=CHANGE_ERRORS,
    )
    def rebalance(self, name: TopologyId, wait: WaitSecs, document: JsonMap) -> dict[str, Any]:
        """Rebalance after a wait in seconds."""
        request = check_request(StormRebalance, document, "a rebalance")
        options = request.rebalanceOptions or RebalanceOptions()
        change = {
            "wait_secs": _secs(wait),
            "workers": options.numWorkers,
            "executors": options.executors,
        }
        return self._act(name, "rebalance", change)

    @router.route(
        "POST",
        "/api/v1/topology/{id}/kill/{wait}",
        summary="Kill a topology",
        responses={200: TopologyOperation},
        errors=CHANGE_ERRORS,
    )
    def kill(self, name: TopologyId, wait: WaitSecs) -> dict[str, Any]:
        """Kill after a wait in seconds."""
        return self._act(name, "kill", {"wait_secs": _secs(wait)})

    @router.route(
        "POST",
        "/api/v1/topology/{id}/component/{component:path}/debug/{action}/{percent}",
        summary="Refused: tuples are not sampled here; the response names the alternative",
        responses={200: TopologyOperation},
        errors=CHANGE_ERRORS,
    )
    def debug_component(
        self,
        name: TopologyId,
        component: DebugComponent,
        action: DebugAction,
        percent: DebugPercent,
    ) -> dict[str, Any]:
        """Refuse to sample the tuples of a component."""
        return self._refuse_debug(name)

    @router.route(
        "POST",
        "/api/v1/topology/{id}/debug/{action}/{percent}",
        summary="Refused: tuples are not sampled here; the response names the alternative",
        responses={200: TopologyOperation},
        errors=CHANGE_ERRORS,
    )
    def debug(self, name: TopologyId, action: DebugAction, percent: DebugPercent) -> dict[str, Any]:
        """Refuse to sample the tuples of a topology."""
        return self._refuse_debug(name)

    @router.route(
        "GET",
        "/api/v1/topology/{id}/logconfig",
        summary="Levels of loggers",
        responses={200: LogLevelsPage},
        errors=READ_ERRORS,
    )
    def log_levels(self, name: TopologyId) -> dict[str, Any]:
        """Changed levels in the workers that respond, by logger."""
        changes = self._levels.current(topology_by_name(self._reader.view(), name))
        now_secs = int(time.time())
        levels: dict[str, Any] = {}
        for logger, change in changes.items():
            timeout_secs = int(change.get("secs") or 0)
            timeout_epoch_ms = 0
            if change.get("secs"):
                timeout_epoch_ms = (now_secs + timeout_secs) * 1000
            levels[logger] = {
                "target_level": change.get("level"),
                "reset_level": change.get("reset"),
                "timeout": timeout_secs,
                "timeout_epoch": timeout_epoch_ms,
            }
        return {"namedLoggerLevels": levels}

    @router.route(
        "POST",
        "/api/v1/topology/{id}/logconfig",
        summary="Change levels of loggers in the workers, for a time or until the next change",
        body=LogLevelsRequest,
        responses={200: LogLevelsPage},
        errors=CHANGE_ERRORS,
    )
    def set_log_levels(self, name: TopologyId, document: JsonMap) -> dict[str, Any]:
        """Change levels; without a target level the one of the conf is set."""
        request = check_request(LogLevelsRequest, document, "a change of log levels")
        changes = {
            logger: level_change(logger, level.target_level, level.timeout or 0, level.reset_level)
            for logger, level in request.namedLoggerLevels.items()
        }
        self._levels.change(topology_by_name(self._reader.view(), name), changes)
        return self.log_levels(name)

    @router.route(
        "GET",
        "/api/v1/topology/{id}/profiling/dumpjstack/{slot}",
        summary="Stacks of a worker's threads",
        responses={200: StacksPage},
        errors=READ_ERRORS,
    )
    def stacks(self, name: TopologyId, slot: WorkerSlot) -> dict[str, Any]:
        """The stacks themselves, without a file in between."""
        match = _SLOT.fullmatch(slot)
        if match is None or int(match["port"]) > 65535:
            raise InvalidRequest(f"a worker is named HOST:PORT, got {slot!r:.80}")
        view = self._reader.view()
        topology = topology_by_name(view, name)
        host = match["host"]
        port = int(match["port"])
        stacks = stacks_of_worker(topology, host, port, self._reader.links)
        base = Links(view).base(host)
        link = f"{base}/logview?cmd=jstack&workerPort={quote(match['port'])}" if base else ""
        return {"status": "ok", "id": slot, "dumplink": link, "stacks": stacks}

    @router.route(
        "GET",
        "/api/v1/topology/{id}/profiling/start/{slot}/{minutes}",
        summary="Profile a worker: the status is 'disabled', because workers are not JVMs",
        responses={200: DisabledAction},
        errors=READ_ERRORS,
    )
    def start_profiling(
        self,
        name: TopologyId,
        slot: WorkerSlot,
        minutes: Annotated[str, Parameter("path", "minutes")],
    ) -> dict[str, Any]:
        """Respond that JVMs are not profiled here."""
        return self._disabled(name)

    @router.route(
        "GET",
        "/api/v1/topology/{id}/profiling/stop/{slot}",
        summary="End profiling: the status is 'disabled', because workers are not JVMs",
        responses={200: DisabledAction},
        errors=READ_ERRORS,
    )
    def stop_profiling(self, name: TopologyId, slot: WorkerSlot) -> dict[str, Any]:
        """Respond that JVMs are not profiled here."""
        return self._disabled(name)

    @router.route(
        "GET",
        "/api/v1/topology/{id}/profiling/dumpprofile/{slot}",
        summary="Store a profile: the status is 'disabled', because workers are not JVMs",
        responses={200: DisabledAction},
        errors=READ_ERRORS,
    )
    def dump_profile(self, name: TopologyId, slot: WorkerSlot) -> dict[str, Any]:
        """Respond that JVMs are not profiled here."""
        return self._disabled(name)

    @router.route(
        "GET",
        "/api/v1/topology/{id}/profiling/dumpheap/{slot}",
        summary="Dump the heap: the status is 'disabled', because workers are not JVMs",
        responses={200: DisabledAction},
        errors=READ_ERRORS,
    )
    def dump_heap(self, name: TopologyId, slot: WorkerSlot) -> dict[str, Any]:
        """Respond that heaps of JVMs are not dumped here."""
        return self._disabled(name)

    def _act(self, name: str, verb: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Execute a verb or launch its run; later pages show the change."""
        changed = self._lifecycle.act(name, verb, document)
        self._reader.forget()
        return {"topologyOperation": verb, "topologyId": changed["id"], "status": "success"}

    def _refuse_debug(self, name: str) -> dict[str, Any]:
        """Raise an error that names the alternative to Storm's event log."""
        topology_by_name(self._reader.view(), name)
        raise InvalidRequest(
            "tuples are not sampled into an event log here: set topology.debug=true and update "
            "the topology, "
            "which logs every tuple"
        )

    def _disabled(self, name: str) -> dict[str, Any]:
        """Response to actions on JVMs, which workers are not."""
        topology_by_name(self._reader.view(), name)
        return {
            "status": "disabled",
            "message": "workers are Python processes: use dumpjstack, or attach py-spy to the "
            "pid of the worker",
        }


def _secs(text: str) -> int:
    if not _WAIT.fullmatch(text):
        raise InvalidRequest(f"the wait must be a number of seconds, got {text!r:.40}")
    return int(text)
