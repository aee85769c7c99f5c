"""Levels of loggers that are kept beside a running topology."""

from __future__ import annotations

import time

import pytest

from storm_dagster.core.invariants.rules import violations
from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced, InvalidRequest, NotAlive
from storm_dagster.model.log_levels import level_in_force
from storm_dagster.model.wire import LevelChange
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.log_levels import keep_log_levels, level_change
from storm_dagster.operations.read.inspection import take_snapshot
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


def test_levels_are_kept_taken_back_and_go_with_the_topology(world: World) -> None:
    topology_id = world.submit("wc")
    ctx = world.context()
    keep_log_levels(
        ctx, "wc", {"a": LevelChange("DEBUG"), "b": LevelChange("WARN", secs=60, reset="ERROR")}
    )
    kept = world.cluster.read_log_levels(topology_id).loggers
    now_ms = int(time.time() * 1000)
    assert level_in_force(kept["a"], now_ms) == LevelChange("DEBUG")
    later = level_in_force(kept["b"], now_ms + 20_000)
    assert (
        later is not None
        and (later.level, later.reset) == ("WARN", "ERROR")
        and 30 <= later.secs <= 41
    )
    assert level_in_force(kept["b"], now_ms + 61_000) is None, "its time is over"
    at = world.cluster.state.get_version(paths.log_levels(topology_id))
    keep_log_levels(ctx, topology_id, {"never": LevelChange()})
    assert world.cluster.state.get_version(paths.log_levels(topology_id)) == at, "nothing changed"
    keep_log_levels(ctx, "wc", {"b": LevelChange()})
    assert list(world.cluster.read_log_levels(topology_id).loggers) == ["a"]
    assert not violations(take_snapshot(ctx))
    lifecycle.kill(ctx, "wc", 0)
    assert not world.cluster.state.exists(paths.topology(topology_id))
    assert world.cluster.read_log_levels(topology_id).loggers == {}


def test_what_is_over_makes_room(world: World) -> None:
    topology_id = world.submit("wc")
    keep_log_levels(world.context(), "wc", {"short": LevelChange("DEBUG", secs=1)})
    time.sleep(1.1)
    keep_log_levels(world.context(), "wc", {"other": LevelChange("INFO")})
    assert list(world.cluster.read_log_levels(topology_id).loggers) == ["other"]


def test_wrong_ones_are_refused(world: World) -> None:
    topology_id = world.submit("wc")
    for arguments in (("", "DEBUG", 0, None), ("x" * 201, "DEBUG", 0, None), ("x", "LOUD", 0, None),
                      ("x", "DEBUG", -1, None), ("x", "DEBUG", True, None), ("x", "DEBUG", 0, "LOUD")):  # fmt: skip
        with pytest.raises(InvalidRequest):
            level_change(*arguments)
    with pytest.raises(InvalidRequest, match="200 may"):
        keep_log_levels(world.context(), "wc", {f"l{n}": LevelChange("INFO") for n in range(201)})
    with pytest.raises(NotAlive):
        keep_log_levels(world.context(), "other", {"a": LevelChange("INFO")})
    old = world.context(epoch=world.epoch())
    world.lead("127.0.0.1:1")
    with pytest.raises(Fenced):
        keep_log_levels(old, "wc", {"a": LevelChange("INFO")})
    assert world.cluster.read_log_levels(topology_id).loggers == {}
