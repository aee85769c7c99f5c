"""State of a gray upgrade and of each of its workers, derived from what was read of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from storm_dagster.model.names import TOPOLOGY_MASTER, topology_name_of
from storm_dagster.model.records import Assignment, TaskTable, WorkerSlot
from storm_dagster.model.view import UpgradeState

UpgradePhase = Literal["ended", "requested", "upgrading", "paused", "rolling back"]
"""``ended``: there is no record; ``requested``: a batch is not picked yet; ``paused``: no batch is under way."""
WorkerPhase = Literal["former", "upgrading", "upgraded", "rolling back"]


def worker_phase(address: str, state: UpgradeState) -> WorkerPhase:
    """State of the worker ``host:port``. One that the upgrade did not take is ``former``."""
    if state.record is None or not (address in state.upgrading or address in state.upgraded):
        return "former"
    if state.record.rollback:
        return "rolling back"
    return "upgraded" if address in state.upgraded else "upgrading"


@dataclass(frozen=True)
class UpgradeSnapshot:
    """Input of every decision about one upgrade."""

    state: UpgradeState
    assignment: Assignment
    table: TaskTable

    @property
    def name(self) -> str:
        """Name of the topology."""
        return topology_name_of(self.assignment.topology_id)

    @property
    def phase(self) -> UpgradePhase:
        """State of the upgrade."""
        record = self.state.record
        if record is None:
            return "ended"
        if record.rollback:
            return "rolling back"
        if self.state.upgrading:
            return "upgrading"
        return "requested" if record.continue_ else "paused"

    @cached_property
    def master(self) -> WorkerSlot | None:
        """Worker of the topology master; ``None`` while it has none."""
        part = self.table.components.get(TOPOLOGY_MASTER)
        task = part.ids[0] if part and part.ids else None
        return next((worker for worker in self.assignment.workers if task in worker.ids), None)

    @cached_property
    def candidates(self) -> tuple[WorkerSlot, ...]:
        """Every worker that an upgrade may take: all but the topology master's, lowest host and port first."""
        able = (worker for worker in self.assignment.workers if worker != self.master)
        return tuple(sorted(able, key=lambda worker: (worker.host, worker.port, worker.node)))

    @cached_property
    def workers(self) -> dict[str, WorkerPhase]:
        """``host:port`` -> state of each candidate. What was taken from a lost host is elsewhere and does not count."""
        return {worker.address: worker_phase(worker.address, self.state) for worker in self.candidates}

    @property
    def complete(self) -> bool:
        """Whether every candidate runs the new code."""
        return set(self.workers.values()) == {"upgraded"}

    def to_document(self) -> dict[str, Any] | None:
        """The upgrade for people and programs; ``None`` while none is under way."""
        record = self.state.record
        if record is None:
            return None
        return {
            "code": record.code_dir,
            "former_code": self.assignment.code_dir,
            "rollback": record.rollback,
            "reason": record.reason,
            "asked": record.continue_,
            "upgrading": sorted(self.state.upgrading),
            "upgraded": sorted(self.state.upgraded),
            "expires_secs": record.expires,
            "workers": dict(self.workers),
        }
