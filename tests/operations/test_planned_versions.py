"""Every transaction checks the versions of the nodes that its plan was made from.

One of these nodes is written between the plan and its commit: the commit must lose the race. A
step without a row in one of the tables fails.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import storm_dagster.operations
from storm_dagster.model import paths
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.steps import all_operations
from storm_rigs.operations.scenes import scene_of
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper

_Path = Callable[[str], str]
"""Path of a node, by the topology's id."""


def _base(topology_id: str) -> str:
    return paths.topology(topology_id)


def _pending(topology_id: str) -> str:
    return f"{paths.topology(topology_id)}/rebalance"


def _assignments(_: str) -> str:
    return paths.ASSIGNMENTS


def _upgrade(topology_id: str) -> str:
    return paths.gray_upgrade(topology_id)


def _token(_: str) -> str:
    return paths.token("t")


def _counter(_: str) -> str:
    return paths.COUNTER


def _access_tokens(_: str) -> str:
    return paths.ACCESS_TOKENS


def _events(_: str) -> str:
    return paths.event_log("wc")


def _blacklist(_: str) -> str:
    return paths.BLACKLIST


def _healing_pause(_: str) -> str:
    return paths.HEALING_PAUSE


PLANNED_FROM: Mapping[str, tuple[_Path, ...]] = {
    "rebalance": (_base, _assignments),
    "finish_rebalance": (_base, _pending, paths.assignment, _assignments),
    "end_rebalance": (_base,),
    "abandon_rebalance": (_base, _pending, _assignments),
    "reassign": (_base, paths.assignment, _assignments),
    "restart": (_base, paths.assignment, _assignments),
    "publish": (_token, _assignments),
    "take_over": (_token, _assignments),
    "take_over_change": (_base,),
    "healing_pause": (_assignments,),
    "resumed_healing": (_healing_pause,),
    "activate": (_base,),
    "deactivate": (_base,),
    "kill": (_base,),
    "drain": (_base,),
    "undo_drain": (_base,),
    "unassign": (_base, _assignments),
    "gray_upgrade": (_base, paths.assignment, _upgrade),
    "continue_upgrade": (_base, paths.assignment, _upgrade),
    "complete_upgrade": (_base, paths.assignment, _assignments, _upgrade),
    "roll_back": (_base, paths.assignment, _upgrade),
    "finish_rollback": (_base, paths.assignment, _upgrade),
    "version_number": (_counter,),
    "token": (_counter,),
    "blacklist": (_blacklist,),
    "log_levels": (_base,),
    "access_token": (_access_tokens,),
    "revoked_token": (_access_tokens,),
    "cancel": (_token,),
    "events.index": (_events,),
    "events.remove": (_events,),
    "events.source": (_events,),
}
"""Step of a transaction -> nodes that its plan was made from."""

WITHOUT_PLAN: Mapping[str, str] = {
    "access_tokens": "creates a node, which fails if the node exists",
    "sweep.upgraded": "deletes lists of an ended upgrade, which the lock of a new one protects",
    "sweep.": "deletes nodes of an id that no topology has any more",
    "remove_base": "deletes the base of a killed topology, which no verb revives",
    "clean.": "deletes nodes of an id that no topology has any more",
}
"""Prefix of the steps whose transaction follows from no state that may change, and the reason."""

_BLOB_STEPS = ("store.", "stage.", "delete.", "events.blob", "events.forget", "clean.blob")
"""Prefixes of the steps that are no transaction."""

WITHOUT_STEP: Mapping[str, str] = {
    "staging.py:_accept_again": "checks the epoch only, for a record that stays",
    "staging.py:_set_token": "sets the record of the version that was read",
    "staging.py:discard_token": "deletes the record of the version that was read",
    "change_records.py:write_change": "creates or sets the record of the version that was read",
    "change_records.py:_update": "sets the record of the version that was read",
    "change_records.py:end_change": "deletes the record of a change that has ended",
    "transactions.py:forget_action": "deletes a node that the leader has executed",
}
"""Function with a transaction that is no step of an operation, and the versions that it checks."""

