"""Logs of state that cannot be rewritten: it is reported, and the task loses nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from storm_dagster.api import ReliableSpout, StatefulBolt, TopologyBuilder, Tuple
from storm_dagster.core.dataplane.keyed_state import Contents
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually

_ROWS = 40
"""Tuples that write 4 MiB, which is more than a log may grow before it is rewritten."""


class Keep(StatefulBolt):
    """Keeps the newest text, of 100 KB."""

    def process(self, tup: Tuple) -> None:
        self.state["n"] = self.state.get("n", 0) + 1
        self.state["text"] = str(tup.values[0]) * 50_000


class KeepInThread(Keep):
    blocking = True


class Disk:
    """Calls that fail as on a full disk, or without descriptors."""

    is_full: ClassVar[bool] = False
    failures: ClassVar[int] = 0

    @classmethod
    def check(cls, code: int) -> None:
        if cls.is_full:
            cls.failures += 1
            raise OSError(code, os.strerror(code))


@pytest.fixture
def disk() -> type[Disk]:
    Disk.is_full = False
    Disk.failures = 0
    return Disk


def keeping(bolt: type[StatefulBolt]) -> TopologyBuilder:
    builder = TopologyBuilder("keeping")
    builder.set_spout("texts", ReliableSpout, outputs=["n"])
    builder.set_bolt("keep", bolt, inputs=["texts"])
    return builder


def give_until(harness: TopologyHarness, condition: Callable[[], Any], what: str) -> int:
    """Give texts until the condition holds; their number."""
    given = 0

    def turn() -> Any:
        nonlocal given
        harness.give("texts", [given % 10 + 10])
        given += 1
        harness.run()
        return given >= _ROWS and condition()

    eventually(turn, 60, what, interval=0.001)
    return given


def state_of(harness: TopologyHarness) -> dict[Any, Any]:
    return dict(harness.tasks("keep")[0].state.items())


@pytest.mark.parametrize("bolt", [Keep, KeepInThread])
def test_a_rewrite_that_fails_is_reported_and_the_task_goes_on(
    bolt: type[StatefulBolt], disk: type[Disk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Contents.snapshot

    def on_full_disk(contents: Contents) -> Any:
        # The opening writes a log, too, before the disk is full.
        disk.check(errno.ENOSPC)
        return snapshot(contents)

    monkeypatch.setattr(Contents, "snapshot", on_full_disk)
    with TopologyHarness(keeping(bolt), {"texts": []}, state_dir=tmp_path) as harness:
        harness.run()
        task = harness.tasks("keep")[0]
        disk.is_full = True
        given = give_until(harness, lambda: harness.errors, "the error")
        (error, *_) = [str(error) for name, error in harness.errors if name == "keep"]
        assert "could not be rewritten, its log only grows" in error
        assert "No space left on device" in error
        assert harness.tasks("keep")[0] is task, "the task is not made anew"
        disk.is_full = False
        (path,) = tmp_path.rglob("keep.state/*/*.log")
        given += give_until(harness, lambda: not path.exists(), "a later rewrite succeeds")
        assert harness.tasks("keep")[0] is task
        result = harness.run()
        assert len(result.acked["texts"]) == given and not result.failed["texts"]
        assert state_of(harness)["n"] == given
    with TopologyHarness(keeping(bolt), {"texts": []}, state_dir=tmp_path) as harness:
        harness.run()
        assert state_of(harness)["n"] == given


@pytest.mark.parametrize("bolt", [Keep, KeepInThread])
def test_a_log_whose_file_is_lost_in_a_rewrite_is_opened_again(
    bolt: type[StatefulBolt], disk: type[Disk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def without_descriptors(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if str(path).endswith(".log") and flags & os.O_APPEND and disk.is_full:
            # The next call succeeds: the harness runs until the task is open.
            disk.is_full = False
            disk.failures += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", without_descriptors)
    builder = keeping(bolt)
    with TopologyHarness(builder, {"texts": []}, state_dir=tmp_path, replays=99) as harness:
        harness.run()
        task = harness.tasks("keep")[0]
        disk.is_full = True
        given = give_until(harness, lambda: disk.failures, "the file is lost")

        def is_made_anew() -> Any:
            harness.run()
            return harness.tasks("keep")[0] not in (None, task)

        eventually(is_made_anew, 60, "the task opens its state again")
        errors = [str(error) for name, error in harness.errors if name == "keep"]
        assert any("Too many open files" in error for error in errors)
        given += give_until(harness, lambda: True, "it goes on")
        eventually(
            lambda: len(set(harness.run().acked["texts"])) == given, 60, "all tuples are acked"
        )
        assert state_of(harness)["n"] >= given, "no tuple is lost"
