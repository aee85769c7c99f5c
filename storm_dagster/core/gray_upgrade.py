"""Rules of a gray upgrade: the next batch of workers, and the end (``docs/decisions.md#gray-upgrade``).

The topology master picks (:func:`pick`), each supervisor moves its own workers (:func:`next_move`), the leader and
the sensor end the upgrade (:func:`due`). Every worker is on one version at any instant: :func:`code_for` says on which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from storm_dagster.model.errors import Conflict, InvalidRequest
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.records import Assignment, GrayUpgrade, GrayWorker, TaskTable, WorkerSlot
from storm_dagster.model.view import UpgradeState

__all__ = [
    "FIRST_MINUTE_SECS",
    "Due",
    "Move",
    "Pick",
    "Selection",
    "SlotRun",
    "candidates",
    "check_master_alone",
    "check_selection",
    "code_for",
    "due",
    "early_failure",
    "next_move",
    "parse_workers",
    "pick",
    "selection_of_conf",
    "upgrade_document",
]

FIRST_MINUTE_SECS = 60.0
"""An upgraded worker that ends so soon after its upgraded start rolls the upgrade back."""


@dataclass(frozen=True)
class Selection:
    """What the caller asked for. Workers count before the component, the component before the bare number."""

    workers: tuple[str, ...] = ()
    """``host:port``."""
    component: str | None = None
    number: int = 0
    """How many workers; with a component 0 means all of its workers."""

    @property
    def empty(self) -> bool:
        """Whether nothing was asked for."""
        return not self.workers and self.component is None and self.number == 0


def parse_workers(text: str | Iterable[str]) -> tuple[str, ...]:
    """``host:port, host:port`` in the order given, each once; :class:`InvalidRequest` for anything else."""
    if not isinstance(text, str | list | tuple):
        raise InvalidRequest(f"{text!r:.40} names no workers: give HOST:PORT,HOST:PORT")
    parts = text.split(",") if isinstance(text, str) else list(text)
    found: dict[str, None] = {}
    for part in parts:
        if not isinstance(part, str):
            raise InvalidRequest(f"{part!r:.40} is no worker: name workers as HOST:PORT")
        word = part.strip()
        if not word:
            continue
        host, _, port = word.rpartition(":")
        if not host or not port.isascii() or not port.isdigit():
            raise InvalidRequest(f"{word!r:.80} is no worker: name workers as HOST:PORT,HOST:PORT")
        found[f"{host}:{int(port)}"] = None
    return tuple(found)


def selection_of_conf(conf: Mapping[str, Any]) -> Selection:
    """The selection in the keys ``topology.upgrade.workers``, ``.component`` and ``.worker.num``."""
    return Selection(
        workers=parse_workers(conf.get("topology.upgrade.workers") or ()),
        component=conf.get("topology.upgrade.component") or None,
        number=int(conf.get("topology.upgrade.worker.num") or 0),
    )


def _master_task(table: TaskTable) -> int | None:
    part = table.components.get(TOPOLOGY_MASTER)
    return part.ids[0] if part and part.ids else None


def check_master_alone(name: str, assignment: Assignment, table: TaskTable) -> None:
    """:class:`InvalidRequest` unless the topology master has a worker of its own: it drives the upgrade.

    It is the assignment that is asked, not the conf: what counts is where the topology master really runs.
    """
    master = _master_task(table)
    home = next((worker for worker in assignment.workers if master in worker.ids), None)
    if home is None:
        raise Conflict(f"the topology master of {name!r} has no worker now: try again when it runs")
    if len(home.ids) > 1:
        others = len(home.ids) - 1
        raise InvalidRequest(
            f"topology {name!r} cannot be upgraded worker by worker: its topology master shares {home.address} with "
            f"{others} other tasks; submit it with topology.master.single.worker=true, or use `storm-dagster update`"
        )


def candidates(assignment: Assignment, table: TaskTable) -> tuple[WorkerSlot, ...]:
    """Every worker that an upgrade may take: all but the topology master's, lowest host and port first."""
    master = _master_task(table)
    return tuple(
        sorted(
            (worker for worker in assignment.workers if master not in worker.ids),
            key=lambda worker: (worker.host, worker.port, worker.node),
        )
    )


def _of_component(workers: Iterable[WorkerSlot], table: TaskTable, component: str) -> list[WorkerSlot]:
    part = table.components.get(component)
    tasks = set(part.ids) if part else set()
    return [worker for worker in workers if tasks & set(worker.ids)]


