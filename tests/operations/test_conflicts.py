"""Two operators at once, the blacklist, and requests that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import (
    Conflict,
    Fenced,
    InvalidRequest,
    NotAlive,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.records import encode_record
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.blacklist import change_blacklist
from storm_dagster.operations.live.rebalance import finish_rebalance, rebalance
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


def together(*actions: Callable[[], Any]) -> list[Any]:
    """Run all at once; what each returned or raised."""
    barrier = threading.Barrier(len(actions))
    results: list[Any] = [None] * len(actions)

    def run(index: int, action: Callable[[], Any]) -> None:
        barrier.wait(30)
        try:
            results[index] = action()
        except StormDagsterError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(actions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_two_rebalances_at_once_are_one_and_a_conflict(world: World) -> None:
    topology_id = world.submit("wc", conf={"topology.workers": 2})
    world.run_workers(topology_id)
    other = world.context(cluster=StormClusterState.open(world.conf))
    for workers in (3, 4, 1):
        results = together(
            lambda n=workers: rebalance(
                world.context(), "wc", workers=n, wait_secs=1000, waits_for_delay=False
            ),
            lambda n=workers: rebalance(
                other, "wc", executors={"split": n + 3}, wait_secs=1000, waits_for_delay=False
            ),
        )
        kinds = sorted(type(result).__name__ for result in results)
        assert kinds == ["Conflict", "RebalanceResult"], results
        base = world.cluster.load_view().topologies[topology_id].base
        assert base.status == "REBALANCING"
        finish_rebalance(world.context(), topology_id)
        world.run_workers(topology_id)
    other.cluster.disconnect()


def test_a_kill_wins_over_everything_that_comes_at_the_same_time(world: World) -> None:
    others = [world.context(cluster=StormClusterState.open(world.conf)) for _ in range(3)]
    verbs: list[Callable[[Any, str], Any]] = [
        lifecycle.deactivate,
        lambda ctx, name: rebalance(ctx, name, workers=3, wait_secs=0),
        lifecycle.activate,
    ]
    for number in range(4):
        name = f"wc{number}"
        world.run_workers(world.submit(name, conf={"topology.workers": 2}))
        killed, *results = together(
            lambda name=name: lifecycle.kill(world.context(), name, 1000),
            *(
                lambda ctx=ctx, verb=verb, name=name: verb(ctx, name)
                for ctx, verb in zip(others, verbs, strict=True)
            ),
        )
        assert killed.status == "KILLED"
        # Each of the others came before it, or is told that the topology is killed.
        for result in results:
            assert not isinstance(result, Exception) or isinstance(result, Conflict | NotAlive), (
                result
            )
        topology = world.named(name)
        assert topology.base.status == "KILLED"
        lifecycle.remove(world.context(), topology.id)
    for ctx in others:
        ctx.cluster.disconnect()


def test_a_rebalance_beyond_the_slots_names_them_and_changes_nothing(
    world: World,
) -> None:
    topology_id = world.submit("wc", conf={"topology.workers": 2})
    before = world.cluster.load_view().topologies[topology_id]
    with pytest.raises(Unavailable, match=r"needs 13 slots, 8 are free .s1: 4, s2: 4."):
        rebalance(world.context(), "wc", workers=12, executors={"count": 12}, wait_secs=0)
    after = world.cluster.load_view().topologies[topology_id]
    assert (after.base_at, after.assignment_at) == (before.base_at, before.assignment_at)


def test_the_blacklist_is_changed_by_two_at_once_and_nothing_is_lost(world: World) -> None:
    other = world.context(cluster=StormClusterState.open(world.conf))
    together(
        *(
            lambda n=n: change_blacklist(world.context() if n % 2 else other, add=[f"h{n}"])
            for n in range(8)
        )
    )
    assert world.cluster.blacklist() == {f"h{n}" for n in range(8)}
    assert change_blacklist(world.context(), remove=[f"h{n}" for n in range(8)], add=["s1"]) == (
        "s1",
    )
    version = world.cluster.state.get_version(paths.BLACKLIST)
    change_blacklist(world.context(), add=["s1"], remove=["never"])
    assert world.cluster.state.get_version(paths.BLACKLIST) == version, (
        "nothing changed, nothing is written"
    )
    world.submit("wc", conf={"topology.workers": 2})
    assert {worker.node for worker in world.assignment().workers} == {"s2"}
    other.cluster.disconnect()


@pytest.mark.parametrize("host", ["", "a b", "h\n", "x" * 300, 3, None, "../x/"])
def test_wrong_hosts_are_refused(world: World, host: Any) -> None:
    with pytest.raises(InvalidRequest):
        change_blacklist(world.context(), add=[host])


def test_a_rebalance_moves_the_tasks_of_a_blacklisted_host_and_no_others(world: World) -> None:
    topology_id = world.submit("wc", conf={"topology.workers": 2})
    world.run_workers(topology_id)
    before = world.assignment().task_slots()
    there = {task for task, slot in before.items() if slot[0] == "s1"}
    assert there and len(there) < len(before)
    change_blacklist(world.context(), add=["s1"])
    report = rebalance(world.context(), "wc", wait_secs=0)
    after = world.assignment().task_slots()
    assert {node for node, _ in after.values()} == {"s2"}
    assert (
        report.moved == len(there)
        and {task for task in before if before[task] != after[task]} == there
    )
    # One whose supervisor is gone cannot be stopped: it stays while it lives.
    change_blacklist(world.context(), add=["s2"], remove=["s1"])
    world.run_workers(topology_id)
    world.cluster.state.delete_node(paths.supervisor("s2"))
    rebalance(world.context(), "wc", wait_secs=0)
    assert world.assignment().task_slots() == after


def test_others_keep_off_the_hosts_that_a_topology_is_isolated_on(world: World) -> None:
    others = world.submit("before", conf={"topology.workers": 2})
    world.run_workers(others)
    for name in ("alone", "beside"):
        world.run_workers(world.submit(name, conf={"isolation.scheduler.machines": ["s1"]}))
    world.submit("after", conf={"topology.workers": 3})
    nodes = {
        name: {worker.node for worker in world.assignment(name).workers}
        for name in ("alone", "beside", "after")
    }
    assert nodes == {"alone": {"s1"}, "beside": {"s1"}, "after": {"s2"}}
    # What was there before stays, as on a blacklisted host, until it is rebalanced; s2 has no slot
    # for it now.
    assert {worker.node for worker in world.assignment("before").workers} == {"s1", "s2"}
    with pytest.raises(Unavailable, match=r"'before' needs 2 slots, 1 is free \(s2: 1\)"):
        rebalance(world.context(), "before", wait_secs=0)
    world.supervisor("s3")
    rebalance(world.context(), "before", wait_secs=0)
    assert "s1" not in {worker.node for worker in world.assignment("before").workers}
    assert "s1" in {worker.node for worker in world.assignment("alone").workers}
    # When it ends its hosts are free again.
    for name in ("alone", "beside"):
        base = world.named(name).base.model_copy(update={"isolation": ()})
        world.cluster.state.set_data(paths.topology(world.named(name).id), encode_record(base))
    world.submit("last", conf={"topology.workers": 5})
    assert "s1" in {worker.node for worker in world.assignment("last").workers}


def test_a_rebalance_with_every_host_blacklisted_changes_nothing_and_says_so(world: World) -> None:
    topology_id = world.submit("wc")
    change_blacklist(world.context(), add=["s1", "s2"])
    before = world.cluster.load_view().topologies[topology_id]
    questions: list[dict[str, Any]] = [
        {"workers": 1},
        {"reassign": True},
        {"executors": {"count": 4}},
        {},
    ]
    for asked in questions:
        with pytest.raises(
            Unavailable, match=r"every host is blacklisted \(s1, s2\).*blacklist remove"
        ):
            rebalance(world.context(), "wc", **asked)
    after = world.cluster.load_view().topologies[topology_id]
    assert (after.base_at, after.assignment_at) == (before.base_at, before.assignment_at)


def test_a_rebalance_that_moves_nothing_waits_for_nothing(world: World) -> None:
    """Seven tasks fill seven workers; an eighth can be wanted, and nothing falls silent for
    that.
    """
    topology_id = world.submit("wc", conf={"topology.workers": 7})
    before = world.cluster.load_view().topologies[topology_id]
    slept: list[float] = []
    report = rebalance(world.context(sleep=slept.append), "wc", workers=8, wait_secs=60)
    after = world.cluster.load_view().topologies[topology_id]
    assert (report.moved, slept) == (0, []) and after.assignment_at == before.assignment_at
    assert (after.base.workers, after.base.status) == (8, "ACTIVE")


def test_a_deposed_leader_changes_no_blacklist(world: World) -> None:
    old = world.context(epoch=world.epoch())
    world.lead("127.0.0.1:1")
    with pytest.raises(Fenced):
        change_blacklist(old, add=["h1"])
    assert world.cluster.blacklist() == frozenset()
