"""The event log of a topology in real ZooKeeper: what is taken stays until it is acknowledged, with
bounds, fencing and cleaning.
"""

from __future__ import annotations

import pytest

from storm_dagster.core import event_log as rules
from storm_dagster.core.event_log import EventSource
from storm_dagster.model import paths
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.errors import Conflict, Fenced, Unavailable
from storm_dagster.model.event_log import is_batch_key
from storm_dagster.model.names import SYSTEM
from storm_dagster.operations.live.cleaner import clean
from storm_dagster.operations.live.event_logs import (
    EventReport,
    acknowledge_events,
    drop_old_events,
    full_text,
    read_page,
    report_refused,
    take_events,
)
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper

OWNER = "shop:default"


def reports(topology_id: str, *numbers: int, text: str = "") -> list[EventReport]:
    return [
        EventReport(
            topology_id,
            "count",
            4,
            DagsterEvent.make(
                "wc/count", "materialization", "lake/words", metadata={"n": number, "text": text}
            ),
        )
        for number in numbers
    ]


def take(world: World, topology_id: str, *numbers: int) -> None:
    source = EventSource(topology_id, declared=True, owner=OWNER, user="ann")
    result = take_events(world.context(), "wc", source, reports(topology_id, *numbers))
    assert result.count == len(numbers) and result.full is None


def numbers_after(
    world: World, after: int = 0, log: str | None = None, limit: int = 200
) -> list[int]:
    page = read_page(world.context(), "wc", log, after, limit)
    return [taken.event.metadata["n"] for taken in page.events]


def log_of(world: World) -> str:
    head = world.cluster.event_log_head("wc")
    assert head is not None
    return head.log


def blobs_of_events(world: World) -> list[str]:
    return [key for key in world.blobs.keys("") if is_batch_key(key)]


def test_events_wait_in_order_until_they_are_acknowledged(world: World) -> None:
    topology_id = world.submit("wc", "t")
    assert world.cluster.event_logs() == {}
    assert not world.cluster.state.exists(paths.EVENTS), "without events nothing is written"
    began_at = world.time
    take(world, topology_id, 1, 2)
    world.time += 1
    take(world, topology_id, 3)
    assert len(blobs_of_events(world)) == 1, "few events share a batch"
    world.time += 4000
    take(world, topology_id, 4)
    assert numbers_after(world) == [1, 2, 3, 4]
    assert numbers_after(world, limit=3) == [1, 2, 3]
    log = log_of(world)
    assert numbers_after(world, 2, log) == [3, 4]
    assert numbers_after(world, 2, "b" * 32) == [1, 2, 3, 4], "numbers of another log mean nothing"
    summary = world.cluster.event_logs()["wc"]
    assert (summary.waiting, summary.since, summary.owner, summary.declared) == (
        4,
        began_at,
        OWNER,
        True,
    )

    for _ in range(2):
        head = acknowledge_events(world.context(), "wc", log, 2)
        assert head is not None and (head.waiting, head.since) == (2, began_at + 1)
        assert numbers_after(world) == [3, 4]
    with pytest.raises(Conflict, match="another one now"):
        acknowledge_events(world.context(), "wc", "b" * 32, 4)
    head = acknowledge_events(world.context(), "wc", log, 4)
    assert head is not None and (head.waiting, head.bytes, head.since) == (0, 0, None)
    assert numbers_after(world) == [] and blobs_of_events(world) == []

    take(world, topology_id, 5)
    page = read_page(world.context(), "wc", log, 4, 200)
    assert [taken.number for taken in page.events] == [5], "numbers are not used twice"


def test_a_reader_ahead_of_a_restored_log_removes_and_misses_nothing(world: World) -> None:
    """ZooKeeper's backup brings the former numbers back, and a code location knows higher ones."""
    topology_id = world.submit("wc", "t")
    for number in range(1, 3):
        take(world, topology_id, number)
    log = log_of(world)
    head = acknowledge_events(world.context(), "wc", log, 500)
    assert head is not None and head.waiting == 2
    assert numbers_after(world, 500, log) == [1, 2]
    assert numbers_after(world, 2, log) == []
    head = acknowledge_events(world.context(), "wc", log, 2)
    assert head is not None and head.waiting == 0


def test_events_keep_who_reported_them(world: World) -> None:
    topology_id = world.submit("wc", "t")
    source = EventSource(topology_id)
    event = DagsterEvent.make("wc/count", "check", ["lake", "wörds"], check="x", passed=False)
    former_release = EventReport(topology_id, None, None, event)
    take_events(world.context(), "wc", source, [*reports(topology_id, 1), former_release])
    first, second = read_page(world.context(), "wc", None, 0, 200).events
    assert (first.component, first.task, first.topology, first.at) == (
        "count",
        4,
        topology_id,
        world.time,
    )
    assert (second.component, second.task, second.event) == (None, None, event)
    report_refused(world.context(), first, "is defined nowhere")
    report_refused(world.context(), first, "is defined nowhere")
    report_refused(world.context(), second, "was refused")
    errors = world.cluster.errors_by_component(topology_id)
    (of_task,) = errors["count"]
    assert (of_task.task, of_task.count) == (4, 2)
    assert of_task.error == "the materialization of 'lake/words' is defined nowhere"
    assert "check of 'lake/wörds' was refused" in errors[SYSTEM][0].error


