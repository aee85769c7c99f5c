"""Levels of loggers by Storm's names, for changes in running workers."""

from typing import cast

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.records import KeptLevel
from storm_dagster.model.wire import LevelChange, LevelName

LEVELS: dict[LevelName, int] = {
    "ALL": 1,
    "TRACE": 5,
    "DEBUG": 10,
    "INFO": 20,
    "WARN": 30,
    "ERROR": 40,
    "FATAL": 50,
    "OFF": 100,
}
"""Storm's name -> the number in Python's logging."""

ROOT = "ROOT"
"""The name under which Storm's clients speak of the root logger."""


def check_level(name: object) -> LevelName:
    """Storm's name of a level, in upper case; :class:`InvalidRequest` for anything else."""
    text = str(name or "").upper()
    text = {"WARNING": "WARN", "CRITICAL": "FATAL"}.get(text, text)
    if text not in LEVELS:
        raise InvalidRequest(f"{name!r:.40} is not a log level: use one of {', '.join(LEVELS)}")
    return cast(LevelName, text)


def level_name(number: int) -> LevelName:
    """The name of a number, or of the next one above it."""
    found: list[LevelName] = [name for name, value in LEVELS.items() if value >= number]
    return found[0] if found else "OFF"


def level_in_force(kept: KeptLevel, now_ms: int) -> LevelChange | None:
    """Level change that is still in force for a starting worker; ``None`` when its time is over."""
    if kept.until_ms is None:
        return LevelChange(level=kept.level, reset=kept.reset)
    left = kept.until_ms - now_ms
    return (
        LevelChange(level=kept.level, secs=-(-left // 1000), reset=kept.reset) if left > 0 else None
    )
