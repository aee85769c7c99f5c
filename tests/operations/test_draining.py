"""Move of topologies off hosts whose supervisors drain."""

from __future__ import annotations

import itertools

import pytest

from storm_dagster.core.drain_obstacles import drain_obstacles
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model.errors import Conflict, Unavailable
from storm_dagster.model.records import SupervisorInfo
from storm_dagster.operations.live.draining import (
    begun_moves,
    move_off_draining,
    topologies_to_move,
)
from storm_dagster.operations.live.lifecycle import deactivate, finish_due, kill
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.upgrade import gray_upgrade
from storm_dagster.testing.waiting import eventually
from storm_rigs.stage.records import Crash, World
from storm_rigs.stage.supervisor_link import LinkedSupervisor

pytestmark = pytest.mark.zookeeper

THREE_WORKERS = {"topology.workers": 3, "topology.message.timeout.secs": 1}
"""Conf of a topology with a worker on each of three hosts; its short timeout ends a wait."""


class Draining(LinkedSupervisor):
    """A supervisor that drains."""

    def _info(self, count: int) -> SupervisorInfo:
        return super()._info(count).model_copy(update={"draining": True})


def nodes(world: World, name: str = "wc") -> set[str]:
    """Supervisors that have workers of the topology."""
    return {worker.node for worker in world.assignment(name).workers}


def drain(world: World, *supervisors: str) -> None:
    """These supervisors drain, and withdraw their free slots."""
    view = world.cluster.load_view()
    for supervisor_id in supervisors:
        ports = tuple(sorted(view.used_ports().get(supervisor_id, ())))
        host = view.supervisors[supervisor_id].host
        world.supervisor(supervisor_id, ports=ports, host=host, draining=True)


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


def test_as_many_workers_move_as_find_a_slot(world: World) -> None:
    world.supervisor("s1", ports=(6900, 6901))
    world.supervisor("s2", ports=())
    world.submit("wc", conf={**THREE_WORKERS, "topology.workers": 2})
    before = world.assignment()
    world.supervisor("s2", ports=(6900,))
    drain(world, "s1")
    result = move_off_draining(world.context(), "wc")
    assert result.outcome == "assigned"
    after = world.assignment()
    stays, moved = sorted(after.workers, key=lambda worker: worker.node)
    assert stays.node == "s1" and stays in before.workers
    assert moved.node == "s2" and len(after.task_slots()) == len(before.task_slots())
    # The next attempt disturbs nothing, and names the reason.
    with pytest.raises(Unavailable, match="s1 is draining"):
        move_off_draining(world.context(), "wc")
    assert world.assignment() == after and world.named().base.status == "ACTIVE"
    world.supervisor("s3")
    move_off_draining(world.context(), "wc")
    assert nodes(world) == {"s2", "s3"}


def begin_move_and_die(world: World) -> None:
    """A leader begins to move a topology off the host that drains, and is killed."""
    world.submit("wc", conf=THREE_WORKERS)
    drain(world, "s1")

    def die(point: str) -> None:
        if point == "after.rebalance":
            raise Crash

    with pytest.raises(Crash):
        move_off_draining(world.context(checkpoint=die), "wc")


def test_a_move_that_a_dead_leader_began_continues_at_once(world: World) -> None:
    begin_move_and_die(world)
    assert world.named().base.status == "REBALANCING" and "s1" in nodes(world)
    assert move_off_draining(world.context(), "wc").outcome == "assigned"
    assert world.named().base.status == "ACTIVE" and nodes(world) == {"s2"}


def test_a_move_off_a_host_that_is_lost_with_the_leader_ends(world: World) -> None:
    """Otherwise the spouts would pause until the delay of the move has passed."""
    begin_move_and_die(world)
    world.lose_supervisor("s1")
    view = world.cluster.load_view()
    assert topologies_to_move(view) == {}
    assert begun_moves(world.context(), view) == ["wc"]
    move_off_draining(world.context(), "wc")
    # What was lost with the host is left to healing.
    assert world.named().base.status == "ACTIVE"
    assert begun_moves(world.context(), world.cluster.load_view()) == []


