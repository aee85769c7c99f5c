"""Causes of reassignments, with keys that make each cause one run, the back-off between attempts,
and the memory of an observer between two polls of the cluster;
:mod:`storm_dagster.zk.sensor_memory` stores it.
"""

from collections.abc import Collection, Iterable, Mapping
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


@dataclass(frozen=True)
class Cause:
    """One reason to reassign tasks of one topology."""

    topology_id: str
    name: str
    generation: int
    """Data version of the assignment that was judged; a newer one makes the cause void."""
    kind: CauseKind
    node: str
    host: str
    port: int
    tasks: tuple[int, ...]
    avoid: tuple[str, ...] = ()
    """Supervisors that must not get new work now (silent ones)."""
    seen: str = ""
    """What was judged: the start token of a worker that does not run, the record of a silent
    topology master.
    """
    silent_secs: float = field(default=0.0, compare=False)
    """How long the observer had seen it so when it judged, of a lost host since its counter last
    rose; 0 where neither is known.
    """

    @property
    def slot(self) -> Slot:
        """The slot that was judged; that of a cause that names no worker has an empty id."""
        return Slot(self.node, self.port)

    @property
    def key(self) -> str:
        """Base of Dagster's run key, equal for every observer of the same cause in the same
        assignment.
        """
        return f"{self.topology_id}:{self.generation}:{self.kind}@{self.node}-{self.port}"

    def describe(self) -> str:
        """The cause in words, with the topology's name."""
        return f"topology {self.name!r}: {self.words()}"

    def words(self) -> str:
        """The cause in words."""
        text = _WORDS[self.kind].format(
            slot=f"{self.host}:{self.port}", host=self.host, node=self.node
        )
        return f"{text} ({len(self.tasks)} tasks)" if self.tasks else text

    def to_json(self) -> dict[str, Any]:
        """The form for a run's config; tasks as ranges, so that it stays small."""
        return {**asdict(self), "tasks": encode_ranges(self.tasks), "avoid": list(self.avoid)}

    @staticmethod
    def from_json(document: Any) -> "Cause":
        """The cause of :meth:`to_json`; :class:`InvalidRequest` for anything else."""
        try:
            return msgspec.convert(
                {**document, "tasks": decode_ranges(document["tasks"])}, Cause, strict=False
            )
        except (KeyError, TypeError, msgspec.ValidationError, Corrupt) as error:
            raise InvalidRequest(
                f"{document!r:.200} is not a cause of a reassignment ({error}): pass what the heartbeat sensor made"
            ) from None


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
"""Cause key -> (attempts made, boot clock before which the next must not start). JSON-able as
lists.
"""

_LONGEST_PAUSE_SECS = 60.0
SPREAD_PAUSE_SECS = 600.0
"""Seconds after a placement in which its tasks are not moved only to spread them better."""


def due_attempts(
    causes: "Iterable[Cause]",
    memory: AttemptMemory,
    *,
    boot_now: float,
    running: Collection[str] = (),
    patience_secs: float = 0.0,
) -> tuple[list[Attempt], dict[str, tuple[int, float]]]:
    """Causes to act on now, and the memory for the next call.

    A cause is tried once it was true for ``patience_secs``, then again after 1, 2, 4 ... 60 s while
    it persists, but not while the run of its last attempt (its run key is in ``running``) goes on;
    a topology with too few workers waits ``SPREAD_PAUSE_SECS``. Causes that are over are forgotten.
    """
    due: list[Attempt] = []
    kept: dict[str, tuple[int, float]] = {}
    for cause in causes:
        first = boot_now + patience_secs
        spread = cause.kind == "too_few_workers"
        longest = SPREAD_PAUSE_SECS if spread else _LONGEST_PAUSE_SECS
        made, not_before = memory.get(cause.key, (0, first))
        # A boot clock that lies further ahead than the longest pause is another machine's.
        if not made:
            not_before = min(not_before, first)
        elif not_before > boot_now + longest:
            not_before = boot_now
        if boot_now >= not_before and f"{cause.key}:{made}" not in running:
            made += 1
            not_before = boot_now + (longest if spread else min(2.0 ** min(made - 1, 10), longest))
            due.append(Attempt(cause, made))
        kept[cause.key] = (made, not_before)
    return due, kept


class FirstSeen(NamedTuple):
    """A version or counter, with the boot clock at which the observer first saw it."""

    value: int
    since: float


class MissingSlot(NamedTuple):
    """A slot of an assignment whose worker's node is absent."""

    since: float
    """Boot clock at which the observer first saw it absent."""
    gone: bool
    """It was there before (a crash), and did not only fail to come yet (a launch)."""
    started: int
    """Newest start of its tasks: another value means another placement with a limit of its own."""


class StartingWorker(NamedTuple):
    """A worker whose tasks have not all reported that they run."""

    since: float
    """Boot clock at which the observer first saw it so."""
    token: str
    """First characters of its start token: another process has its own time."""


class TopologyMemory(msgspec.Struct, frozen=True):
    """One topology as it was last seen, with the boot clock at which each part first looked so."""

    assignment: FirstSeen
    """Data version of its assignment."""
    beats: FirstSeen
    """mzxid of its heartbeat record; -1 when it has none."""
    missing: Mapping[str, MissingSlot] = msgspec.field(default_factory=dict)
    """``"node:port"`` -> absent worker."""
    starting: Mapping[str, StartingWorker] = msgspec.field(default_factory=dict)
    """``"node:port"`` -> worker that is there and does not run all its tasks yet."""
    room: FirstSeen | UnsetType = UNSET
    """Number of workers that it lacks and free slots could take; unset when it lacks none, or is
    not complete.
    """


class LivenessMemory(msgspec.Struct, frozen=True):
    """All that an observer remembers. Empty at first, and after another boot of its machine."""

    boot_id: str = ""
    since: float = 0.0
    """Boot clock of the first look, or after an outage of the moment by which whoever lives has
    reconnected.
    """
    topologies: Mapping[str, TopologyMemory] = msgspec.field(default_factory=dict)
    supervisors: Mapping[str, FirstSeen] = msgspec.field(default_factory=dict)
    """Supervisor id -> its counter."""
    frozen_since: float | None = None
    lost: Mapping[str, float] | UnsetType = UNSET
    """``"node:port"`` -> boot clock at which its worker last counted as lost; unset when none was
    lost recently.
    """
    last_signs: Mapping[str, float] | UnsetType = UNSET
    """Host that went and still holds tasks -> boot clock at which its counter last rose; unset when
    there is none.
    """
    cold: bool = False
    """The first look was at a cluster that had just been started as a whole: lost hosts get a
    launch window.
    """
