"""State machine of a gray upgrade: batches, moves of single workers, and the transitions of the
whole upgrade.

The supervisor of the topology master picks (:func:`pick`), each one moves its own workers
(:func:`next_move`), the leader and the sensor end the upgrade (:func:`due`, :func:`transition`).
Every worker is on one version at any instant: :func:`code_for` says on which.
"""

from dataclasses import asdict, dataclass, field
from typing import Literal

from storm_dagster.core.transitions import apply_event
from storm_dagster.core.upgrade.selection import (
    Selection,
    UpgradeSnapshot,
    check_master_alone,
    check_selection,
    selected,
    worker_phase,
)
from storm_dagster.model.errors import Conflict, InvalidRequest
from storm_dagster.model.records import Assignment, GrayUpgrade, GrayWorker, StormBase, WorkerSlot
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import UpgradeState

FIRST_MINUTE_SECS = 60.0
"""An upgraded worker that ends so soon after its upgraded start rolls the upgrade back."""
_REQUESTED = "it was asked for"


@dataclass(frozen=True)
class Pick:
    """One batch: the workers whose code changes now, and the record afterwards."""

    workers: tuple[str, ...]
    """``host:port``, lowest first."""
    record: GrayUpgrade


def pick(snapshot: UpgradeSnapshot) -> Pick | None:
    """The next batch; ``None`` unless one was asked for and none is under way.

    Afterwards nothing goes on by itself: ``continue`` is off, the list of workers is cleared, and
    so is a component of which every worker was taken. A batch may be empty, when what was asked for
    has gone meanwhile.
    """
    record = snapshot.state.record
    if record is None or snapshot.phase != "requested":
        return None
    left = [
        each.address
        for each in selected(record, snapshot)
        if snapshot.workers[each.address] == "former"
    ]
    whole = bool(record.workers) or (record.component is not None and not record.number)
    chosen = left if whole else left[: record.number]
    used_up = not record.workers and len(chosen) == len(left)
    component = None if used_up else record.component
    return Pick(
        tuple(chosen),
        record.model_copy(update={"continue_": False, "workers": (), "component": component}),
    )


def code_for(
    worker: WorkerSlot, assignment: Assignment, state: UpgradeState | None
) -> tuple[str, bool]:
    """The code that the worker's next process runs, and whether a process that runs other code must
    go for it.

    A worker that an upgrade did not take keeps its process: when the upgrade ends, its next start
    brings the topology's code at that time. So ``complete_upgrade`` serves those who want only some
    workers upgraded.
    """
    phase = "former" if state is None else worker_phase(worker.address, state)
    if phase == "former" or state is None or state.record is None:
        return assignment.code_dir, assignment.type == "UpdateTopology"
    return (assignment.code_dir if phase == "rolling back" else state.record.code_dir), True


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
    """Write of a supervisor about one of its workers."""

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
    """The write about the worker ``address``, whose process is ``run``; ``None``: nothing now.

    ``former`` is the assignment's code. With the new code all tasks must run before the worker
    counts as upgraded; when they do not within ``launch_secs`` of the process's start, that fails
    the upgrade.
    """
    phase, record = worker_phase(address, state), state.record
    if phase == "rolling back":
        return (
            Move(address, "back")
            if run is not None and run.code_dir == former and run.running
            else None
        )
    if phase != "upgrading" or record is None or run is None or run.code_dir != record.code_dir:
        return None
    mark = state.upgrading[address]
    if mark.failed is not None:
        return None
    if run.running:
        return Move(
            address,
            "upgraded",
            mark.model_copy(update={"boot_id": boot_id, "started": run.started}),
        )
    if boot_now - run.started <= launch_secs:
        return None
    reason = f"the tasks of {address} did not run within {launch_secs:g} s of its start with the new code"
    return Move(address, "failed", mark.model_copy(update={"failed": reason}))


