"""The slot request of a topology without a history is the general one, from its summary alone."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.scheduling.plan import event_of
from storm_dagster.core.scheduling.requested_workers import (
    Grants,
    SlotRequest,
    grant_requests,
    slot_request,
)
from storm_dagster.core.scheduling.strategy import TopologyEvent, request_without_history
from storm_dagster.model.placement import TopologyToPlace
from storm_rigs.placement.placement_clusters import generated_batch, small_topology


def general_request(event: TopologyEvent) -> SlotRequest:
    """The request from executors, history and granted requests."""
    grants = Grants()
    if event.strategy.grants_requests:
        grants = grant_requests(event.about, event.executors, event.history)
    respread = event.strategy.respreads and event.about.event == "monitor"
    return slot_request(event.about, event.executors, event.history, grants, respread=respread)


@given(seed=st.integers(0, 2**32))
def test_a_request_without_history_needs_the_summary_only(seed: int) -> None:
    for topology in generated_batch(random.Random(seed)).topologies:
        event = event_of(topology.model_copy(update={"old": (), "user_workers": ()}))
        assert event.history.is_empty
        assert request_without_history(event.about) == general_request(event)
        assert event.request() == general_request(event)


def test_a_topology_without_tasks_requests_no_slot() -> None:
    request = event_of(TopologyToPlace(name="empty")).request()
    assert request.unchanged
    assert (request.wanted, request.missing, request.master_alone) == (0, 0, False)


def test_a_lonely_topology_master_has_one_worker() -> None:
    topology = small_topology(bolts={}, spouts={}, ackers=0, workers=12, single_master=True)
    request = event_of(topology).request()
    assert (request.wanted, request.master_alone) == (1, True)


def test_a_topology_master_that_is_alone_has_one_worker_more() -> None:
    topology = small_topology(bolts={"b": (20, ["s"])}, spouts={"s": 1}, workers=10)
    request = event_of(topology).request()
    assert (request.wanted, request.master_alone) == (11, True)
