"""One step of healing: from a poll result to the attempts to make now.

The healing sensor and the leader both take it. :func:`healing_step` is pure. It observes the
cluster, counts the attempts and their back-off, and keeps the alarm of the mass-loss guard
(``docs/decisions.md#mass-loss``). Its caller launches the reassignments.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from storm_dagster.core.liveness.detection import LivenessResult, observe
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.liveness.pause import SeenPause, note_pause, pause_text
from storm_dagster.core.liveness.retries import (
    Outlook,
    TopologyAttemptMemory,
    end_attempts,
    needs_plan,
    note_attempts,
    permit_attempt,
)
from storm_dagster.model.multimap import multimap
from storm_dagster.model.view import ClusterView


@dataclass(frozen=True)
class HealingSettings:
    """Settings of one healer."""

    limits: LivenessLimits
    boot_id: str
    """Boot id of the healer's machine."""
    longest_gap_secs: float = float("inf")
    """Longest time between two steps after which limits continue to run.

    During a longer one the healer did not observe, so all limits restart.
    """
    patience_secs: float = 0.0
    """Seconds that another healer has for a cause, or for the promise of a plan."""
    are_runs: bool = False
    """True if attempts are Dagster runs: the number of those that change nothing is limited."""


class HealingState(msgspec.Struct, frozen=True):
    """Memory of a healer; its times are of the boot clock, valid until the next boot."""

    liveness: LivenessMemory = msgspec.field(default_factory=LivenessMemory)
    attempts: AttemptMemory = msgspec.field(default_factory=dict)
    """Attempts for the causes of the last step; empty while healing is frozen or paused."""
    topology_attempts: TopologyAttemptMemory | UnsetType = msgspec.field(
        default=UNSET, name="tries"
    )
    """Attempts by topology, also after their causes are over; unset without one."""
    promises: Mapping[str, float] | UnsetType = UNSET
    """Topology id -> boot clock since which a plan promises that an attempt changes something.

    Only for topologies that need a plan, and only with patience for another healer; else unset.
    """
    polled_at: float | UnsetType = UNSET
    """Boot clock of the last step; unset without one, or if all limits restart."""
    alarm: str | None = None
    """Reason of the freeze by the mass-loss guard, since the last step; ``None`` without one."""
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
    """Attempts to make now; none while healing is frozen or paused."""
    memory: S
    """Memory for the next step."""
    observation: LivenessResult
    next_check: float | None
    """Boot clock at which the next limit or back-off ends; ``None`` if none is running."""
    waiting: tuple[str, ...] = ()
    """Names of the topologies whose causes get no attempt now, because none would help them."""
    paused: str | None = None
    """Sentence about the pause by operators, for which all causes wait; ``None`` without one."""


