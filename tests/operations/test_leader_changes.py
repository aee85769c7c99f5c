"""Submissions, updates, rebalances and restarts under which the leader changes: they continue, and
undo nothing that the next leader has acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import AlreadyAlive, Conflict, Fenced, NotAlive, StormDagsterError
from storm_dagster.model.operation_record import OperationRecord
from storm_dagster.model.records import encode_record
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.change_records import read_change
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.submit import submission
from storm_dagster.operations.submit.continuing import MAX_CONTINUATIONS, run_stage
from storm_dagster.operations.submit.staging import (
    allocate_topology_id,
    read_client_token,
    read_record,
)
from storm_rigs.operations.acting import finish_submission, submit
from storm_rigs.operations.lagging import LaggingCluster
from storm_rigs.stage.records import Crash, World

pytestmark = pytest.mark.zookeeper

Begin = Callable[[World, OperationsContext], object]


def begin_submission(world: World, ctx: OperationsContext) -> None:
    handle = world.upload("h", conf={"topology.workers": 2})
    submit(ctx, name="wc", token="new", handle=handle)


def begin_update(world: World, ctx: OperationsContext) -> None:
    handle = world.upload("h2", conf={"topology.workers": 3})
    lifecycle.update(ctx, "wc", token="new", handle=handle)


def begin_rebalance(world: World, ctx: OperationsContext) -> None:
    rebalance(ctx, "wc", workers=3, wait_secs=0)


OPERATIONS: dict[str, tuple[Begin, int]] = {
    "submit": (begin_submission, 2),
    "update": (begin_update, 3),
    "rebalance": (begin_rebalance, 3),
}
"""Operation -> how it begins, and the workers of the topology when it has taken place."""


def at_step(number: int, action: Callable[[], object]) -> Callable[[str], None]:
    """Observer of steps that acts before or after the step of that number; see ``passed``."""
    left = count(number, -1)

    def observe(point: str) -> None:
        if next(left) == 0:
            action()

    return observe


def every_step(world: World, name: str, check: Callable[[World, int], bool]) -> int:
    """Begin the operation again and again; ``check`` acts at the step of its number, and says if
    the operation came to that step. The number of steps.
    """
    for number in count():
        if name != "submit":
            world.submit("wc", f"old-{number}", conf={"topology.workers": 1})
        came_there = check(world, number)
        if world.find() is not None:
            lifecycle.kill(world.context(), "wc", 0)
        for token in world.cluster.state.get_children(paths.TOKENS):
            world.cluster.state.delete_node(paths.token(token))
        if not came_there:
            return number
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name == "update" else []) for name in OPERATIONS],
)
def test_it_continues_when_the_leader_changes_at_any_step(world: World, name: str) -> None:
    begin, workers = OPERATIONS[name]

    def change_leader(world: World, number: int) -> bool:
        changes: list[int] = []
        observer = at_step(number, lambda: changes.append(world.lead()))
        begin(world, world.context(checkpoint=observer, run="run-1"))
        topology = world.named()
        assert (topology.base.status, topology.base.workers) == ("ACTIVE", workers)
        assert len(world.assignment().workers) == workers
        return bool(changes)

    assert every_step(world, name, change_leader) > 3


INTERFERENCES = ("kill", "kill and submit", "update")


@pytest.mark.parametrize(
    ("name", "interference"),
    [
        pytest.param(
            name, interference, marks=[] if (name, interference) == small else pytest.mark.long
        )
        for small in [("update", "kill")]
        for name in ("update", "rebalance")
        for interference in INTERFERENCES
    ],
)
def test_what_the_next_leader_acknowledged_is_not_undone(
    world: World, name: str, interference: str
) -> None:
    """Between any two steps the leader changes, and the next one executes a kill or an update."""
    begin, _ = OPERATIONS[name]

    def interfere(world: World, number: int) -> bool:
        acknowledged: list[str | None] = []
        was_done: list[bool] = []

        def act() -> None:
            base = world.named().base
            was_done.append(base.token == "new" or (base.status, base.workers) == ("ACTIVE", 3))
            world.lead()
            other = world.context(run="run-of-another")
            if interference == "update":
                handle = world.upload("h3", conf={"topology.workers": 2})
                try:
                    lifecycle.update(other, "wc", token=f"other-{number}", handle=handle)
                except StormDagsterError:
                    return  # Nothing was acknowledged: a rebalance is in its delay.
                acknowledged.append(world.named().id)
                return
            lifecycle.kill(other, "wc", 0)
            acknowledged.append(None)
            if interference == "kill and submit":
                acknowledged[:] = [world.submit("wc", f"other-{number}", ctx=other)]

        passed = [0]

        def observe(point: str) -> None:
            passed[0] += 1
            if passed[0] == number + 1 and world.find() is not None:
                act()

        error: StormDagsterError | None = None
        try:
            begin(world, world.context(checkpoint=observe, run="run-1"))
        except StormDagsterError as raised:
            error = raised
        topology = world.find()
        if acknowledged:
            assert (None if topology is None else topology.id) == acknowledged[0], error
            if not was_done[0]:
                assert isinstance(error, NotAlive | AlreadyAlive | Conflict), error
        return passed[0] > number

    assert every_step(world, name, interfere) > 1


Action = Callable[[World, OperationsContext, int], object]


def kill_now(world: World, other: OperationsContext, number: int) -> None:
    lifecycle.kill(other, "wc", 0)


def kill_later(world: World, other: OperationsContext, number: int) -> None:
    lifecycle.kill(other, "wc", 30)


def submit_another(world: World, other: OperationsContext, number: int) -> None:
    world.submit("wc", f"other-{number}", ctx=other)


def kill_and_submit(world: World, other: OperationsContext, number: int) -> None:
    kill_now(world, other, number)
    submit_another(world, other, number)


def deactivate(world: World, other: OperationsContext, number: int) -> None:
    lifecycle.deactivate(other, "wc")


REFUSED: dict[Action, type[StormDagsterError] | None] = {
    kill_now: None,
    kill_later: None,
    kill_and_submit: None,
    submit_another: AlreadyAlive,
    deactivate: NotAlive,
}
"""Action of the next leader during a submission -> the error that refuses it in some steps.

