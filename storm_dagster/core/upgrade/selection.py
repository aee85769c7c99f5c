"""State of a gray upgrade and its workers, and checks of requests and code.

A selection names the workers of the next batch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from storm_dagster.model.errors import Conflict, InvalidRequest, InvalidTopology
from storm_dagster.model.names import TOPOLOGY_MASTER, topology_name_of
from storm_dagster.model.records import Assignment, GrayUpgrade, TaskTable, WorkerSlot
from storm_dagster.model.requests import parse_workers
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import UpgradeState

UpgradePhase = Literal["ended", "requested", "upgrading", "paused", "rolling back"]
"""State of an upgrade.

``ended``: there is no record; ``requested``: the batch is not picked yet; ``paused``: no batch is
under way.
"""
WorkerPhase = Literal["former", "upgrading", "upgraded", "rolling back"]


def worker_phase(address: str, state: UpgradeState) -> WorkerPhase:
    """State of the worker ``host:port``; ``former`` if the upgrade did not take it."""
    if state.record is None:
        return "former"
    if address not in state.upgrading and address not in state.upgraded:
        return "former"
    if state.record.rollback:
        return "rolling back"
    return "upgraded" if address in state.upgraded else "upgrading"


@dataclass(frozen=True)
class UpgradeSnapshot:
    """Input of every decision about one upgrade."""

    state: UpgradeState
    assignment: Assignment
    """The topology's current assignment, with the former code until the upgrade is completed."""
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
        """Worker of the topology master; ``None`` while no worker has its task."""
        part = self.table.components.get(TOPOLOGY_MASTER)
        if part is None or not part.ids:
            return None
        for worker in self.assignment.workers:
            if part.ids[0] in worker.ids:
                return worker
        return None

    @cached_property
    def candidates(self) -> tuple[WorkerSlot, ...]:
        """Workers that an upgrade may take, lowest host and port first.

        They are all workers but the topology master's.
        """
        workers = (worker for worker in self.assignment.workers if worker != self.master)
        return tuple(sorted(workers, key=lambda worker: (worker.host, worker.port, worker.node)))

    @cached_property
    def workers(self) -> dict[str, WorkerPhase]:
        """``host:port`` -> state of each candidate.

        A worker that was moved from a lost host has another address, so its state is not kept.
        """
        return {
            worker.address: worker_phase(worker.address, self.state) for worker in self.candidates
        }

    @property
    def complete(self) -> bool:
        """True if every candidate runs the new code."""
        return set(self.workers.values()) == {"upgraded"}

    def to_document(self) -> dict[str, Any] | None:
        """The upgrade as JSON; ``None`` while none is under way."""
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


@dataclass(frozen=True)
class Selection:
    """Workers that the caller requested.

    Workers take precedence over the component, and the component over the bare number.
    """

    workers: tuple[str, ...] = ()
    """``host:port``."""
    component: str | None = None
    """Workers with a task of this component."""
    number: int = 0
    """Number of workers; with a component 0 means all of its workers."""

    @property
    def empty(self) -> bool:
        """True if no worker is requested."""
        return not self.workers and self.component is None and self.number == 0

    def to_document(self) -> dict[str, Any]:
        """The fields of a request."""
        return {**asdict(self), "workers": list(self.workers)}


def selection_of_conf(conf: Mapping[str, Any]) -> Selection:
    """Read the selection from a conf.

    The keys are ``topology.upgrade.workers``, ``.component`` and ``.worker.num``.
    """
    return Selection(
        workers=parse_workers(conf.get("topology.upgrade.workers") or ()),
        component=conf.get("topology.upgrade.component") or None,
        number=int(conf.get("topology.upgrade.worker.num") or 0),
    )


def selected(selection: Selection | GrayUpgrade, snapshot: UpgradeSnapshot) -> list[WorkerSlot]:
    """Candidates that a selection names, before its number limits them.

    The lowest host and port come first.
    """
    candidates = list(snapshot.candidates)
    if selection.workers:
        return [worker for worker in candidates if worker.address in selection.workers]
    if selection.component is None:
        return candidates
    part = snapshot.table.components.get(selection.component)
    tasks = set(part.ids) if part else set[int]()
    return [worker for worker in candidates if not tasks.isdisjoint(worker.ids)]


