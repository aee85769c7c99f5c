"""One step of healing: poll result in, attempts to make now out; the healing sensor and the leader
both take it.

:func:`healing_step` is pure. It observes the cluster, counts the attempts and their back-off, and
keeps the alarm of the mass-loss guard (``docs/decisions.md#mass-loss``); whoever calls it launches
the reassignments.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from storm_dagster.core.liveness.causes import (
    Attempt,
    AttemptMemory,
    Cause,
    LivenessMemory,
    due_attempts,
)
from storm_dagster.core.liveness.detection import LivenessLimits, LivenessResult, observe
from storm_dagster.model.view import ClusterView


@dataclass(frozen=True)
class HealingSettings:
    """Settings of one healer."""

    limits: LivenessLimits
    boot_id: str
    longest_gap_secs: float = float("inf")
    """After a longer pause between two steps, silence of the healer is not silence of a worker."""
    patience_secs: float = 0.0
    """Seconds that a cause is left to another healer before the first attempt."""


class HealingState(msgspec.Struct, frozen=True):
    """Memory of a healer. Times are of the boot clock and mean nothing after another boot."""

    liveness: LivenessMemory = msgspec.field(default_factory=LivenessMemory)
    attempts: AttemptMemory = msgspec.field(default_factory=dict)
    polled_at: float | UnsetType = UNSET
    """Boot clock of the last step; unset when there was none, or when everything gets its full time
    again.
    """
    alarm: str | None = None
    """Why healing pauses, as of the last step."""


S = TypeVar("S", bound=HealingState)


@dataclass(frozen=True)
class HealingStepResult(Generic[S]):
    """Result of one step."""

    attempts: list[Attempt]
    """Attempts to make now; none while the guard pauses healing."""
    memory: S
    observation: LivenessResult
    next_check: float | None
    """Boot clock at which the next limit or back-off ends; ``None`` when none is running."""


def healing_step(
    view: ClusterView,
    memory: S,
    now: float,
    settings: HealingSettings,
    *,
    busy: Callable[[Collection[Cause]], Collection[str]] = lambda causes: (),
) -> HealingStepResult[S]:
    """Decide what to heal in ``view`` at boot clock ``now``.

    ``busy`` gives, when there are causes, ids of topologies whose reassignment is under way: they
    get no new attempt.
    """
    gap = 0.0 if memory.polled_at is UNSET else now - memory.polled_at
    grant = memory.polled_at is UNSET or not 0 <= gap <= settings.longest_gap_secs
    seen = observe(
        view, memory.liveness, settings.limits, boot_id=settings.boot_id, boot_now=now, grant=grant
    )
    made = memory.attempts
    if view.supervisors.keys() - memory.liveness.supervisors.keys():
        # What found no slot may find one now.
        made = {key: (1, now) if number else (0, until) for key, (number, until) in made.items()}
    waiting = busy(seen.causes) if seen.causes else ()
    running = [
        f"{each.key}:{made.get(each.key, (0, now))[0]}"
        for each in seen.causes
        if each.topology_id in waiting
    ]
    due, attempts = due_attempts(
        seen.causes, made, boot_now=now, running=running, patience_secs=settings.patience_secs
    )
    ends = [seen.next_check, *(until for _, until in attempts.values() if until > now)]
    return HealingStepResult(
        attempts=due,
        memory=replace(
            memory, liveness=seen.memory, attempts=attempts, polled_at=now, alarm=seen.frozen
        ),
        observation=seen,
        next_check=min((end for end in ends if end is not None), default=None),
    )