A kill is accepted in every step: it cancels the submission, or it kills the topology.
"""


def state_of(world: World) -> tuple[str, str, str] | None:
    """Id, status and target status of the topology; ``None`` without one."""
    topology = world.find()
    if topology is None:
        return None
    return topology.id, topology.base.status, topology.base.wanted_status


def interfere_with_submission(world: World, number: int, action: Action) -> bool:
    """Submit `wc`; at that step the leader changes, and the next one executes the action.

    False if the submission has no step of that number.
    """
    token = f"new-{number}"
    handle = world.upload("h", conf={"topology.workers": 2})
    leader = world.context()
    allocate_topology_id(leader, token, "wc", world.epoch(), request={"handle": handle})
    acknowledged: list[tuple[str, str, str] | None] = []
    was_active: list[bool] = []

    def act() -> None:
        topology = world.find()
        was_active.append(topology is not None and topology.base.status == "ACTIVE")
        world.lead()
        try:
            action(world, world.context(run="run-of-another"), number)
        except StormDagsterError as error:
            refusal = REFUSED[action]
            assert refusal is not None and isinstance(error, refusal), error
            return
        acknowledged.append(state_of(world))

    error: StormDagsterError | None = None
    try:
        ctx = world.context(checkpoint=at_step(number, act), run="run-1")
        submit(ctx, name="wc", token=token, handle=handle)
    except StormDagsterError as raised:
        error = raised
    if not acknowledged:
        assert error is None
        assert world.named().base.token == token and world.named().base.status == "ACTIVE"
        return bool(was_active)
    assert state_of(world) == acknowledged[0], error
    if action is deactivate or was_active[0]:
        assert error is None
    else:
        assert isinstance(error, NotAlive | AlreadyAlive | Conflict), error
    return True


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(
            action, id=action.__name__, marks=[] if action is kill_now else pytest.mark.long
        )
        for action in REFUSED
    ],
)
def test_a_submission_undoes_nothing_that_the_next_leader_acknowledged(
    world: World, action: Action
) -> None:
    number = 0
    while interfere_with_submission(world, number, action):
        if world.find() is not None:
            lifecycle.kill(world.context(), "wc", 0)
        number += 1
    assert number > 20


def test_a_restart_continues_when_the_leader_changes_at_any_step(world: World) -> None:
    world.submit("wc")
    for number, point in enumerate(("before.restart", "after.restart", "")):
        epochs: list[int] = []

        def change(passed: str, point: str = point, epochs: list[int] = epochs) -> None:
            if passed == point and not epochs:
                epochs.append(world.lead())

        lifecycle.restart(world.context(checkpoint=change, run="run-1"), "wc")
        assert world.assignment().restarts == number + 1
        assert bool(epochs) is bool(point)


@pytest.mark.parametrize("action", [kill_now, kill_and_submit, deactivate])
def test_a_restart_ends_if_its_topology_was_changed_since(world: World, action: Action) -> None:
    world.submit("wc")
    acknowledged: list[object] = []

    def change(point: str) -> None:
        if point == "before.restart":
            world.lead()
            action(world, world.context(), 0)
            acknowledged.append(world.find())

    with pytest.raises(Conflict if action is deactivate else NotAlive):
        lifecycle.restart(world.context(checkpoint=change, run="run-1"), "wc")
    assert [world.find()] == acknowledged


def test_a_restart_is_not_that_of_a_later_topology_of_the_name(world: World) -> None:
    world.submit("wc")

    def replace(point: str) -> None:
        if point == "before.restart":
            kill_and_submit(world, world.context(), 0)

    with pytest.raises(NotAlive, match="was killed or replaced while it was restarted"):
        lifecycle.restart(world.context(checkpoint=replace), "wc")
    assert world.assignment().restarts == 0


def staged(world: World, ctx: OperationsContext, *, replaces: str | None = None) -> None:
    """Stage the submission of ``wc`` with the token ``t``, to be published."""
    handle = world.upload("h")
    submission.stage_conf(ctx, name="wc", token="t", handle=handle, replaces=replaces)
    submission.stage_code(ctx, token="t")
    submission.stage_tasks(ctx, token="t")
    submission.stage_assignment(ctx, token="t")


def publish(ctx: OperationsContext) -> Any:
    return run_stage(ctx, "t", lambda: submission.publish_assignment(ctx, token="t"))


def test_of_two_runs_of_a_token_one_takes_it_over(world: World) -> None:
    first, second = world.context(run="run-1"), world.context(run="run-2")
    staged(world, first)
    epoch = world.lead()
    started: list[str] = []

    def publish_first(point: str) -> None:
        if point == "before.take_over" and not started:
            started.append(point)
            publish(first)

    with pytest.raises(Conflict, match="run run-1 continues the submission"):
        publish(world.context(run="run-2", checkpoint=publish_first))
    stored = read_client_token(second, "t")
    assert stored is not None and (stored[0].run, stored[0].epoch) == ("run-1", epoch)
    assert world.named().base.token == "t"


def test_a_run_that_was_taken_over_publishes_nothing(world: World) -> None:
    first = world.context(run="run-1")
    staged(world, first)
    end_after_taking_over(world, "run-2")
    with pytest.raises(Conflict, match="run run-2 continues the submission"):
        submission.publish_assignment(first, token="t")
    world.lead()
    with pytest.raises(Conflict, match="run run-2 continues the submission"):
        publish(first)
    assert world.find() is None


def end_after_taking_over(world: World, run: str) -> None:
    """The leader changes, and the run ends right after it took the submission over."""

    def end(point: str) -> None:
        if point == "after.stage.record":
            raise Crash(point)

    world.lead()
    with pytest.raises(Crash):
        publish(world.context(run=run, checkpoint=end))


def test_a_new_execution_takes_over_from_the_run_of_the_record(world: World) -> None:
    staged(world, world.context(run="run-1"))
    end_after_taking_over(world, "run-1")
    again = world.context(run="run-2")
    submission.stage_conf(again, name="wc", token="t", handle="h")
    finish_submission(again, token="t")
    assert world.named().base.status == "ACTIVE"


def test_the_name_of_a_submission_may_be_taken_meanwhile(world: World) -> None:
    ctx = world.context(run="run-1")
    staged(world, ctx)
    world.lead()
    other = world.submit("wc", "other")
    with pytest.raises(AlreadyAlive, match="another submission of the name came first"):
        publish(ctx)
    assert world.named().id == other


@pytest.mark.parametrize("change", ["deactivate", "rebalance"])
def test_an_update_ends_if_its_topology_was_changed_since(world: World, change: str) -> None:
    old = world.submit("wc", "old")
    ctx = world.context(run="run-1")
    staged(world, ctx, replaces=old)
    world.lead()
    if change == "deactivate":
        lifecycle.deactivate(world.context(), "wc")
    else:
        rebalance(world.context(), "wc", executors={"count": 3}, wait_secs=0)
    before = world.named()
    with pytest.raises(Conflict, match="was changed while its replacement was prepared"):
        publish(ctx)
    assert world.named() == before


def test_a_rebalance_ends_if_its_topology_was_changed_since(world: World) -> None:
    world.submit("wc", conf={"topology.workers": 1})

    def change(point: str) -> None:
        if point == "before.rebalance":
            world.lead()
            lifecycle.deactivate(world.context(), "wc")

    with pytest.raises(Conflict, match="was changed while this change of it was planned"):
        rebalance(world.context(checkpoint=change, run="run-1"), "wc", workers=2, wait_secs=0)
    base = world.named().base
    assert (base.status, base.workers) == ("INACTIVE", 1)


@pytest.mark.parametrize("owner", ["run-1", "run-2"])
def test_a_rebalance_takes_over_its_record_alone(world: World, owner: str) -> None:
    topology_id = world.submit("wc", conf={"topology.workers": 1})
    record = OperationRecord(
        topology_id=topology_id, name="wc", verb="rebalance", epoch=0, started_secs=1, run_id=owner
    )
    world.cluster.state.mkdirs(paths.OPERATIONS)
    world.cluster.state.create_node(paths.operation("r"), encode_record(record))
    epochs: list[int] = []

    def change(point: str) -> None:
        if point == "before.rebalance" and not epochs:
            epochs.append(world.lead())

    ctx = world.context(checkpoint=change, run="run-1")
    if owner == "run-2":
        with pytest.raises(Conflict, match="run run-2 executes this change"):
            rebalance(ctx, "wc", workers=2, wait_secs=0, request_id="r")
        assert world.named().base.workers == 1
        return
    rebalance(ctx, "wc", workers=2, wait_secs=0, request_id="r")
    assert world.named().base.workers == 2
    stored = read_change(ctx, "r")
    assert stored is not None and stored[0].epoch == epochs[0]


def test_the_third_change_of_the_leader_ends_a_stage(world: World) -> None:
    ctx = world.context(
        run="run-1", checkpoint=lambda point: point == "before.publish" and world.lead()
    )
    staged(world, ctx)
    with pytest.raises(Fenced):
        publish(ctx)
    stored = read_client_token(ctx, "t")
    assert stored is not None and read_record(ctx, "t").epoch == stored[0].epoch
    assert world.epoch() == stored[0].epoch + 1
    assert world.find() is None
    assert MAX_CONTINUATIONS == 2


def test_a_server_that_is_behind_does_not_end_a_stage(world: World) -> None:
    """It still has the epoch that is over."""
    staged(world, world.context(run="run-1"))
    lagging = LaggingCluster(world.cluster)

    def change_leader() -> None:
        world.lead()
        lagging.state.lags = True

    publish(world.context(cluster=lagging, run="run-1", checkpoint=at_step(0, change_leader)))
    assert world.named().assignment is not None


def test_a_deposed_leader_does_not_continue(world: World) -> None:
    staged(world, world.context(run="run-1"))
    deposed = world.context(epoch=world.epoch(), run="run-1")
    world.lead()
    with pytest.raises(Fenced):
        publish(deposed)
    assert world.find() is None