def test_a_rebalance_that_a_user_asked_for_is_not_hurried(world: World) -> None:
    world.submit("wc", conf=THREE_WORKERS)
    rebalance(world.context(), "wc", workers=4, wait_secs=3600, waits_for_delay=False)
    assert begun_moves(world.context(), world.cluster.load_view()) == []
    drain(world, "s1")
    with pytest.raises(Conflict, match="REBALANCING"):
        move_off_draining(world.context(), "wc")
    assert "its rebalance has not ended" in drain_obstacles(world.cluster.load_view(), "s1")


def test_a_supervisor_that_drains_names_what_holds_its_workers(world: World) -> None:
    world.submit("wc", conf=THREE_WORKERS)
    drain(world, "s1")
    assert drain_obstacles(world.cluster.load_view(), "s1") == ""
    drain(world, "s2")
    slots = sorted(worker.port for worker in world.assignment().workers if worker.node == "s1")
    expected = f"wc ({', '.join(map(str, slots))}): no slot is free for it on another host"
    assert drain_obstacles(world.cluster.load_view(), "s1") == expected
    kill(world.context(), "wc", wait_secs=3600)
    expected = "it is being killed, and its delay has not passed"
    assert expected in drain_obstacles(world.cluster.load_view(), "s1")


@pytest.mark.long
def test_a_supervisor_reads_what_its_drain_waits_for(world: World) -> None:
    world.submit("wc", conf=THREE_WORKERS)
    drain(world, "s2")
    world.lose_supervisor("s1")
    supervisor = Draining(world.conf, "s1", ports=())
    supervisor.link.start()
    try:
        eventually(
            lambda: "no slot is free for it" in supervisor.link.drain_obstacles,
            60,
            "the obstacles of the drain",
        )
        world.supervisor("s3")
        eventually(lambda: supervisor.link.drain_obstacles == "", 60, "a free slot")
    finally:
        supervisor.link.close()


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


@pytest.mark.parametrize("step", ["rebalance", "finish_rebalance"])
def test_the_next_leader_completes_a_move_of_a_dead_one(world: World, step: str) -> None:
    for supervisor_id in ("s1", "s2"):
        world.supervisor(supervisor_id, host="127.0.0.1")
    topology_id = world.submit("wc", conf=THREE_WORKERS)
    world.run_workers(topology_id)
    drain(world, "s1")
    # Two seconds between two looks: the workers are records, and never answer.
    seconds = itertools.count(0, 2)
    times = {"sleep": lambda secs: None, "monotonic": lambda: float(next(seconds))}
    dead = False

    def die(point: str) -> None:
        nonlocal dead
        dead = dead or point == f"after.{step}"
        if dead:
            raise Crash

    with pytest.raises(Crash):
        move_off_draining(world.context(checkpoint=die, **times), "wc")
    assert world.named().base.status == "REBALANCING"
    # What the leader does all the time: due transitions, then the hosts that drain.
    finish_due(world.context(**times), boot_id="b", boot_now=0)
    if topologies_to_move(world.cluster.load_view()):
        move_off_draining(world.context(**times), "wc")
    memory = finish_due(world.context(**times), boot_id="b", boot_now=0).memory
    finish_due(world.context(**times), memory, boot_id="b", boot_now=6)
    assert world.named().base.status == "ACTIVE" and nodes(world) == {"s2"}


def test_a_topology_that_was_deactivated_stays_so(world: World) -> None:
    world.submit("wc", conf=THREE_WORKERS)
    deactivate(world.context(), "wc")
    drain(world, "s1")
    move_off_draining(world.context(), "wc")
    assert world.named().base.status == "INACTIVE" and nodes(world) == {"s2"}
