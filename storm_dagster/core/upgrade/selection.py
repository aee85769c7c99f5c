"""State of a gray upgrade and its workers, and requests for it: which come next, and whether that
and the code can be.
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
"""``ended``: there is no record; ``requested``: a batch is not picked yet; ``paused``: no batch is
under way.
"""
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
        """Every worker that an upgrade may take: all but the topology master's, lowest host and
        port first.
        """
        able = (worker for worker in self.assignment.workers if worker != self.master)
        return tuple(sorted(able, key=lambda worker: (worker.host, worker.port, worker.node)))

    @cached_property
    def workers(self) -> dict[str, WorkerPhase]:
        """``host:port`` -> state of each candidate. What was taken from a lost host is elsewhere
        and does not count.
        """
        return {
            worker.address: worker_phase(worker.address, self.state) for worker in self.candidates
        }

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


@dataclass(frozen=True)
class Selection:
    """Workers that the caller asked for. Workers count before the component, the component before
    the bare number.
    """

    workers: tuple[str, ...] = ()
    """``host:port``."""
    component: str | None = None
    number: int = 0
    """How many workers; with a component 0 means all of its workers."""

    @property
    def empty(self) -> bool:
        """Whether nothing was asked for."""
        return not self.workers and self.component is None and self.number == 0

    def to_document(self) -> dict[str, Any]:
        """The fields of a request."""
        return {**asdict(self), "workers": list(self.workers)}


def selection_of_conf(conf: Mapping[str, Any]) -> Selection:
    """The selection in the keys ``topology.upgrade.workers``, ``.component`` and
    ``.worker.num``.
    """
    return Selection(
        workers=parse_workers(conf.get("topology.upgrade.workers") or ()),
        component=conf.get("topology.upgrade.component") or None,
        number=int(conf.get("topology.upgrade.worker.num") or 0),
    )


def selected(selection: Selection | GrayUpgrade, snapshot: UpgradeSnapshot) -> list[WorkerSlot]:
    """The candidates that a selection names, lowest host and port first, before its number limits
    them.
    """
    able = list(snapshot.candidates)
    if selection.workers:
        return [worker for worker in able if worker.address in selection.workers]
    if selection.component is None:
        return able
    part = snapshot.table.components.get(selection.component)
    tasks = set(part.ids) if part else set()
    return [worker for worker in able if tasks & set(worker.ids)]


def check_selection(selection: Selection, snapshot: UpgradeSnapshot) -> None:
    """:class:`InvalidRequest` for a selection that names what is not there, or picks nothing."""
    of = f"upgrade of {snapshot.name!r}"
    if selection.number < 0:
        raise InvalidRequest(f"{of}: {selection.number} workers cannot be upgraded: give 1 or more")
    if selection.empty:
        raise InvalidRequest(
            f"{of}: no workers are selected: give a number (-n), a component (-p) or workers (-w HOST:PORT,...)"
        )
    masters = {worker.address for worker in snapshot.assignment.workers} - snapshot.workers.keys()
    for worker in selection.workers:
        if worker in masters:
            raise InvalidRequest(
                f"{of}: {worker} runs the topology master, which is not upgraded: choose others"
            )
        if worker not in snapshot.workers:
            known = ", ".join(sorted(snapshot.workers))
            raise InvalidRequest(f"{of}: it has no worker {worker}: its workers are {known}")
    components = snapshot.table.components.keys() - {TOPOLOGY_MASTER}
    if (
        not selection.workers
        and selection.component is not None
        and selection.component not in components
    ):
        known = ", ".join(sorted(components))
        raise InvalidRequest(
            f"{of}: it has no component {selection.component!r}: its components are {known}"
        )
    chosen = selected(selection, snapshot)
    if all(snapshot.workers[worker.address] == "upgraded" for worker in chosen):
        raise InvalidRequest(
            f"{of}: all {len(chosen)} workers that were asked for run the new code already: "
            "choose others, or complete the upgrade"
        )


def check_master_alone(snapshot: UpgradeSnapshot) -> None:
    """:class:`InvalidRequest` unless the topology master has a worker of its own: it drives the
    upgrade.

    The assignment decides, not the conf: what counts is where the topology master really runs.
    """
    home = snapshot.master
    if home is None:
        raise Conflict(
            f"the topology master of {snapshot.name!r} has no worker now: try again when it runs"
        )
    if len(home.ids) > 1:
        raise InvalidRequest(
            f"topology {snapshot.name!r} cannot be upgraded worker by worker: its topology master shares {home.address} "
            f"with {len(home.ids) - 1} other tasks; submit it with topology.master.single.worker=true, or use "
            "`storm-dagster update`"
        )


def check_compatible(name: str, old: TopologySpec, new: TopologySpec) -> None:
    """:class:`InvalidTopology` unless both have the same components, streams and groupings.

    What a component does may change, its parallelism is that of the running topology. Another
    wiring would mix: an old task would send by the old rule what a new one expects by the new, and
    the same key could reach two tasks.
    """
    remedy = "beside the old: use `storm-dagster update`, which replaces the whole topology"
    for kind, before, after in (("spout", old.spouts, new.spouts), ("bolt", old.bolts, new.bolts)):
        for component in sorted(before.keys() ^ after.keys()):
            what = "has no" if component in before else "has a new"
            raise InvalidTopology(
                f"the new code of {name!r} {what} {kind} {component!r}, so that it cannot run {remedy}"
            )
        for component, part in before.items():
            other = after[component]
            for what, same in (
                ("streams", part.outputs == other.outputs),
                ("inputs", part.inputs == other.inputs),
            ):
                if not same:
                    raise InvalidTopology(
                        f"the {what} of {kind} {component!r} differ in the new code of {name!r}, so that it cannot run "
                        f"{remedy}"
                    )