def check_selection(
    name: str,
    selection: Selection,
    assignment: Assignment,
    table: TaskTable,
    upgraded: Iterable[str] = (),
) -> None:
    """:class:`InvalidRequest` for a selection that names what is not there, or picks nothing."""
    if selection.number < 0:
        raise InvalidRequest(
            f"upgrade of {name!r}: {selection.number} workers cannot be upgraded: give 1 or more"
        )
    if selection.empty:
        raise InvalidRequest(
            f"upgrade of {name!r}: nothing says which workers come first: give a number (-n), a component (-p) "
            "or workers (-w HOST:PORT,...)"
        )
    able = candidates(assignment, table)
    done = set(upgraded)
    if selection.workers:
        known = {worker.address for worker in able}
        masters = {worker.address for worker in assignment.workers} - known
        for worker in selection.workers:
            if worker in masters:
                raise InvalidRequest(
                    f"upgrade of {name!r}: {worker} runs the topology master, which is not upgraded: choose others"
                )
            if worker not in known:
                raise InvalidRequest(
                    f"upgrade of {name!r}: it has no worker {worker}: its workers are {', '.join(sorted(known))}"
                )
        chosen = [worker for worker in able if worker.address in selection.workers]
    elif selection.component is not None:
        known = set(table.components) - {TOPOLOGY_MASTER}
        if selection.component not in known:
            raise InvalidRequest(
                f"upgrade of {name!r}: it has no component {selection.component!r}: its components are "
                f"{', '.join(sorted(known))}"
            )
        chosen = _of_component(able, table, selection.component)
    else:
        chosen = list(able)
    if all(worker.address in done for worker in chosen):
        raise InvalidRequest(
            f"upgrade of {name!r}: all {len(chosen)} workers that were asked for run the new code already: "
            "choose others, or complete the upgrade"
        )


@dataclass(frozen=True)
class Pick:
    """One batch: the workers whose code changes now, and the record afterwards."""

    workers: tuple[str, ...]
    """``host:port``, lowest first."""
    record: GrayUpgrade


def pick(state: UpgradeState, assignment: Assignment, table: TaskTable) -> Pick | None:
    """The next batch; ``None`` unless one was asked for and none is under way.

    Afterwards nothing goes on by itself: ``continue`` is off, the list of workers is cleared, and so is a component
    of which every worker was taken. A batch may be empty, when what was asked for has gone meanwhile.
    """
    record = state.record
    if record is None or record.rollback or not record.continue_ or state.upgrading:
        return None
    able = candidates(assignment, table)
    left = [worker for worker in able if worker.address not in state.upgraded]
    component = record.component
    if record.workers:
        chosen = [worker for worker in left if worker.address in record.workers]
    elif component is not None:
        of_component = _of_component(left, table, component)
        chosen = of_component[: record.number] if record.number else of_component
        if len(chosen) == len(of_component):
            component = None
    else:
        chosen = left[: record.number]
    after = record.model_copy(update={"continue_": False, "workers": (), "component": component})
    return Pick(tuple(worker.address for worker in chosen), after)


def code_for(worker: WorkerSlot, assignment: Assignment, state: UpgradeState | None) -> tuple[str, bool]:
    """The code that the worker's next process runs, and whether a process that runs other code must go for it.

    A worker that an upgrade did not take keeps its process: when the upgrade ends, its next start brings the
    topology's code at that time. So ``complete_upgrade`` serves those who want only some workers upgraded.
    """
    record = state.record if state is not None else None
    taken = (
        state is not None
        and record is not None
        and (worker.address in state.upgrading or worker.address in state.upgraded)
    )
    if not taken or record is None:
        return assignment.code_dir, assignment.type == "UpdateTopology"
    return (assignment.code_dir if record.rollback else record.code_dir), True


@dataclass(frozen=True)
class SlotRun:
    """The process in one slot of a supervisor."""

    port: int
    topology_id: str
    code_dir: str
    started: float
    """Boot clock, seconds."""
    running: bool
    """Its newest beat says that all its tasks run."""


@dataclass(frozen=True)
class Move:
    """What a supervisor has to write about one of its workers."""

    worker: str
    """``host:port``."""
    kind: Literal["upgraded", "back", "failed"]
    """It runs the new code; it runs the former code again; it ended too soon or did not come up."""
    record: GrayWorker = field(default_factory=GrayWorker)