def early_failure(
    address: str, state: UpgradeState, code_dir: str, text: str, *, boot_id: str, boot_now: float
) -> Move | None:
    """The write about a failure (an exit, a hang, a start that did not come about) of that code in
    that slot.

    ``None`` for the former code, and for a worker that has run the new code for more than a minute:
    that one is restarted in place with the new code, like any other.
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
class UpgradeEvent:
    """Something that changes an upgrade: a request, or what is due."""

    action: Literal[
        "begin", "continue", "complete", "expire", "roll_back", "finish_rollback", "abandon"
    ]
    reason: str | None = None
    selection: Selection = field(default_factory=Selection)
    """With ``begin`` and ``continue``: the next batch."""
    record: GrayUpgrade | None = None
    """With ``begin``: the record without its batch."""
    former: str = ""
    """With ``begin``: the topology's code when the new code was stored."""
    submitted_keys: tuple[str, ...] = ()
    """With ``begin``: conf keys that came with the new code's submission."""
    token: str = ""
    """With ``continue``: the client token of the call."""


def due(snapshot: UpgradeSnapshot, *, age_secs: float = 0.0) -> UpgradeEvent | None:
    """The event that is due for an UPGRADING or ROLLBACK topology; ``None``: it goes on.

    ``age_secs``: for how long the caller has seen the upgrade, by its own clock.
    """
    state, record = snapshot.state, snapshot.state.record
    if record is None:
        return UpgradeEvent("abandon", "its upgrade record is gone")
    if record.rollback:
        waiting = "rolling back" in snapshot.workers.values()
        return None if waiting else UpgradeEvent("finish_rollback", record.reason or _REQUESTED)
    for address, mark in sorted({**state.upgraded, **state.upgrading}.items()):
        if mark.failed and address in snapshot.workers:
            return UpgradeEvent("roll_back", mark.failed)
    total = len(snapshot.workers)
    if snapshot.complete:
        return UpgradeEvent("complete", f"all {total} workers run the new code")
    if age_secs >= record.ttl_secs:
        done = list(snapshot.workers.values()).count("upgraded")
        return UpgradeEvent("expire", f"its time is up with {done} of {total} workers")
    return None


@dataclass(frozen=True)
class UpgradeTransition:
    """Outcome of an event: base, record and code afterwards, and how they are written."""

    outcome: str
    """``begun``, ``continued``, ``completed``, ``expired``, ``rolling back``, ``rolled back``,
    ``abandoned``, ``unchanged``.
    """
    base: StormBase
    record: GrayUpgrade | None = None
    """``None``: the record goes, and with it the lists of workers."""
    reason: str = ""
    step: str | None = None
    """The operation's step that writes it; ``None``: nothing is written."""
    action: str | None = None
    """For the listener of actions on topologies."""
    code_dir: str | None = None
    """The new code, when it becomes the topology's."""


def transition(
    base: StormBase, snapshot: UpgradeSnapshot, event: UpgradeEvent
) -> UpgradeTransition:
    """The transition of an upgrade under ``event``; :class:`Conflict` and :class:`InvalidRequest`
    as of the checks.
    """
    record, reason = snapshot.state.record, event.reason or ""
    if event.action == "begin":
        check_begin(base, snapshot)
        if snapshot.assignment.code_dir != event.former:
            raise Conflict(f"topology {base.name!r} was replaced meanwhile: upgrade it again")
        check_selection(event.selection, snapshot)
        after = _request(event.record, event.selection)
        running = snapshot.assignment.code_dir
        keys = {code: part for code, part in base.submitted_keys.items() if code == running}
        keys[after.code_dir] = event.submitted_keys
        base = apply_event(base, "upgrade").model_copy(update={"submitted_keys": keys})
        action = VERBS["gray-upgrade"].action
        return UpgradeTransition("begun", base, after, step="gray_upgrade", action=action)
    if event.action == "continue":
        after = _request(
            check_continue(base, snapshot, event.selection), event.selection, event.token
        )
        return UpgradeTransition(
            "continued",
            base,
            after,
            step="continue_upgrade",
            action=VERBS["gray-upgrade"].action,
        )
    if event.action in ("finish_rollback", "abandon"):
        found = due(snapshot)
        if found is None or found.action not in ("finish_rollback", "abandon"):
            return UpgradeTransition("unchanged", base, record)
        return _close(base, "rolled back", found.reason or "")
    if event.action == "roll_back":
        if base.status == "ROLLBACK":
            return UpgradeTransition("rolling back", base, record, (record and record.reason) or "")
        check_ending(base, back=True)
        if record is None:
            return _close(base, "abandoned", "its upgrade record is gone")
        after = record.model_copy(
            update={"rollback": True, "continue_": False, "workers": (), "reason": event.reason}
        )
        base = apply_event(base, "rollback")
        return UpgradeTransition(
            "rolling back", base, after, reason, "roll_back", VERBS["rollback"].action
        )
    if record is not None and record.rollback:
        raise Conflict(
            f"the upgrade of {base.name!r} is being rolled back: wait until that has ended"
        )
    check_ending(base, back=False)
    if record is None:
        return _close(base, "abandoned", reason or _REQUESTED)
    return UpgradeTransition(
        "expired" if event.action == "expire" else "completed",
        apply_event(base, "end_upgrade"),
        reason=reason or _REQUESTED,
        step="complete_upgrade",
        action=VERBS["complete-upgrade"].action,
        code_dir=record.code_dir,
    )


