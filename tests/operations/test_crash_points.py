"""``kill -9`` after every step of every operation: it completes or is undone, and I1 to I8 hold.

The list of points is generated from what the operations declare (:mod:`storm_dagster.operations.steps`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import storm_dagster.operations
from storm_dagster.core.invariants import RULES, violations
from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.upgrade.machine import Move
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, NotAlive
from storm_dagster.model.names import jar_key
from storm_dagster.model.records import GrayWorker
from storm_dagster.operations.live import healing, lifecycle
from storm_dagster.operations.live.cleaner import clean
from storm_dagster.operations.live.draining import drain, undo_drain
from storm_dagster.operations.live.rebalance import ABANDON_REBALANCE, FINISH_REBALANCE, rebalance
from storm_dagster.operations.read.inspection import take_snapshot
from storm_dagster.operations.steps import all_operations, no_observer
from storm_dagster.operations.submit.publishing import ACTIVATE_TOPOLOGY
from storm_dagster.operations.upgrade import COMPLETE_UPGRADE, FINISH_ROLLBACK, ROLL_BACK
from storm_dagster.zk.gray_upgrades import write_move
from storm_rigs.acting import Actor, finish_due, log_level, submit, upgrade
from storm_rigs.archives import pack_archive
from storm_rigs.upgrades import UpgradeStandIns

pytestmark = pytest.mark.zookeeper

LIFECYCLE = "storm_dagster.operations.live.lifecycle"


@dataclass
class Scene:
    """An operation that is about to begin in a world."""

    world: Any
    target: str
    arguments: dict[str, Any]
    again: Callable[[Any], object]
    """The same operation, repeated by somebody else on their context."""
    begun: Callable[[], bool]
    """Whether the operation has done anything that counts, so that the leader alone must complete it."""
    completed: Callable[[], object]
    """Asserts that it is done."""
    undone: Callable[[], object]
    """Asserts that nothing of it remains."""
    snapshot: dict[str, Any] = field(default_factory=dict)


def named(world: Any, name: str = "wc") -> Any:
    return world.cluster.load_view().topology_named(name)


def gone(world: Any, topology_id: str) -> None:
    """No node and no blob names the topology, besides its token."""
    state = world.cluster.state
    nodes = [
        path
        for path in (
            paths.topology(topology_id),
            paths.assignment(topology_id),
            paths.tasks(topology_id),
            paths.taskbeats(topology_id),
            paths.task_errors(topology_id),
            paths.gray_upgrade(topology_id),
            paths.metrics(topology_id),
            paths.workers(topology_id),
        )
        if state.exists(path)
    ]
    assert [*nodes, *(key for key in world.blobs.keys("") if topology_id in key)] == []


def submission(world: Any) -> Scene:
    arguments = {"name": "wc", "token": "t", "handle": world.upload("h", conf={"topology.workers": 2})}

    def completed() -> None:
        topology = named(world)
        assert (topology.base.status, topology.base.token) == ("ACTIVE", "t")
        assert len(topology.assignment.workers) == 2

    return Scene(
        world,
        "storm_rigs.acting:submit",
        arguments,
        again=lambda ctx: submit(ctx, **arguments),
        begun=lambda: named(world) is not None,
        completed=completed,
        undone=lambda: assert_nothing(world),
    )


def assert_nothing(world: Any) -> None:
    assert not world.cluster.load_view().topologies
    assert [key for key in world.blobs.keys("") if not key.startswith("upload.")] == []


def killing(world: Any) -> Scene:
    topology_id = world.submit("wc", "t", conf={"topology.workers": 2})
    world.cluster.report_error(topology_id, 1, "boom", time=1)

    def begun() -> bool:
        topology = named(world)
        return topology is None or topology.base.status == "KILLED"

    return Scene(
        world,
        f"{LIFECYCLE}:kill",
        {"name": "wc", "wait_secs": 0},
        again=lambda ctx: lifecycle.kill(ctx, "wc", 0),
        begun=begun,
        completed=lambda: gone(world, topology_id),
        undone=lambda: is_active(world, topology_id),
    )


def is_active(world: Any, topology_id: str, workers: int = 2) -> None:
    topology = named(world)
    assert (topology.id, topology.base.status, topology.base.workers) == (topology_id, "ACTIVE", workers)
    assert len(topology.assignment.workers) == workers
    assert "rebalance" not in (world.cluster.state.find_children(paths.topology(topology_id)) or ())


def turning(event: str) -> Callable[[Any], Scene]:
    def scene(world: Any) -> Scene:
        world.submit("wc", "t", inactive=event == "activate")
        wanted, before = ("ACTIVE", "INACTIVE") if event == "activate" else ("INACTIVE", "ACTIVE")

        def status(expected: str) -> None:
            base = named(world).base
            assert base.status == base.wanted_status == expected

        return Scene(
            world,
            f"{LIFECYCLE}:{event}",
            {"name": "wc"},
            again=lambda ctx: getattr(lifecycle, event)(ctx, "wc"),
            begun=lambda: named(world).base.status == wanted,
            completed=lambda: status(wanted),
            undone=lambda: status(before),
        )

    return scene


def rebalancing(world: Any) -> Scene:
    topology_id = world.submit("wc", "t", conf={"topology.workers": 2})
    pending = {"workers": 4, "executors": {"split": 3}, "wait_secs": 0}

    def completed() -> None:
        is_active(world, topology_id, 4)
        assert named(world).base.executors["split"] == 3

    return Scene(
        world,
        "storm_dagster.operations.live.rebalance:rebalance",
        {"name": "wc", **pending},
        again=lambda ctx: rebalance(ctx, "wc", **pending),
        begun=lambda: (named(world).base.status, named(world).base.workers) != ("ACTIVE", 2),
        completed=completed,
        undone=lambda: is_active(world, topology_id),
    )


def replacing(verb: str) -> Callable[[Any], Scene]:
    def scene(world: Any) -> Scene:
        old = world.submit("wc", "t", conf={"topology.workers": 2})
        old_code = world.blobs.meta(jar_key(old)).sha256
        options: dict[str, Any] = {"token": "next"}
        if verb == "update":
            options["handle"] = world.upload("h2", conf={"topology.workers": 2}, archive=pack_archive("newer archive"))

        def completed() -> None:
            new = named(world)
            assert new.id != old
            is_active(world, new.id)
            assert (world.blobs.meta(jar_key(new.id)).sha256 == old_code) == (verb == "restart")
            gone(world, old)

        def undone() -> None:
            is_active(world, old)
            assert world.blobs.meta(jar_key(old)).sha256 == old_code

        return Scene(
            world,
            f"{LIFECYCLE}:{verb}",
            {"name": "wc", **options},
            again=lambda ctx: getattr(lifecycle, verb)(ctx, "wc", **options),
            begun=lambda: named(world).id != old,
            completed=completed,
            undone=undone,
        )

    return scene


def reassigning(world: Any) -> Scene:
    topology_id = world.submit("wc", "t", conf={"topology.workers": 2})
    lost = named(world).assignment.workers[0]
    world.cluster.state.delete_node(paths.supervisor(lost.node))
    world.supervisor("s3")

    def causes() -> list[Cause]:
        topology = named(world)
        return [
            Cause(
                topology.id,
                "wc",
                topology.assignment_at.version,
                "lost_host",
                worker.node,
                worker.host,
                worker.port,
                worker.ids,
            )
            for worker in topology.assignment.workers
            if worker.node == lost.node
        ]

    def completed() -> None:
        is_active(world, topology_id)
        assert causes() == []

    return Scene(
        world,
        "storm_rigs.acting:reassign",
        {"causes": [cause.to_json() for cause in causes()]},
        again=lambda ctx: healing.reassign(ctx, causes()),
        # The cause is seen again for as long as it is there: nobody needs to remember it.
        begun=lambda: causes() == [],
        completed=completed,
        undone=lambda: is_active(world, topology_id),
    )


def cleaning(world: Any) -> Scene:
    living = world.submit("living", "l")
    orphan = world.submit("wc", "t", conf={"topology.workers": 2})
    world.cluster.state.delete_node(paths.topology(orphan))
    before = {key: world.blobs.meta(key).sha256 for key in world.blobs.keys("") if living in key}

    def completed() -> None:
        gone(world, orphan)
        topology = named(world, "living")
        assert topology.id == living and topology.assignment is not None
        assert before == {key: world.blobs.meta(key).sha256 for key in world.blobs.keys("") if living in key}

    now = {"grace_secs": 0, "token_secs": 0}
    return Scene(
        world,
        "storm_dagster.operations.live.cleaner:clean",
        now,
        again=lambda ctx: clean(ctx, **now),
        begun=lambda: True,
        completed=completed,
        undone=lambda: None,
    )


def blacklisting(world: Any) -> Scene:
    from storm_dagster.operations.live.blacklist import change_blacklist

    world.submit("wc", "t")

    def listed(*hosts: str) -> None:
        assert world.cluster.load_view().blacklist == frozenset(hosts)

    return Scene(
        world,
        "storm_dagster.operations.live.blacklist:change_blacklist",
        {"add": ["s2"]},
        again=lambda ctx: change_blacklist(ctx, add=["s2"]),
        begun=lambda: bool(world.cluster.load_view().blacklist),
        completed=lambda: listed("s2"),
        undone=lambda: listed(),
    )


def levelling(world: Any) -> Scene:
    topology_id = world.submit("wc", "t")

    def kept() -> list[str]:
        return sorted(world.cluster.read_log_levels(topology_id).loggers)

    def is_kept(*loggers: str) -> None:
        assert kept() == list(loggers)

    return Scene(
        world,
        "storm_rigs.acting:log_level",
        {"name": "wc", "logger": "my.module", "level": "DEBUG"},
        again=lambda ctx: log_level(ctx, "wc", "my.module", "DEBUG"),
        begun=lambda: bool(kept()),
        completed=lambda: is_kept("my.module"),
        undone=is_kept,
    )


def due_removal(world: Any) -> Scene:
    scene = killing(world)
    lifecycle.kill(world.context(), "wc", 5)
    return due(scene)


def due_rebalance(world: Any) -> Scene:
    scene = rebalancing(world)
    rebalance(world.context(), "wc", workers=4, executors={"split": 3}, wait_secs=5, stay=False)
    return due(scene)


def due_rebalance_that_fits_no_more(world: Any) -> Scene:
    topology_id = world.submit("wc", "t", conf={"topology.workers": 2})
    rebalance(world.context(), "wc", workers=7, wait_secs=5, stay=False)
    world.cluster.state.delete_node(paths.supervisor("s2"))
    return due(
        Scene(
            world,
            "",
            {},
            again=finish_due,
            begun=lambda: True,
            completed=lambda: is_active(world, topology_id),
            undone=lambda: None,
        )
    )


def due_activation(world: Any) -> Scene:
    scene = submission(world)
    with Actor(world.conf, world.blobs.directory, scene.target, scene.arguments) as actor:
        assert actor.run_to("after.publish")
        actor.kill()
    return due(scene)


def due(scene: Scene) -> Scene:
    """The leader, or the sensor, finishes what another process began."""
    scene.target, scene.arguments = "storm_rigs.acting:finish_due", {}
    scene.again = finish_due
    return scene


UPGRADABLE = {"topology.workers": 3, "topology.master.single.worker": True}


def upgradable(world: Any) -> UpgradeStandIns:
    topology_id = world.submit("wc", "t", conf=UPGRADABLE)
    # What an earlier upgrade of very many workers left.
    world.cluster.state.create_node(f"{paths.gray_upgrade(topology_id, 'upgraded_workers')}/h:1")
    return UpgradeStandIns(world.cluster, topology_id)


def under_way(world: Any, number: int = 1) -> UpgradeStandIns:
    """An upgrade with that many workers upgraded."""
    stand_ins = upgradable(world)
    handle = world.upload("h2", conf=UPGRADABLE, archive=pack_archive("newer archive"))
    lifecycle.gray_upgrade(world.context(), "wc", Selection(number=number), handle=handle, token="u")
    stand_ins.batch()
    assert len(stand_ins.state.upgraded) == number
    return stand_ins


def whole(world: Any, stand_ins: UpgradeStandIns, status: str) -> Any:
    """The upgrade; its code and the topology's are there, and the status is that one."""
    topology, state = stand_ins.topology, stand_ins.state
    assert topology.base.status == status
    codes = [topology.code_dir, *([state.record.code_dir] if state.record else [])]
    assert all(world.blobs.exists(jar_key(code)) for code in codes)
    return state


