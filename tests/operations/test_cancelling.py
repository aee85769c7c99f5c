"""A kill of a topology that is being submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from storm_dagster.model.dagster_names import STAGES
from storm_dagster.model.errors import Conflict, Fenced, NotAlive
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.read.under_way import operations_under_way
from storm_dagster.operations.submit import submission
from storm_dagster.operations.submit.open_tokens import OpenTokenReader, starting_topologies
from storm_dagster.operations.submit.staging import (
    allocate_topology_id,
    read_client_token,
    release_token,
)
from storm_rigs.operations.losing import LosingCluster
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper

CANCELLED = "cancelled by kill: submit topology 'wc' again"


def stages_of(ctx: OperationsContext, handle: str) -> Sequence[Callable[[], object]]:
    """The six stages of the submission ``t1`` of ``wc``."""
    return (
        lambda: submission.stage_conf(ctx, name="wc", token="t1", handle=handle),
        lambda: submission.stage_code(ctx, token="t1"),
        lambda: submission.stage_tasks(ctx, token="t1"),
        lambda: submission.stage_assignment(ctx, token="t1"),
        lambda: submission.publish_assignment(ctx, token="t1"),
        lambda: submission.activate_topology(ctx, token="t1"),
    )


def accept(world: World, stages: int = 4) -> OperationsContext:
    """A submission that was accepted, and has ended that many stages; the context of its run."""
    ctx = world.context(run="run-1")
    handle = world.upload("h1")
    allocate_topology_id(ctx, "t1", "wc", ctx.current_epoch(), request={"handle": handle})
    for run_stage in stages_of(ctx, handle)[:stages]:
        run_stage()
    return ctx


@pytest.mark.parametrize("stages", range(5))
def test_a_kill_cancels_a_submission_in_each_of_its_stages(world: World, stages: int) -> None:
    ctx = accept(world, stages)
    (starting,) = starting_topologies(OpenTokenReader(), world.cluster.state)
    result = lifecycle.kill(world.context(), "wc")
    assert (result.topology_id, result.status) == (starting.id, None)
    (cancelled,) = result.cancelled
    assert (cancelled.token, cancelled.step, cancelled.handle) == ("t1", STAGES[stages], "h1")
    assert cancelled.run_id == ("run-1" if stages else "")
    assert operations_under_way(world.context()) == []
    assert starting_topologies(OpenTokenReader(), world.cluster.state) == []
    assert [key for key in world.blobs.keys("") if not key.startswith("upload.")] == []
    for run_stage in stages_of(ctx, "h1"):
        with pytest.raises(NotAlive, match=CANCELLED):
            run_stage()
    assert not world.cluster.load_view().topologies


def test_a_former_release_reads_a_cancelled_submission_as_published_and_gone(world: World) -> None:
    accept(world)
    lifecycle.kill(world.context(), "wc")
    stored = read_client_token(world.context(), "t1")
    assert stored is not None
    record, version = stored
    assert (record.published, record.ended, record.request) == (True, True, {})
    # The leader of a former release ends the record of the run: it stays as it is.
    release_token(world.context(), "t1", ended=True)
    assert read_client_token(world.context(), "t1") == (record, version)


def test_a_token_that_was_cancelled_begins_no_second_submission(world: World) -> None:
    ctx = accept(world)
    lifecycle.kill(world.context(), "wc")
    epoch = ctx.current_epoch()
    for request in (None, {"handle": "h2"}):
        with pytest.raises(NotAlive, match=CANCELLED):
            allocate_topology_id(ctx, "t1", "wc", epoch, request=request)
    assert world.submit("wc", "t2") == world.named().id, "another token does"


def at(point: str, action: Callable[[], object]) -> Callable[[str], None]:
    """Observer of steps that does ``action`` once, at that point."""
    done: list[str] = []

    def observe(passed: str) -> None:
        if passed == point and not done:
            done.append(passed)
            action()

    return observe


def test_a_publication_that_is_first_is_killed_as_usual(world: World) -> None:
    ctx = accept(world)
    killing = world.context(
        checkpoint=at("before.cancel", lambda: submission.publish_assignment(ctx, token="t1"))
    )
    result = lifecycle.mark_killed(killing, "wc", 30)
    assert (result.status, result.cancelled) == ("KILLED", ())
    assert world.named().base.status == "KILLED"
    with pytest.raises(Conflict, match="was killed before it was activated"):
        submission.activate_topology(ctx, token="t1")


def test_a_publication_that_is_second_is_refused(world: World) -> None:
    accept(world)
    publishing = world.context(
        checkpoint=at("before.publish", lambda: lifecycle.mark_killed(world.context(), "wc"))
    )
    with pytest.raises(NotAlive, match=CANCELLED):
        submission.publish_assignment(publishing, token="t1")
    assert not world.cluster.load_view().topologies


@pytest.mark.parametrize("landed", [True, False])
def test_a_kill_whose_reply_is_lost_cancels_once(world: World, landed: bool) -> None:
    accept(world)
    ctx = world.context()
    losing: Any = LosingCluster(ctx.cluster, 1, landed)
    result = lifecycle.mark_killed(replace(ctx, cluster=losing), "wc")
    assert [each.token for each in result.cancelled] == ["t1"]
    stored = read_client_token(ctx, "t1")
    assert stored is not None and stored[0].cancelled_by == "kill"


def test_a_deposed_leader_cancels_nothing(world: World) -> None:
    accept(world)
    epoch = world.epoch()
    world.lead()
    with pytest.raises(Fenced):
        lifecycle.mark_killed(world.context(epoch=epoch), "wc")
    stored = read_client_token(world.context(), "t1")
    assert stored is not None and not stored[0].cancelled_by


def test_all_submissions_of_a_name_are_cancelled_and_no_other(world: World) -> None:
    ctx = accept(world)
    epoch = ctx.current_epoch()
    allocate_topology_id(ctx, "t2", "wc", epoch)
    other, _ = allocate_topology_id(ctx, "t3", "other", epoch)
    allocate_topology_id(ctx, "t4", "wc", epoch, "update")
    result = lifecycle.mark_killed(ctx, "wc")
    assert {each.token for each in result.cancelled} == {"t1", "t2"}
    assert {each.key for each in operations_under_way(ctx)} == {"t3", "t4"}
    assert lifecycle.mark_killed(ctx, other.topology_id).topology_id == other.topology_id
    with pytest.raises(NotAlive, match="'wc' is not alive"):
        lifecycle.mark_killed(ctx, "wc")


def test_a_kill_of_a_topology_that_runs_cancels_no_submission(world: World) -> None:
    world.submit("wc", "t1")
    ctx = world.context()
    allocate_topology_id(ctx, "t2", "wc", ctx.current_epoch())
    result = lifecycle.mark_killed(ctx, "wc", 30)
    assert (result.status, result.cancelled) == ("KILLED", ())
    assert [each.key for each in operations_under_way(ctx)] == ["t2"]
