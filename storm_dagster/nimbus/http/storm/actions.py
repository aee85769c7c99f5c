"""What Storm's UI can do to a topology: the POST routes, and looking into a worker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.nimbus.http.storm.formats import Links
from storm_dagster.nimbus.lifecycle_requests import LifecycleRequests
from storm_dagster.nimbus.reading import ClusterReader
from storm_dagster.nimbus.worker_stacks import stacks_of_worker
from storm_dagster.operations.context import topology_by_name

__all__ = ["TopologyActions"]

_WAIT = re.compile(r"[0-9]{1,9}")
_SLOT = re.compile(r"(?P<host>[A-Za-z0-9._:\[\]-]{1,255}):(?P<port>[0-9]{1,5})")


class TopologyActions:
    """Each change goes the way of every change: as a Dagster run, or by the leader itself in an emergency."""

    def __init__(self, lifecycle: LifecycleRequests, reader: ClusterReader) -> None:
        self._lifecycle = lifecycle
        self._reader = reader

    def _act(self, name: str, verb: str, document: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._lifecycle.act(name, verb, document)
        self._reader.forget()
        return {"topologyOperation": verb, "topologyId": answer["id"], "status": "success"}

    def activate(self, name: str) -> dict[str, Any]:
        """``POST /topology/:id/activate``."""
        return self._act(name, "activate", {})

    def deactivate(self, name: str) -> dict[str, Any]:
        """``POST /topology/:id/deactivate``."""
        return self._act(name, "deactivate", {})

    def kill(self, name: str, wait: str) -> dict[str, Any]:
        """``POST /topology/:id/kill/:wait``; the wait is in seconds."""
        return self._act(name, "kill", {"wait_secs": _secs(wait)})

    def rebalance(self, name: str, wait: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /topology/:id/rebalance/:wait`` with ``{"rebalanceOptions": {"numWorkers", "executors"}}``."""
        options = document.get("rebalanceOptions", {})
        if options is None:
            options = {}
        unknown = sorted(set(document) - {"rebalanceOptions", "callback"})
        if unknown or not isinstance(options, dict):
            raise InvalidRequest(
                'a rebalance is {"rebalanceOptions": {"numWorkers": 2, "executors": {"count": 4}}}'
            )
        wrong = sorted(set(options) - {"numWorkers", "executors"})
        if wrong:
            raise InvalidRequest(f"rebalanceOptions has no {wrong[0]!r:.40}: it has numWorkers and executors")
        return self._act(
            name,
            "rebalance",
            {
                "wait_secs": _secs(wait),
                "workers": _number(options.get("numWorkers"), "numWorkers"),
                "executors": _numbers(options.get("executors")),
            },
        )

    def debug(self, name: str) -> dict[str, Any]:
        """Storm's sampling of tuples into an event log: there is none here, and the answer says what to do instead."""
        topology_by_name(self._reader.view(), name)
        raise InvalidRequest(
            "tuples are not sampled into an event log here: set topology.debug=true and update the topology, "
            "which logs every tuple"
        )

    def log_levels(self, name: str) -> dict[str, Any]:
        """``GET /topology/:id/logconfig``: no logger of a worker has a level of its own."""
        topology_by_name(self._reader.view(), name)
        return {"namedLoggerLevels": {}}

    def set_log_levels(self, name: str) -> dict[str, Any]:
        """``POST /topology/:id/logconfig``."""
        topology_by_name(self._reader.view(), name)
        raise InvalidRequest(
            "levels of loggers are not changed in running workers: set storm.log.level or the component's own conf, "
            "and update the topology"
        )

    def stacks(self, name: str, slot: str) -> dict[str, Any]:
        """``GET /topology/:id/profiling/dumpjstack/:host:port``: the stacks themselves, at once."""
        match = _SLOT.fullmatch(slot)
        if match is None or int(match["port"]) > 65535:
            raise InvalidRequest(f"a worker is named HOST:PORT, got {slot!r:.80}")
        view = self._reader.view()
        topology = topology_by_name(view, name)
        host, port = match["host"], int(match["port"])
        stacks = stacks_of_worker(topology, host, port, self._reader.security)
        base = Links.of(view).base(host)
        link = f"{base}/logview?cmd=jstack&workerPort={quote(match['port'])}" if base else ""
        return {"status": "ok", "id": slot, "dumplink": link, "stacks": stacks}

    def profiling(self, name: str) -> dict[str, Any]:
        """Storm's JVM profiler and heap dumps: a worker is no JVM, which Storm calls ``disabled``."""
        topology_by_name(self._reader.view(), name)
        return {
            "status": "disabled",
            "message": "workers are Python processes: use dumpjstack, or attach py-spy to the pid of the worker",
        }


def _secs(text: str) -> int:
    if not _WAIT.fullmatch(text):
        raise InvalidRequest(f"the wait must be a number of seconds, got {text!r:.40}")
    return int(text)


def _number(value: Any, what: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise InvalidRequest(f"{what} must be a whole number, got {value!r:.40}")


def _numbers(value: Any) -> dict[str, int | None] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest('executors must map component ids to numbers, such as {"count": 4}')
    return {name: _number(number, "executors") for name, number in value.items()}
