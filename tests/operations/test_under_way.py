"""Operations under way, as any process lists them."""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.model import paths
from storm_dagster.model.dagster_names import STAGES
from storm_dagster.model.errors import Conflict, Fenced
from storm_dagster.model.operation_record import OperationRecord
from storm_dagster.model.operation_text import operation_text
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.change_records import (
    claim_change,
    end_change,
    end_change_of_run,
    load_changes,
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
    read_client_token,
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
    assert read_client_token(ctx, "t1") is None
    world.submit("wc", "t2")
    published = read_client_token(ctx, "t2")
    assert published is not None
    discard_token(ctx, "t2", published[1] - 1, epoch)
    assert read_client_token(ctx, "t2") == published


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
    stored = read_client_token(ctx, "t1")
    assert stored is not None
    assert (stored[0].published, stored[0].ended, stored[0].request) == (True, False, {})


def test_of_two_runs_of_one_request_only_the_first_has_its_record(world: World) -> None:
    world.submit("wc", "t1")
    ctx = world.context()
    write_change(ctx, "r1", change(world, "restart"))
    claim_change(ctx, "r1", "run-1")
    claim_change(ctx, "r1", "run-1")
    with pytest.raises(Conflict, match="run run-1 executes this change"):
        claim_change(ctx, "r1", "run-2")
    set_run(ctx, "r1", "run-2")
    end_change_of_run(ctx, "r1", "run-2")
    stored = read_change(ctx, "r1")
    assert stored is not None and stored[0].run_id == "run-1"
    end_change_of_run(ctx, "r1", "run-1")
    assert read_change(ctx, "r1") is None
    with pytest.raises(Conflict, match="is gone"):
        claim_change(ctx, "r1", "run-2")
    # A leader of the release before writes no record.
    claim_change(ctx, "r1", "run-2", is_recorded=False)


def test_a_leader_does_not_rewrite_a_record_claimed_by_a_run(world: World) -> None:
    world.submit("wc", "t1")
    ctx = world.context()
    judged = write_change(ctx, "r1", change(world, "restart"))
    claim_change(ctx, "r1", "run-1")
    with pytest.raises(Conflict):
        write_change(ctx, "r1", change(world, "restart"), judged)
    stored = read_change(ctx, "r1")
    assert stored is not None and stored[0].run_id == "run-1"


def test_a_record_that_was_repeated_is_not_ended_with_its_former_run(world: World) -> None:
    world.submit("wc", "t1")
    ctx = world.context()
    epoch = ctx.current_epoch()
    judged = write_change(ctx, "r1", change(world, "gray-upgrade"))
    write_change(ctx, "r1", change(world, "gray-upgrade"))
    end_change(ctx, "r1", judged)
    assert read_change(ctx, "r1") is not None
    request = {"handle": "h2"}
    _, version = allocate_topology_id(ctx, "t2", "other", epoch, request=request)
    release_token(ctx, "t2", ended=False)
    allocate_topology_id(ctx, "t2", "other", epoch, request=request)
    release_token(ctx, "t2", ended=True, version=version)
    stored = read_client_token(ctx, "t2")
    assert stored is not None and not stored[0].ended and stored[0].request == request


def test_a_deposed_leader_accepts_no_repetition(world: World) -> None:
    """The record of a former attempt has a request already, and needs no change."""
    deposed = world.context(epoch=world.context().current_epoch())
    allocate_topology_id(deposed, "t1", "wc", deposed.current_epoch(), request={"handle": "h1"})
    epoch = world.lead()
    with pytest.raises(Fenced):
        allocate_topology_id(deposed, "t1", "wc", deposed.current_epoch(), request={"handle": "h1"})
    ctx = world.context()
    record, version = allocate_topology_id(ctx, "t1", "wc", epoch, request={"handle": "h1"})
    assert record.epoch == epoch and read_client_token(ctx, "t1") == (record, version)


def test_a_submission_that_had_ended_is_listed_again_while_its_run_continues(
    world: World,
) -> None:
    ctx = world.context()
    handle = world.upload("h1")
    submission.stage_conf(ctx, name="wc", token="t1", handle=handle)
    release_token(ctx, "t1", ended=True)
    assert listed(world) == []
    # A re-execution of the run from a later stage.
    submission.restage_conf(ctx, "t1")
    assert listed(world) == [("t1", "submit", "wc", "topology_code")]
    release_token(ctx, "t1", ended=True)
    submission.stage_conf(ctx, name="wc", token="t1", handle=handle)
    assert listed(world) == [("t1", "submit", "wc", "topology_code")]


def test_the_step_of_a_change_counts_an_unrecorded_run(world: World) -> None:
    world.submit("wc", "t1")
    ctx = world.context()
    write_change(ctx, "r1", change(world, "restart"))
    (operation,) = operations_under_way(ctx, run_of={"r1": "run-1"}.get)
    assert (operation.step, operation.run_id) == ("workers", "run-1")


def test_a_damaged_record_is_named_with_its_reason(world: World) -> None:
    world.submit("wc", "t1")
    ctx = world.context()
    write_change(ctx, "r1", change(world, "restart"))
    world.cluster.state.create_node(paths.operation("broken"), b"{")
    changes = load_changes(world.cluster.state)
    assert changes.records.keys() == {"r1"} and changes.damaged.keys() == {"broken"}
    end_change(ctx, "broken", changes.versions["broken"])
    assert world.cluster.state.find_children(paths.OPERATIONS) == ["r1"]
