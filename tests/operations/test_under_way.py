"""Operations under way, as any process lists them."""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.model.dagster_names import STAGES
from storm_dagster.model.errors import Conflict
from storm_dagster.model.operation_record import OperationRecord
from storm_dagster.model.operation_text import operation_text
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.change_records import (
    end_change,
    read_change,
    release_change,
    set_run,
    write_change,
)
from storm_dagster.operations.read.under_way import operations_under_way
from storm_dagster.operations.submit import submission
from storm_dagster.operations.submit.staging import (
    allocate_topology_id,
    discard_token,
    read_token,
    release_token,
)
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


def listed(world: World) -> list[tuple[str, str, str, str]]:
    """Token, verb, name and step of each operation."""
    return [
        (operation.key, operation.verb, operation.topology, operation.step)
        for operation in operations_under_way(world.context())
    ]


def test_a_submission_is_listed_from_its_acceptance_until_it_is_active(world: World) -> None:
    ctx = world.context()
    handle = world.upload("h1")
    record, _ = allocate_topology_id(ctx, "t1", "wc", ctx.current_epoch())
    assert (record.epoch, record.started_secs) == (ctx.current_epoch(), ctx.now_secs())
    steps = (
        lambda: submission.stage_conf(ctx, name="wc", token="t1", handle=handle),
        lambda: submission.stage_code(ctx, token="t1"),
        lambda: submission.stage_tasks(ctx, token="t1"),
        lambda: submission.stage_assignment(ctx, token="t1"),
        lambda: submission.publish_assignment(ctx, token="t1"),
        lambda: submission.activate_topology(ctx, token="t1"),
    )
    for stage, run_stage in zip(STAGES, steps, strict=True):
        assert listed(world) == [("t1", "submit", "wc", stage)]
        run_stage()
    assert listed(world) == []
    topology = world.named()
    assert topology.id == record.topology_id, "the id that the token got at its acceptance"


def test_an_update_is_listed_beside_the_topology_that_it_replaces(world: World) -> None:
    old = world.submit("wc", "t1")
    ctx = world.context()
    handle = world.upload("h2")
    submission.stage_conf(ctx, name="wc", token="t2", handle=handle, replaces=old)
    assert listed(world) == [("t2", "update", "wc", "topology_code")]


def test_a_topology_that_is_submitted_inactive_is_not_under_way(world: World) -> None:
    ctx = world.context()
    handle = world.upload("h1")
    submission.stage_conf(ctx, name="wc", token="t1", handle=handle, inactive=True)
    submission.stage_code(ctx, token="t1")
    submission.stage_tasks(ctx, token="t1")
    submission.stage_assignment(ctx, token="t1")
    submission.publish_assignment(ctx, token="t1")
    assert listed(world) == []


def test_a_record_that_changed_is_not_discarded(world: World) -> None:
    ctx: OperationsContext = world.context()
    epoch = ctx.current_epoch()
    _, version = allocate_topology_id(ctx, "t1", "wc", epoch)
    discard_token(ctx, "t1", version, epoch)
    assert read_token(ctx, "t1") is None
    world.submit("wc", "t2")
    published = read_token(ctx, "t2")
    assert published is not None
    discard_token(ctx, "t2", published[1] - 1, epoch)
    assert read_token(ctx, "t2") == published


def change(world: World, verb: str, name: str = "wc", **more: Any) -> OperationRecord:
    ctx = world.context()
    return OperationRecord(
        topology_id=world.named(name).id,
        name=name,
        verb=verb,
        epoch=ctx.current_epoch(),
        started_secs=ctx.now_secs(),
        **more,
    )


def test_a_change_is_listed_until_it_has_ended(world: World) -> None:
    world.submit("wc", "t1")
    ctx = world.context()
    write_change(ctx, "r1", change(world, "restart", user="ada", request={"a": 1}))
    assert listed(world) == [("r1", "restart", "wc", "launch")]
    set_run(ctx, "r1", "run-1")
    (operation,) = operations_under_way(ctx)
    assert (operation.step, operation.run_id, operation.user) == ("workers", "run-1", "ada")
    assert operation_text(operation.to_document(operation.started_secs + 3)) == (
        "restarting (starts workers) for 3 s"
    )
    release_change(ctx, "r1")
    stored = read_change(ctx, "r1")
    assert stored is not None and stored[0].is_abandoned and stored[0].run_id == "run-1"
    end_change(ctx, "r1")
    end_change(ctx, "r1")
    assert listed(world) == []


def test_a_change_of_a_topology_that_is_gone_is_not_listed(world: World) -> None:
    world.submit("wc", "t1")
    ctx = world.context()
    write_change(ctx, "r1", change(world, "rebalance"))
    lifecycle.kill(ctx, "wc", wait_secs=0)
    assert listed(world) == []


def test_a_request_belongs_to_one_topology(world: World) -> None:
    world.submit("wc", "t1")
    world.submit("other", "t2")
    ctx = world.context()
    write_change(ctx, "r1", change(world, "gray-upgrade"))
    with pytest.raises(Conflict, match="token of its own"):
        write_change(ctx, "r1", change(world, "gray-upgrade", "other"))


def test_a_submission_that_has_ended_is_not_listed_until_it_is_repeated(world: World) -> None:
    ctx = world.context()
    epoch = ctx.current_epoch()
    request = {"name": "wc", "handle": "h1", "token": "t1"}
    first, _ = allocate_topology_id(ctx, "t1", "wc", epoch, request=request, user="ada")
    assert (first.request, first.user) == (request, "ada")
    release_token(ctx, "t1", ended=False)
    assert listed(world) == [("t1", "submit", "wc", "topology_conf")]
    release_token(ctx, "t1", ended=True)
    assert listed(world) == []
    again, _ = allocate_topology_id(ctx, "t1", "wc", epoch, request=request)
    assert again.topology_id == first.topology_id and again.request == request
    assert listed(world) == [("t1", "submit", "wc", "topology_conf")]


def test_a_run_publishes_although_its_record_had_ended(world: World) -> None:
    ctx = world.context()
    world.upload("h1")
    allocate_topology_id(ctx, "t1", "wc", ctx.current_epoch(), request={"handle": "h1"})
    release_token(ctx, "t1", ended=True)
    world.submit("wc", "t1")
    stored = read_token(ctx, "t1")
    assert stored is not None
    assert (stored[0].published, stored[0].ended, stored[0].request) == (True, False, {})
