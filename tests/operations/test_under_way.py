"""Operations under way, as any process lists them."""

from __future__ import annotations

import pytest

from storm_dagster.model.dagster_names import STAGES
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.read.under_way import operations_under_way
from storm_dagster.operations.submit import submission
from storm_dagster.operations.submit.staging import allocate_topology_id, discard_token, read_token
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


def listed(world: World) -> list[tuple[str, str, str, str]]:
    """Token, verb, name and stage of each operation."""
    return [
        (operation.token, operation.record.verb, operation.record.name, operation.stage)
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