_SHORT = {("rebalance", "_assignments"), ("reassign", "_base"), ("gray_upgrade", "assignment")}
"""Cases of every run; the others take a process each."""


def _cases() -> list[object]:
    """(operation, step, node) of each transaction, by the first operation that has the step."""
    operation_of: dict[str, str] = {}
    for name, declared in all_operations().items():
        for step in declared.steps:
            operation_of.setdefault(step, name)
    # A rebalance that does not fit is abandoned only when it is due.
    operation_of["finish_rebalance"] = "finish_due"
    cases: list[object] = []
    for step, nodes in PLANNED_FROM.items():
        for node in nodes:
            marks = [] if (step, node.__name__) in _SHORT else [pytest.mark.long]
            name = f"{step}-{node.__name__.strip('_')}"
            cases.append(pytest.param(operation_of[step], step, node, marks=marks, id=name))
    return cases


def _topology_id(world: World) -> str:
    """Id of the topology ``wc``; empty if the scene has none yet."""
    topology = world.find()
    return "" if topology is None else topology.id


def _write_again(world: World, path: str) -> None:
    """Raise the data version of a node; its data stays."""
    state = world.cluster.state
    data = state.get_data(path)
    assert data is not None, f"{path} does not exist: the row of this step names a wrong node"
    state.set_data(path, data)


@pytest.mark.parametrize(("operation", "step", "node"), _cases())
def test_a_commit_loses_to_a_change_of_what_it_was_planned_from(
    world: World, operation: str, step: str, node: _Path
) -> None:
    scene = scene_of(world, operation, step)
    with scene.act() as actor:
        assert actor.run_to(f"before.{step}"), f"{operation} never came to {step}"
        _write_again(world, node(_topology_id(world)))
        passed = len(actor.points)
        actor.go_on()
        actor.finish()
        following = actor.points[passed : passed + 1]
    assert following != [f"after.{step}"], f"{step} was committed on an older plan"


def test_every_transaction_names_what_it_was_planned_from() -> None:
    unknown: set[str] = set()
    for declared in all_operations().values():
        for step in declared.steps:
            prefixes = (*WITHOUT_PLAN, *_BLOB_STEPS)
            if step not in PLANNED_FROM and not step.startswith(prefixes):
                unknown.add(step)
    assert unknown == set(), "add the step to PLANNED_FROM, or to WITHOUT_PLAN with the reason"


def test_every_transaction_is_a_step_or_gives_its_reason() -> None:
    """Transactions that no step names are found in the source."""
    direct: set[str] = set()
    for path in Path(storm_dagster.operations.__path__[0]).rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and _commits_without_step(function):
                direct.add(f"{path.name}:{function.name}")
    # The function that makes the transactions of all steps.
    assert direct - {"transactions.py:commit"} == WITHOUT_STEP.keys()


def _commits_without_step(function: ast.FunctionDef) -> bool:
    """True if the function calls the method ``commit`` of a transaction."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(isinstance(call, ast.Attribute) and call.attr == "commit" for call in calls)


def test_a_rebalance_planned_before_a_healing_silences_no_spout(world: World) -> None:
    """The healing comes between the plan and its transaction; then the spread is even."""
    topology_id = world.submit("wc", conf={"topology.workers": 2})
    statuses: list[str] = []
    moves = [4]

    def heal_first(point: str) -> None:
        """Reach the wanted spread by another process, before the first commit."""
        if point == "before.rebalance" and moves:
            rebalance(world.context(), "wc", workers=moves.pop(), wait_secs=0)
        statuses.append(world.named().base.status)

    report = rebalance(world.context(checkpoint=heal_first), "wc", workers=4, wait_secs=60)
    assert (report.outcome, report.delay_secs) == ("unchanged", 0)
    assert world.named().id == topology_id and set(statuses) == {"ACTIVE"}
