"""A task that cannot be opened: what its worker's heartbeat says about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from storm_dagster.host.worker_spec import HeartbeatFile
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.runtime.heartbeat import HeartbeatThread
from storm_dagster.worker.tasks.errors import describe_error


def fail(text: str) -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_an_error_is_described_with_its_file_and_line() -> None:
    line = fail.__code__.co_firstlineno + 2
    assert describe_error(fail("no\nfile")) == (
        f"ValueError: no file (test_start_failures.py, line {line})"
    )
    assert describe_error(KeyError("x")) == "KeyError: 'x'"


@pytest.mark.parametrize("text", ["", "count[7]: ValueError: no file", '"\\\x00ä' * 2000])
def test_a_beat_has_the_failure_and_can_be_read(text: str, tmp_path: Path) -> None:
    failures = [text]
    path = tmp_path / "beat"
    passes = iter(range(10**9))
    thread = HeartbeatThread(
        path, 0.01, lambda: next(passes), lambda: "starting", lambda: failures[0]
    )
    thread.start()

    def read() -> HeartbeatFile:
        return eventually(lambda: HeartbeatFile.read(path), 30, "a beat")

    beat = read()
    assert bool(beat.failure) == bool(text)
    if len(text) < 100:
        assert beat.failure == text
    # The next beat is written over it, whatever its length was.
    failures[0] = ""
    eventually(lambda: read().failure == "", 30, "a beat without a failure")
    thread.stop()
