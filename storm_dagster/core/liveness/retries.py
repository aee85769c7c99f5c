"""Rule that decides whether an attempt for a topology is worth making.

See ``docs/decisions.md#worthwhile-attempts``. An assignment gets one attempt without a plan. Later
attempts are made when a plan of the local planner says that they change the assignment, not when
something in the cluster has changed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from storm_dagster.core.liveness.causes import Cause, CauseKind
from storm_dagster.core.usable_slots import UserBounds, draining_slots, usable_slots
from storm_dagster.model.records import HEALING
from storm_dagster.model.view import ClusterView, TopologyView

FRUITLESS_PAUSE_SECS = 60.0
"""Seconds after the request of a run that changed nothing in which its topology gets no run."""
MAX_FRUITLESS = 10
"""Runs that change nothing, for one topology in a day."""
DAY_SECS = 86_400.0
_ENDED = -1
"""Generation of an attempt that has ended, and after which the assignment has changed."""
REMINDER_SECS = 8 * 3600.0
"""Seconds after which a topology that waits gets an attempt although no plan places its tasks."""
_FREE_SLOT_KINDS: frozenset[CauseKind] = frozenset({"unassigned", "too_few_workers"})
"""Causes that free slots make.

The view lacks what only the topology's conf says, such as its reserve: they are always planned.
"""

Outlook = Callable[[Sequence[Cause]], bool | None]
"""Result of a plan for these causes of one topology, made without an effect.