def upgrading(world: Any) -> Scene:
    stand_ins = upgradable(world)
    handle = world.upload("h2", conf=UPGRADABLE, archive=pack_archive("newer archive"))
    arguments = {"name": "wc", "number": 1, "handle": handle, "token": "u"}

    def completed() -> None:
        assert whole(world, stand_ins, "UPGRADING").record.number == 1
        assert stand_ins.topology.code_dir == stand_ins.id, "nothing runs it yet"

    def undone() -> None:
        assert whole(world, stand_ins, "ACTIVE").record is None

    return Scene(
        world,
        "storm_rigs.acting:upgrade",
        arguments,
        again=lambda ctx: upgrade(ctx, **arguments),
        begun=lambda: stand_ins.state.record is not None,
        completed=completed,
        undone=undone,
    )


def going_on(world: Any) -> Scene:
    stand_ins = under_way(world)
    arguments = {"name": "wc", "number": 1, "handle": None, "token": ""}

    def asked(wanted: bool) -> None:
        assert whole(world, stand_ins, "UPGRADING").record.continue_ == wanted

    return Scene(
        world,
        "storm_rigs.acting:upgrade",
        arguments,
        again=lambda ctx: upgrade(ctx, **arguments),
        begun=lambda: stand_ins.state.record.continue_,
        completed=lambda: asked(True),
        undone=lambda: asked(False),
    )


