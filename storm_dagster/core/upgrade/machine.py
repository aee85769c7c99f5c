"""State machine of a gray upgrade.

It has batches, moves of single workers, and the transitions of the whole upgrade. The supervisor of
the topology master picks (:func:`pick`), each supervisor moves its own workers (:func:`next_move`),
the leader and the sensor end the upgrade (:func:`due`, :func:`transition`). Every worker is on one
version at any instant: :func:`code_for` returns it.
"""

from dataclasses import asdict, dataclass, field
from typing import Literal

from storm_dagster.core.submission.conf import with_base_conf
from storm_dagster.core.submission.kept_sizes import with_unapplied_sizes
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
from storm_dagster.model.records import (
    Assignment,
    BaseConf,
    GrayUpgrade,
    GrayWorker,
    StormBase,
    WorkerSlot,
)
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import UpgradeState

FIRST_MINUTE_SECS = 60.0
"""An upgraded worker that ends within this time of its start rolls the upgrade back."""
_REQUESTED = "it was asked for"
"""Reason of an end that a user requested without a reason."""


@dataclass(frozen=True)
class Pick:
    """One batch: the workers whose code changes now, and the record afterwards."""

    workers: tuple[str, ...]
    """``host:port``, lowest first."""
    record: GrayUpgrade


def pick(snapshot: UpgradeSnapshot) -> Pick | None:
    """Pick the next batch; ``None`` unless one is requested and none is under way.

    After it the upgrade pauses: ``continue`` is off, the list of workers is cleared, and so is a
    component of which every worker was taken. A batch may be empty, if the requested workers no
    longer exist.
    """
    record = snapshot.state.record
    if record is None or snapshot.phase != "requested":
        return None
    addresses = [worker.address for worker in selected(record, snapshot)]
    former = [address for address in addresses if snapshot.workers[address] == "former"]
    # A list of workers, or a component without a number, is one batch.
    takes_all = bool(record.workers) or (record.component is not None and not record.number)
    chosen = former if takes_all else former[: record.number]
    component = record.component
    if not record.workers and len(chosen) == len(former):
        # No worker of the component is left: its next batch would be empty.
        component = None
    changes = {"continue_": False, "workers": (), "component": component}
    return Pick(tuple(chosen), record.model_copy(update=changes))


def code_for(
    worker: WorkerSlot, assignment: Assignment, state: UpgradeState | None
) -> tuple[str, bool]:
    """Return the code of the worker's next process, and True if it is urgent.

    It then replaces a process that runs other code. ``state`` is ``None`` without an upgrade. A
    worker that an upgrade did not take keeps its
    process: after the end of the upgrade, its next start uses the topology's code at that time. So
    ``complete_upgrade`` also serves users who want only some workers upgraded.
    """
    phase = "former" if state is None else worker_phase(worker.address, state)
    if phase == "former" or state is None or state.record is None:
        return assignment.code_dir, assignment.type == "UpdateTopology"
    if phase == "rolling back":
        return assignment.code_dir, True
    return state.record.code_dir, True


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
    failure: str = ""
    """Task that could not be opened, with its error, by that beat; empty without one."""


@dataclass(frozen=True)
class Move:
    """Write of a supervisor about one of its workers."""

    worker: str
    """``host:port``."""
    kind: Literal["upgraded", "back", "failed"]
    """It runs the new code; it is back on the former code; it ended too soon or did not start."""
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
    """The write about the worker ``address`` that is due now, or ``None``.

    ``run`` is its process, ``None`` without one; ``former`` is the assignment's code. With the new
    code all tasks must run before the worker counts as upgraded. The upgrade fails at the first
    task that cannot be opened, or if they do not run within ``launch_secs`` of the process's start.
    """
    phase = worker_phase(address, state)
    record = state.record
    if phase == "rolling back":
        is_back = run is not None and run.code_dir == former and run.running
        return Move(address, "back") if is_back else None
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
    if run.failure:
        # The first error is enough: tuples wait as long as the new code is tried again.
        reason = f"{address}: a task could not be opened with the new code: {run.failure}"
    elif boot_now - run.started <= launch_secs:
        return None
    else:
        reason = (
            f"the tasks of {address} did not run within {launch_secs:g} s of its start "
            "with the new code"
        )
    return Move(address, "failed", mark.model_copy(update={"failed": reason}))


