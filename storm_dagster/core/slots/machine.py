"""State machine of one slot (port) of a supervisor, pure, after Storm 2's ``Slot``
(``docs/decisions.md#slot-machine``).

``step(slot, event, now, limits)`` gives the next slot and the instructions that the supervisor has
to execute; what comes of an instruction comes back as another event. Times are seconds of one
monotonic clock. The machine never has two processes in one slot: ``Launch`` is given only while
none is known and none is being started.

========================  ==========================================================================
state                     meaning
========================  ==========================================================================
``empty``                 nothing is wanted here and nothing runs
``waiting-for-code``      work is wanted, its code is not on this disk yet
``waiting-for-start``     the code is there; a process is due, being started, or has not beaten yet
``running``               the process beats
``waiting-for-update``    the process runs on while the new code of its topology is fetched
``killing``               the process has to go, for nothing or for another topology
``killing-to-relaunch``   the process has to go, and one of the same topology follows
========================  ==========================================================================
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from storm_dagster.core.slots import model
from storm_dagster.core.slots.model import SlotLimits, SupervisedSlot, Work
from storm_dagster.model.exit_codes import EXIT_SUPERSEDED

_Result: TypeAlias = "tuple[SupervisedSlot, tuple[model.Instruction, ...]]"
_KILL_AGAIN = 5.0


def crash_delay(crashes: int, limits: SlotLimits) -> float:
    """Pause before a restart, by crashes in a row: 0, 1, 2, 4 ...
    (``docs/decisions.md#restart-in-place``).
    """
    return 0.0 if crashes <= 1 else min(limits.longest_delay, 2.0 ** min(crashes - 2, 30))


def is_restarting(slot: SupervisedSlot) -> bool:
    """Whether a worker that ran here is being brought back in place
    (``SupervisorInfo.restarting``).
    """
    return _same_topology(slot.wanted, slot.ran) and slot.state not in (
        "running",
        "waiting-for-update",
    )


def extend_deadline(slot: SupervisedSlot, seconds: float) -> SupervisedSlot:
    """Extend the heartbeat deadline by ``seconds`` without a supervisor (a suspended machine, a
    stopped process).

    Silence while nobody watched proves nothing about the worker.
    """
    return replace(slot, beat_at=slot.beat_at + seconds)


def step(slot: SupervisedSlot, event: model.Event, now: float, limits: SlotLimits) -> _Result:
    """The slot after ``event``, and instructions. Late results that fit nothing any more change
    nothing.
    """
    return _HANDLERS[type(event)](slot, event, now, limits)


def _same_topology(one: Work | None, other: Work | None) -> bool:
    return one is not None and other is not None and one.topology_id == other.topology_id


def _enter(slot: SupervisedSlot, state: model.SlotState, now: float) -> SupervisedSlot:
    return replace(slot, state=state, since=now) if slot.state != state else slot


def _assigned(
    slot: SupervisedSlot, event: model.Assigned, now: float, limits: SlotLimits
) -> _Result:
    work, lazy = event.work, event.lazy
    if work == slot.wanted and lazy == slot.lazy:
        return slot, ()
    if work != slot.wanted and work != slot.counted:
        # Other code starts with a clean slate: what a rollback brings back must not wait for what
        # crashed.
        slot = replace(slot, crashes=0, not_before=0.0)
    slot = replace(slot, counted=None, wanted=work, lazy=lazy, reason="")
    if not _same_topology(work, slot.ran):
        slot = replace(slot, ran=None)
    if work is not None and slot.ready != work.code_dir:
        slot = replace(slot, ready=None)
    if slot.launching:
        # The answer decides: a process that nobody wants any more is ended as soon as it is known.
        return _fetch(slot, now)
    if slot.worker is None:
        return _without_process(slot, now)
    if slot.state in ("killing", "killing-to-relaunch"):
        return _fetch(_enter_killing(slot), now)
    if work == slot.worker.work:
        # Back to what runs before anything was done to it.
        return _enter(
            slot, "running" if slot.running_since is not None else "waiting-for-start", now
        ), ()
    if _same_topology(work, slot.worker.work):
        return _other_code(slot, now)
    return _end_process(slot, now)


def _other_code(slot: SupervisedSlot, now: float) -> _Result:
    """Keep a process with other code of the topology running until the wanted code is here, or for
    good if lazy.

    One that was started before the newest restart goes in any case.
    """
    assert slot.wanted is not None and slot.worker is not None
    if slot.lazy and slot.wanted.restarts == slot.worker.work.restarts:
        slot = _enter(
            slot, "running" if slot.running_since is not None else "waiting-for-start", now
        )
        return _fetch(slot, now)
    return _update_or_fetch(_enter(slot, "waiting-for-update", now), now)


def _fetch(slot: SupervisedSlot, now: float) -> _Result:
    """Ask for the wanted code when it is neither here nor on its way."""
    if (
        slot.wanted is None
        or slot.wanted.code_dir in (slot.ready, slot.fetching)
        or now < slot.not_before
    ):
        return slot, ()
    return replace(slot, fetching=slot.wanted.code_dir), (model.Fetch(slot.wanted.code_dir),)


def _without_process(slot: SupervisedSlot, now: float) -> _Result:
    """Next state of a slot that has no process and starts none."""
    if slot.wanted is None:
        return replace(
            _enter(slot, "empty", now), running_since=None, fetching=None, ready=None
        ), ()
    if slot.ready != slot.wanted.code_dir:
        return _fetch(_enter(slot, "waiting-for-code", now), now)
    work = slot.wanted
    slot = replace(_enter(slot, "waiting-for-start", now), running_since=None)
    if now < slot.not_before:
        return slot, ()
    return replace(slot, launching=True, since=now), (model.Launch(work),)


def _update_or_fetch(slot: SupervisedSlot, now: float) -> _Result:
    assert slot.wanted is not None
    return _end_process(slot, now) if slot.ready == slot.wanted.code_dir else _fetch(slot, now)


def _enter_killing(slot: SupervisedSlot) -> SupervisedSlot:
    assert slot.worker is not None
    return replace(
        slot,
        state="killing-to-relaunch" if _same_topology(slot.wanted, slot.worker.work) else "killing",
    )


def _end_process(slot: SupervisedSlot, now: float) -> _Result:
    """TERM now, KILL after a while; code that comes next is fetched meanwhile."""
    worker = slot.worker
    assert worker is not None
    slot, fetch = _fetch(replace(_enter_killing(slot), since=now, killed_at=None), now)
    return slot, (model.Terminate(worker.id), *fetch)


def _code_ready(
    slot: SupervisedSlot, event: model.CodeReady, now: float, limits: SlotLimits
) -> _Result:
    code_dir = event.code_dir
    if slot.fetching == code_dir:
        slot = replace(slot, fetching=None)
    if slot.wanted is None or slot.wanted.code_dir != code_dir:
        return slot, ()
    slot = replace(
        slot, ready=code_dir, reason="" if slot.state == "waiting-for-code" else slot.reason
    )
    if slot.state == "waiting-for-code":
        return _without_process(slot, now)
    if slot.state == "waiting-for-update":
        return _end_process(slot, now)
    return slot, ()


def _code_failed(
    slot: SupervisedSlot, event: model.CodeFailed, now: float, limits: SlotLimits
) -> _Result:
    if slot.fetching != event.code_dir:
        return slot, ()
    work = slot.wanted
    slot = replace(slot, fetching=None)
    if work is None or work.code_dir != event.code_dir:
        return slot, ()
    news = slot.reason != event.reason
    pause = limits.longest_delay if event.lasting else limits.fetch_again_after
    slot = replace(slot, reason=event.reason, not_before=now + pause)
    return slot, (model.Report(work.topology_id, event.reason),) if news and event.lasting else ()


def _launched(
    slot: SupervisedSlot, event: model.Launched, now: float, limits: SlotLimits
) -> _Result:
    if slot.worker is not None or (not slot.launching and not event.beating):
        # A process that the machine did not ask for must not stay: two in one slot are never
        # allowed.
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
        return slot if event.beating else _enter(slot, "waiting-for-start", now), ()
    if _same_topology(slot.wanted, event.worker.work):
        return _other_code(slot, now)
    return _end_process(slot, now)


def _launch_failed(
    slot: SupervisedSlot, event: model.LaunchFailed, now: float, limits: SlotLimits
) -> _Result:
    if not slot.launching:
        return slot, ()
    work = slot.wanted
    slot = replace(slot, launching=False)
    if work is None:
        return _without_process(slot, now)
    if event.code_missing:
        return _without_process(replace(slot, ready=None, reason=event.reason), now)
    report = (model.Report(work.topology_id, event.reason),) if slot.reason != event.reason else ()
    slot = replace(_count_crash(slot, now, limits), reason=event.reason)
    slot, instructions = _without_process(slot, now)
    return slot, (*report, *instructions)


def _beat(slot: SupervisedSlot, event: model.Beat, now: float, limits: SlotLimits) -> _Result:
    if slot.worker is None or slot.worker.id != event.worker_id:
        return slot, ()
    work = slot.worker.work
    slot = replace(slot, beat_at=now)
    if slot.running_since is None:
        slot = replace(
            slot, running_since=now, ran=work if _same_topology(slot.wanted, work) else None
        )
    if slot.state != "waiting-for-start":
        return slot, ()
    return replace(_enter(slot, "running", now), reason=""), ()


def _count_crash(
    slot: SupervisedSlot, now: float, limits: SlotLimits, least: float = 0.0
) -> SupervisedSlot:
    stable = slot.running_since is not None and now - slot.running_since >= limits.stable_after
    crashes = 1 if stable else slot.crashes + 1
    return replace(slot, crashes=crashes, not_before=now + max(least, crash_delay(crashes, limits)))


def _exited(slot: SupervisedSlot, event: model.Exited, now: float, limits: SlotLimits) -> _Result:
    worker = slot.worker
    if worker is None or worker.id != event.worker_id:
        return slot, ()
    ordered = slot.state in ("killing", "killing-to-relaunch")
    report: tuple[model.Instruction, ...] = ()
    if not ordered and slot.wanted is not None:
        if event.status == EXIT_SUPERSEDED:
            # It read an assignment that does not name it: the next refresh decides.
            slot = replace(
                slot, not_before=now + limits.stopped_delay, reason="its worker was superseded"
            )
        else:
            # Status 0 is a TERM that did not come from here: `stop` ends workers before their
            # supervisor.
            least = limits.stopped_delay if event.status == 0 else 0.0
            slot = _count_crash(slot, now, limits, least)
            slot = replace(slot, reason=f"its worker {_describe_exit(event.status)}")
            if event.status != 0:
                report = (model.Report(worker.work.topology_id, slot.reason),)
    slot = replace(slot, worker=None, killed_at=None, running_since=None)
    slot, instructions = _without_process(slot, now)
    return slot, (model.Clean(worker.id), *instructions, *report)


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "ended"
    return f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"


def _tick(slot: SupervisedSlot, event: model.Tick, now: float, limits: SlotLimits) -> _Result:
    if slot.worker is None:
        return (slot, ()) if slot.launching else _without_process(slot, now)
    if slot.state in ("killing", "killing-to-relaunch"):
        worker_id = slot.worker.id
        slot, fetch = _fetch(slot, now)
        first = slot.killed_at is None and now - slot.since >= limits.kill_after
        if first or (slot.killed_at is not None and now - slot.killed_at >= _KILL_AGAIN):
            return replace(slot, killed_at=now), (model.Kill(worker_id), *fetch)
        return slot, fetch
    silent_for = now - slot.beat_at
    if slot.running_since is None:
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
