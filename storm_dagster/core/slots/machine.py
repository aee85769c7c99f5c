"""State machine of one slot (port) of a supervisor, after Storm 2's ``Slot``.

Pure; see ``docs/decisions.md#slot-machine``. ``step(slot, event, now, limits)`` returns the next
slot and the instructions that the supervisor must execute; the result of an instruction is another
event. Times are seconds of one monotonic clock. The machine never has two processes in one slot:
``Launch`` is returned only if no process is known and none is being started.

========================  ==========================================================================
state                     meaning
========================  ==========================================================================
``empty``                 no work is wanted here and no process runs
``waiting-for-code``      work is wanted, its code is not on this disk yet
``waiting-for-start``     the code is on the disk; the process is due, starting, or has not beaten
``running``               the process beats
``waiting-for-update``    the process runs while the new code of its topology is fetched
``killing``               the process must end; no process or another topology's follows
``killing-to-relaunch``   the process must end, and one of the same topology follows
========================  ==========================================================================
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from storm_dagster.core.slots import model
from storm_dagster.core.slots.model import SlotLimits, SupervisedSlot, Work
from storm_dagster.model.exit_codes import EXIT_SUPERSEDED

_Result: TypeAlias = "tuple[SupervisedSlot, tuple[model.Instruction, ...]]"
"""The next slot, and the instructions in the order of their execution."""
_KILL_INTERVAL_SECS = 5.0
"""Pause before KILL is sent once more to a process that is still there."""


def crash_delay(crashes: int, limits: SlotLimits) -> float:
    """Pause before a restart, by crashes in a row: 0, 1, 2, 4 ... seconds.

    See ``docs/decisions.md#restart-in-place``.
    """
    if crashes <= 1:
        return 0.0
    return min(limits.longest_delay, 2.0 ** min(crashes - 2, 30))


def is_restarting(slot: SupervisedSlot) -> bool:
    """True if a worker that ran here is being restarted in place.

    ``SupervisorInfo.restarting`` lists these slots.
    """
    if slot.state in ("running", "waiting-for-update"):
        return False
    return _same_topology(slot.wanted, slot.ran)


def extend_deadline(slot: SupervisedSlot, seconds: float) -> SupervisedSlot:
    """Extend the heartbeat deadline by a time without a supervisor, in seconds.

    The machine was suspended, or the supervisor's process was stopped. A worker that was not
    observed is not known to be silent.
    """
    return replace(slot, beat_at=slot.beat_at + seconds)


def step(slot: SupervisedSlot, event: model.Event, now: float, limits: SlotLimits) -> _Result:
    """Return the slot after ``event``, and instructions.

    A late result that no longer concerns the slot does not change it.
    """
    return _HANDLERS[type(event)](slot, event, now, limits)


def _same_topology(work: Work | None, other: Work | None) -> bool:
    return work is not None and other is not None and work.topology_id == other.topology_id


def _enter(slot: SupervisedSlot, state: model.SlotState, now: float) -> SupervisedSlot:
    """The slot in this state, since now unless it is there already."""
    if slot.state == state:
        return slot
    return replace(slot, state=state, since=now)


def _enter_started(slot: SupervisedSlot, now: float) -> SupervisedSlot:
    """The slot in the state of its process: running, or waiting for its first beat."""
    if slot.running_since is not None:
        return _enter(slot, "running", now)
    return _enter(slot, "waiting-for-start", now)


def _assigned(
    slot: SupervisedSlot, event: model.Assigned, now: float, limits: SlotLimits
) -> _Result:
    """Store the wanted work, and do the next step towards it."""
    work = event.work
    if work == slot.wanted and event.lazy == slot.lazy:
        return slot, ()
    if work != slot.wanted and work != slot.counted:
        # Other code starts without crashes: code that a rollback restores must not wait because
        # the newer code crashed.
        slot = replace(slot, crashes=0, not_before=0.0)
    slot = replace(slot, counted=None, wanted=work, lazy=event.lazy, reason="")
    if not _same_topology(work, slot.ran):
        slot = replace(slot, ran=None)
    if work is not None and slot.ready != work.code_dir:
        slot = replace(slot, ready=None)
    if slot.launching:
        # The result decides: a process that is no longer wanted is ended as soon as it is known.
        return _fetch(slot, now)
    if slot.worker is None:
        return _without_process(slot, now)
    if slot.state in ("killing", "killing-to-relaunch"):
        # A process that was asked to end is not kept, even if its work is wanted once more.
        return _fetch(_enter_killing(slot), now)
    if work == slot.worker.work:
        # The former work is wanted once more, before its process was ended.
        return _enter_started(slot, now), ()
    if _same_topology(work, slot.worker.work):
        return _other_code(slot, now)
    return _end_process(slot, now)


def _other_code(slot: SupervisedSlot, now: float) -> _Result:
    """Keep a process with other code of the topology until the wanted code is here.

    A lazy slot keeps it permanently. A process that was started before the newest restart is ended
    in any case.
    """
    assert slot.wanted is not None and slot.worker is not None
    if slot.lazy and slot.wanted.restarts == slot.worker.work.restarts:
        return _fetch(_enter_started(slot, now), now)
    return _update_or_fetch(_enter(slot, "waiting-for-update", now), now)


def _fetch(slot: SupervisedSlot, now: float) -> _Result:
    """Fetch the wanted code if it is neither here nor being fetched.

    Without effect before ``not_before``: a later tick repeats it.
    """
    if slot.wanted is None or now < slot.not_before:
        return slot, ()
    if slot.wanted.code_dir in (slot.ready, slot.fetching):
        return slot, ()
    return replace(slot, fetching=slot.wanted.code_dir), (model.Fetch(slot.wanted.code_dir),)


def _without_process(slot: SupervisedSlot, now: float) -> _Result:
    """Next step of a slot that has no process and starts none: fetch, launch, or wait."""
    if slot.wanted is None:
        slot = _enter(slot, "empty", now)
        return replace(slot, running_since=None, fetching=None, ready=None), ()
    if slot.ready != slot.wanted.code_dir:
        return _fetch(_enter(slot, "waiting-for-code", now), now)
    work = slot.wanted
    slot = replace(_enter(slot, "waiting-for-start", now), running_since=None)
    if now < slot.not_before:
        return slot, ()
    return replace(slot, launching=True, since=now), (model.Launch(work),)


def _update_or_fetch(slot: SupervisedSlot, now: float) -> _Result:
    """End the process if the wanted code is here, else fetch the code."""
    assert slot.wanted is not None
    if slot.ready == slot.wanted.code_dir:
        return _end_process(slot, now)
    return _fetch(slot, now)


def _enter_killing(slot: SupervisedSlot) -> SupervisedSlot:
    """The slot in the killing state of its wanted work, killing since the same time as before."""
    assert slot.worker is not None
    if _same_topology(slot.wanted, slot.worker.work):
        return replace(slot, state="killing-to-relaunch")
    return replace(slot, state="killing")


def _end_process(slot: SupervisedSlot, now: float) -> _Result:
    """Send TERM now, KILL later; the next code is fetched at the same time."""
    worker = slot.worker
    assert worker is not None
    slot, fetch = _fetch(replace(_enter_killing(slot), since=now, killed_at=None), now)
    return slot, (model.Terminate(worker.id), *fetch)


def _code_ready(
    slot: SupervisedSlot, event: model.CodeReady, now: float, limits: SlotLimits
) -> _Result:
    """Start or replace the process that waits for this code; other code changes nothing."""
    code_dir = event.code_dir
    if slot.fetching == code_dir:
        slot = replace(slot, fetching=None)
    if slot.wanted is None or slot.wanted.code_dir != code_dir:
        return slot, ()
    slot = replace(slot, ready=code_dir)
    if slot.state == "waiting-for-code":
        return _without_process(replace(slot, reason=""), now)
    if slot.state == "waiting-for-update":
        return _end_process(slot, now)
    return slot, ()


def _code_failed(
    slot: SupervisedSlot, event: model.CodeFailed, now: float, limits: SlotLimits
) -> _Result:
    """Set the time of the next fetch; report a lasting failure, once for each reason."""
    if slot.fetching != event.code_dir:
        return slot, ()
    work = slot.wanted
    slot = replace(slot, fetching=None)
    if work is None or work.code_dir != event.code_dir:
        return slot, ()
    instructions: tuple[model.Instruction, ...] = ()
    pause = limits.fetch_again_after
    if event.lasting:
        pause = limits.longest_delay
        if slot.reason != event.reason:
            instructions = (model.Report(work.topology_id, event.reason),)
    return replace(slot, reason=event.reason, not_before=now + pause), instructions


def _launched(
    slot: SupervisedSlot, event: model.Launched, now: float, limits: SlotLimits
) -> _Result:
    """Store the process, and keep, replace or end it by the work that is wanted now."""
    if slot.worker is not None or (not slot.launching and not event.beating):
        # A process that the machine did not launch must end: a slot never has two processes.
        return slot, (model.Kill(event.worker.id),)
    slot = replace(
        slot,
        worker=event.worker,
        launching=False,
        beat_at=now,
        since=now,
        killed_at=None,
        running_since=None,
    )
    if event.beating:
        slot = replace(_enter(slot, "running", now), running_since=now, ran=event.worker.work)
    if slot.wanted == event.worker.work:
        return _enter_started(slot, now), ()
    if _same_topology(slot.wanted, event.worker.work):
        return _other_code(slot, now)
    return _end_process(slot, now)


def _launch_failed(
    slot: SupervisedSlot, event: model.LaunchFailed, now: float, limits: SlotLimits
) -> _Result:
    """Fetch missing code, or count a crash and report it, once for each reason.

    The failure of work that is no longer wanted neither delays nor accuses the wanted work.
    """
    if not slot.launching:
        return slot, ()
    work = event.work
    slot = replace(slot, launching=False)
    if work != slot.wanted:
        return _without_process(slot, now)
    if event.code_missing:
        return _without_process(replace(slot, ready=None, reason=event.reason), now)
    report: tuple[model.Instruction, ...] = ()
    if slot.reason != event.reason:
        report = (model.Report(work.topology_id, event.reason),)
    slot = replace(_count_crash(slot, now, limits), reason=event.reason)
    slot, instructions = _without_process(slot, now)
    return slot, (*report, *instructions)


def _beat(slot: SupervisedSlot, event: model.Beat, now: float, limits: SlotLimits) -> _Result:
    """Note the heartbeat; with the first one the process runs."""
    if slot.worker is None or slot.worker.id != event.worker_id:
        return slot, ()
    work = slot.worker.work
    slot = replace(slot, beat_at=now)
    if slot.running_since is None:
        ran = work if _same_topology(slot.wanted, work) else None
        slot = replace(slot, running_since=now, ran=ran)
    if slot.state != "waiting-for-start":
        return slot, ()
    return replace(_enter(slot, "running", now), reason=""), ()


def _count_crash(
    slot: SupervisedSlot, now: float, limits: SlotLimits, min_delay: float = 0.0
) -> SupervisedSlot:
    """The slot with one crash more, and the back-off, of at least ``min_delay``, that follows.

    The first crash after a stable minute counts as the first one.
    """
    stable = slot.running_since is not None and now - slot.running_since >= limits.stable_after
    crashes = 1 if stable else slot.crashes + 1
    delay = max(min_delay, crash_delay(crashes, limits))
    return replace(slot, crashes=crashes, not_before=now + delay)


def _exited(slot: SupervisedSlot, event: model.Exited, now: float, limits: SlotLimits) -> _Result:
    """Clean up after the process, and do the next step of a slot without one.

    An exit that was not ordered counts as a crash, except that of a superseded worker. It is
    reported unless its status is 0.
    """
    worker = slot.worker
    if worker is None or worker.id != event.worker_id:
        return slot, ()
    ordered = slot.state in ("killing", "killing-to-relaunch")
    report: tuple[model.Instruction, ...] = ()
    if not ordered and slot.wanted is not None:
        if event.status == EXIT_SUPERSEDED:
            # It read an assignment that does not name it: the next refresh decides.
            retry_at = now + limits.stopped_delay
            slot = replace(slot, not_before=retry_at, reason="its worker was superseded")
        else:
            # Status 0 is a TERM that the supervisor did not send: `stop` ends workers before their
            # supervisor.
            min_delay = limits.stopped_delay if event.status == 0 else 0.0
            slot = _count_crash(slot, now, limits, min_delay)
            slot = replace(slot, reason=f"its worker {_describe_exit(event.status)}")
            if event.status != 0:
                report = (model.Report(worker.work.topology_id, slot.reason),)
    # After the crash was counted, which reads ``running_since``.
    slot = replace(slot, worker=None, killed_at=None, running_since=None)
    slot, instructions = _without_process(slot, now)
    return slot, (model.Clean(worker.id), *instructions, *report)


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "ended"
    if status < 0:
        return f"was ended by signal {-status}"
    return f"ended with exit code {status}"


def _tick(slot: SupervisedSlot, event: model.Tick, now: float, limits: SlotLimits) -> _Result:
    """Do the steps whose time has come: fetch, launch, KILL, or the end of a silent process."""
    if slot.worker is None and slot.launching:
        return slot, ()
    if slot.worker is None:
        return _without_process(slot, now)
    if slot.state in ("killing", "killing-to-relaunch"):
        worker_id = slot.worker.id
        slot, fetch = _fetch(slot, now)
        if slot.killed_at is None:
            kill = now - slot.since >= limits.kill_after
        else:
            kill = now - slot.killed_at >= _KILL_INTERVAL_SECS
        if kill:
            return replace(slot, killed_at=now), (model.Kill(worker_id), *fetch)
        return slot, fetch
    silent_for = now - slot.beat_at
    if slot.running_since is None:
        # ``beat_at`` is the start of a process that has not beaten.
        hung = silent_for > max(limits.start_timeout, limits.silence_timeout)
        reason = f"its worker did not report within {limits.start_timeout:g} s of its start"
    else:
        hung = silent_for > limits.silence_timeout
        reason = f"its worker was silent for more than {limits.silence_timeout:g} s"
    if hung:
        report = model.Report(slot.worker.work.topology_id, reason)
        # Counted like a crash, so that a worker that always hangs is not restarted without a pause.
        slot = replace(_count_crash(slot, now, limits), reason=reason)
        slot, instructions = _end_process(slot, now)
        return slot, (*instructions, report)
    if slot.state == "waiting-for-update":
        return _update_or_fetch(slot, now)
    return slot, ()


_HANDLERS: dict[type, Callable[[SupervisedSlot, Any, float, SlotLimits], _Result]] = {
    model.Assigned: _assigned,
    model.CodeReady: _code_ready,
    model.CodeFailed: _code_failed,
    model.Launched: _launched,
    model.LaunchFailed: _launch_failed,
    model.Beat: _beat,
    model.Exited: _exited,
    model.Tick: _tick,
}
"""Class of an event -> its transition; not all of them read ``limits``."""
