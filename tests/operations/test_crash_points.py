"""``kill -9``, an exit or a long freeze after every step of every operation: it completes or is
undone, and I1 to I8 hold.

The list of points is generated from what the operations declare
(:mod:`storm_dagster.operations.steps`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import storm_dagster.operations
from storm_dagster.core.invariants.rules import RULES, ClusterSnapshot, violations
from storm_dagster.model.errors import Conflict, NotAlive
from storm_dagster.operations.context import no_observer
from storm_dagster.operations.live.cleaner import clean
from storm_dagster.operations.read.inspection import take_snapshot
from storm_dagster.operations.steps import all_operations
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.operations.acting import Actor, finish_due
from storm_rigs.operations.scenes import SCENES, scene_of
from storm_rigs.servers.request_counts import server_metrics
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper

POINTS = [(name, step) for name, declared in all_operations().items() for step in declared.steps]
# A restart is an update from its own code, and what is due is what a kill or rebalance left: the
# same code takes their steps, so that the second and third test ask once for both.
DISTINCT = [(name, step) for name, step in POINTS if name not in ("restart", "finish_due")]


def all_in_chaos(points: list[tuple[str, str]], *ways: Any) -> list[Any]:
    """The last step of each operation in every run, after which there is most to lose; all others
    in `make chaos`.

    Of further ``ways`` one operation in every run.
    """
    last = dict(points)
    small = {("submit", way) for way in ways[1:]} | {
        (name, way) for name in last for way in ways[:1] or [None]
    }
    return [
        pytest.param(
            *((name, step, way) if ways else (name, step)),
            marks=[] if last[name] == step and (name, way) in small else pytest.mark.chaos,
        )
        for way in ways or [None]
        for name, step in points
    ]


HEALS = {rule.name for rule in RULES if rule.heals}


def check(world: World, former: ClusterSnapshot | None = None) -> ClusterSnapshot:
    """Assert that the invariants hold which no one heals; the snapshot that was judged."""
    snapshot = take_snapshot(world.context(), former)
    found = [violation for violation in violations(snapshot) if violation.rule not in HEALS]
    assert [violation.sentence for violation in found] == []
    return snapshot


def clean_up(world: World) -> None:
    """The cleaner, when everything that may expire has expired; what it leaves belongs to
    something.
    """
    clean(world.context(), grace_secs=0, token_secs=0, upload_secs=0)
    report, _ = clean(world.context(), grace_secs=0, token_secs=0, upload_secs=0)
    assert (report.nodes, report.blobs, report.tokens, report.waiting, report.problems) == (
        (),
        (),
        (),
        0,
        (),
    )


def freeze(actor: Actor, world: World) -> None:
    """For three times its session; then it goes on, in a new one or with an error that has a
    type.
    """
    server = f"127.0.0.1:{world.conf['storm.zookeeper.port']}"
    before = server_metrics(server)["zk_global_sessions"]
    actor.freeze(3 * SHORT_MS / 1000)
    # The server ends sessions when it has a processor, which may be later than they expire.
    eventually(
        lambda: server_metrics(server)["zk_global_sessions"] < before, what="the end of its session"
    )
    actor.go_on()
    actor.finish()


WAYS: dict[str, Callable[[Actor, World], None]] = {
    "killed": lambda actor, _: actor.kill(),
    "exits": lambda actor, _: actor.exit(),
    "frozen": freeze,
}
SHORT_MS = patience(1000)


@pytest.mark.parametrize(("operation", "step", "way"), all_in_chaos(POINTS, *WAYS))
def test_what_was_killed_after_any_step_is_completed_by_its_repetition(
    world: World, operation: str, step: str, way: str
) -> None:
    scene = scene_of(world, operation, step)
    session = {"storm.zookeeper.session.timeout": SHORT_MS} if way == "frozen" else {}
    with scene.act(**session) as actor:
        assert actor.run_to(f"after.{step}"), f"{operation} never passed {step}"
        WAYS[way](actor, world)
    before = check(world)
    world.lead()
    try:
        scene.again(world.context())
    except (NotAlive, Conflict):
        pass  # It was complete, or it goes on by itself.
    finish_due(world.context())
    scene.completed()
    check(world, before)
    clean_up(world)
    scene.completed()
    check(world)


@pytest.mark.parametrize(("operation", "step"), all_in_chaos(DISTINCT))
def test_the_leader_completes_or_undoes_an_operation_killed_anywhere(
    world: World, operation: str, step: str
) -> None:
    scene = scene_of(world, operation, step)
    with scene.act() as actor:
        assert actor.run_to(f"after.{step}"), f"{operation} never passed {step}"
        actor.kill()
    world.lead()
    begun = scene.begun()
    finish_due(world.context())
    clean_up(world)
    if begun:
        scene.completed()
    else:
        scene.undone()
    check(world)


@pytest.mark.parametrize(("operation", "step"), all_in_chaos(DISTINCT))
def test_what_was_deposed_before_any_step_writes_nothing_more(
    world: World, operation: str, step: str
) -> None:
    """The epoch ends while the process stands before a step. Cluster state stays as the new leader
    found it.
    """
    scene = scene_of(world, operation, step)
    with scene.act() as actor:
        assert actor.run_to(f"before.{step}")
        world.lead()
        before = everything(world)
        actor.go_on()
        error = actor.finish()
    assert error is None or type(error).__name__ == "Fenced"
    if error is not None:
        assert everything(world) == before
    finish_due(world.context())
    check(world)


def everything(world: World) -> dict[str, Any]:
    """Every node of the cluster with its data and version."""
    state, found, folders = world.cluster.state, {}, [""]
    while folders:
        folder = folders.pop()
        for child in state.get_children(folder or "/"):
            path = f"{folder}/{child}"
            found[path] = state.get_data_with_version(path)
            folders.append(path)
    return found


@pytest.mark.parametrize("operation", sorted(all_operations()))
def test_an_operation_passes_the_steps_that_it_declares_and_no_others(
    zk_worlds: Callable[[], World], operation: str
) -> None:
    passed: set[str] = set()
    for make, _ in SCENES[operation]:
        with make(zk_worlds()).act() as actor:
            assert actor.finish() is None
        passed |= {
            point.removeprefix("after.") for point in actor.points if point.startswith("after.")
        }
    assert passed == set(all_operations()[operation].steps)


def test_every_step_in_the_code_belongs_to_an_operation() -> None:
    """Steps on paths that no scene takes are found in the source."""
    declared: set[object] = {step for each in all_operations().values() for step in each.steps}
    named_in_code = set()
    for path in Path(storm_dagster.operations.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                at = {"step": 1, "commit": 2, "delete_tree": 3}.get(node.func.id)
                name = node.args[at] if at is not None and len(node.args) > at else None
                if isinstance(name, ast.Constant):
                    named_in_code.add(name.value)
    assert named_in_code and named_in_code <= declared
    assert set(SCENES) == set(all_operations()), (
        "every operation has a scene, and every scene an operation"
    )


def test_nothing_outside_of_a_context_can_observe_steps(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """Neither the environment nor a conf key reaches the observer: a context that was given none
    has none.
    """
    for name in ("STORM_DAGSTER_CRASHPOINT", "CRASHPOINT", "CRASH_AT", "STORM_DAGSTER_CHECKPOINT"):
        monkeypatch.setenv(name, "after.publish")
    ctx = world.context(conf=world.context().conf)
    assert ctx.checkpoint is no_observer
    assert world.submit(
        "wc", conf={"crash.at": "after.publish", "checkpoint": "after.publish"}, ctx=ctx
    )