def next_move(
    address: str,
    state: UpgradeState,
    former: str,
    run: SlotRun | None,
    *,
    boot_id: str,
    boot_now: float,
    launch_secs: float,
) -> Move | None:
    """What is to be written about the worker ``address``, whose process is ``run``; ``None``: nothing now.

    ``former`` is the assignment's code. With the new code all tasks must run before the worker counts as upgraded;
    when they do not within ``launch_secs`` of the process's start, that fails the upgrade.
    """
    record = state.record
    if record is None:
        return None
    if record.rollback:
        if address not in state.upgrading and address not in state.upgraded:
            return None
        return Move(address, "back") if run is not None and run.code_dir == former and run.running else None
    mark = state.upgrading.get(address)
    if mark is None or mark.failed is not None or run is None or run.code_dir != record.code_dir:
        return None
    if run.running:
        return Move(address, "upgraded", mark.model_copy(update={"boot_id": boot_id, "started": run.started}))
    if boot_now - run.started > launch_secs:
        reason = f"the tasks of {address} did not run within {launch_secs:g} s of its start with the new code"
        return Move(address, "failed", mark.model_copy(update={"failed": reason}))
    return None


def early_failure(
    address: str, state: UpgradeState, code_dir: str, text: str, *, boot_id: str, boot_now: float
) -> Move | None:
    """What a failure (an exit, a hang, a start that did not come about) of that code in that slot means.

    ``None`` for the former code, and for a worker that has run the new code for more than a minute: that one is
    restarted in place with the new code, like any other.
    """
    record = state.record
    if record is None or record.rollback or code_dir != record.code_dir:
        return None
    mark = state.upgrading.get(address)
    if mark is None:
        mark = state.upgraded.get(address)
        if mark is None or mark.boot_id != boot_id or boot_now - mark.started > FIRST_MINUTE_SECS:
            return None
    if mark.failed is not None:
        return None
    return Move(address, "failed", mark.model_copy(update={"failed": f"{address}: {text}"}))


@dataclass(frozen=True)
class Due:
    """What the leader or the sensor has to do about an upgrade."""

    action: Literal["complete", "expire", "roll_back", "finish_rollback", "abandon"]
    reason: str


def due(state: UpgradeState, assignment: Assignment, table: TaskTable, *, now_secs: int) -> Due | None:
    """What an UPGRADING or ROLLBACK topology has come to; ``None``: it goes on.

    Workers that the assignment names no more do not count: what was taken from a lost host is elsewhere.
    """
    record = state.record
    if record is None:
        return Due("abandon", "its upgrade record is gone")
    able = {worker.address for worker in candidates(assignment, table)}
    if record.rollback:
        left = able & (state.upgrading.keys() | state.upgraded.keys())
        return None if left else Due("finish_rollback", record.reason or "it was asked for")
    marks = sorted({**state.upgraded, **state.upgrading}.items())
    failed = next((mark.failed for name, mark in marks if mark.failed and name in able), None)
    if failed is not None:
        return Due("roll_back", failed)
    if able and able <= state.upgraded.keys():
        return Due("complete", f"all {len(able)} workers run the new code")
    if now_secs >= record.expires:
        return Due(
            "expire", f"its time is up with {len(able & state.upgraded.keys())} of {len(able)} workers"
        )
    return None


def upgrade_document(state: UpgradeState, assignment: Assignment, table: TaskTable) -> dict[str, Any] | None:
    """What an upgrade has come to, for people and progress; ``None`` while none is under way."""
    record = state.record
    if record is None:
        return None
    able = candidates(assignment, table)
    workers = {}
    for worker in able:
        address = worker.address
        taken = address in state.upgrading or address in state.upgraded
        if record.rollback:
            workers[address] = "rolling back" if taken else "former"
        elif address in state.upgrading:
            workers[address] = "upgrading"
        else:
            workers[address] = "upgraded" if address in state.upgraded else "former"
    return {
        "code": record.code_dir,
        "former_code": assignment.code_dir,
        "rollback": record.rollback,
        "reason": record.reason,
        "asked": record.continue_,
        "upgrading": sorted(state.upgrading),
        "upgraded": sorted(state.upgraded),
        "expires_secs": record.expires,
        "workers": workers,
    }