def ended(world: Any, stand_ins: UpgradeStandIns, code: str) -> None:
    assert whole(world, stand_ins, "ACTIVE").record is None
    assert stand_ins.topology.code_dir == code
    for part in ("upgrading_workers", "upgraded_workers"):
        assert world.cluster.state.find_children(paths.gray_upgrade(stand_ins.id, part)) == []


def completing(world: Any, number: int = 1) -> Scene:
    stand_ins = under_way(world, number)
    new = stand_ins.state.record.code_dir

    def undone() -> None:
        assert whole(world, stand_ins, "UPGRADING").record is not None

    return Scene(
        world,
        f"{LIFECYCLE}:complete_upgrade",
        {"name": "wc"},
        again=lambda ctx: lifecycle.complete_upgrade(ctx, "wc"),
        begun=lambda: stand_ins.state.record is None,
        completed=lambda: ended(world, stand_ins, new),
        undone=undone,
    )


def rolling_back(world: Any) -> Scene:
    stand_ins = under_way(world, 2)

    def rolled(wanted: bool) -> None:
        assert whole(world, stand_ins, "ROLLBACK" if wanted else "UPGRADING").record.rollback == wanted

    return Scene(
        world,
        f"{LIFECYCLE}:roll_back",
        {"name": "wc"},
        again=lambda ctx: lifecycle.roll_back(ctx, "wc"),
        begun=lambda: stand_ins.state.record.rollback,
        completed=lambda: rolled(True),
        undone=lambda: rolled(False),
    )


