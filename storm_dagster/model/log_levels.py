"""Levels of loggers by Storm's names, for changes in running workers."""

from typing import Literal, cast

from pydantic import Field

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.records import Record
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
"""Storm's name -> its number in Python's logging."""

ROOT = "ROOT"
"""Storm's name of the root logger."""


class KeptLevel(Record):
    """The level that a logger was given while its topology runs."""

    v: Literal[1] = Field(default=1, exclude=True)
    level: LevelName
    until_ms: int | None = None
    """End (epoch ms); ``None``: until it is removed."""
    reset: LevelName | None = None
    """The level afterwards; ``None``: that of the conf."""


class KeptLevels(Record):
    """``/topology/<id>/log_levels``: logger -> level.

    Workers that start after a change read it.
    """

    loggers: dict[str, KeptLevel] = {}


def check_level(name: object) -> LevelName:
    """Storm's name of a level, in upper case.

    :class:`InvalidRequest` for other names.
    """
    text = str(name or "").upper()
    text = {"WARNING": "WARN", "CRITICAL": "FATAL"}.get(text, text)
    if text not in LEVELS:
        raise InvalidRequest(f"{name!r:.40} is not a log level: use one of {', '.join(LEVELS)}")
    return cast(LevelName, text)


def level_name(number: int) -> LevelName:
    """Name of the level with that number, or of the next level above it."""
    for name, value in LEVELS.items():
        if value >= number:
            return name
    return "OFF"


def level_in_force(stored: KeptLevel, now_ms: int) -> LevelChange | None:
    """Stored level change as a starting worker applies it.

    ``None`` if its time is over.
    """
    if stored.until_ms is None:
        return LevelChange(level=stored.level, reset=stored.reset)
    remaining_ms = stored.until_ms - now_ms
    if remaining_ms <= 0:
        return None
    # Rounded up to whole seconds.
    return LevelChange(level=stored.level, secs=-(-remaining_ms // 1000), reset=stored.reset)
