"""Causes of reassignments, back-off between attempts, and an observer's memory.

The key of a cause makes it one run. The memory passes from one poll of the cluster to the next;
:mod:`storm_dagster.zk.sensor_memory` stores it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from storm_dagster.model.errors import Corrupt, InvalidRequest
from storm_dagster.model.ranges import decode_ranges, encode_ranges
from storm_dagster.model.slot import Slot

CauseKind = Literal[
    "dead_worker",
    "dead_task",
    "never_ran",
    "lost_host",
    "silent_master",
    "unassigned",
    "too_few_workers",
]

_WORDS: Mapping[CauseKind, str] = {
    "dead_worker": "worker {slot} did not come back",
    "dead_task": "a task of worker {slot} is dead",
    "never_ran": "worker {slot} is there, but its tasks did not report within the launch window",
    "lost_host": "host {host} is lost with supervisor {node}, so worker {slot} is gone",
    "silent_master": "the topology master in worker {slot} is silent",
    "unassigned": "tasks have no slot",
    "too_few_workers": "it has fewer workers than it asked for, and slots are free",
}
"""Kind of cause -> the cause in words."""


@dataclass(frozen=True)
class Cause:
    """One reason to reassign tasks of one topology."""

    topology_id: str
    name: str
    generation: int
    """Data version of the assignment that was judged; a newer one makes the cause void."""
    kind: CauseKind
    node: str
    """Supervisor id of the judged worker; empty for a cause without a worker, as is ``host``."""
    host: str
    port: int
    """Port of the judged worker; 0 for a cause without a worker."""
    tasks: tuple[int, ...]
    """All tasks of the worker, or those without a slot; empty for too few workers."""
    avoid: tuple[str, ...] = ()
    """Supervisors that must not get new work now (silent ones)."""
    seen: str = ""
    """Identity of the judged thing.

    It is the start token of a worker that does not run, or the record of a silent topology master.
    """
    silent_secs: float = field(default=0.0, compare=False)
    """Time for which the observer had seen the silence when it judged; 0 if it is unknown.

    For a lost host it counts from the last rise of the host's counter.
    """

    @property
    def slot(self) -> Slot:
        """The judged slot; a cause without a worker has a slot with an empty id."""
        return Slot(self.node, self.port)

    @property
    def key(self) -> str:
        """Base of Dagster's run key.

        It is equal for every observer of the same cause in the same assignment.
        """
        return f"{self.topology_id}:{self.generation}:{self.kind}@{self.node}-{self.port}"

    @property
    def subject(self) -> str:
        """The key without the assignment."""
        return _subject_of(self.key)

    def describe(self) -> str:
        """The cause in words, with the topology's name."""
        return f"topology {self.name!r}: {self.words()}"

    def words(self) -> str:
        """The cause in words."""
        slot = f"{self.host}:{self.port}"
        text = _WORDS[self.kind].format(slot=slot, host=self.host, node=self.node)
        if self.tasks:
            text += f" ({len(self.tasks)} tasks)"
        return text

    def to_json(self) -> dict[str, Any]:
        """Return the form for a run's config; tasks are ranges, so that it stays small."""
        return {**asdict(self), "tasks": encode_ranges(self.tasks), "avoid": list(self.avoid)}

    @staticmethod
    def from_json(document: Any) -> "Cause":
        """Read the document of :meth:`to_json`; :class:`InvalidRequest` for any other."""
        try:
            fields = {**document, "tasks": decode_ranges(document["tasks"])}
            return msgspec.convert(fields, Cause, strict=False)
        except (KeyError, TypeError, msgspec.ValidationError, Corrupt) as error:
            raise InvalidRequest(
                f"{document!r:.200} is not a cause of a reassignment ({error}): pass one of the "
                "heartbeat sensor"
            ) from None


def _subject_of(key: str) -> str:
    """The subject of the cause with that key."""
    topology_id, _, judged = key.split(":", 2)
    return f"{topology_id}:{judged}"


@dataclass(frozen=True)
class Attempt:
    """A cause to act on now, and the number of the attempt."""

    cause: "Cause"
    number: int

    @property
    def run_key(self) -> str:
        """``topology:generation:cause:attempt``."""
        return f"{self.cause.key}:{self.number}"


AttemptMemory = Mapping[str, tuple[int, float]]
"""Cause key -> (number of attempts, boot clock before which the next must not start).

JSON has lists for the pairs.
"""

_MAX_PAUSE_SECS = 60.0
"""Longest back-off between two attempts for one cause."""
_MAX_DOUBLINGS = 10
"""2**10 s are longer than every back-off; a larger power could overflow."""
SPREAD_PAUSE_SECS = 600.0
"""Seconds after a placement in which its tasks are not moved only to spread them better."""