def early_failure(
    address: str, state: UpgradeState, code_dir: str, text: str, *, boot_id: str, boot_now: float
) -> Move | None:
    """The write about a failure of this code in this slot.

    A failure is an exit, a hang, or a start that failed; ``text`` describes it. ``None`` for the
    former code, if a failure is recorded already or the rollback has begun, and for a worker that
    has run the new code for more than a minute: it is restarted in place with the new code, like
    any other worker.
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
    """Change of an upgrade: a request, or an event that is due."""

    action: Literal[
        "begin", "continue", "complete", "expire", "roll_back", "finish_rollback", "abandon"
    ]
    reason: str | None = None
    """Reason in words; ``None`` for a request without one."""
    worker: str = ""
    """With ``roll_back``: ``host:port`` of the worker that failed."""
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
    base_conf: BaseConf | None = None
    """With ``complete`` and ``expire``: for a record that a leader of the release before wrote."""


def due(snapshot: UpgradeSnapshot, *, age_secs: float = 0.0) -> UpgradeEvent | None:
    """The event that is due for an UPGRADING or ROLLBACK topology, or ``None``.

    A failed worker comes before the end of the upgrade, so that it is rolled back.
    ``age_secs`` is the time for which the caller has seen the upgrade, by its own clock.
    """
    state = snapshot.state
    record = state.record
    if record is None:
        return UpgradeEvent("abandon", "its upgrade record is gone")
    if record.rollback:
        if "rolling back" in snapshot.workers.values():
            return None
        return UpgradeEvent("finish_rollback", record.reason or _REQUESTED)
    for address, mark in sorted({**state.upgraded, **state.upgrading}.items()):
        # A worker that was moved has another address: its former one has no part in the upgrade.
        if mark.failed and address in snapshot.workers:
            return UpgradeEvent("roll_back", mark.failed, address)
    total = len(snapshot.workers)
    if snapshot.complete:
        return UpgradeEvent("complete", f"all {total} workers run the new code")
    if age_secs >= record.ttl_secs:
        upgraded = list(snapshot.workers.values()).count("upgraded")
        return UpgradeEvent("expire", f"its time is up with {upgraded} of {total} workers")
    return None


@dataclass(frozen=True)
class UpgradeTransition:
    """Outcome of an event: the new base, record and code, and how they are written."""

    outcome: str
    """``begun``, ``continued``, ``completed``, ``expired``, ``rolling back``, ``rolled back``,
    ``abandoned``, ``unchanged``.
    """
    base: StormBase
    record: GrayUpgrade | None = None
    """``None``: the record is deleted, and the lists of workers, too."""
    reason: str = ""
    """Reason of the end or the rollback; empty for other outcomes."""
    step: str | None = None
    """The operation's step that writes it; ``None``: no write is needed."""
    action: str | None = None
    """For the listener of actions on topologies."""
    code_dir: str | None = None
    """The new code, if it becomes the topology's."""


def transition(
    base: StormBase, snapshot: UpgradeSnapshot, event: UpgradeEvent
) -> UpgradeTransition:
    """Return the transition of an upgrade under ``event``.

    ``unchanged`` for the end of a rollback or of an upgrade without a record that is not due in
    this snapshot. Raises :class:`Conflict` and :class:`InvalidRequest` like the checks of the
    event.
    """
    if event.action == "begin":
        return _begin(base, snapshot, event)
    if event.action == "continue":
        record = check_continue(base, snapshot, event.selection)
        return UpgradeTransition(
            "continued",
            base,
            _request(record, event.selection, event.token),
            step="continue_upgrade",
            action=VERBS["gray-upgrade"].action,
        )
    if event.action in ("finish_rollback", "abandon"):
        due_event = due(snapshot)
        if due_event is None or due_event.action not in ("finish_rollback", "abandon"):
            return UpgradeTransition("unchanged", base, snapshot.state.record)
        return _close(base, "rolled back", due_event.reason or "")
    if event.action == "roll_back":
        return _roll_back(base, snapshot, event)
    return _complete(base, snapshot, event)


def _begin(base: StormBase, snapshot: UpgradeSnapshot, event: UpgradeEvent) -> UpgradeTransition:
    """The transition that begins an upgrade with its first batch."""
    check_begin(base, snapshot)
    running_code = snapshot.assignment.code_dir
    if running_code != event.former:
        raise Conflict(
            f"topology {base.name!r} was replaced after the new code was stored: upgrade it again"
        )
    check_selection(event.selection, snapshot)
    record = _request(event.record, event.selection)
    # Only the keys of the two versions that may run are of use.
    keys: dict[str, tuple[str, ...]] = {}
    if running_code in base.submitted_keys:
        keys[running_code] = base.submitted_keys[running_code]
    keys[record.code_dir] = event.submitted_keys
    base = apply_event(base, "upgrade").model_copy(update={"submitted_keys": keys})
    return UpgradeTransition(
        "begun", base, record, step="gray_upgrade", action=VERBS["gray-upgrade"].action
    )


def _roll_back(
    base: StormBase, snapshot: UpgradeSnapshot, event: UpgradeEvent
) -> UpgradeTransition:
    """The transition that begins the rollback; unchanged if it has begun already."""
    record = snapshot.state.record
    if base.status == "ROLLBACK":
        reason = "" if record is None else record.reason
        return UpgradeTransition("rolling back", base, record, reason or "")
    check_ending(base, back=True)
    if record is None:
        return _close(base, "abandoned", "its upgrade record is gone")
    changes = {"reason": event.reason, "failed_worker": event.worker}
    record = record.model_copy(
        update={"rollback": True, "continue_": False, "workers": (), **changes}
    )
    return UpgradeTransition(
        "rolling back",
        apply_event(base, "rollback"),
        record,
        event.reason or "",
        step="roll_back",
        action=VERBS["rollback"].action,
    )