def test_a_log_survives_its_topology_and_ends_empty(world: World) -> None:
    topology_id = world.submit("wc", "t")
    take(world, topology_id, 1)
    world.cluster.state.delete_node(paths.topology(topology_id))

    def cleaned() -> None:
        result, _ = clean(world.context(), grace_secs=0, token_secs=0, upload_secs=0)
        assert result.problems == ()

    cleaned()
    assert numbers_after(world) == [1], "its Dagster may still get them"
    # Deployed once more, under another id.
    other_id = world.submit("wc", "t2")
    take(world, other_id, 2)
    log = log_of(world)
    assert numbers_after(world) == [1, 2]
    acknowledge_events(world.context(), "wc", log, 2)
    cleaned()
    assert log_of(world) == log, "the topology is alive"
    world.cluster.state.delete_node(paths.topology(other_id))
    cleaned()
    assert world.cluster.event_logs() == {}
    third_id = world.submit("wc", "t3")
    take(world, third_id, 3)
    assert log_of(world) != log


def test_only_blobs_without_an_index_are_garbage(world: World) -> None:
    topology_id = world.submit("wc", "t")
    take(world, topology_id, 1)
    (kept,) = blobs_of_events(world)
    orphan = f"events.{log_of(world)}.000000000009.{'0' * 16}"
    world.blobs.put(orphan, b"{}")
    world.blobs.put("events.csv", b"of a user")
    _, memory = clean(world.context(), boot_now=0.0)
    _, memory = clean(world.context(), memory, boot_now=59.0)
    assert orphan in blobs_of_events(world), "it may be about to get its index"
    result, _ = clean(world.context(), memory, boot_now=60.0)
    assert orphan in result.blobs and blobs_of_events(world) == [kept]
    assert world.blobs.exists("events.csv")
    world.cluster.state.set_data(paths.event_log("wc"), b"damaged")
    world.blobs.put(orphan, b"{}")
    clean(world.context(), grace_secs=0)
    assert blobs_of_events(world) == sorted([kept, orphan]), "a damaged log may name any"


def test_old_events_are_dropped_counted_and_reported(world: World) -> None:
    topology_id = world.submit("wc", "t")
    take(world, topology_id, 1, 2)
    world.time += 90_000
    take(world, topology_id, 3)
    world.time += rules.MAX_AGE_SECS - 90_000
    assert drop_old_events(world.context(), "wc") == 0
    world.time += 1
    assert drop_old_events(world.context(), "wc") == 2
    assert drop_old_events(world.context(), "wc") == 0
    assert numbers_after(world) == [3]
    summary = world.cluster.event_logs()["wc"]
    assert (summary.waiting, summary.dropped) == (1, 2)
    (error,) = world.cluster.errors_by_component(topology_id)[SYSTEM]
    assert error.error.startswith(
        "2 events for Dagster are dropped, they waited for more than 7 days"
    )
    assert OWNER in error.error and "topology_events_sensor" in error.error


def test_a_full_log_takes_nothing_until_events_are_acknowledged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "MAX_LOG_EVENTS", 3)
    topology_id = world.submit("wc", "t")
    source = EventSource(topology_id)
    result = take_events(world.context(), "wc", source, reports(topology_id, 1, 2, 3, 4))
    assert result.count == 3 and result.full is not None
    text = full_text("wc", result.full, world.time + 600)
    assert "event log of 'wc' is full" in text
    assert "3 events wait for the cluster's Dagster, the oldest for 10 min" in text
    assert text.endswith("start the Dagster at dagster.graphql.url")
    result = take_events(world.context(), "wc", source, reports(topology_id, 4))
    assert result.count == 0 and result.full is not None
    acknowledge_events(world.context(), "wc", log_of(world), 1)
    assert take_events(world.context(), "wc", source, reports(topology_id, 4)).count == 1
    assert numbers_after(world) == [2, 3, 4]


def test_a_deposed_leader_takes_and_removes_nothing(world: World) -> None:
    topology_id = world.submit("wc", "t")
    take(world, topology_id, 1)
    former = world.context(epoch=world.epoch())
    world.lead()
    with pytest.raises(Fenced):
        take_events(former, "wc", EventSource(topology_id), reports(topology_id, 2))
    with pytest.raises(Fenced):
        acknowledge_events(former, "wc", log_of(world), 1)
    assert numbers_after(world) == [1]
    clean(world.context(), grace_secs=0)
    assert len(blobs_of_events(world)) == 1


def test_a_nimbus_without_the_blob_neither_reads_nor_loses_it(world: World) -> None:
    topology_id = world.submit("wc", "t")
    take(world, topology_id, 1)
    (key,) = blobs_of_events(world)
    content = world.blobs.read(key)
    world.blobs.delete(key)
    with pytest.raises(Unavailable, match="lacks a part of it"):
        numbers_after(world)
    take(world, topology_id, 2)
    world.blobs.put(key, content)
    assert numbers_after(world) == [1, 2], "the new event did not join the missing batch"


def test_many_large_events_come_in_several_answers(world: World) -> None:
    topology_id = world.submit("wc", "t")
    large = reports(topology_id, *range(250), text="x" * 10_000)
    source = EventSource(topology_id)
    while large:
        large = large[take_events(world.context(), "wc", source, large).count :]
    found: list[int] = []
    answers = 0
    while page := numbers_after(world, len(found), log_of(world)):
        found += page
        answers += 1
        assert len(page) <= 104, "about 1 MiB"
    assert found == list(range(250)) and answers == 3
    acknowledge_events(world.context(), "wc", log_of(world), 250)
    assert blobs_of_events(world) == []
