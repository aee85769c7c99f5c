"""One step of healing: from a poll result to the attempts to make now.

The healing sensor and the leader both take it. :func:`healing_step` is pure. It observes the
cluster, counts the attempts and their back-off, and keeps the alarm of the mass-loss guard
(``docs/decisions.md#mass-loss``). Its caller launches the reassignments.
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
from storm_dagster.core.liveness.pause import SeenPause, pause_text, see_pause
from storm_dagster.model.view import ClusterView


@dataclass(frozen=True)
class HealingSettings:
    """Settings of one healer."""

    limits: LivenessLimits
    boot_id: str
    """Boot id of the healer's machine."""
    longest_gap_secs: float = float("inf")
    """Longest pause between two steps after which limits continue to run.

    During a longer one the healer did not observe, so all limits restart.
    """
    patience_secs: float = 0.0
    """Seconds that another healer has for a cause before the first attempt."""


class HealingState(msgspec.Struct, frozen=True):
    """Memory of a healer; its times are of the boot clock, valid until the next boot."""

    liveness: LivenessMemory = msgspec.field(default_factory=LivenessMemory)
    attempts: AttemptMemory = msgspec.field(default_factory=dict)
    """Attempts for the causes of the last step; empty without a cause, and during a pause."""
    polled_at: float | UnsetType = UNSET
    """Boot clock of the last step; unset without one, or if all limits restart."""
    alarm: str | None = None
    """Reason why healing pauses since the last step."""
    pause: SeenPause | UnsetType = UNSET
    """Pause by operators that the last step saw; unset without one."""

    @property
    def paused(self) -> bool:
        """True if no cause was healed in the last step because operators have paused healing."""
        return self.pause is not UNSET and not self.pause.is_over


S = TypeVar("S", bound=HealingState)


@dataclass(frozen=True)
class HealingStepResult(Generic[S]):
    """Result of one step."""

    attempts: list[Attempt]
    """Attempts to make now; none while the guard pauses healing."""
    memory: S
    """Memory for the next step."""
    observation: LivenessResult
    next_check: float | None
    """Boot clock at which the next limit or back-off ends; ``None`` if none is running."""
    paused: str | None = None
    """Sentence about the pause by operators, for which all causes wait; ``None`` without one."""


def healing_step(
    view: ClusterView,
    memory: S,
    now: float,
    settings: HealingSettings,
    *,
    busy: Callable[[Collection[Cause]], Collection[str]] = lambda causes: (),
) -> HealingStepResult[S]:
    """Decide what to heal in ``view`` at boot clock ``now``.

    All limits restart if the healer did not observe the cluster without a gap since the last step.
    ``busy`` gets the causes, if there are any, and returns ids of topologies whose reassignment is
    under way: they get no new attempt.
    """
    restart_limits = True
    if memory.polled_at is not UNSET:
        restart_limits = not 0 <= now - memory.polled_at <= settings.longest_gap_secs
    observation = observe(
        view,
        memory.liveness,
        settings.limits,
        boot_id=settings.boot_id,
        boot_now=now,
        restart_limits=restart_limits,
    )
    former_pause = None if memory.pause is UNSET else memory.pause
    pause = see_pause(view.healing_pause, former_pause, now)
    paused: str | None = None
    if view.healing_pause is not None and pause is not None and not pause.is_over:
        paused = pause_text(view.healing_pause)
    attempts = memory.attempts
    if view.supervisors.keys() - memory.liveness.supervisors.keys():
        attempts = _retry_now(attempts, now)
    # While the guard pauses healing there are no causes: their attempts are forgotten.
    due, attempts = due_attempts(
        # Likewise in a pause by operators: afterwards each cause is as new.
        [] if paused else observation.causes,
        attempts,
        boot_now=now,
        running=_unfinished_runs(observation.causes, attempts, busy),
        patience_secs=settings.patience_secs,
    )
    wake_times = [not_before for _, not_before in attempts.values() if not_before > now]
    if observation.next_check is not None:
        wake_times.append(observation.next_check)
    return HealingStepResult(
        attempts=due,
        memory=replace(
            memory,
            liveness=observation.memory,
            attempts=attempts,
            polled_at=now,
            alarm=observation.frozen,
            pause=UNSET if pause is None else pause,
        ),
        observation=observation,
        next_check=min(wake_times, default=None),
        paused=paused,
    )


def _retry_now(attempts: AttemptMemory, now: float) -> AttemptMemory:
    """The attempts after a supervisor was added.

    It may have a slot for tasks that found none.
    """
    retried: dict[str, tuple[int, float]] = {}
    for key, (number, not_before) in attempts.items():
        if number > 0:
            # Due now, and the back-off continues as after the first attempt.
            retried[key] = (1, now)
        else:
            # Another healer still has its patience for a cause without an attempt.
            retried[key] = (number, not_before)
    return retried


def _unfinished_runs(
    causes: Collection[Cause],
    attempts: AttemptMemory,
    busy: Callable[[Collection[Cause]], Collection[str]],
) -> list[str]:
    """Keys of the last runs of the causes whose topology is busy."""
    if not causes:
        return []
    busy_topologies = busy(causes)
    run_keys: list[str] = []
    for cause in causes:
        if cause.topology_id in busy_topologies:
            number, _ = attempts.get(cause.key, (0, 0.0))
            run_keys.append(Attempt(cause, number).run_key)
    return run_keys
