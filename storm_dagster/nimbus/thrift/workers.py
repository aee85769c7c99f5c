"""What Thrift clients ask of running workers: the levels of their loggers, as Storm's structures."""

from __future__ import annotations

import time
from typing import Any

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.view import TopologyView
from storm_dagster.model.wire import LevelChange
from storm_dagster.nimbus.requests.worker_levels import WorkerLevels
from storm_dagster.nimbus.thrift.idl import load_idl
from storm_dagster.operations.live.log_levels import level_change

__all__ = ["WorkerLogLevels"]


class WorkerLogLevels:
    """``LogConfig`` and what stands behind it."""

    def __init__(self, levels: WorkerLevels) -> None:
        self._levels = levels

    def change(self, topology: TopologyView, config: Any) -> None:
        """Change levels in every worker of the topology; :class:`InvalidRequest` for a level that is none."""
        entries = (config.named_logger_level if config is not None else None) or {}
        changes = {
            name: change for name, entry in entries.items() if (change := _change(name, entry)) is not None
        }
        self._levels.change(topology, changes)

    def config(self, topology: TopologyView) -> Any:
        """A LogConfig: what is changed in any worker that answers."""
        idl = load_idl()
        found: dict[str, Any] = {}
        for name, change in self._levels.current(topology).items():
            secs = int(change.get("secs") or 0)
            found[name] = idl.LogLevel(
                action=idl.LogLevelAction.UNCHANGED,
                target_log_level=change.get("level"),
                reset_log_level_timeout_secs=secs,
                reset_log_level_timeout_epoch=int(time.time()) + secs if secs else None,
                reset_log_level=change.get("reset"),
            )
        return idl.LogConfig(named_logger_level=found)


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
