"""Somebody else kills the topology between any two steps of an operation; and what a submission
writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, NotAlive, StormDagsterError
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.cleaner import clean
from storm_dagster.operations.live.healing import reassign
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


def remnants(world: World) -> list[str]:
    """Nodes of topologies, and blobs, that are left; tokens and backups may stay."""
    state = world.cluster.state
    parents = (
        paths.TOPOLOGY,
        paths.ASSIGNMENTS,
        paths.TASKS,
        paths.TASKBEATS,
        paths.TASKERRORS,
        paths.METRICS,
        paths.GRAY_UPGRADE,
        paths.WORKERS,
    )
    nodes = [f"{parent}/{child}" for parent in parents for child in state.get_children(parent)]
    return [*nodes, *world.blobs.keys("wc-"), *world.blobs.keys("staging")]


def heal(world: World, ctx: OperationsContext) -> None:
    topology = world.named()
    assert topology.assignment is not None and topology.assignment_at is not None
    worker = topology.assignment.workers[0]
    cause = Cause(
        topology.id,
        "wc",
        topology.assignment_at.version,
        "dead_worker",
        worker.node,
        worker.host,
        worker.port,
        worker.ids,
    )
    reassign(ctx, [cause])


OPERATIONS: dict[str, Callable[[World, OperationsContext], object]] = {
    "reassign": heal,
    "rebalance": lambda world, ctx: rebalance(
        ctx, "wc", workers=2, executors={"split": 4}, wait_secs=0
    ),
    "deactivate": lambda world, ctx: lifecycle.deactivate(ctx, "wc"),
    "restart": lambda world, ctx: lifecycle.restart(ctx, "wc"),
    "kill": lambda world, ctx: lifecycle.kill(ctx, "wc", 0),
}


LONG = ("kill",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.chaos if name in LONG else [])
        for name in sorted(OPERATIONS)
    ],
)
def test_killed_between_any_two_steps(world: World, name: str) -> None:
    number = 0
    while True:
        number += 1
        world.submit("wc", f"{name}-{number}")
        left = number

        def interfere(point: str) -> None:
            nonlocal left
            left -= 1
            if left == 0 and world.cluster.load_view().topology_named("wc") is not None:
                lifecycle.kill(world.context(), "wc", 0)

        try:
            OPERATIONS[name](world, world.context(checkpoint=interfere))
        except StormDagsterError:
            pass  # A typed error is an answer.
        assert not world.cluster.load_view().corrupt
        # Whatever stands is whole; what does not stand has left nothing that the cleaner would not
        # take.
        if world.cluster.load_view().topology_named("wc") is not None:
            lifecycle.kill(world.context(), "wc", 0)
        clean(
            world.context(),
            {f"token {name}-{number}": -1e9},
            boot_now=0.0,
            grace_secs=0,
            token_secs=0,
        )
        assert remnants(world) == []
        if left > 0:
            break
    assert number >= 2


def _stays_killed(world: World, old: str) -> None:
    topology = world.find()
    assert topology is not None and (topology.id, topology.base.status) == (old, "KILLED")


def _stays(wanted: str) -> Callable[[World, str], None]:
    def check(world: World, old: str) -> None:
        lifecycle.finish_due(
            world.context(),
            lifecycle.finish_due(world.context(), boot_now=0.0).memory,
            boot_now=1e9,
        )
        base = world.named().base
        assert base.status == base.wanted_status == wanted

    return check


def _keeps_its_parallelism(world: World, old: str) -> None:
    base = world.named().base
    assert (base.workers, base.executors["split"]) == (2, 4)


COMMANDS: dict[str, tuple[Callable[[OperationsContext], object], Callable[[World, str], None]]] = {
    "kill": (lambda ctx: lifecycle.kill(ctx, "wc", 60), _stays_killed),
    "deactivate": (lambda ctx: lifecycle.deactivate(ctx, "wc"), _stays("INACTIVE")),
    "activate": (lambda ctx: lifecycle.activate(ctx, "wc"), _stays("ACTIVE")),
    "rebalance": (
        lambda ctx: rebalance(ctx, "wc", 2, {"split": 4}, wait_secs=0),
        _keeps_its_parallelism,
    ),
}
"""What an operator may ask for while an update or a restart is under way, and what is true for good
when it was acknowledged.
"""


@pytest.mark.parametrize(
    ("command", "replacement"),
    [
        pytest.param(
            command, verb, marks=pytest.mark.long if (command, verb) != ("kill", "update") else []
        )
        for command in sorted(COMMANDS)
        for verb in ("update", "restart")
        # An update brings a parallelism of its own: whoever updates later decides.
        if (command, verb) != ("rebalance", "update")
    ],
)
def test_what_was_acknowledged_during_a_replacement_stays(
    world: World, command: str, replacement: str
) -> None:
    """At each step: while it is prepared, while the old one drains, when its transaction is sent,
    and afterwards.
    """
    run, check = COMMANDS[command]
    number, clock = 0, count(step=20)
    for number in count():
        name, left, acknowledged = f"{replacement}-{number}", number, ""
        old = world.submit("wc", name, conf={"topology.workers": 1}, inactive=command == "activate")
        world.run_workers(old)

        def interfere(point: str) -> None:
            nonlocal left, acknowledged
            left -= 1
            if left == -1:
                current = world.named().id
                with contextlib.suppress(StormDagsterError):
                    run(world.context(monotonic=lambda: next(clock)))
                    acknowledged = current

        ctx = world.context(
            checkpoint=interfere, monotonic=lambda: next(clock), sleep=lambda seconds: None
        )
        with contextlib.suppress(Conflict, NotAlive):
            if replacement == "restart":
                lifecycle.restart(ctx, "wc")
            else:
                handle = world.upload(f"h-{number}", conf={"topology.workers": 1})
                lifecycle.update(ctx, "wc", token=f"again-{number}", handle=handle)
        if acknowledged:
            check(world, acknowledged)
        if world.find() is not None:
            lifecycle.kill(world.context(), "wc", 0)
        if left >= 0:
            break
    assert number > (20 if replacement == "update" else 1)


class CountingState:
    """Real ZooKeeper behind it; counts commits and the nodes that they write."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.transactions = 0
        self.nodes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def transaction(self) -> Any:
        transaction = self._state.transaction()
        commit = transaction.commit

        def counting() -> Any:
            results = commit()
            self.transactions += 1
            self.nodes += sum(1 for result in results if result is not None)
            return results

        transaction.commit = counting
        return transaction