def due_attempts(
    causes: Iterable[Cause],
    memory: AttemptMemory,
    *,
    boot_now: float,
    running: Collection[str] = (),
    patience_secs: float = 0.0,
    permitted: Callable[[Sequence[Cause]], bool] = lambda causes: True,
) -> tuple[list[Attempt], dict[str, tuple[int, float]]]:
    """Return the causes to act on now, and the memory for the next call.

    The first attempt is due when the cause has been true for ``patience_secs``, also while the
    assignment changed, the next ones after 1, 2, 4 ... 60 s while it persists. A topology with too
    few workers waits ``SPREAD_PAUSE_SECS``. No attempt is due while the run of the last one (its
    run key is in ``running``) continues. Causes that are over are forgotten. ``permitted`` gets all
    due causes of one topology. Without its permission they stay due, and their number of attempts
    does not rise.
    """
    attempts_of: dict[str, tuple[int, float]] = {}
    due_of: dict[str, list[Cause]] = {}
    first_times = _first_times(memory) if patience_secs else {}
    for cause in causes:
        first_at = min(boot_now + patience_secs, first_times.get(cause.subject, float("inf")))
        _, max_pause = _pauses(cause)
        attempts, not_before = memory.get(cause.key, (0, first_at))
        # A time that lies further ahead than the patience, or than the longest back-off, is of
        # another machine's boot clock.
        if not attempts:
            not_before = min(not_before, first_at)
        elif not_before > boot_now + max_pause:
            not_before = boot_now
        attempts_of[cause.key] = (attempts, not_before)
        if boot_now >= not_before and f"{cause.key}:{attempts}" not in running:
            due_of.setdefault(cause.topology_id, []).append(cause)
    due: list[Attempt] = []
    for topology_causes in due_of.values():
        if not permitted(topology_causes):
            continue
        for cause in topology_causes:
            attempts, _ = attempts_of[cause.key]
            attempts_of[cause.key] = (attempts + 1, boot_now + _pause_after(cause, attempts))
            due.append(Attempt(cause, attempts + 1))
    return due, attempts_of


def _first_times(memory: AttemptMemory) -> dict[str, float]:
    """Subject of each cause -> boot clock at which its next attempt was due."""
    return {_subject_of(key): not_before for key, (_, not_before) in memory.items()}


def _pause_after(cause: Cause, attempts: int) -> float:
    """Seconds until the attempt after the next one, if the cause had that many ``attempts``."""
    min_pause, max_pause = _pauses(cause)
    back_off = 2.0 ** min(attempts, _MAX_DOUBLINGS)
    return min(max(back_off, min_pause), max_pause)


def _pauses(cause: Cause) -> tuple[float, float]:
    """Shortest and longest pause between two attempts for a cause."""
    if cause.kind == "too_few_workers":
        return SPREAD_PAUSE_SECS, SPREAD_PAUSE_SECS
    return 0.0, _MAX_PAUSE_SECS


class FirstSeen(NamedTuple):
    """A version or counter, with the boot clock at which the observer first saw it."""

    value: int
    since: float


class MissingSlot(NamedTuple):
    """A slot of an assignment whose worker's node is absent."""

    since: float
    """Boot clock at which the observer first saw it absent."""
    gone: bool
    """True if it ran before (a crash); False if it has not come yet (a launch)."""
    started: int
    """Newest start of its tasks: another value means another placement, with its own limit."""


class StartingWorker(NamedTuple):
    """A worker whose tasks have not all reported that they run."""

    since: float
    """Boot clock at which the observer first saw it in this state."""
    token: str
    """First characters of its start token: another process gets its own time."""


class TopologyMemory(msgspec.Struct, frozen=True):
    """State of one topology at the last poll, with the boot clock of each change."""

    assignment: FirstSeen
    """Data version of its assignment."""
    beats: FirstSeen
    """mzxid of its heartbeat record; -1 if it has none."""
    missing: Mapping[str, MissingSlot] = msgspec.field(default_factory=dict)
    """``"node:port"`` -> absent worker."""
    starting: Mapping[str, StartingWorker] = msgspec.field(default_factory=dict)
    """``"node:port"`` -> worker that lives and does not run all its tasks yet."""
    room: FirstSeen | UnsetType = UNSET
    """Number of workers that it lacks and that free slots could take.

    Unset if it lacks none, or if workers are missing or starting.
    """


class LivenessMemory(msgspec.Struct, frozen=True):
    """Memory of an observer, empty at first and after another boot of its machine."""

    boot_id: str = ""
    since: float = 0.0
    """Boot clock of the first poll.

    After an outage it is the moment by which all live processes have reconnected.
    """
    topologies: Mapping[str, TopologyMemory] = msgspec.field(default_factory=dict)
    """Topology id -> its memory, of the topologies whose dead tasks are reassigned."""
    supervisors: Mapping[str, FirstSeen] = msgspec.field(default_factory=dict)
    """Supervisor id -> its counter."""
    frozen_since: float | None = None
    """Boot clock at which the mass loss was first seen; ``None`` without one."""
    lost: Mapping[str, float] | UnsetType = UNSET
    """``"node:port"`` -> boot clock at which its worker last counted as lost.

    Unset if no worker was lost recently.
    """
    last_signs: Mapping[str, float] | UnsetType = UNSET
    """Supervisor that is gone but still has tasks -> boot clock at which its counter last rose.

    Unset if there is no such supervisor.
    """
    cold: bool = False
    """True if the whole cluster had just started at the first poll.

    Lost hosts then get a launch window.
    """
