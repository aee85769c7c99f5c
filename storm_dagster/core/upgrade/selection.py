"""Requests for a gray upgrade: which workers come next, whether that can be, and whether the new code can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from storm_dagster.core.upgrade.snapshot import UpgradeSnapshot
from storm_dagster.model.errors import Conflict, InvalidRequest, InvalidTopology
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.records import GrayUpgrade, WorkerSlot
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.verbs import parse_workers


@dataclass(frozen=True)
class Selection:
    """Workers that the caller asked for. Workers count before the component, the component before the bare number."""

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
    """The selection in the keys ``topology.upgrade.workers``, ``.component`` and ``.worker.num``."""
    return Selection(
        workers=parse_workers(conf.get("topology.upgrade.workers") or ()),
        component=conf.get("topology.upgrade.component") or None,
        number=int(conf.get("topology.upgrade.worker.num") or 0),
    )


def selected(selection: Selection | GrayUpgrade, snapshot: UpgradeSnapshot) -> list[WorkerSlot]:
    """The candidates that a selection names, lowest host and port first, before its number limits them."""
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
            raise InvalidRequest(f"{of}: {worker} runs the topology master, which is not upgraded: choose others")
        if worker not in snapshot.workers:
            known = ", ".join(sorted(snapshot.workers))
            raise InvalidRequest(f"{of}: it has no worker {worker}: its workers are {known}")
    components = snapshot.table.components.keys() - {TOPOLOGY_MASTER}
    if not selection.workers and selection.component is not None and selection.component not in components:
        known = ", ".join(sorted(components))
        raise InvalidRequest(f"{of}: it has no component {selection.component!r}: its components are {known}")
    chosen = selected(selection, snapshot)
    if all(snapshot.workers[worker.address] == "upgraded" for worker in chosen):
        raise InvalidRequest(
            f"{of}: all {len(chosen)} workers that were asked for run the new code already: "
            "choose others, or complete the upgrade"
        )


def check_master_alone(snapshot: UpgradeSnapshot) -> None:
    """:class:`InvalidRequest` unless the topology master has a worker of its own: it drives the upgrade.

    The assignment decides, not the conf: what counts is where the topology master really runs.
    """
    home = snapshot.master
    if home is None:
        raise Conflict(f"the topology master of {snapshot.name!r} has no worker now: try again when it runs")
    if len(home.ids) > 1:
        raise InvalidRequest(
            f"topology {snapshot.name!r} cannot be upgraded worker by worker: its topology master shares {home.address} "
            f"with {len(home.ids) - 1} other tasks; submit it with topology.master.single.worker=true, or use "
            "`storm-dagster update`"
        )


def check_compatible(name: str, old: TopologySpec, new: TopologySpec) -> None:
    """:class:`InvalidTopology` unless both have the same components, streams and groupings.

    What a component does may change, its parallelism is that of the running topology. Another wiring would mix:
    an old task would send by the old rule what a new one expects by the new, and the same key could reach two tasks.
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
            for what, same in (("streams", part.outputs == other.outputs), ("inputs", part.inputs == other.inputs)):
                if not same:
                    raise InvalidTopology(
                        f"the {what} of {kind} {component!r} differ in the new code of {name!r}, so that it cannot run "
                        f"{remedy}"
                    )