def healing_step(
    view: ClusterView,
    memory: S,
    now: float,
    settings: HealingSettings,
    *,
    busy: Callable[[Collection[Cause]], Collection[str]] = lambda causes: (),
    outlook: Outlook = lambda causes: None,
) -> HealingStepResult[S]:
    """Decide what to heal in ``view`` at boot clock ``now``.

    All limits restart if the healer did not observe the cluster without a gap since the last step.
    ``busy`` gets the causes, if there are any, and returns ids of topologies whose reassignment is
    under way: they get no new attempt. ``outlook`` gets the due causes of a topology whose attempt
    must be planned first (:func:`~storm_dagster.core.liveness.retries.permit_attempt`).
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
    pause = note_pause(view.healing_pause, former_pause, now)
    paused: str | None = None
    if view.healing_pause is not None and pause is not None and not pause.is_over:
        paused = pause_text(view.healing_pause)
    # While the guard freezes healing there are no causes: their attempts are forgotten. Likewise in
    # a pause by operators: afterwards each cause is as new.
    causes = () if paused else observation.causes
    busy_topologies = busy(causes) if causes else ()
    topology_attempts = end_attempts(
        view, memory.topology_attempts or {}, busy_topologies, now, are_runs=settings.are_runs
    )
    permissions = _Permissions(memory, topology_attempts, now, settings, outlook)
    if settings.patience_secs:
        permissions.note_promises(causes)
    due, attempts = due_attempts(
        causes,
        memory.attempts,
        boot_now=now,
        running=_unfinished_runs(causes, memory.attempts, busy_topologies),
        patience_secs=settings.patience_secs,
        permitted=permissions.grant,
    )
    wake_times = [not_before for _, not_before in attempts.values() if not_before > now]
    wake_times += [at for at in permissions.promise_ends() if at > now]
    if observation.next_check is not None:
        wake_times.append(observation.next_check)
    noted_attempts = note_attempts(view, topology_attempts, permissions.attempted, now)
    return HealingStepResult(
        attempts=due,
        memory=replace(
            memory,
            liveness=observation.memory,
            attempts=attempts,
            topology_attempts=noted_attempts or UNSET,
            promises=permissions.promises or UNSET,
            polled_at=now,
            alarm=observation.frozen,
            pause=UNSET if pause is None else pause,
        ),
        observation=observation,
        next_check=min(wake_times, default=None),
        waiting=tuple(permissions.waiting),
        paused=paused,
    )


class _Permissions:
    """Permissions of one step, and the topologies that it attempts."""

    def __init__(
        self,
        memory: HealingState,
        topology_attempts: TopologyAttemptMemory,
        now: float,
        settings: HealingSettings,
        outlook: Outlook,
    ) -> None:
        self._topology_attempts = topology_attempts
        """Attempts before this step, with the results of those that have ended."""
        self._former_promises: Mapping[str, float] = memory.promises or {}
        self._now = now
        self._settings = settings
        self._outlook = outlook
        self.attempted: set[str] = set()
        """Ids of the topologies that get an attempt now."""
        self.promises: dict[str, float] = {}
        """As in :class:`HealingState`."""
        self.waiting: list[str] = []
        """Names of the topologies whose due causes get no attempt now."""

    def grant(self, causes: Sequence[Cause]) -> bool:
        """Decide about all due causes of one topology."""
        topology_id = causes[0].topology_id
        permission = permit_attempt(
            causes,
            self._topology_attempts.get(topology_id),
            now=self._now,
            outlook=self._outlook,
            are_runs=self._settings.are_runs,
        )
        is_granted = permission.is_granted
        if is_granted and permission.planned:
            is_granted = self._now >= self._promise_end(topology_id)
        if is_granted:
            self.attempted.add(topology_id)
        else:
            self.waiting.append(causes[0].name)
        return is_granted

    def note_promises(self, causes: Iterable[Cause]) -> None:
        """Note since when a plan promises something to topologies that need one.

        A host that joins gives its promise to every healer at once: the other one comes first.
        """
        by_topology = multimap((cause.topology_id, cause) for cause in causes)
        for topology_id, own_causes in by_topology.items():
            former = self._topology_attempts.get(topology_id)
            if needs_plan(own_causes, former) and self._outlook(own_causes):
                since = self._former_promises.get(topology_id, self._now)
                # A later time is of another boot's clock.
                self.promises[topology_id] = min(since, self._now)

    def promise_ends(self) -> list[float]:
        """Boot clocks at which the patience with the promises ends."""
        return [self._promise_end(topology_id) for topology_id in self.promises]

    def _promise_end(self, topology_id: str) -> float:
        since = self.promises.get(topology_id, self._now)
        return since + self._settings.patience_secs


def _unfinished_runs(
    causes: Collection[Cause],
    attempts: AttemptMemory,
    busy_topologies: Collection[str],
) -> list[str]:
    """Keys of the last runs of the causes whose topology is busy."""
    run_keys: list[str] = []
    for cause in causes:
        if cause.topology_id in busy_topologies:
            number, _ = attempts.get(cause.key, (0, 0.0))
            run_keys.append(Attempt(cause, number).run_key)
    return run_keys
