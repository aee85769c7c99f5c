"""A sensor on a node of ZooKeeper: every change once, by zxid, seen at once, and within Dagster's
limit.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from storm_dagster import ZooKeeperChange, build_zookeeper_sensor
from storm_dagster.defs.zookeeper_sensor import ChangeFunction
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.dagster_results import SensorTick, tick_sensor

MakeSensor = Callable[..., dg.SensorDefinition]

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]


@dg.job
def react() -> None: ...


@pytest.fixture
def node(zk_conf: dict[str, object], zk_cluster: StormClusterState) -> str:
    """Absolute path of a node below the test's root."""
    zk_cluster.state.set_data("/shop", b"")
    return f"{zk_conf['storm.zookeeper.root']}/shop"


@pytest.fixture
def sensor(zk_conf: dict[str, object], tmp_path: Path) -> MakeSensor:
    """Makes a sensor on a path, with ticks of no length."""

    def make(path: str, on_change: ChangeFunction, **options: Any) -> dg.SensorDefinition:
        options = {
            "job": react,
            "home": str(tmp_path),
            "overrides": zk_conf,
            "tick_secs": 0.0,
            **options,
        }
        return build_zookeeper_sensor("shop", path, on_change, **options)

    return make


def tick(made: dg.SensorDefinition, cursor: str | None = None) -> SensorTick:
    with dg.DagsterInstance.ephemeral(settings={"sensors": {"use_threads": True}}) as instance:
        return tick_sensor(made, instance, cursor)


def ask(_: dg.SensorEvaluationContext, change: ZooKeeperChange) -> dg.RunRequest:
    return dg.RunRequest()


def ignore(_: dg.SensorEvaluationContext, change: ZooKeeperChange) -> None: ...


def test_each_change_is_handed_over_once(
    sensor: MakeSensor, zk_cluster: StormClusterState, node: str
) -> None:
    seen: list[ZooKeeperChange] = []

    def on_change(_: dg.SensorEvaluationContext, change: ZooKeeperChange) -> dg.RunRequest:
        seen.append(change)
        return dg.RunRequest(tags={"value": change.data.decode()})

    made = sensor(node, on_change)
    first = tick(made)
    assert not first.run_requests and not seen
    zk_cluster.state.set_data("/shop", b"open")
    second = tick(made, first.cursor)
    (request,) = second.run_requests
    assert request.tags["value"] == "open"
    assert request.run_key == f"{node}:{seen[0].zxid}"
    # Neither the next tick nor one that is repeated with the old cursor makes another run.
    assert not tick(made, second.cursor).run_requests
    (again,) = tick(made, first.cursor).run_requests
    assert again.run_key == request.run_key
    # Writing the same bytes is a change: ZooKeeper counts it.
    zk_cluster.state.set_data("/shop", b"open")
    third = tick(made, second.cursor)
    assert third.run_requests[0].run_key != request.run_key
    zk_cluster.state.delete_node("/shop")
    gone = tick(made, third.cursor)
    assert str(gone.run_requests[0].run_key).endswith(":gone")
    assert not seen[-1].exists and seen[-1].data == b""
    assert not tick(made, gone.cursor).run_requests


def test_children_count_when_asked_for(
    sensor: MakeSensor, zk_cluster: StormClusterState, node: str
) -> None:
    found: list[tuple[str, ...]] = []
    made = sensor(node, lambda _, change: found.append(change.children), children=True)
    cursor = tick(made).cursor
    zk_cluster.state.create_node("/shop/b")
    zk_cluster.state.create_node("/shop/a")
    cursor = tick(made, cursor).cursor
    assert found == [("a", "b")]
    plain = sensor(node, lambda _, change: found.append(change.children))
    cursor = tick(plain).cursor
    zk_cluster.state.create_node("/shop/c")
    tick(plain, cursor)
    assert found == [("a", "b")]


def test_a_waiting_tick_wakes_at_the_change(
    sensor: MakeSensor, zk_cluster: StormClusterState, node: str
) -> None:
    made = sensor(node, ask, tick_secs=50.0)
    cursor = tick(sensor(node, ignore)).cursor
    found: list[SensorTick] = []
    thread = threading.Thread(target=lambda: found.append(tick(made, cursor)), daemon=True)
    thread.start()
    time.sleep(0.5)
    zk_cluster.state.set_data("/shop", b"now")
    eventually(lambda: bool(found), timeout=30, what="the tick's end")
    thread.join()
    assert found[
        0
    ].run_requests  # A tick that had not woken would go on, and ask for nothing at its end.


def test_what_the_function_raises_loses_no_change(
    sensor: MakeSensor, zk_cluster: StormClusterState, node: str
) -> None:
    def broken(_: dg.SensorEvaluationContext, change: ZooKeeperChange) -> None:
        raise ValueError("not today")

    cursor = tick(sensor(node, broken)).cursor
    zk_cluster.state.set_data("/shop", b"x")
    with pytest.raises(ValueError, match="not today"):
        tick(sensor(node, broken), cursor)
    made = sensor(node, ask)
    assert tick(made, cursor).run_requests


@pytest.mark.parametrize("cursor", ["", "nonsense", "[]", json.dumps({"marks": "x"})])
def test_an_unknown_cursor_starts_again(sensor: MakeSensor, node: str, cursor: str) -> None:
    made = sensor(node, ask)
    assert not tick(made, cursor).run_requests
    first = sensor(node, ask, on_first_look=True)
    assert tick(first, cursor).run_requests


def test_an_ensemble_that_counts_from_one_has_run_keys_of_its_own(
    sensor: MakeSensor, zk_cluster: StormClusterState, node: str
) -> None:
    seen: list[ZooKeeperChange] = []

    def on_change(_: dg.SensorEvaluationContext, change: ZooKeeperChange) -> dg.RunRequest:
        seen.append(change)
        return dg.RunRequest()

    made = sensor(node, on_change)
    first = tick(made, json.dumps({"marks": [1, 1, -1], "last": 10**15}))
    zk_cluster.state.set_data("/shop", b"open")
    second = tick(made, first.cursor)
    made_keys = [request.run_key for result in (first, second) for request in result.run_requests]
    assert made_keys == [f"{node}:{change.zxid}" for change in seen]
    assert len(set(made_keys)) == 2


def test_ticks_beyond_dagsters_limit_and_relative_paths_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="tick_secs=60"):
        build_zookeeper_sensor("s", "/a", ignore, tick_secs=60)
    with pytest.raises(InvalidRequest, match="absolute"):
        build_zookeeper_sensor("s", "a", ignore)


def test_without_zookeeper_a_tick_is_skipped(sensor: MakeSensor) -> None:
    conf = {
        "storm.zookeeper.servers": ["127.0.0.1"],
        "storm.zookeeper.port": 9,
        "storm.zookeeper.connection.timeout": 200,
    }
    assert tick(sensor("/a", ignore, overrides=conf)).skipped
