"""Every write to ZooKeeper and its guard: a new one stands on this list, or the test fails.

A write is found by the name of the method that does it, in the source of the whole package.
``fenced(...)`` is no such method: the transaction that it makes checks the epoch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "storm_dagster"

WRITERS = frozenset(
    {
        "claim_ephemeral_node", "create_async", "create_node", "create_sequential", "delete_async", "delete_node",
        "delete_node_blobstore", "ensure_path", "ensure_path_async", "mkdirs", "set_async", "set_data",
        "set_ephemeral_node", "transaction", "Transaction", "TransactionRequest",
    }
)  # fmt: skip
"""Methods that write to ZooKeeper, or make the transaction that does."""
EPOCH = "the leadership epoch"
SESSION = "the writer's own session"
ASSIGNMENT = "the version of the assignment"
UPGRADE = "the version of the gray upgrade, which rises with each change of its record"
OWN_VERSION = "the version of the very node: compare and set"
EMPTY = "creates empty folders where they are missing, and changes none"
APPEND = "appends a node of its own, from which nothing is decided"
INTO = "part of a transaction of the caller, who guards it; parts of a record that no head names are nothing"
LAYER = "the storage layer itself"
COMPAT = "Storm's own operations: no daemon holds them"

EVIDENCE = {
    EPOCH: r"paths\.EPOCH|fenced\(",
    SESSION: r"owned\(|ephemeral|\{self\.me\}|== self\.me|\{address\}",
    ASSIGNMENT: r"paths\.assignment\(",
    UPGRADE: r"paths\.gray_upgrade\(",
    OWN_VERSION: r"version",
}
"""What the function that writes must contain, so that the guard is not only on this list."""

GUARDED: dict[str, dict[str, str]] = {
    "defs/declared/deploy.py": {
        "deploy_lock.claim_ephemeral_node": SESSION,
        "deploy_lock.delete_node": SESSION,
    },
    "defs/healing/sensor_watch.py": {
        "SensorWatch.hold_healer.claim_ephemeral_node": SESSION,
        "SensorWatch.release_healer.delete_node": SESSION,
        "SensorWatch.publish_alarm.set_data": SESSION,
    },
    "nimbus/blobs/registry.py": {
        "BlobRegistry.register_written.transaction": EPOCH,
        "BlobRegistry.forget.transaction": EPOCH,
        "BlobRegistry.register_held.transaction": SESSION,
        "BlobRegistry.register_held.delete_node": SESSION,
        "BlobRegistry.unregister.delete_node": SESSION,
    },
    "nimbus/daemon.py": {"_initialize.mkdirs": EMPTY},
    "operations/live/event_logs.py": {"_store.mkdirs": EMPTY},
    "spark/planner.py": {
        "ClusterSessionIds.replace.transaction": OWN_VERSION,
        "ClusterSessionIds.replace.set_data": OWN_VERSION,
    },
    "zk/cluster_state.py": {
        "ZooKeeperClusterState._create.create_async": LAYER,
        "ZooKeeperClusterState._create_with_parents.mkdirs": LAYER,
        "ZooKeeperClusterState.mkdirs.mkdirs": LAYER,
        "ZooKeeperClusterState._set.set_async": LAYER,
        "ZooKeeperClusterState.set_ephemeral_node.transaction": LAYER,
        "ZooKeeperClusterState.delete_node.delete_async": LAYER,
        "ZooKeeperClusterState.delete_node.delete_node": LAYER,
        "ZooKeeperClusterState.transaction.Transaction": LAYER,
    },
    "zk/gray_upgrades.py": {"write_pick.transaction": EPOCH, "write_move.transaction": UPGRADE},
    "zk/leadership.py": {
        "LeadershipSession._take.mkdirs": EMPTY,
        "LeadershipSession._take.transaction": SESSION,
        "LeadershipSession.resign.transaction": EPOCH,
        "LeadershipSession.register_follower.set_ephemeral_node": SESSION,
        "LeadershipSession.unregister_follower.delete_node": SESSION,
    },
    "zk/root.py": {
        "create_root_node.create_async": EMPTY,
        "create_cluster_root.mkdirs": EMPTY,
        "create_cluster_root.transaction": EMPTY,
        "secure_root.create_node": EMPTY,
    },
    "zk/sensor_memory.py": {"store_memory.mkdirs": EMPTY},
    "zk/shards.py": {"_write_parts.create_node": INTO},
    "zk/state_protocol.py": {"ClusterState.delete_node_blobstore.delete_node": LAYER},
    "zk/storm_cluster_state.py": {
        "StormClusterState.supervisor_heartbeat.set_ephemeral_node": SESSION,
        "StormClusterState._guard_assignment.transaction": ASSIGNMENT,
        "StormClusterState.fenced.transaction": EPOCH,
    },
    "zk/storm_operations.py": {
        "StormOperations._begin.transaction": COMPAT,
        "StormOperations.remove_storm.delete_node": COMPAT,
        "StormOperations.teardown_heartbeats.delete_node": COMPAT,
        "StormOperations._change_beats.attempt.create_node": COMPAT,
        "StormOperations._change_beats.attempt.set_data": COMPAT,
        "StormOperations.teardown_topology_errors.delete_node": COMPAT,
    },
    "zk/task_errors.py": {
        "TaskErrors.report_error.create_sequential": APPEND,
        "TaskErrors.report_error.delete_node": APPEND,
        "TaskErrors.report_error.set_data": OWN_VERSION,
    },
    "zk/transaction.py": {
        "Transaction._request.TransactionRequest": LAYER,
        "Transaction.set.add.set_data": LAYER,
    },
    "zk/worker_nodes.py": {
        "WorkerNodes.write_worker_node.transaction": ASSIGNMENT,
        "WorkerNodes.remove_worker_node.transaction": SESSION,
    },
}
"""File -> every write in it -> its guard."""


@cache
def writes() -> dict[str, dict[str, str]]:
    """File -> (``function.method`` -> source of that function), of every call that writes."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        # Connectors reach no ZooKeeper (test_import_direction): their transactions are those of
        # databases.
        if "connectors" in path.parts or not any(f"{name}(" in text for name in WRITERS):
            continue
        name = path.relative_to(PACKAGE).as_posix()
        for place, node in _calls(ast.parse(text), [], ""):
            found.setdefault(name, {})[place] = node
    return found


