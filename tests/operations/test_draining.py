"""Move of topologies off hosts whose supervisors drain."""

from __future__ import annotations

import pytest

from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model.errors import Conflict, Unavailable
from storm_dagster.operations.live.draining import move_off_draining, topologies_to_move
from storm_dagster.operations.live.lifecycle import finish_due
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.upgrade import gray_upgrade
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper

THREE_WORKERS = {"topology.workers": 3, "topology.message.timeout.secs": 1}
"""Conf of a topology with a worker on each of three hosts; its short timeout ends a wait."""


def nodes(world: World, name: str = "wc") -> set[str]:
    """Supervisors that have workers of the topology."""
    return {worker.node for worker in world.assignment(name).workers}


def drain(world: World, *supervisors: str) -> None:
    """These supervisors drain, and withdraw their free slots."""
    view = world.cluster.load_view()
    for supervisor_id in supervisors:
        ports = tuple(sorted(view.used_ports().get(supervisor_id, ())))
        world.supervisor(supervisor_id, ports=ports, draining=True)


def test_only_the_tasks_of_draining_hosts_move(world: World) -> None:
    world.supervisor("s3")
    world.submit("wc", conf=THREE_WORKERS)
    assert nodes(world) == {"s1", "s2", "s3"}
    before = world.assignment().task_slots()
    drain(world, "s2")
    assert topologies_to_move(world.cluster.load_view()) == {"wc": ["s2"]}
    result = move_off_draining(world.context(), "wc")
    assert result.outcome == "assigned" and result.status == "ACTIVE"
    assert nodes(world) == {"s1", "s3"}
    after = world.assignment().task_slots()
    assert all(after[task] == slot for task, slot in before.items() if slot.node != "s2")
    assert topologies_to_move(world.cluster.load_view()) == {}


def test_one_move_leaves_all_hosts_that_drain(world: World) -> None:
    world.supervisor("s3")
    world.submit("wc", conf=THREE_WORKERS)
    drain(world, "s1", "s2")
    move_off_draining(world.context(), "wc")
    assert nodes(world) == {"s3"}


def test_without_a_free_slot_elsewhere_nothing_is_disturbed(world: World) -> None:
    world.supervisor("s2", ports=())
    world.submit("wc", conf=THREE_WORKERS)
    before = world.named()
    drain(world, "s1")
    with pytest.raises(Unavailable):
        move_off_draining(world.context(), "wc")
    after = world.named()
    assert (after.base, after.assignment) == (before.base, before.assignment)


def test_when_every_host_drains_the_error_names_it(world: World) -> None:
    world.submit("wc")
    drain(world, "s1", "s2")
    with pytest.raises(Unavailable, match=r"every host is draining \(s1, s2\)"):
        move_off_draining(world.context(), "wc")


def test_a_draining_host_gets_no_new_topology(world: World) -> None:
    world.supervisor("s1", draining=True)
    world.submit("wc", conf={"topology.workers": 2})
    assert nodes(world) == {"s2"}


def test_a_gray_upgrade_is_not_interrupted(world: World) -> None:
    world.submit("wc", conf={**THREE_WORKERS, "topology.master.single.worker": True})
    gray_upgrade(world.context(), "wc", Selection(number=1), handle=world.upload("next"))
    drain(world, "s1")
    with pytest.raises(Conflict, match="UPGRADING"):
        move_off_draining(world.context(), "wc")


def test_the_next_leader_finishes_a_move_that_was_begun(world: World) -> None:
    """The former leader died while the spouts paused: what it left is a rebalance that is due."""
    world.submit("wc", conf=THREE_WORKERS)
    drain(world, "s1")
    rebalance(world.context(), "wc", wait_secs=1, stay=False)
    assert world.named().base.status == "REBALANCING"
    with pytest.raises(Conflict, match="wait until the rebalance ends"):
        move_off_draining(world.context(), "wc")
    memory = finish_due(world.context(), boot_id="b", boot_now=0).memory
    finish_due(world.context(), memory, boot_id="b", boot_now=2)
    assert world.named().base.status == "ACTIVE" and nodes(world) == {"s2"}