class CountingCluster:
    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.state = CountingState(cluster.state)

    fenced = StormClusterState.fenced  # over the state above

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)


@pytest.mark.parametrize("secret", [None, "a-secret-planted-for-tests-4711"])
@pytest.mark.parametrize("parallelism", [1, 200])
def test_a_submission_writes_few_nodes_however_many_tasks(
    zk_worlds: Callable[..., World], parallelism: int, secret: str | None
) -> None:
    """At most 24 nodes in at most 4 transactions, those of the blobs included; also with users in
    ZooKeeper.
    """
    world = zk_worlds({"storm.secret": secret})
    topology = {
        "spouts": {
            "s": {
                "object": {"python": "m:S"},
                "parallelism": parallelism,
                "outputs": {"default": {"fields": ["x"]}},
            }
        }
    }
    cluster = CountingCluster(world.cluster)
    topology_id = world.submit("wc", topology=topology, ctx=world.context(cluster=cluster))
    assert cluster.state.transactions == 3
    # Each of three blobs is its node, that of its nimbus, and its highest number.
    assert cluster.state.nodes + 9 <= 24
    # Whatever workers may write and may not create is there.
    assert all(
        world.cluster.state.exists(node_of(topology_id))
        for node_of in (
            paths.state_home,
            paths.taskbeats,
            paths.metrics,
            paths.workers,
            paths.task_errors,
        )
    )
