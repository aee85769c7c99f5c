"""Asset checks at `storm/assignment`: the rules of placement, asked of every assignment that stands.

Healing leaves alone what lives, so an assignment may be uneven for a while: these warn, and a rebalance mends
what they find. That every task has one slot and no slot two topologies is asked by the checks of `checks.py`.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from storm_dagster.core.reassignment import current_topology
from storm_dagster.core.scheduling.assignment_checks import (
    differ_node_faults,
    isolation_faults,
    move_faults,
    quota_faults,
)
from storm_dagster.defs.pictures.metadata import notes
from storm_dagster.defs.resources.operating import Handles, operations
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.names import placement_key
from storm_dagster.model.placement import TopologyToPlace
from storm_dagster.operations.context import OperationsContext, load_runnable

__all__ = ["PLACEMENT_CHECKS", "placement_check"]


@dataclass(frozen=True)
class _Standing:
    """An assignment and what it was made from."""

    topology: TopologyToPlace
    hosts: frozenset[str]
    stored: Mapping[str, Any]


def _moves(standing: _Standing) -> Iterator[str]:
    moves = standing.stored.get("moves")
    if moves is None:
        return
    workers = {
        f"{worker['node']}:{worker['port']}": worker["tasks"] for worker in standing.stored.get("workers", ())
    }
    yield from move_faults(standing.topology.name, moves, workers)


PLACEMENT_CHECKS: Mapping[str, tuple[str, Callable[[_Standing], Iterator[str]]]] = {
    "quotas_kept": (
        "Every topology has as many workers as it wants, with evenly many executors.",
        lambda standing: quota_faults(standing.topology),
    ),
    "isolation_kept": (
        "Workers of a topology with isolation.scheduler.machines run on those hosts.",
        lambda standing: isolation_faults(standing.topology, standing.hosts),
    ),
    "differ_node_kept": (
        "Tasks of a component with task.on.differ.node run on different supervisors.",
        lambda standing: differ_node_faults(standing.topology),
    ),
    "fewest_moves": ("The last rebalance of each topology moved no more tasks than it had to.", _moves),
}
"""Check -> the rule in words, and what asks it of one topology."""


def _standing(ops: OperationsContext) -> Iterator[_Standing]:
    view = ops.cluster.load_view()
    hosts = frozenset(info.host for info in view.supervisors.values() if info.host not in view.blacklist)
    for topology in view.topologies.values():
        if topology.base.status == "KILLED" or topology.tasks is None or topology.assignment is None:
            continue
        try:
            runnable = load_runnable(ops, topology.id)
            stored = json.loads(ops.blobs.read(placement_key(topology.id)))
        except (StormDagsterError, ValueError):
            # Missing blobs are what another check is about.
            continue
        standing = current_topology(view, topology, runnable, topology.tasks)
        yield _Standing(standing, hosts, stored)


def placement_check(name: str) -> Callable[..., dg.AssetCheckResult]:
    """The function of one of them."""
    _, rule = PLACEMENT_CHECKS[name]

    def check(context: dg.AssetCheckExecutionContext, handles: Handles) -> dg.AssetCheckResult:
        with operations(context, handles) as ops:
            looked_at = list(_standing(ops))
        found = [text for standing in looked_at for text in rule(standing)]
        return dg.AssetCheckResult(
            passed=not found,
            severity=dg.AssetCheckSeverity.WARN,
            metadata={"violations": len(found), "found": notes(found[:50]), "topologies": len(looked_at)},
        )

    return check
