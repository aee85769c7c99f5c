"""Log levels, changed while a worker runs."""

from __future__ import annotations

import logging

import pytest

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.log_levels import KeptLevel, KeptLevels, check_level
from storm_dagster.model.wire import LevelChange
from storm_dagster.worker.runtime.log_levels import LogLevels


@pytest.fixture
def logger(request: pytest.FixtureRequest) -> logging.Logger:
    made = logging.getLogger(f"test.{request.node.name}")
    made.setLevel(logging.ERROR)
    return made


def test_a_level_lasts_as_long_as_it_was_asked_for(logger: logging.Logger) -> None:
    levels = LogLevels()
    levels.apply({logger.name: LevelChange(level="DEBUG", secs=10)}, now=100.0)
    assert logger.level == logging.DEBUG
    assert levels.document(104.0) == {
        logger.name: LevelChange(level="DEBUG", secs=6, reset="ERROR")
    }
    levels.expire(109.9)
    assert logger.level == logging.DEBUG
    levels.expire(110.0)
    assert logger.level == logging.ERROR and levels.document(110.0) == {}


def test_a_second_change_returns_to_where_the_first_one_began(logger: logging.Logger) -> None:
    levels = LogLevels()
    levels.apply({logger.name: LevelChange(level="DEBUG")}, now=0.0)
    levels.apply({logger.name: LevelChange(level="WARN")}, now=0.0)
    assert logger.level == logging.WARNING
    levels.expire(1e9)
    assert logger.level == logging.WARNING, "without a time it stays"
    levels.apply({logger.name: LevelChange()}, now=0.0)
    assert logger.level == logging.ERROR
    levels.apply({logger.name: LevelChange(level="TRACE", secs=1, reset="INFO")}, now=0.0)
    levels.expire(1.0)
    assert logger.level == logging.INFO


def test_there_is_an_end_to_what_is_remembered(logger: logging.Logger) -> None:
    levels = LogLevels()
    levels.apply({f"{logger.name}.{n}": LevelChange(level="INFO") for n in range(300)}, now=0.0)
    assert len(levels.document(0.0)) == 200


def test_names_of_levels() -> None:
    assert (check_level("warning"), check_level("Info"), check_level("CRITICAL")) == (
        "WARN",
        "INFO",
        "FATAL",
    )
    for wrong in ("LOUD", "", None, 10):
        with pytest.raises(InvalidRequest, match="not a log level"):
            check_level(wrong)


def test_what_was_changed_before_the_worker_began_is_changed_in_it(logger: logging.Logger) -> None:
    kept = KeptLevels(
        loggers={
            logger.name: KeptLevel(level="DEBUG", until_ms=1_010_000),
            f"{logger.name}.over": KeptLevel(level="DEBUG", until_ms=999_999),
            f"{logger.name}.asked": KeptLevel(level="DEBUG"),
        }
    )
    levels = LogLevels()
    levels.apply({f"{logger.name}.asked": LevelChange(level="WARN")}, now=50.0)
    levels.restore(kept, now_ms=1_000_000, now=50.0)
    assert {name: change.level for name, change in levels.document(50.0).items()} == {
        logger.name: "DEBUG",
        f"{logger.name}.asked": "WARN",
    }
    levels.expire(60.0)
    assert logger.level == logging.ERROR