``True`` if the plan changes the assignment. ``False`` if it does not, or while other topologies are
planned first. ``None`` if the topology cannot be planned, for example because its code is not in
reach.
"""


class TopologyAttempts(NamedTuple):
    """Attempts for one topology, also after their causes are over."""

    generation: int
    """Data version of the assignment at the last attempt.

    -1 if the attempt has ended and the assignment has changed since.
    """
    at: float
    """Boot clock of the last attempt."""
    fruitless: tuple[float, ...] = ()
    """Boot clocks of earlier attempts of the last day that changed nothing."""


TopologyAttemptMemory = Mapping[str, TopologyAttempts]
"""Topology id -> its attempts."""


@dataclass(frozen=True)
class Permission:
    """Decision about one topology."""

    is_granted: bool
    planned: bool = False
    """True if a plan promises that the attempt changes the assignment."""


def fruitless_attempts(
    former: TopologyAttempts | None, generation: int, now: float
) -> tuple[float, ...]:
    """Boot clocks of the attempts of the last day that changed nothing, oldest first.

    The last attempt is one of them if the assignment is still that of its time. Times of another
    boot's clock are left out.
    """
    if former is None:
        return ()
    attempts = list(former.fruitless)
    is_noted = bool(attempts) and attempts[-1] == former.at
    if former.generation == generation and not is_noted:
        attempts.append(former.at)
    recent = [at for at in attempts if 0 <= now - at < DAY_SECS]
    return tuple(recent[-MAX_FRUITLESS:])


def permit_attempt(
    causes: Sequence[Cause],
    former: TopologyAttempts | None,
    *,
    now: float,
    outlook: Outlook,
    are_runs: bool,
) -> Permission:
    """Decide whether the due ``causes`` of one topology are worth an attempt.

    With ``are_runs`` an attempt is a Dagster run. Then a topology gets at most one run that changes
    nothing in a minute, and ten in a day. In the rest of that minute or day the leader heals what a
    plan can place: its attempts are no runs.
    """
    generation = causes[0].generation
    fruitless = fruitless_attempts(former, generation, now)
    if are_runs and fruitless:
        is_soon = now - fruitless[-1] < FRUITLESS_PAUSE_SECS
        if is_soon or len(fruitless) >= MAX_FRUITLESS:
            return Permission(False)
    is_reminder = former is not None and not 0 <= now - former.at < REMINDER_SECS
    is_free_slot_cause = any(cause.kind in _FREE_SLOT_KINDS for cause in causes)
    if is_reminder and not is_free_slot_cause:
        return Permission(True)
    if not needs_plan(causes, former):
        return Permission(True)
    promise = outlook(causes)
    if promise is None:
        return Permission(True)
    return Permission(promise, planned=promise)


def needs_plan(causes: Sequence[Cause], former: TopologyAttempts | None) -> bool:
    """True if an attempt for ``causes`` of one topology must be planned first.

    Only the first attempt for an assignment is not, unless free slots are its cause.
    """
    is_first = former is None or former.generation != causes[0].generation
    return not is_first or any(cause.kind in _FREE_SLOT_KINDS for cause in causes)


def end_attempts(
    view: ClusterView,
    topology_attempts: TopologyAttemptMemory,
    busy: Collection[str],
    now: float,
    *,
    are_runs: bool,
) -> dict[str, TopologyAttempts]:
    """The attempts of all topologies, with the result of those that have ended.

    An attempt has ended if its topology is not ``busy``. One that has changed nothing is noted at
    once: a later change may come from another healer. With ``are_runs`` that includes a run before
    which the leader has healed the topology. Topologies that are gone are forgotten.
    """
    memory: dict[str, TopologyAttempts] = {}
    for topology in view.topologies.values():
        former = topology_attempts.get(topology.id)
        if former is None or topology.assignment_at is None:
            continue
        memory[topology.id] = former
        has_ended = topology.id not in busy and former.at < now
        if not has_ended or former.generation == _ENDED:
            continue
        generation = topology.assignment_at.version
        is_unchanged = former.generation == generation
        is_late = are_runs and not is_unchanged and not _healed_by_run(topology, former)
        fruitless = former.fruitless
        if is_unchanged or is_late:
            fruitless = fruitless_attempts(former, former.generation, now)
        ended_generation = generation if is_unchanged else _ENDED
        memory[topology.id] = TopologyAttempts(ended_generation, former.at, fruitless)
    return memory


def _healed_by_run(topology: TopologyView, former: TopologyAttempts) -> bool:
    """True if a run has healed the topology since the attempt, by the history of its assignment."""
    if topology.assignment is None or topology.assignment_at is None:
        return False
    changes = topology.assignment_at.version - former.generation
    newest = topology.assignment.history[: max(0, changes)]
    return any(change.action == HEALING and change.run for change in newest)


def note_attempts(
    view: ClusterView,
    topology_attempts: TopologyAttemptMemory,
    attempted: Collection[str],
    now: float,
) -> dict[str, TopologyAttempts]:
    """The attempts of all topologies for the next step.

    ``topology_attempts`` are the result of :func:`end_attempts`, ``attempted`` the ids of the
    topologies of which an attempt is made now.
    """
    memory = dict(topology_attempts)
    for topology_id in attempted:
        assignment_at = view.topologies[topology_id].assignment_at
        if assignment_at is not None:
            generation = assignment_at.version
            fruitless = fruitless_attempts(topology_attempts.get(topology_id), generation, now)
            memory[topology_id] = TopologyAttempts(generation, now, fruitless)
    return memory


def plan_key(view: ClusterView, causes: Sequence[Cause], bounds: UserBounds) -> tuple[Any, ...]:
    """Everything that a plan for ``causes`` of one topology is made from.

    Two plans of equal keys are equal. Beats, start times and other topologies' tasks are not part
    of it, so that a host that comes and goes gives few different keys.
    """
    topology = view.topologies[causes[0].topology_id]
    avoid: set[str] = set()
    for cause in causes:
        avoid.update(cause.avoid)
    usable = usable_slots(view, placing=[topology.id], avoid=avoid, bounds=bounds)
    # Of supervisors with as many free ports, the planner prefers the one with fewer ports in use.
    supervisors = tuple(
        (
            supervisor.id,
            supervisor.info.host,
            len(set(supervisor.info.ports)),
            tuple(sorted(supervisor.unused)),
        )
        for supervisor in usable.supervisors
    )
    base = topology.base
    # Workers whose supervisor is gone, or avoided, stay where they are only while they live; those
    # of a host that drains stay, too, since the leader moves them.
    unstopped = tuple(
        sorted(
            slot
            for slot in topology.live_workers
            if slot.node not in view.supervisors or slot.node in avoid
        )
    )
    return (
        topology.id,
        causes[0].generation,
        topology.code_dir,
        base.workers,
        tuple(sorted(base.executors.items())),
        tuple(sorted((cause.kind, cause.slot, cause.tasks) for cause in causes)),
        supervisors,
        unstopped,
        tuple(draining_slots(view, topology)),
        usable.more_workers,
    )
