"""A task that cannot be opened: what its worker's heartbeat says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import storm_dagster
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
    assert describe_error(TimeoutError()) == "TimeoutError", "it has no text"


def test_a_package_beside_this_one_is_the_authors_code() -> None:
    """Its name begins with that of this package, as those of plug-ins do."""
    folder = Path(storm_dagster.__file__).parent
    plugin = load_source(f"{folder}_shop/prices.py", "def call(function):\n    return function()\n")
    product = load_source(
        f"{folder}/calls.py",
        "import sys\n"
        "from storm_dagster.worker.tasks.stacks import component_stack\n"
        "def fail():\n    raise ValueError('no price')\n"
        "def stack():\n    return component_stack(sys._getframe())\n",
    )
    with pytest.raises(ValueError, match="no price") as caught:
        plugin["call"](product["fail"])
    assert describe_error(caught.value) == "ValueError: no price (prices.py, line 2)"
    lines = plugin["call"](product["stack"]).splitlines()
    files = [line.split(chr(34))[1] for line in lines if line.strip().startswith("File")]
    assert files[-2:] == [f"{folder}_shop/prices.py", f"{folder}/calls.py"]


def load_source(file: str, source: str) -> dict[str, Any]:
    """Names of a module whose code is said to be in ``file``."""
    module: dict[str, Any] = {}
    exec(compile(source, file, "exec"), module)  # noqa: S102
    return module


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
