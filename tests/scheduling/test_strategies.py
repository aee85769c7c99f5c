"""Every registered strategy keeps the rules, and a new one takes a class and a line of the
registry.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.scheduling.balanced import Balanced
from storm_dagster.core.scheduling.explain import choice_of
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.core.scheduling.slot_allocation import SlotAllocation
from storm_dagster.core.scheduling.strategy import Strategy, strategy_of
from storm_dagster.model.conf import CONF_KEYS
from storm_dagster.model.placement import PlacementBatch
from storm_dagster.model.placement_reasons import Reason
from storm_dagster.model.slot import Slot
from storm_dagster.model.strategies import STRATEGIES
from storm_rigs.placement.placement_clusters import generated_batch, small_topology, supervisor
from storm_rigs.placement.placement_invariants import placement_faults


def with_strategy(batch: PlacementBatch, name: str) -> PlacementBatch:
    """The batch with all topologies of one strategy."""
    topologies = tuple(
        topology.model_copy(update={"strategy": name}) for topology in batch.topologies
    )
    return batch.model_copy(update={"topologies": topologies})


def test_the_conf_takes_what_is_registered() -> None:
    assert CONF_KEYS["topology.scheduler.strategy"].choices == tuple(STRATEGIES)


@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(STRATEGIES)))
def test_every_strategy_keeps_the_rules(seed: int, name: str) -> None:
    batch = with_strategy(generated_batch(random.Random(seed)), name)
    assert placement_faults(batch, plan_placement(batch)) == []


@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(STRATEGIES)))
def test_a_placement_applied_twice_changes_nothing(seed: int, name: str) -> None:
    batch = with_strategy(generated_batch(random.Random(seed)), name)
    for topology in batch.topologies:
        fresh = topology.model_copy(
            update={"event": "new", "old": (), "dead": (), "unstopped": (), "user_workers": ()}
        )
        first = plan_placement(batch.model_copy(update={"topologies": (fresh,)})).placements[0]
        for event in ("monitor", "rebalance") if first.status == "assigned" else ():
            again = fresh.model_copy(
                update={"event": event, "reassign": False, "old": first.workers}
            )
            second = plan_placement(batch.model_copy(update={"topologies": (again,)})).placements[0]
            assert second.status == "unchanged", event


class Packed(Balanced):
    """A strategy that fills a supervisor before it uses the next; executors go into its slots as
    with ``balanced``.
    """

    def allocate(self, allocation: SlotAllocation) -> None:
        """Take free slots by supervisor and port."""
        allocation.require_supervisor()
        wanted = allocation.request.wanted
        slots = [
            Slot(node, port) for node in allocation.nodes for port in allocation.ports_of(node)
        ]
        if len(slots) < wanted:
            raise allocation.short(wanted, with_remedy=True)
        for slot in slots[:wanted]:
            allocation.take(slot, Reason.SLOT_LOWEST_ID)


def test_a_new_strategy_is_a_class_and_a_line_of_the_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STRATEGIES, "packed", f"{__name__}:Packed")
    strategy: Strategy = strategy_of("packed")
    assert strategy.chain
    shape: dict[str, Any] = {
        "bolts": {"split": (4, ["lines"])},
        "spouts": {"lines": 2},
        "workers": 3,
    }
    topology = small_topology(**shape, strategy="packed")
    batch = PlacementBatch(
        supervisors=tuple(supervisor(n, [6900, 6901]) for n in (1, 2, 3)), topologies=(topology,)
    )
    result = plan_placement(batch)
    assert placement_faults(batch, result) == []
    assert [worker.slot.key for worker in result.placements[0].workers] == [
        "s1:6900",
        "s1:6901",
        "s2:6900",
    ]
    choice = choice_of(topology, result.placements[0], 4)
    assert choice is not None
    assert choice.candidates > 1
