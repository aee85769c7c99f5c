"""Verbs whose topology is killed while they are under way: each ends with ``NotAlive``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model.errors import NotAlive
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.rebalance import finish_rebalance, rebalance
from storm_dagster.operations.upgrade import gray_upgrade
from storm_dagster.operations.upgrade_waiting import await_upgrade
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper

WAITS = pytest.mark.parametrize("wait_secs", [0, 30], ids=["gone", "KILLED"])
"""Delay of the kill: the topology is gone, or in its delay."""


def killing(world: World, wait_secs: int) -> Callable[[object], None]:
    """A function of one argument that kills the topology at its first call."""
    calls: list[object] = []

    def kill(argument: object) -> None:
        if not calls:
            calls.append(argument)
            lifecycle.kill(world.context(), "wc", wait_secs)

    return kill


def at(point: str, kill: Callable[[object], None]) -> Callable[[str], None]:
    """Observer of steps that kills the topology at that point."""
    return lambda passed: kill(passed) if passed == point else None


@WAITS
def test_a_rebalance_that_waits_for_its_delay(world: World, wait_secs: int) -> None:
    world.submit("wc", conf={"topology.workers": 1})
    pauses: list[float] = []
    kill = killing(world, wait_secs)

    def sleep(secs: float) -> None:
        pauses.append(secs)
        kill(secs)

    with pytest.raises(NotAlive, match="was killed while it was rebalanced"):
        rebalance(world.context(sleep=sleep), "wc", workers=2, wait_secs=3600)
    assert len(pauses) == 1, "it does not wait for the end of its delay"


def test_a_rebalance_whose_delay_has_passed(world: World) -> None:
    topology_id = world.submit("wc", conf={"topology.workers": 1})
    rebalance(world.context(), "wc", workers=2, wait_secs=30, waits_for_delay=False)
    lifecycle.kill(world.context(), "wc", 30)
    with pytest.raises(NotAlive, match="was killed while it was rebalanced"):
        finish_rebalance(world.context(), topology_id)


@WAITS
@pytest.mark.parametrize(
    "point", ["before.stage.tasks", "before.stage.placement", "before.drain", "before.publish"]
)
def test_an_update_in_each_of_its_stages(world: World, wait_secs: int, point: str) -> None:
    # Its workers answer no poll of the drain, which ends after the message timeout.
    topology_id = world.submit("wc", "t1", conf={"topology.message.timeout.secs": 1})
    world.run_workers(topology_id)
    handle = world.upload("h2")
    killer = killing(world, wait_secs)

    def kill(passed: object) -> None:
        if wait_secs == 0:
            # Its workers end with the topology.
            for node, port in world.cluster.live_workers(topology_id):
                world.stop_worker(topology_id, node, port)
        killer(passed)

    ctx = world.context(checkpoint=at(point, kill))
    with pytest.raises(NotAlive, match="was killed while its replacement was prepared"):
        lifecycle.update(ctx, "wc", token="t2", handle=handle)
    topology = world.find()
    assert topology is None or (topology.id, topology.base.status) == (topology_id, "KILLED")


@WAITS
def test_a_restart(world: World, wait_secs: int) -> None:
    world.submit("wc", "t1")
    ctx = world.context(checkpoint=at("before.restart", killing(world, wait_secs)))
    with pytest.raises(NotAlive):
        lifecycle.restart(ctx, "wc")


def test_a_gray_upgrade_that_waits_for_its_batch(world: World) -> None:
    topology_id = world.submit(
        "wc", "t1", conf={"topology.workers": 3, "topology.master.single.worker": True}
    )
    world.run_workers(topology_id)
    handle = world.upload("h2", conf={"topology.workers": 3, "topology.master.single.worker": True})
    request = gray_upgrade(world.context(), "wc", Selection(number=1), handle=handle, token="t2")
    for back in (False, True):
        ctx = world.context(sleep=killing(world, 30))
        with pytest.raises(NotAlive, match="was killed while it was"):
            await_upgrade(ctx, request, wait_secs=60, on_worker=lambda *_: None, back=back)
