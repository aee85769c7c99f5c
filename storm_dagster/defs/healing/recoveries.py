"""Recovery times of topologies: from the poll that missed a worker to the one that saw all run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storm_dagster.model.view import ClusterView, TopologyView

RecoveryMemory = Mapping[str, tuple[int, float | None]]
"""Topology id -> (version of its assignment when all ran last, boot clock since when some do not)."""


@dataclass(frozen=True)
class Recovery:
    """A topology all of whose workers run again."""

    topology_id: str
    name: str
    seconds: float
    moved: bool
    """Tasks were moved; otherwise the workers came back in place."""


def _complete(topology: TopologyView) -> bool:
    assignment = topology.assignment
    if assignment is None:
        return False
    running = {slot for slot, worker in topology.live_workers.items() if worker.status == "running"}
    return all(worker.slot in running for worker in assignment.workers)


def recoveries(
    view: ClusterView, memory: RecoveryMemory, boot_now: float
) -> tuple[list[Recovery], dict[str, tuple[int, float | None]]]:
    """Topologies that are complete again, and what to hand in next time.

    A change of the assignment while all workers live (rebalance, deploy) is none: a recovery begins only
    when a worker is missing under the assignment under which all ran.
    """
    found: list[Recovery] = []
    known: dict[str, tuple[int, float | None]] = {}
    for topology in view.topologies.values():
        if topology.assignment_at is None:
            continue
        version = topology.assignment_at.version
        before = memory.get(topology.id)
        if _complete(topology):
            known[topology.id] = (version, None)
            if before is not None and before[1] is not None and boot_now >= before[1]:
                found.append(Recovery(topology.id, topology.base.name, boot_now - before[1], version != before[0]))
        elif before is not None:
            if before[1] is not None:
                known[topology.id] = before
            elif before[0] == version and topology.base.status in ("ACTIVE", "INACTIVE"):
                known[topology.id] = (version, boot_now)
    return found, known
