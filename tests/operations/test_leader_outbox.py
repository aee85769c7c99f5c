"""Outbox of the leader: events for Dagster without a run, in ZooKeeper and in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from storm_dagster.model import paths
from storm_dagster.model.records import decode_record
from storm_dagster.model.unreported import UnreportedEvents
from storm_dagster.nimbus.requests.unreported import LeaderOutbox
from storm_dagster.operations.live import lifecycle
from storm_rigs.operations.losing import LosingCluster
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


def test_the_transaction_of_a_leaders_verb_notes_its_event(world: World) -> None:
    """So a leader that is lost right after the verb leaves the event to the next one."""
    topology_id = world.submit("wc", "t1")
    world.cluster.state.mkdirs(paths.UNREPORTED)
    plain = world.context()
    lifecycle.deactivate(plain, "wc")
    lifecycle.activate(replace(plain, verb="activate"), "wc")
    lifecycle.activate(replace(plain, verb="activate"), "wc")
    lifecycle.mark_killed(replace(plain, verb="kill"), "wc", wait_secs=60)
    assert len(world.cluster.state.find_children(paths.UNREPORTED) or ()) == 2
    next_leader = LeaderOutbox()
    next_leader.adopt(plain)
    assert len(next_leader) == 2
    assert world.cluster.state.find_children(paths.UNREPORTED) == []
    raw = world.cluster.state.get_data(paths.UNREPORTED)
    assert raw is not None
    events = decode_record(UnreportedEvents, raw, paths.UNREPORTED).events
    assert [(event.metadata["verb"], event.metadata["status"]) for event in events] == [
        ("activate", "ACTIVE"),
        ("kill", "KILLED"),
    ]
    assert {event.metadata["topology_id"] for event in events} == {topology_id}


@pytest.mark.parametrize("landed", [True, False])
def test_a_lost_answer_costs_no_event_for_dagster(world: World, landed: bool) -> None:
    """The leader does not know if it has moved an event into its record, and adds another one."""
    world.submit("wc", "t1")
    world.cluster.state.mkdirs(paths.UNREPORTED)
    ctx = world.context()
    outbox = LeaderOutbox()
    outbox.adopt(ctx)
    lifecycle.deactivate(replace(ctx, verb="deactivate"), "wc")
    losing: Any = LosingCluster(world.cluster, 1, landed)
    outbox.take_noted(replace(ctx, cluster=losing))
    outbox.add(ctx, "wc", "the topology was healed")
    outbox.take_noted(ctx)
    assert sorted(_unreported_events(world)) == ["deactivate", "the topology was healed"]
    assert len(outbox) == 2
    assert world.cluster.state.find_children(paths.UNREPORTED) == []


def _unreported_events(world: World) -> list[str]:
    """Verb or description of each event that waits in ZooKeeper."""
    raw = world.cluster.state.get_data(paths.UNREPORTED)
    assert raw is not None
    events = decode_record(UnreportedEvents, raw, paths.UNREPORTED).events
    return [event.metadata.get("verb", event.description) for event in events]


def test_an_event_in_memory_is_stored_with_the_next_ones(world: World) -> None:
    """ZooKeeper takes neither the event nor the move after it, and is then back."""
    world.submit("wc", "t1")
    world.cluster.state.mkdirs(paths.UNREPORTED)
    ctx = world.context()
    outbox = LeaderOutbox()
    outbox.adopt(ctx)
    losing: Any = LosingCluster(world.cluster, 1, landed=False)
    outbox.add(replace(ctx, cluster=losing), "wc", "the topology was healed")
    lifecycle.deactivate(replace(ctx, verb="deactivate"), "wc")
    losing = LosingCluster(world.cluster, 1, landed=False)
    outbox.take_noted(replace(ctx, cluster=losing))
    outbox.take_noted(ctx)
    assert sorted(_unreported_events(world)) == ["deactivate", "the topology was healed"]
