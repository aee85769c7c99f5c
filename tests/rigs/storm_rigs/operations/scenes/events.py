"""Scenes of events for Dagster, which a topology's log takes and gives away."""

from __future__ import annotations

import time

from storm_dagster.core.event_log import EventSource
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.event_log import is_batch_key
from storm_dagster.operations.live.event_logs import EventReport, read_page, take_events
from storm_rigs.operations.acting import acknowledge, redirect_events, take_event
from storm_rigs.operations.scenes.scene import Scene
from storm_rigs.stage.records import World

_ACTING = "storm_rigs.operations.acting"


def report(topology_id: str, partition: str) -> EventReport:
    """A materialization of that partition."""
    event = DagsterEvent.make("wc/count", "materialization", "lake/words", partition=partition)
    return EventReport(topology_id, "count", 4, event)


def partitions(world: World) -> list[str | None]:
    """The partitions of the events that wait, in order."""
    page = read_page(world.context(), "wc", None, 0, 200)
    return [taken.event.partition for taken in page.events]


def _stores_only_what_waits(world: World) -> None:
    """Assert that each blob of events is named by the log."""
    stored = world.cluster.read_event_log("wc")
    named = [] if stored is None else [batch.blob for batch in stored.batches]
    assert [key for key in world.blobs.keys("") if is_batch_key(key)] == sorted(named)


def taking(world: World) -> Scene:
    """An event that joins one that waits."""
    topology_id = world.submit("wc", "t")
    # By the clock of the process that acts: an event joins a batch of its own hour.
    ctx = world.context(now_secs=lambda: int(time.time()))
    take_events(ctx, "wc", EventSource(topology_id), [report(topology_id, "first")])
    arguments = {"topology_id": topology_id, "partition": "second"}

    def completed() -> None:
        found = partitions(world)
        # A repetition after a crash may have it twice.
        assert found[:2] == ["first", "second"] and set(found) == {"first", "second"}

    def undone() -> None:
        assert partitions(world) == ["first"]
        _stores_only_what_waits(world)

    return Scene(
        world,
        f"{_ACTING}:take_event",
        arguments,
        again=lambda ctx: take_event(ctx, **arguments),
        begun=lambda: len(partitions(world)) > 1,
        completed=completed,
        undone=undone,
    )


def acknowledging(world: World) -> Scene:
    """The first of two batches, which Dagster has."""
    topology_id = world.submit("wc", "t")
    ctx = world.context()
    for partition in ("first", "second"):
        take_events(ctx, "wc", EventSource(topology_id), [report(topology_id, partition)])
        # Later events do not join a batch of an hour ago.
        world.time += 4000
    head = world.cluster.event_log_head("wc")
    assert head is not None
    arguments = {"log": head.log, "number": 1}
    return Scene(
        world,
        f"{_ACTING}:acknowledge",
        arguments,
        again=lambda ctx: acknowledge(ctx, **arguments),
        begun=lambda: partitions(world) == ["second"],
        completed=lambda: _is_left(world, ["second"]),
        undone=lambda: _is_left(world, ["first", "second"]),
    )


def _is_left(world: World, expected: list[str]) -> None:
    assert partitions(world) == expected
    head = world.cluster.event_log_head("wc")
    assert head is not None and head.waiting == len(expected)


def redirecting(world: World) -> Scene:
    """Events of a topology that a code location declares by now."""
    topology_id = world.submit("wc", "t")
    take_events(world.context(), "wc", EventSource(topology_id), [report(topology_id, "first")])

    def owner() -> str | None:
        head = world.cluster.event_log_head("wc")
        assert head is not None and head.waiting == 1
        return head.owner

    def completed() -> None:
        assert owner() == "shop:default"

    def undone() -> None:
        assert owner() is None

    arguments = {"topology_id": topology_id, "owner": "shop:default"}
    return Scene(
        world,
        f"{_ACTING}:redirect_events",
        arguments,
        again=lambda ctx: redirect_events(ctx, **arguments),
        begun=lambda: owner() is not None,
        completed=completed,
        undone=undone,
    )
