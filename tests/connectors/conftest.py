"""Workers that write to a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.sink_rig import SinkRig


@pytest.fixture
def make_sink_rig(
    tmp_path: Path, zk_cluster: StormClusterState, zk_conf: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int, dict[str, Any], str], SinkRig]]:
    """Make the rig of so many numbers, with a conf, and the class of the sink."""
    monkeypatch.setenv("RIG_FOLDER", str(tmp_path))
    made: list[SinkRig] = []

    def make(total: int, conf: dict[str, Any], kind: str) -> SinkRig:
        made.append(SinkRig(tmp_path, zk_cluster, zk_conf, total, conf, kind))
        return made[-1]

    yield make
    for each in made:
        each.rig.stop()