def rolled_back(world: Any) -> Scene:
    stand_ins = under_way(world, 2)
    lifecycle.roll_back(world.context(), "wc")
    stand_ins.supervise()
    back = Scene(
        world,
        "",
        {},
        again=finish_due,
        begun=lambda: True,
        completed=lambda: ended(world, stand_ins, stand_ins.id),
        undone=lambda: None,
    )
    return due(back)


def due_completion(world: Any) -> Scene:
    return due(completing(world, 3))


def due_roll_back(world: Any) -> Scene:
    scene = rolling_back(world)
    topology_id = named(world).id
    state = world.cluster.read_upgrade(topology_id)
    failed = Move(min(state.upgraded), "failed", GrayWorker(failed="it ended"))
    write_move(world.cluster.state, topology_id, state, failed)
    return due(scene)


def draining(undo: bool) -> Callable[[Any], Scene]:
    def scene(world: Any) -> Scene:
        topology_id = world.submit("wc", "t", conf={"topology.workers": 2})
        arguments: dict[str, Any] = {"topology_id": topology_id}
        if undo:
            drain(world.context(), topology_id, 0)
        else:
            arguments["longest_secs"] = 0
        operate = undo_drain if undo else drain

        def silent(wanted: bool) -> None:
            base = named(world).base
            assert (base.status, base.wanted_status) == ("INACTIVE" if wanted else "ACTIVE", "ACTIVE")
            assert (base.delay_secs is not None) == wanted

        # The leader lets it go on in any case, once its time has passed.
        return Scene(
            world,
            f"storm_dagster.operations.live.draining:{operate.__name__}",
            arguments,
            again=lambda ctx: operate(ctx, **arguments),
            begun=lambda: True,
            completed=lambda: silent(False),
            undone=lambda: None,
        )

    return scene