def _complete(base: StormBase, snapshot: UpgradeSnapshot, event: UpgradeEvent) -> UpgradeTransition:
    """The transition that makes the new code the topology's."""
    record = snapshot.state.record
    if record is not None and record.rollback:
        raise Conflict(
            f"the upgrade of {base.name!r} is being rolled back: wait until the rollback has ended"
        )
    check_ending(base, back=False)
    reason = event.reason or _REQUESTED
    if record is None:
        return _close(base, "abandoned", reason)
    after = apply_event(base, "end_upgrade")
    base_fields = record.base_conf or event.base_conf
    if base_fields is not None:
        # From now on the new code's conf is the topology's, with its isolation and its owner.
        after = with_base_conf(after, base_fields)
    after = with_unapplied_sizes(after, record.unapplied_sizes)
    return UpgradeTransition(
        "expired" if event.action == "expire" else "completed",
        after,
        reason=reason,
        step="complete_upgrade",
        action=VERBS["complete-upgrade"].action,
        code_dir=record.code_dir,
    )


def _request(record: GrayUpgrade | None, selection: Selection, token: str = "") -> GrayUpgrade:
    """The record with a request for the next batch, which the supervisor has not picked yet."""
    if record is None:
        raise InvalidRequest("a gray upgrade begins with a record: store the new code first")
    return record.model_copy(update={**asdict(selection), "continue_": True, "batch_token": token})


def _close(base: StormBase, outcome: str, reason: str) -> UpgradeTransition:
    """The transition that deletes the record; the topology is ACTIVE with the code that it has."""
    return UpgradeTransition(
        outcome, apply_event(base, "end_upgrade"), reason=reason, step="finish_rollback"
    )


def landed(transition: UpgradeTransition, base: StormBase, snapshot: UpgradeSnapshot) -> bool:
    """True if a transition whose reply was lost took effect.

    ``base`` and ``snapshot`` are those of now. A rollback is not looked up here: the topology's
    status shows it.
    """
    record = snapshot.state.record
    if transition.step == "gray_upgrade":
        if record is None or transition.record is None:
            return False
        # The supervisor may have picked its batch since; no other upgrade has its code.
        return record.code_dir == transition.record.code_dir
    if transition.step == "continue_upgrade":
        if record == transition.record:
            return True
        if record is None or transition.record is None:
            return False
        # The supervisor may have picked it since, as above.
        return bool(record.batch_token) and record.batch_token == transition.record.batch_token
    if transition.step == "complete_upgrade":
        return base.status == "ACTIVE" and snapshot.assignment.code_dir == transition.code_dir
    return False


def check_begin(base: StormBase, snapshot: UpgradeSnapshot) -> None:
    """Raise :class:`Conflict` unless an upgrade may begin now.

    Raises :class:`InvalidRequest` if the topology master shares its worker.
    """
    if snapshot.phase not in ("ended", "rolling back"):
        raise Conflict(
            f"topology {base.name!r} is being upgraded already: continue without new code, "
            "complete the upgrade, or roll it back"
        )
    apply_event(base, "upgrade")
    check_master_alone(snapshot)


def check_continue(base: StormBase, snapshot: UpgradeSnapshot, selection: Selection) -> GrayUpgrade:
    """Return the record of the upgrade that may continue with this selection.

    Raises an error with the reason if it must not continue.
    """
    record = snapshot.state.record
    phase = snapshot.phase
    if base.status == "ACTIVE":
        raise InvalidRequest(
            f"topology {base.name!r} is not being upgraded: give the new code (TARGET) to begin"
        )
    if phase == "rolling back":
        raise Conflict(
            f"the upgrade of {base.name!r} is being rolled back: wait until the rollback has ended"
        )
    if record is None or base.status != "UPGRADING":
        # Raises the error of the table of statuses, unless the topology is ACTIVE since.
        apply_event(base, "upgrade")
        raise Conflict(f"the upgrade of {base.name!r} is about to end: try again")
    if phase != "paused":
        waiting = ", ".join(sorted(snapshot.state.upgrading)) or "not picked yet"
        raise Conflict(
            f"a batch of the upgrade of {base.name!r} is under way ({waiting}): wait until its "
            "workers run the new code"
        )
    check_selection(selection, snapshot)
    return record


def check_ending(base: StormBase, *, back: bool) -> None:
    """Raise :class:`Conflict` unless an upgrade is under way that can be completed.

    With ``back``: unless it can be rolled back, or is being rolled back.
    """
    if base.status == "UPGRADING" or (back and base.status == "ROLLBACK"):
        return
    action = "roll back" if back else "complete"
    raise Conflict(
        f"topology {base.name!r} is {base.status}, no upgrade is under way: there is nothing to "
        f"{action}"
    )
