"""One name, a hundred clients: exactly one submission wins, and the others are told so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from storm_dagster.model.errors import AlreadyAlive, StormDagsterError
from storm_dagster.operations.submit import submission
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


@pytest.mark.parametrize("clients", [20, pytest.param(100, marks=pytest.mark.chaos)])
def test_exactly_one_of_many_wins(zk_worlds: Callable[[], Any], clients: int) -> None:
    world = zk_worlds()
    ctx = world.context()
    tokens = [f"client-{number}" for number in range(clients)]
    for token in tokens:
        handle = world.upload(f"handle-{token}")
        submission.stage_conf(ctx, name="a.b", token=token, handle=handle)
    # Names that differ only by what a dot would match never collide.
    other = world.submit("aXb")

    def submit(token: str) -> str:
        try:
            for stage in (
                submission.stage_code,
                submission.stage_tasks,
                submission.stage_assignment,
                submission.publish_assignment,
                submission.activate_topology,
            ):
                stage(ctx, token=token)
        except AlreadyAlive:
            return "AlreadyAlive"
        except StormDagsterError as error:
            return f"{type(error).__name__}: {error.message}"
        return "won"

    with ThreadPoolExecutor(16) as pool:
        outcomes = Counter(pool.map(submit, tokens))
    assert outcomes == {"won": 1, "AlreadyAlive": clients - 1}
    bases = [world.cluster.storm_base(topology_id) for topology_id in world.cluster.active_storms()]
    assert Counter(base.name for base in bases if base) == {"a.b": 1, "aXb": 1}
    slots = [slot for id in world.cluster.active_storms() for slot in assigned(world, id)]
    assert len(slots) == len(set(slots)), "no slot is given twice"
    assert world.cluster.storm_base(other).status == "ACTIVE"


def assigned(world: World, topology_id: str) -> list[tuple[str, int]]:
    found = world.cluster.read_assignment(topology_id)
    return [worker.slot for worker in found[0].workers] if found else []