SCENES: dict[str, list[tuple[Callable[[Any], Scene], tuple[str, ...] | None]]] = {
    "submit": [(submission, None)],
    "kill": [(killing, None)],
    "activate": [(turning("activate"), None)],
    "deactivate": [(turning("deactivate"), None)],
    "rebalance": [(rebalancing, None)],
    "restart": [(replacing("restart"), None)],
    "update": [(replacing("update"), None)],
    "reassign": [(reassigning, None)],
    "clean": [(cleaning, None)],
    "blacklist": [(blacklisting, None)],
    "log_levels": [(levelling, None)],
    "gray_upgrade": [(upgrading, None)],
    "continue_upgrade": [(going_on, None)],
    "complete_upgrade": [(completing, None)],
    "roll_back": [(rolling_back, None)],
    "finish_rollback": [(rolled_back, None)],
    "drain": [(draining(False), None)],
    "undo_drain": [(draining(True), None)],
    "finish_due": [
        (due_completion, COMPLETE_UPGRADE.steps),
        (due_roll_back, ROLL_BACK.steps),
        (rolled_back, FINISH_ROLLBACK.steps),
        (due_rebalance, FINISH_REBALANCE.steps),
        (due_rebalance_that_fits_no_more, ABANDON_REBALANCE.steps),
        (due_activation, ACTIVATE_TOPOLOGY.steps),
        (due_removal, None),
    ],
}
"""Operation -> how it is set up, and for which of its steps (``None``: for all others)."""


def scene_of(world: Any, operation: str, step: str) -> Scene:
    for make, steps in SCENES[operation]:
        if steps is None or step in steps:
            return make(world)
    raise AssertionError(f"no scene reaches {step} of {operation}: add one to SCENES")


POINTS = [(name, step) for name, declared in all_operations().items() for step in declared.steps]
# A restart is an update from its own code, and what is due is what a kill or rebalance left: the same code takes
# their steps, so that the second and third test ask once for both.
DISTINCT = [(name, step) for name, step in POINTS if name not in ("restart", "finish_due")]