def check_selection(selection: Selection, snapshot: UpgradeSnapshot) -> None:
    """Raise :class:`InvalidRequest` for a selection that cannot be upgraded.

    It is empty, names workers or components that do not exist, or picks only upgraded workers.
    """
    place = f"upgrade of {snapshot.name!r}"
    if selection.number < 0:
        raise InvalidRequest(
            f"{place}: {selection.number} workers cannot be upgraded: give 1 or more"
        )
    if selection.empty:
        raise InvalidRequest(
            f"{place}: no workers are selected: give a number (-n), a component (-p) or workers "
            "(-w HOST:PORT,...)"
        )
    # ``workers`` of the snapshot has all but the topology master's.
    masters = {worker.address for worker in snapshot.assignment.workers} - snapshot.workers.keys()
    for worker in selection.workers:
        if worker in masters:
            raise InvalidRequest(
                f"{place}: {worker} runs the topology master, which is not upgraded: choose others"
            )
        if worker not in snapshot.workers:
            addresses = ", ".join(sorted(snapshot.workers))
            raise InvalidRequest(f"{place}: it has no worker {worker}: its workers are {addresses}")
    components = snapshot.table.components.keys() - {TOPOLOGY_MASTER}
    component = selection.component
    if not selection.workers and component is not None and component not in components:
        names = ", ".join(sorted(components))
        raise InvalidRequest(
            f"{place}: it has no component {component!r}: its components are {names}"
        )
    chosen = selected(selection, snapshot)
    if all(snapshot.workers[worker.address] == "upgraded" for worker in chosen):
        raise InvalidRequest(
            f"{place}: all {len(chosen)} workers that were asked for run the new code already: "
            "choose others, or complete the upgrade"
        )


def check_master_alone(snapshot: UpgradeSnapshot) -> None:
    """Require that the topology master is alone in its worker.

    It controls the upgrade, so its worker cannot be upgraded. Judges the worker that the assignment
    gives the topology master, whatever the conf says. :class:`Conflict`: the topology master has no
    worker now; :class:`InvalidRequest`: it shares its worker with other tasks.
    """
    master_worker = snapshot.master
    if master_worker is None:
        raise Conflict(
            f"the topology master of {snapshot.name!r} has no worker now: try again when it runs"
        )
    if len(master_worker.ids) > 1:
        raise InvalidRequest(
            f"topology {snapshot.name!r} cannot be upgraded worker by worker: its topology master "
            f"shares {master_worker.address} with {len(master_worker.ids) - 1} other tasks; submit "
            "it with "
            "topology.master.single.worker=true, or use `storm-dagster update`"
        )


def check_compatible(name: str, old: TopologySpec, new: TopologySpec) -> None:
    """Require equal components, streams and groupings.

    Raises :class:`InvalidTopology`. The code of a component may change; its parallelism is that of
    the running topology. With another wiring, an old task would send tuples by the old grouping and
    a new one would expect them by the new grouping, so the same key could reach two tasks.
    """
    remedy = "beside the old: use `storm-dagster update`, which replaces the whole topology"
    for kind, old_parts, new_parts in (
        ("spout", old.spouts, new.spouts),
        ("bolt", old.bolts, new.bolts),
    ):
        for component in sorted(old_parts.keys() ^ new_parts.keys()):
            change = "has no" if component in old_parts else "has a new"
            raise InvalidTopology(
                f"the new code of {name!r} {change} {kind} {component!r}, so that it cannot run "
                f"{remedy}"
            )
        for component, old_part in old_parts.items():
            new_part = new_parts[component]
            if old_part.outputs != new_part.outputs:
                differing = "streams"
            elif old_part.inputs != new_part.inputs:
                differing = "inputs"
            else:
                continue
            raise InvalidTopology(
                f"the {differing} of {kind} {component!r} differ in the new code of {name!r}, so "
                f"that it cannot run {remedy}"
            )
