"""Asset checks at `storm/assignment`: the rules of placement for every current assignment.

Healing leaves alone what lives, so an assignment may be uneven for a while: these warn, and a rebalance fixes
what they find. `checks.py` checks that every task has one slot and no slot has two topologies.
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


@dataclass(frozen=True)
class _CheckedTopology:
    """An assignment and what it was made from."""

    topology: TopologyToPlace
    hosts: frozenset[str]
    stored: Mapping[str, Any]


def _moves(checked: _CheckedTopology) -> Iterator[str]:
    moves = checked.stored.get("moves")
    if moves is None:
        return
    workers = {f"{worker['node']}:{worker['port']}": worker["tasks"] for worker in checked.stored.get("workers", ())}
    yield from move_faults(checked.topology.name, moves, workers)


PLACEMENT_CHECKS: Mapping[str, Callable[[_CheckedTopology], Iterator[str]]] = {
    "quotas_kept": lambda checked: quota_faults(checked.topology),
    "isolation_kept": lambda checked: isolation_faults(checked.topology, checked.hosts),
    "differ_node_kept": lambda checked: differ_node_faults(checked.topology),
    "fewest_moves": _moves,
}
"""Check -> its function for one topology."""


def _checked_topologies(ops: OperationsContext) -> Iterator[_CheckedTopology]:
    view = ops.cluster.load_view()
    hosts = frozenset(info.host for info in view.supervisors.values() if info.host not in view.blacklist)
    for topology in view.topologies.values():
        if topology.base.status == "KILLED" or topology.tasks is None or topology.assignment is None:
            continue
        try:
            runnable = load_runnable(ops, topology)
            stored = json.loads(ops.blobs.read(placement_key(topology.id)))
        except (StormDagsterError, ValueError):
            # Missing blobs are what another check is about.
            continue
        checked = current_topology(view, topology, runnable, topology.tasks)
        yield _CheckedTopology(checked, hosts, stored)


def placement_check(name: str) -> Callable[..., dg.AssetCheckResult]:
    """The function of one of them."""

    def check(context: dg.AssetCheckExecutionContext, handles: Handles) -> dg.AssetCheckResult:
        with operations(context, handles) as ops:
            topologies = list(_checked_topologies(ops))
        found = [text for checked in topologies for text in PLACEMENT_CHECKS[name](checked)]
        return dg.AssetCheckResult(
            passed=not found,
            severity=dg.AssetCheckSeverity.WARN,
            metadata={"violations": len(found), "found": notes(found[:50]), "topologies": len(topologies)},
        )

    return check