def all_in_chaos(points: list[tuple[str, str]]) -> list[Any]:
    """The last step of each operation in every run, after which there is most to lose; all others in `make chaos`."""
    last = dict(points)
    return [pytest.param(name, step, marks=[] if last[name] == step else pytest.mark.chaos) for name, step in points]


HEALS = {rule.name for rule in RULES if rule.heals}


def check(world: Any, former: Any = None) -> Any:
    snapshot = take_snapshot(world.context(), former)
    found = [violation for violation in violations(snapshot) if violation.rule not in HEALS]
    assert [violation.sentence for violation in found] == []
    return snapshot


def act(scene: Scene) -> Actor:
    return Actor(scene.world.conf, scene.world.blobs.directory, scene.target, scene.arguments)


def clean_up(world: Any) -> None:
    """The cleaner, when everything that may expire has expired; what it leaves belongs to something."""
    clean(world.context(), grace_secs=0, token_secs=0, upload_secs=0)
    report, _ = clean(world.context(), grace_secs=0, token_secs=0, upload_secs=0)
    assert (report.nodes, report.blobs, report.tokens, report.waiting, report.problems) == ((), (), (), 0, ())


@pytest.mark.parametrize(("operation", "step"), all_in_chaos(POINTS))
def test_killed_after_a_step_and_repeated(world: Any, operation: str, step: str) -> None:
    scene = scene_of(world, operation, step)
    with act(scene) as actor:
        assert actor.run_to(f"after.{step}"), f"{operation} never passed {step}"
        actor.kill()
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
def test_killed_after_a_step_and_left_to_the_leader(world: Any, operation: str, step: str) -> None:
    scene = scene_of(world, operation, step)
    with act(scene) as actor:
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
def test_deposed_before_a_step_it_writes_nothing_more(world: Any, operation: str, step: str) -> None:
    """The epoch ends while the process stands before a step. Cluster state stays as the new leader found it."""
    scene = scene_of(world, operation, step)
    with act(scene) as actor:
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


def everything(world: Any) -> dict[str, Any]:
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
    zk_worlds: Callable[[], Any], operation: str
) -> None:
    passed: set[str] = set()
    for make, _ in SCENES[operation]:
        with act(make(zk_worlds())) as actor:
            assert actor.finish() is None
        passed |= {point.removeprefix("after.") for point in actor.points if point.startswith("after.")}
    assert passed == set(all_operations()[operation].steps)


def test_every_step_in_the_code_belongs_to_an_operation() -> None:
    """Steps on paths that no scene takes are found in the source."""
    declared = {step for each in all_operations().values() for step in each.steps}
    named_in_code = set()
    for path in Path(storm_dagster.operations.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                at = {"step": 1, "commit": 2, "delete_tree": 3}.get(node.func.id)
                if at is not None and len(node.args) > at and isinstance(node.args[at], ast.Constant):
                    named_in_code.add(node.args[at].value)
    assert named_in_code and named_in_code <= declared
    assert set(SCENES) == set(all_operations()), "every operation has a scene, and every scene an operation"


def test_nothing_outside_of_a_context_can_observe_steps(monkeypatch: pytest.MonkeyPatch, world: Any) -> None:
    """Neither the environment nor a conf key reaches the observer: a context that was given none has none."""
    for name in ("STORM_DAGSTER_CRASHPOINT", "CRASHPOINT", "CRASH_AT", "STORM_DAGSTER_CHECKPOINT"):
        monkeypatch.setenv(name, "after.publish")
    ctx = world.context(conf=world.context().conf)
    assert ctx.checkpoint is no_observer
    assert world.submit("wc", conf={"crash.at": "after.publish", "checkpoint": "after.publish"}, ctx=ctx)
