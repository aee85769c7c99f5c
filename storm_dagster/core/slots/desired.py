"""Desired work of each slot of one supervisor, from the cluster's assignments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storm_dagster.core.slots.model import Work
from storm_dagster.core.upgrade.machine import code_for
from storm_dagster.model.records import Assignment
from storm_dagster.model.view import UpgradeState


@dataclass(frozen=True)
class DesiredSlots:
    """Desired work of each slot, and the slots that are assigned to several topologies."""

    work: Mapping[int, Work]
    contested: Mapping[int, tuple[str, ...]]
    """Port -> topology ids, ascending. Such a slot keeps what runs in it; nothing new is started there."""
    lazy: frozenset[int] = frozenset()
    """Ports whose process may go on with other code of the same topology: the work is for its next start."""


def desired_slots(
    assignments: Mapping[str, Assignment], supervisor_id: str, upgrades: Mapping[str, UpgradeState] | None = None
) -> DesiredSlots:
    """Desired slots of ``supervisor_id`` by ``assignments``; both maps are by topology id."""
    desired: dict[int, set[Work]] = {}
    lazy: set[int] = set()
    for topology_id, assignment in assignments.items():
        upgrade = (upgrades or {}).get(topology_id)
        for worker in assignment.workers:
            if worker.node == supervisor_id:
                code_dir, hurry = code_for(worker, assignment, upgrade)
                desired.setdefault(worker.port, set()).add(Work(topology_id, code_dir, assignment.restarts))
                if not hurry:
                    lazy.add(worker.port)
    work = {port: next(iter(works)) for port, works in desired.items() if len(works) == 1}
    return DesiredSlots(
        work=work,
        lazy=frozenset(lazy & work.keys()),
        contested={
            port: tuple(sorted(work.topology_id for work in works)) for port, works in desired.items() if len(works) > 1
        },
    )


def check_ports(ports: tuple[int, ...]) -> str | None:
    """Reason why a supervisor cannot offer these slots, or ``None``."""
    if not ports:
        return "supervisor.slots.ports is empty: name at least one port"
    wrong = [port for port in ports if not 1 <= port <= 65535]
    if wrong:
        return f"supervisor.slots.ports holds {wrong[0]}: ports are 1 to 65535"
    twice = sorted({port for port in ports if ports.count(port) > 1})
    if twice:
        return f"supervisor.slots.ports names {twice[0]} twice: name each port once"
    return None
