"""Dynamic log levels of a worker (as Storm's)."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from storm_dagster.model.log_levels import LEVELS, ROOT, KeptLevels, level_in_force, level_name
from storm_dagster.model.wire import LevelChange, LevelName

_log = logging.getLogger(__name__)
_MAX_CHANGED = 200
"""Loggers that may be changed at the same time; further changes are refused with a warning."""


@dataclass(frozen=True)
class _Changed:
    level: LevelName
    back: int
    """Level to return to: the requested one, or the one before the change."""
    until: float | None
    """Time at which the change is reverted; ``None``: until a request does it."""


class LogLevels:
    """Changed levels, and the levels to return to.

    Used only by the worker's loop.
    """

    def __init__(self) -> None:
        self._changed: dict[str, _Changed] = {}
        """Name of a logger -> its change."""

    def apply(self, changes: Mapping[str, LevelChange], now: float) -> None:
        """Set levels by logger, for ``secs`` unless that is 0.

        A change without a level reverts an earlier one. A second change of a logger does not alter
        the level to return to, unless it names one.
        """
        for name, change in changes.items():
            earlier = self._changed.pop(name, None)
            if change.level is None:
                if earlier is not None:
                    self._set(name, earlier.back)
                continue
            if len(self._changed) >= _MAX_CHANGED:
                _log.warning("level of %s is not changed: %d are already", name, _MAX_CHANGED)
                continue
            current = earlier.back if earlier is not None else _logger(name).level
            back = current if change.reset is None else LEVELS[change.reset]
            until = now + change.secs if change.secs > 0 else None
            self._changed[name] = _Changed(change.level, back, until)
            self._set(name, LEVELS[change.level])

    def restore(self, levels: KeptLevels, now_ms: int, now: float) -> None:
        """Set the levels that are stored for the topology.

        Except those that a request has changed before.
        """
        changes: dict[str, LevelChange] = {}
        for name, level in levels.loggers.items():
            if name in self._changed:
                continue
            change = level_in_force(level, now_ms)
            if change is not None:
                changes[name] = change
        self.apply(changes, now)

    def expire(self, now: float) -> None:
        """Revert the changes whose time has passed."""
        for name, changed in list(self._changed.items()):
            if changed.until is not None and now >= changed.until:
                del self._changed[name]
                self._set(name, changed.back)

    def document(self, now: float) -> dict[str, LevelChange]:
        """Return the changed levels; ``secs`` is the remaining time."""
        return {
            name: LevelChange(
                level=changed.level,
                secs=0 if changed.until is None else max(1, round(changed.until - now)),
                reset=level_name(changed.back),
            )
            for name, changed in self._changed.items()
        }

    def _set(self, name: str, level: int) -> None:
        _logger(name).setLevel(level)
        _log.info("level of logger %s is %s", name, logging.getLevelName(level))


def _logger(name: str) -> logging.Logger:
    return logging.getLogger() if name == ROOT else logging.getLogger(name)