def _request(record: GrayUpgrade | None, selection: Selection, token: str = "") -> GrayUpgrade:
    if record is None:
        raise InvalidRequest("a gray upgrade begins with a record: store the new code first")
    return record.model_copy(update={**asdict(selection), "continue_": True, "batch_token": token})


def _close(base: StormBase, outcome: str, reason: str) -> UpgradeTransition:
    """The record goes, the status is ACTIVE again, the code stays what it was."""
    return UpgradeTransition(
        outcome, apply_event(base, "end_upgrade"), reason=reason, step="finish_rollback"
    )


def landed(sent: UpgradeTransition, base: StormBase, snapshot: UpgradeSnapshot) -> bool:
    """Whether a transition whose reply was lost took effect. A rollback needs no asking: its status
    shows it.
    """
    record = snapshot.state.record
    if sent.step == "gray_upgrade":
        # The supervisor may have picked its batch since; no other upgrade has its code.
        return (
            record is not None
            and sent.record is not None
            and record.code_dir == sent.record.code_dir
        )
    if sent.step == "continue_upgrade":
        # The supervisor may have picked it since, as above.
        mine = "" if sent.record is None else sent.record.batch_token
        return record == sent.record or (
            record is not None and bool(mine) and record.batch_token == mine
        )
    completed = base.status == "ACTIVE" and snapshot.assignment.code_dir == sent.code_dir
    return sent.step == "complete_upgrade" and completed


def check_begin(base: StormBase, snapshot: UpgradeSnapshot) -> None:
    """:class:`Conflict` unless an upgrade may begin now; :class:`InvalidRequest` without a topology
    master of its own.
    """
    if snapshot.phase not in ("ended", "rolling back"):
        raise Conflict(
            f"topology {base.name!r} is being upgraded already: go on without new code, complete the upgrade, or roll it "
            "back"
        )
    apply_event(base, "upgrade")
    check_master_alone(snapshot)


def check_continue(base: StormBase, snapshot: UpgradeSnapshot, selection: Selection) -> GrayUpgrade:
    """The record of the upgrade that may go on with that selection; the error that says why not."""
    record, phase = snapshot.state.record, snapshot.phase
    if base.status == "ACTIVE":
        raise InvalidRequest(
            f"topology {base.name!r} is not being upgraded: give the new code (TARGET) to begin"
        )
    if phase == "rolling back":
        raise Conflict(
            f"the upgrade of {base.name!r} is being rolled back: wait until that has ended"
        )
    if record is None or base.status != "UPGRADING":
        # In the words of the table of statuses.
        apply_event(base, "upgrade")
        raise Conflict(f"the upgrade of {base.name!r} is about to end: try again")
    if phase != "paused":
        waiting = ", ".join(sorted(snapshot.state.upgrading)) or "not picked yet"
        raise Conflict(
            f"a batch of the upgrade of {base.name!r} is under way ({waiting}): wait until its workers run the new code"
        )
    check_selection(selection, snapshot)
    return record


def check_ending(base: StormBase, *, back: bool) -> None:
    """:class:`Conflict` unless an upgrade is under way that can be completed, or rolled ``back``
    (again).
    """
    if base.status != "UPGRADING" and not (back and base.status == "ROLLBACK"):
        what = "roll back" if back else "complete"
        raise Conflict(
            f"topology {base.name!r} is {base.status}, no upgrade is under way: there is nothing to {what}"
        )
