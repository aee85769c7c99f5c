"""An update keeps the workers and executors of a rebalance, unless it names them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.deploy import update
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.submit.submission import update_differences
from storm_rigs.stage.records import WORD_COUNT, World

pytestmark = pytest.mark.zookeeper


def with_parallelism(count: int) -> dict[str, Any]:
    """The word count with that parallelism of its bolt ``count``."""
    topology = copy.deepcopy(WORD_COUNT)
    topology["bolts"]["count"]["parallelism"] = count
    return topology


@pytest.fixture
def rebalanced(world: World) -> World:
    """A topology of 2 workers and 2 executors of ``count``, which now has 4 and 5."""
    world.submit("wc", conf={"topology.workers": 2})
    rebalance(world.context(), "wc", workers=4, executors={"count": 5}, wait_secs=0)
    return world


def sizes(world: World) -> tuple[int, int, int, int]:
    """Workers of base and assignment, executors and tasks of ``count``."""
    base = world.named().base
    tasks = world.tasks().components["count"].ids
    return base.workers, len(world.assignment().workers), base.executors["count"], len(tasks)


@pytest.mark.parametrize(
    ("conf", "topology", "expected"),
    [
        ({}, WORD_COUNT, (4, 4, 5, 5)),
        ({"topology.workers": 2}, WORD_COUNT, (2, 2, 5, 5)),
        ({"topology.bolt.parallelism": {"count": 2}}, WORD_COUNT, (4, 4, 2, 2)),
        ({}, with_parallelism(3), (4, 4, 3, 3)),
        ({"topology.max.task.parallelism": 4}, WORD_COUNT, (4, 4, 4, 4)),
    ],
    ids=["nothing", "workers", "executors", "other code", "a lower limit"],
)
def test_an_update_keeps_what_it_does_not_name(
    rebalanced: World, conf: dict[str, Any], topology: Any, expected: tuple[int, ...]
) -> None:
    world = rebalanced
    before = world.named()
    world.upload("new", topology, conf)
    differences = update_differences(world.context(), before, "new")
    result = update(world.context(), "wc", token="new", handle="new")
    assert world.named().id != before.id
    assert sizes(world) == expected
    # The run lists the same changes as the preview.
    listed = {change.key: {"old": change.old, "new": change.new} for change in result.changes}
    assert listed == differences
    # The preview has announced the numbers that have changed, and no others.
    changes = {"topology.workers": (4, expected[0]), "parallelism.count": (5, expected[2])}
    announced = {
        key: (difference["old"], difference["new"])
        for key, difference in differences.items()
        if key in changes
    }
    assert announced == {key: pair for key, pair in changes.items() if pair[0] != pair[1]}


def test_a_second_update_keeps_them_as_well(rebalanced: World) -> None:
    for number in range(2):
        rebalanced.upload(f"new{number}", WORD_COUNT, {"my.key": number})
        update(rebalanced.context(), "wc", token=f"t{number}", handle=f"new{number}")
    assert sizes(rebalanced) == (4, 4, 5, 5)


def test_a_gray_upgrade_announces_no_executors(rebalanced: World) -> None:
    rebalanced.upload("new", WORD_COUNT, {})
    context = rebalanced.context()
    differences = update_differences(context, rebalanced.named(), "new", replaces=False)
    assert "parallelism.count" not in differences


@pytest.mark.parametrize(
    ("is_rebalanced", "expected"), [(False, (3, 4, 4, 4)), (True, (3, 4, 6, 6))]
)
def test_numbers_that_a_gray_upgrade_left_are_none_of_a_rebalance(
    world: World, is_rebalanced: bool, expected: tuple[int, ...]
) -> None:
    single_master = {"topology.master.single.worker": True}
    world.submit("wc", conf={**single_master, "topology.workers": 2})
    former = sizes(world)
    world.upload("new", with_parallelism(4), {"topology.workers": 3})
    result = lifecycle.gray_upgrade(world.context(), "wc", Selection(number=9), handle="new")
    assert [warning.partition(", ")[0] for warning in result.warnings] == [
        "topology 'wc' keeps 2 workers in a gray upgrade",
        f"topology 'wc' keeps {former[2]} executors of 'count' in a gray upgrade",
    ]
    lifecycle.complete_upgrade(world.context(), "wc")
    assert sizes(world) == former
    if is_rebalanced:
        rebalance(world.context(), "wc", executors={"count": 6}, wait_secs=0)
    # The code of the gray upgrade once more, and a conf that names no size.
    world.upload("next", with_parallelism(4), {"my.key": 1})
    update(world.context(), "wc", token="next", handle="next")
    assert sizes(world) == expected
    assert world.named().base.unapplied_sizes == ()
