"""Worlds: a real cluster state and a local blob store for each test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from storm_rigs.stage.builder import Stage
from storm_rigs.stage.conf import zookeeper_conf
from storm_rigs.stage.records import World

# Scenes assert what they promise: failures show both sides, as in a test.
pytest.register_assert_rewrite("storm_rigs.operations.scenes")


@pytest.fixture
def zk_worlds(zookeeper_server: str, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes clusters with a leader and two supervisors of four slots each."""
    with ExitStack() as stages:

        def make(conf: Mapping[str, Any] | None = None) -> World:
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            keys = {**zookeeper_conf(zookeeper_server), **(conf or {})}
            return stages.enter_context(Stage(folder, keys)).world()

        yield make


@pytest.fixture
def world(stage: Stage) -> World:
    """One of these clusters."""
    return stage.world()
