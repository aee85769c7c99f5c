"""What clients ask of running workers: the levels of their loggers."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storm_dagster.model.errors import InvalidRequest, StormDagsterError, Unavailable
from storm_dagster.model.log_levels import check_level
from storm_dagster.model.security import Security
from storm_dagster.model.view import TopologyView
from storm_dagster.model.wire import LevelChange
from storm_dagster.nimbus.thrift.idl import load_idl
from storm_dagster.operations.worker_curve import link_key_of
from storm_dagster.operations.worker_requests import ask_worker

__all__ = ["WorkerLogLevels"]

_log = logging.getLogger(__name__)
_ANSWER_SECS = 2.0
_AT_ONCE = 8
_LONGEST_SECS = 366 * 86400


class WorkerLogLevels:
    """Storm's dynamic log levels. Workers keep them while they run: a restarted one has those of its conf again."""

    def __init__(self, security: Security) -> None:
        self._security = security

    def change(self, topology: TopologyView, config: Any) -> None:
        """Change levels in every worker of the topology.

        :class:`InvalidRequest` for a level that is none, :class:`Unavailable` when a worker did not answer; the others
        have changed then.
        """
        changes = {
            name: change for name, entry in _entries(config) if (change := _change(name, entry)) is not None
        }
        if not changes:
            return
        silent = [who for who, answer in self._ask_all(topology, changes) if answer is None]
        if silent:
            raise Unavailable(
                f"log levels of topology {topology.base.name!r} are not changed at {', '.join(sorted(silent))}: "
                "those workers did not answer; try again"
            )

    def config(self, topology: TopologyView) -> Any:
        """A LogConfig: what is changed in any worker that answers."""
        idl = load_idl()
        found: dict[str, Any] = {}
        for _, answer in self._ask_all(topology, {}):
            for name, change in (answer or {}).items():
                secs = int(change.get("secs") or 0)
                found[name] = idl.LogLevel(
                    action=idl.LogLevelAction.UNCHANGED,
                    target_log_level=change.get("level"),
                    reset_log_level_timeout_secs=secs,
                    reset_log_level_timeout_epoch=int(time.time()) + secs if secs else None,
                    reset_log_level=change.get("reset"),
                )
        return idl.LogConfig(named_logger_level=found)

    def _ask_all(
        self, topology: TopologyView, changes: dict[str, LevelChange]
    ) -> list[tuple[str, dict[str, Any] | None]]:
        key = link_key_of(self._security, topology.id)

        def ask(worker: Any) -> tuple[str, dict[str, Any] | None]:
            who = f"{worker.host}:{worker.port}"
            live = topology.live_workers.get(worker.slot)
            if live is None:
                return who, None
            try:
                answer = ask_worker(
                    worker.host, worker.port, live.token, "log_levels", _ANSWER_SECS, key, levels=changes
                )
            except StormDagsterError as error:
                _log.info("%s gave no log levels: %s", who, error)
                return who, None
            return who, dict(answer.get("levels") or {})

        workers = topology.assignment.workers if topology.assignment else ()
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="nimbus-thrift-levels") as pool:
            return list(pool.map(ask, workers))


def _entries(config: Any) -> list[tuple[str, Any]]:
    return list(((config.named_logger_level if config is not None else None) or {}).items())


def _change(name: str, entry: Any) -> LevelChange | None:
    action = load_idl().LogLevelAction
    if not name or len(name) > 200:
        raise InvalidRequest(f"{name!r:.40} names no logger: give 1 to 200 characters, or ROOT")
    if entry.action == action.REMOVE:
        return LevelChange()
    if entry.action != action.UPDATE:
        return None
    secs = entry.reset_log_level_timeout_secs or 0
    if not 0 <= secs <= _LONGEST_SECS:
        raise InvalidRequest(f"the level of logger {name!r:.80} cannot be kept for {secs} s")
    reset = check_level(entry.reset_log_level) if entry.reset_log_level else None
    return LevelChange(level=check_level(entry.target_log_level), secs=secs, reset=reset)
