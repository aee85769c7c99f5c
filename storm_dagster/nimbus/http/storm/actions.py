"""Actions of Storm's UI on a topology: the POST routes, and views into a worker."""

import re
import time
from collections.abc import Mapping
from functools import partialmethod
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, Field

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.requests import RequestModel, check_request
from storm_dagster.nimbus.http.storm.formats import Links
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.running_workers import WorkerLevels, stacks_of_worker
from storm_dagster.operations.context import topology_by_name
from storm_dagster.operations.live.log_levels import level_change

_WAIT = re.compile(r"[0-9]{1,9}")
_SLOT = re.compile(r"(?P<host>[A-Za-z0-9._:\[\]-]{1,255}):(?P<port>[0-9]{1,5})")


_Number = int | Annotated[str, Field(pattern="^[0-9]{1,9}$"), AfterValidator(int)] | None


class RebalanceOptions(RequestModel):
    """Options of a rebalance."""

    numWorkers: _Number = None
    executors: dict[str, _Number] | None = None


class StormRebalance(RequestModel):
    """Body of a rebalance, as Storm's UI sends it."""

    rebalanceOptions: RebalanceOptions | None = None
    callback: Any = None


class LoggerLevel(RequestModel):
    """Level of a logger, for ``timeout`` seconds; without a target level the logger has that of the
    conf again.
    """

    target_level: Any = None
    reset_level: Any = None
    timeout: int | None = None
    timeout_epoch: Any = None


class LogLevelsRequest(BaseModel):
    """Body of a change of log levels, as Storm's UI sends it."""

    namedLoggerLevels: dict[str, LoggerLevel]


class TopologyActions:
    """Changes like all others: by the leader itself, or as a Dagster run."""

    def __init__(
        self, lifecycle: LifecycleRequests, reader: ClusterReader, levels: WorkerLevels
    ) -> None:
        self._levels = levels
        self._lifecycle = lifecycle
        self._reader = reader

    def _act(
        self, name: str, verb: str, document: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """``POST /topology/:id/VERB``."""
        answer = self._lifecycle.act(name, verb, document or {})
        self._reader.forget()
        return {"topologyOperation": verb, "topologyId": answer["id"], "status": "success"}

    activate = partialmethod(_act, verb="activate")
    deactivate = partialmethod(_act, verb="deactivate")

    def kill(self, name: str, wait: str) -> dict[str, Any]:
        """``POST /topology/:id/kill/:wait``; the wait is in seconds."""
        return self._act(name, "kill", {"wait_secs": _secs(wait)})

    def rebalance(self, name: str, wait: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /topology/:id/rebalance/:wait`` with ``{"rebalanceOptions": {"numWorkers",
        "executors"}}``.
        """
        options = (
            check_request(StormRebalance, document, "a rebalance").rebalanceOptions
            or RebalanceOptions()
        )
        change = {
            "wait_secs": _secs(wait),
            "workers": options.numWorkers,
            "executors": options.executors,
        }
        return self._act(name, "rebalance", change)

    def debug(self, name: str, *_: str) -> dict[str, Any]:
        """Storm's sampling of tuples into an event log: not supported; the response names the
        alternative.
        """
        topology_by_name(self._reader.view(), name)
        raise InvalidRequest(
            "tuples are not sampled into an event log here: set topology.debug=true and update the topology, "
            "which logs every tuple"
        )

    def log_levels(self, name: str) -> dict[str, Any]:
        """``GET /topology/:id/logconfig``: what is changed in any worker that answers, with Storm's
        keys.
        """
        found = self._levels.current(topology_by_name(self._reader.view(), name))
        now = int(time.time())
        return {
            "namedLoggerLevels": {
                logger: {
                    "target_level": change.get("level"),
                    "reset_level": change.get("reset"),
                    "timeout": int(change.get("secs") or 0),
                    "timeout_epoch": (now + int(change["secs"])) * 1000
                    if change.get("secs")
                    else 0,
                }
                for logger, change in found.items()
            }
        }

    def set_log_levels(self, name: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /topology/:id/logconfig`` with ``{"namedLoggerLevels": {logger: {"target_level",
        "timeout", "reset_level"}}}``; a logger without a target level has that of the conf again.
        """
        entries = check_request(
            LogLevelsRequest, document, "a change of log levels"
        ).namedLoggerLevels
        changes = {
            logger: level_change(logger, entry.target_level, entry.timeout or 0, entry.reset_level)
            for logger, entry in entries.items()
        }
        self._levels.change(topology_by_name(self._reader.view(), name), changes)
        return self.log_levels(name)

    def stacks(self, name: str, slot: str) -> dict[str, Any]:
        """``GET /topology/:id/profiling/dumpjstack/:host:port``: the stacks themselves, at once."""
        match = _SLOT.fullmatch(slot)
        if match is None or int(match["port"]) > 65535:
            raise InvalidRequest(f"a worker is named HOST:PORT, got {slot!r:.80}")
        view = self._reader.view()
        topology = topology_by_name(view, name)
        host, port = match["host"], int(match["port"])
        stacks = stacks_of_worker(topology, host, port, self._reader.security)
        base = Links(view).base(host)
        link = f"{base}/logview?cmd=jstack&workerPort={quote(match['port'])}" if base else ""
        return {"status": "ok", "id": slot, "dumplink": link, "stacks": stacks}

    def profiling(self, name: str, *_: str) -> dict[str, Any]:
        """Storm's JVM profiler and heap dumps: a worker is no JVM, which Storm calls
        ``disabled``.
        """
        topology_by_name(self._reader.view(), name)
        return {
            "status": "disabled",
            "message": "workers are Python processes: use dumpjstack, or attach py-spy to the pid of the worker",
        }


def _secs(text: str) -> int:
    if not _WAIT.fullmatch(text):
        raise InvalidRequest(f"the wait must be a number of seconds, got {text!r:.40}")
    return int(text)
