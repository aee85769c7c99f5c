"""Numbers of workers and executors that an update keeps: those of a rebalance that neither the call
nor the new code names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from storm_dagster.core.submission.kept_sizes import (
    KeptSizes,
    Sizes,
    describe_unapplied,
    executor_limits,
    kept_sizes,
    named_sizes,
    unapplied_sizes,
    with_rebalanced_sizes,
    with_unapplied_sizes,
)
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.records import StormBase
from storm_dagster.model.topology import TopologySpec


@pytest.mark.parametrize(
    ("conf", "names"),
    [
        ({}, ()),
        ({"topology.workers": 2}, ("topology.workers",)),
        # Dropping a kept value names the size as well.
        ({"topology.workers": None}, ("topology.workers",)),
        (
            {"topology.bolt.parallelism": {"b": 2}, "topology.spout.parallelism": {"a": 1}},
            ("a", "b"),
        ),
        ({"topology.bolt.parallelism": None, "topology.spout.parallelism": {}}, ()),
        ({"topology.tasks": 9, "topology.max.task.parallelism": 3}, ()),
    ],
)
def test_a_call_names_workers_and_executors_by_three_keys(
    conf: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert named_sizes(conf) == names


CODE = Sizes(2, {"a": 1, "b": 2, TOPOLOGY_MASTER: 1})
"""Numbers of the former code, and of a new one that does not change them."""


def kept(
    workers: int,
    executors: Mapping[str, int],
    *,
    new: Sizes = CODE,
    named: tuple[str, ...] = (),
    limits: Mapping[str, int] | None = None,
) -> KeptSizes:
    """Numbers that an update keeps of a topology that runs with these ones."""
    base = base_with(workers, executors)
    return kept_sizes(base, CODE, new, named=named, limits=limits or {})


def base_with(workers: int, executors: Mapping[str, int]) -> StormBase:
    """The base of a topology that runs with these numbers."""
    return StormBase(
        name="t",
        launch_time_secs=0,
        status="ACTIVE",
        workers=workers,
        executors=dict(executors),
        token="k",
    )


def test_numbers_of_a_rebalance_are_kept_up_and_down() -> None:
    assert kept(4, {"a": 3, "b": 1}) == KeptSizes(4, {"a": 3, "b": 1})
    assert kept(1, {"a": 1, "b": 9}) == KeptSizes(1, {"b": 9})


def test_without_a_rebalance_the_new_code_decides() -> None:
    assert kept(2, CODE.executors) == KeptSizes()
    assert kept(2, CODE.executors, new=Sizes(7, {"a": 5, "b": 2})) == KeptSizes()


def test_a_number_that_the_call_names_is_not_kept() -> None:
    assert kept(4, {"a": 3, "b": 5}, named=("topology.workers", "a")) == KeptSizes(None, {"b": 5})


def test_a_number_that_the_new_code_changes_is_not_kept() -> None:
    assert kept(4, {"a": 3, "b": 5}, new=Sizes(3, {"a": 2, "b": 2})) == KeptSizes(None, {"b": 5})


def test_new_and_removed_components_and_the_topology_master_keep_nothing() -> None:
    new = Sizes(2, {"b": 2, "c": 4, TOPOLOGY_MASTER: 1})
    assert kept(2, {"a": 9, "b": 2, TOPOLOGY_MASTER: 3}, new=new) == KeptSizes()


def test_a_kept_number_of_executors_is_at_most_the_limit_of_the_new_code() -> None:
    assert kept(2, {"a": 9, "b": 5}, limits={"a": 4, "b": 8}) == KeptSizes(None, {"a": 4, "b": 5})


GRAY = Sizes(3, {"a": 4, "b": 2, TOPOLOGY_MASTER: 1})
"""Numbers of a code that came by a gray upgrade, which applies none of them."""


def test_a_gray_upgrade_notes_the_numbers_that_it_does_not_apply() -> None:
    base = base_with(2, CODE.executors)
    sizes = unapplied_sizes(base, CODE, GRAY)
    assert sizes == {"a": (1, 4), "topology.workers": (2, 3)}
    for text, remedy in zip(
        describe_unapplied("t", sizes), ("rebalance t -n 3", "rebalance t -e a=4"), strict=True
    ):
        assert "topology 't' keeps" in text
        assert remedy in text
    after = with_unapplied_sizes(base, sizes)
    assert kept_sizes(after, GRAY, GRAY, named=(), limits={}) == KeptSizes()
    # They are noted until a number is applied, also by a later gray upgrade of another code.
    again = with_unapplied_sizes(after, unapplied_sizes(after, GRAY, Sizes(3, {"a": 5, "b": 3})))
    assert again.unapplied_sizes == ("a", "b", "topology.workers")


def test_a_number_of_a_rebalance_is_kept_before_and_after_a_gray_upgrade() -> None:
    base = base_with(7, {**CODE.executors, "a": 6})
    assert unapplied_sizes(base, CODE, GRAY) == {}
    upgraded = with_unapplied_sizes(base_with(2, CODE.executors), ("a", "topology.workers"))
    rebalanced = with_rebalanced_sizes(upgraded, 2, {**CODE.executors, "a": 6})
    assert rebalanced.unapplied_sizes == ("topology.workers",)
    assert kept_sizes(rebalanced, GRAY, GRAY, named=(), limits={}) == KeptSizes(None, {"a": 6})
    assert with_rebalanced_sizes(rebalanced, 5, rebalanced.executors).unapplied_sizes == ()


@pytest.mark.parametrize(
    ("total", "own", "limits"),
    [
        ({}, {}, {}),
        ({"topology.tasks": 6}, {}, {"s": 6}),
        ({"topology.max.task.parallelism": 3}, {}, {"s": 3}),
        ({"topology.tasks": 6, "topology.max.task.parallelism": 3}, {}, {"s": 3}),
        ({"topology.tasks": 2, "topology.max.task.parallelism": 3}, {}, {"s": 2}),
        # The conf of a component has precedence.
        ({"topology.tasks": 6}, {"topology.tasks": 9}, {"s": 9}),
        ({"topology.tasks": None, "topology.max.task.parallelism": None}, {}, {}),
    ],
)
def test_executors_are_limited_by_tasks_and_by_the_highest_parallelism(
    total: dict[str, Any], own: dict[str, Any], limits: dict[str, int]
) -> None:
    spout = {"object": {"python": "m:S"}, "conf": own}
    spec = TopologySpec.model_validate({"name": "t", "spouts": {"s": spout}, "bolts": {}})
    assert executor_limits(spec, total) == limits
