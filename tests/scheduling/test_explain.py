"""What a task's worker was chosen against (``explain NAME TASK``), and who moves (``rebalance
--dry-run``).
"""

from __future__ import annotations

import json
import random

from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.scheduling.explain import Alternative, choice_of
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.placement import PlacementBatch, TopologyPlacement
from storm_dagster.model.placement_reasons import REASONS, Reason
from storm_dagster.operations.read.explaining import choice_document, moves_document
from storm_rigs.placement.placement_clusters import generated_batch, small_topology, supervisor

WORD_COUNT = small_topology(
    bolts={"split": (2, ["spout"]), "count": (2, ["split"])}, spouts={"spout": 1}, workers=2
)
FOUR = range(6900, 6904)
BATCH = PlacementBatch(
    supervisors=(supervisor(1, FOUR), supervisor(2, FOUR)), topologies=(WORD_COUNT,)
)


def test_the_selector_that_decided_and_what_it_compared() -> None:
    (placement,) = plan_placement(BATCH).placements
    second = choice_of(WORD_COUNT, placement, 2)
    assert second is not None
    assert (second.worker, second.candidates) == ("s2:6900", 2)
    assert second.alternatives == (
        Alternative("s1:6900", "tasks of its component in the worker", 1, 0),
    )
    stored = json.loads(json.dumps(placement.to_document()))
    acker = choice_document(WORD_COUNT, TopologyPlacement.from_document(stored), 5)
    assert acker == {
        "task": 5,
        "worker": "s2:6900",
        "candidates": 2,
        "alternatives": [
            {"worker": "s1:6900", "selector": "tasks in the worker", "had": 3, "chosen_had": 2}
        ],
    }


def test_what_was_not_chosen_by_comparing_has_no_alternatives() -> None:
    kept = WORD_COUNT.model_copy(
        update={"event": "monitor", "old": plan_placement(BATCH).placements[0].workers}
    )
    batch = BATCH.model_copy(update={"topologies": (kept,)})
    assert choice_of(kept, plan_placement(batch).placements[0], 2) is None
    assert choice_of(WORD_COUNT, plan_placement(BATCH).placements[0], 99) is None


@given(seed=st.integers(0, 2**32))
def test_every_choice_can_be_told_again(seed: int) -> None:
    batch = generated_batch(random.Random(seed))
    by_name = {topology.name: topology for topology in batch.topologies}
    for placement in plan_placement(batch).placements:
        topology = by_name[placement.name]
        for task, why in placement.reasons.items():
            reason = REASONS.get(why)
            if reason is None or reason > Reason.FIRST:
                continue
            choice = choice_of(topology, placement, task)
            if choice is None and topology.differ_node:
                # Being apart may fill a worker above its quota, which the sizes alone do not tell.
                continue
            assert choice is not None
            (home,) = [worker for worker in placement.workers if task in worker.ids]
            assert choice.worker == home.slot.key


def test_moves_name_task_component_from_to_and_why() -> None:
    from storm_dagster.core.reassignment import assignment_of

    (placement,) = plan_placement(BATCH).placements
    before = assignment_of(placement, topology_id="wc-1-1", previous=None, now_secs=1)
    wider = WORD_COUNT.model_copy(
        update={"event": "rebalance", "workers": 3, "old": placement.workers}
    )
    (after,) = plan_placement(BATCH.model_copy(update={"topologies": (wider,)})).placements
    rows = moves_document(before, after, {**WORD_COUNT.tasks})
    assert len(rows) == after.moved == 2
    assert {row["to"] for row in rows} == {"s1:6901"}
    for row in rows:
        assert row["component"] == WORD_COUNT.tasks[row["task"]]
        assert row["from"] in ("s1:6900", "s2:6900")
        assert (
            "s1:6901: of equally loaded supervisors it has the lowest id: next is s2" in row["why"]
        )