def _calls(node: ast.AST, scope: list[str], source: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = ast.unparse(child) if isinstance(child, ast.FunctionDef) else source
            yield from _calls(child, [*scope, child.name], inner)
            continue
        if isinstance(child, ast.Call):
            method = _writer(child.func)
            if method is not None:
                yield ".".join([*scope, method]), source
        yield from _calls(child, scope, source)


def _writer(function: ast.expr) -> str | None:
    if isinstance(function, ast.Name):
        return function.id if function.id in WRITERS else None
    return (
        function.attr if isinstance(function, ast.Attribute) and function.attr in WRITERS else None
    )


def test_every_write_has_a_guard() -> None:
    found = {name: set(places) for name, places in writes().items()}
    listed = {name: set(places) for name, places in GUARDED.items()}
    assert found == listed, (
        "say on the list what guards the new write, or write by fenced(...) or a method that is on it"
    )


@pytest.mark.parametrize("name", GUARDED)
def test_a_function_that_writes_has_its_guard_in_it(name: str) -> None:
    sources = writes()[name]
    assert [
        place
        for place, guard in GUARDED[name].items()
        if guard in EVIDENCE and not re.search(EVIDENCE[guard], sources[place])
    ] == []


def test_only_the_layer_and_storms_own_operations_write_without_a_guard() -> None:
    free = {name for name, places in GUARDED.items() if {LAYER, COMPAT} & set(places.values())}
    assert free == {
        "zk/cluster_state.py",
        "zk/state_protocol.py",
        "zk/transaction.py",
        "zk/storm_operations.py",
    }


def test_no_daemon_holds_storms_own_operations() -> None:
    importers = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(
            r"\bzk\.storm_operations\b|import StormOperations", path.read_text(encoding="utf-8")
        )
    ]
    # The one that is left names it in its documentation.
    assert importers == ["zk/storm_cluster_state.py"]
