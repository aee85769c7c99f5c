"""Memory of the heartbeat sensor between its ticks, and its decisions.

They are the observed restarts and recoveries, and the run requests made from causes. A recovery
lasts from the poll that missed a worker to the poll that saw all workers run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import dagster as dg
import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from storm_dagster.core.liveness.causes import Attempt, FirstSeen
from storm_dagster.core.liveness.step import HealingState
from storm_dagster.defs.keys import TOPOLOGY_TAG
from storm_dagster.defs.observe.sensors import digest
from storm_dagster.model.bounded_map import BoundedMap
from storm_dagster.model.dagster_names import HEALING_TAGS, REASSIGN_JOB, DagsterNames
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.zk.sensor_memory import decode_memory, encode_memory, load_memory, store_memory
from storm_dagster.zk.storm_cluster_state import StormClusterState

REASSIGN_OP = f"{REASSIGN_JOB}_op"
"""Name of the op of the reassignment job, at which a run's config has its causes."""
CAUSE_TAG = "storm/cause"
"""Run tag: the kind of the causes."""
_MAX_KEY_LENGTH = 240
"""Characters of a run key; a longer one is cut, and ends with its hash."""
_MAX_RECENT_MEMORIES = 8
"""Memories that a process keeps, of all its heartbeat sensors together."""
RecoveryMemory = Mapping[str, tuple[int, float | None]]
"""Topology id -> (version of its last complete assignment, start of the outage).

The start is a time of the boot clock, ``None`` while all workers run.
"""
_EARLY_OBSERVATIONS = 10
"""Observations of a topology that are not limited; later ones are."""
_OBSERVED_SECS = 3600.0
"""Time between two later observations of a topology."""
_DAY_SECS = 86_400.0
"""Time without an observation after which a topology's count restarts."""
_UNSEEN = FirstSeen(-2, 0.0)
"""Placeholder of a counter in the stored record.

No heartbeat record or supervisor has the value -2, so that any current value is a change.
"""


class HealingMemory(HealingState, frozen=True):
    """Memory of the sensor between two polls."""

    used: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Cause key -> highest attempt number of its run keys (current assignments)."""
    workers: Mapping[str, Mapping[str, str]] = msgspec.field(default_factory=dict)
    """Topology id -> ``"node:port"`` -> start token (8 characters) of the worker."""
    recovering: RecoveryMemory = msgspec.field(default_factory=dict)
    """Topologies that were complete once, and their current outages."""
    asked: Mapping[str, tuple[float, str]] = msgspec.field(default_factory=dict)
    """Requests in the record of an earlier release, which are not read.

    :attr:`topology_attempts` has them.
    """
    observed: Mapping[str, tuple[int, float]] = msgspec.field(default_factory=dict)
    """Topology id -> (number of its observations, boot clock of the last one).

    A day without an observation ends the count.
    """

    def to_record(self) -> bytes:
        """Encode the memory without the values that change with every heartbeat.

        In a healthy cluster the bytes are the same after every poll. The counters of heartbeats
        are placeholders, and supervisors are left out. So another process that reads the record
        sees each counter for the first time, and grants it one full timeout.
        """
        topologies = {
            topology_id: replace(part, beats=_UNSEEN)
            for topology_id, part in self.liveness.topologies.items()
        }
        liveness = replace(self.liveness, topologies=topologies, supervisors={})
        return encode_memory(replace(self, liveness=liveness, polled_at=UNSET))


class _CursorText(msgspec.Struct, frozen=True):
    """Fields of the cursor, a JSON object that Dagster stores."""

    memory: str | None = None
    """Name of the memory's record in ZooKeeper."""
    looked_at: float | None = None
    """Boot clock of the last poll; ``None`` if all limits restart."""


class HealingCursor:
    """The sensor's cursor: its record in ZooKeeper, and its last poll.

    The record has the memory. The code server's process also keeps the newest complete memories, so
    that counters are judged over ticks of any length without a write.
    """

    _recent: ClassVar[BoundedMap[str, HealingMemory]] = BoundedMap(_MAX_RECENT_MEMORIES)
    """Text of a cursor -> the complete memory at the end of its tick."""

    def __init__(self, sensor: str, text: str | None) -> None:
        self._sensor = sensor
        self._text = text or ""
        cursor = decode_memory(_CursorText, text)
        self._record = cursor.memory
        self._polled_at = cursor.looked_at

    def load(self, cluster: StormClusterState) -> HealingMemory:
        """The memory at the end of the cursor's tick.

        In the process of that tick it is complete, in another one it is that of the record. Empty
        but for the time of the last poll if the record is lost.
        """
        memory = self._recent.get(self._text)
        if memory is not None:
            return memory
        record = load_memory(cluster, self._sensor, self._record)
        polled_at = UNSET if self._polled_at is None else self._polled_at
        return replace(decode_memory(HealingMemory, record), polled_at=polled_at)

    def store(self, cluster: StormClusterState, memory: HealingMemory, epoch: int) -> None:
        """Write the record if it changed; :meth:`after` names it in the cursor.

        ``epoch`` is that of the view that the memory was made from. If it is over, or another
        process was faster, there is no write, and the cursor names the former record.
        """
        self._record = store_memory(
            cluster, self._sensor, memory.to_record(), self._record, epoch=epoch
        )

    def after(self, memory: HealingMemory) -> str:
        """The text of the cursor after a tick.

        This process keeps ``memory`` for the tick that begins with this cursor.
        """
        polled_at = None if memory.polled_at is UNSET else memory.polled_at
        text = encode_memory(_CursorText(self._record, polled_at)).decode()
        self._recent[text] = memory
        return text


@dataclass(frozen=True)
class Restart:
    """A worker that was restarted in its slot as another process."""

    name: str
    topology_id: str
    node: str
    host: str
    port: int
    pid: int


def restarts(
    view: ClusterView, former_tokens: Mapping[str, Mapping[str, str]]
) -> tuple[list[Restart], dict[str, dict[str, str]]]:
    """Workers that were replaced in place, and the tokens for the next call.

    ``former_tokens`` are those of the last call. A slot without a live worker keeps its last token,
    so that a restart of any length is seen. Slots that the assignment no longer names are
    forgotten.
    """
    restarted: list[Restart] = []
    # Topology id -> "node:port" -> start token, as in HealingMemory.workers.
    tokens: dict[str, dict[str, str]] = {}
    for topology_id, topology in view.topologies.items():
        former_slots = former_tokens.get(topology_id, {})
        slot_tokens: dict[str, str] = {}
        for worker in topology.workers:
            key = worker.slot.key
            former = former_slots.get(key)
            live_worker = topology.live_workers.get(worker.slot)
            if live_worker is None:
                if former is not None:
                    slot_tokens[key] = former
                continue
            token = live_worker.token[:8]
            slot_tokens[key] = token
            if former is not None and former != token:
                restarted.append(
                    Restart(
                        topology.base.name,
                        topology_id,
                        worker.node,
                        worker.host,
                        worker.port,
                        live_worker.pid,
                    )
                )
        if slot_tokens:
            tokens[topology_id] = slot_tokens
    return restarted, tokens


@dataclass(frozen=True)
class Recovery:
    """A topology whose workers all run after an outage."""

    topology_id: str
    name: str
    seconds: float
    """Length of the outage, from the poll that missed a worker."""
    moved: bool
    """True if tasks were moved; otherwise the workers came back in place."""


_Change = TypeVar("_Change", Restart, Recovery)


def recoveries(
    view: ClusterView, memory: RecoveryMemory, boot_now: float
) -> tuple[list[Recovery], dict[str, tuple[int, float | None]]]:
    """Topologies that are complete after an outage, and the memory for the next call.

    A change of the assignment while all workers live (rebalance, deploy) is not a recovery: a
    recovery begins only when a worker is missing under the assignment under which all ran. It
    then ends under any assignment, because the tasks of that worker may be moved.
    """
    recovered: list[Recovery] = []
    next_memory: dict[str, tuple[int, float | None]] = {}
    for topology in view.topologies.values():
        if topology.assignment_at is None:
            continue
        version = topology.assignment_at.version
        former = memory.get(topology.id)
        former_version, outage_since = (None, None) if former is None else former
        if _is_complete(topology):
            next_memory[topology.id] = (version, None)
            # An outage that begins in the future was noted before another boot: its length is
            # unknown.
            if outage_since is not None and boot_now >= outage_since:
                is_moved = version != former_version
                recovered.append(
                    Recovery(topology.id, topology.base.name, boot_now - outage_since, is_moved)
                )
        elif former is not None:
            if outage_since is not None:
                next_memory[topology.id] = former
            # Else an outage begins now, unless the assignment changed or the status shows that
            # workers are replaced on purpose. The topology is then forgotten until it is complete.
            elif former_version == version and topology.base.status in ("ACTIVE", "INACTIVE"):
                next_memory[topology.id] = (version, boot_now)
    return recovered, next_memory


def _is_complete(topology: TopologyView) -> bool:
    """True if every assigned worker runs."""
    if topology.assignment is None:
        return False
    running = {slot for slot, worker in topology.live_workers.items() if worker.status == "running"}
    return all(worker.slot in running for worker in topology.workers)


def assign_attempt_numbers(
    view: ClusterView, attempts: Iterable[Attempt], used: Mapping[str, int]
) -> tuple[list[Attempt], dict[str, int]]:
    """Number the attempts so that none of their run keys was used before.

    Returns them, and the used numbers for the next call. A cause that was over and comes back in
    the same assignment restarts its back-off, but Dagster remembers run keys permanently, so that
    its numbers continue. Numbers of former assignments are forgotten.
    """
    current_assignments = {
        f"{topology.id}:{topology.assignment_at.version}"
        for topology in view.topologies.values()
        if topology.assignment_at
    }
    next_used = {
        key: number for key, number in used.items() if key.rpartition(":")[0] in current_assignments
    }
    numbered: list[Attempt] = []
    for attempt in attempts:
        free_number = next_used.get(attempt.cause.key, 0) + 1
        numbered.append(Attempt(attempt.cause, max(attempt.number, free_number)))
    next_used.update({attempt.cause.key: attempt.number for attempt in numbered})
    return numbered, next_used


def limit_observations(
    changes: Iterable[_Change], observed: Mapping[str, tuple[int, float]], now: float
) -> tuple[list[_Change], dict[str, tuple[int, float]]]:
    """Restarts or recoveries to observe, and the counts for the next call.

    Of one topology the first ten are observed, then one an hour. A day without an observation
    restarts the count, and so does a clock that was set back by another boot. All changes of one
    poll, of equal ``now``, count as one observation.
    """
    counts = {
        topology_id: (count, last)
        for topology_id, (count, last) in observed.items()
        if 0 <= now - last < _DAY_SECS
    }
    worthwhile: list[_Change] = []
    for change in changes:
        count, last = counts.get(change.topology_id, (0, now))
        is_same_poll = count > 0 and last == now
        if count < _EARLY_OBSERVATIONS or now - last >= _OBSERVED_SECS or is_same_poll:
            counts[change.topology_id] = (count if is_same_poll else count + 1, now)
            worthwhile.append(change)
    return worthwhile, counts


def run_requests(attempts: Iterable[Attempt], names: DagsterNames) -> list[dg.RunRequest]:
    """One run for each cause, as a person would count them, and one for each topology.

    A lost host is one cause, however many topologies and slots it had; each other cause is one per
    topology. Causes that share a topology share a run: a second run would find another assignment
    than it was requested for, and change nothing. The run key is
    ``topology:generation:cause:attempt``, so that a repeated tick, after a code reload or a restart
    of the daemon, starts no run twice.
    """
    by_cause: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        cause = attempt.cause
        subject = cause.node if cause.kind == "lost_host" else cause.topology_id
        by_cause.setdefault((cause.kind, subject), []).append(attempt)
    groups: list[list[Attempt]] = []
    for _, members in sorted(by_cause.items()):
        topologies = {member.cause.topology_id for member in members}
        sharing = [
            group
            for group in groups
            if not topologies.isdisjoint(member.cause.topology_id for member in group)
        ]
        groups = [group for group in groups if group not in sharing]
        merged: list[Attempt] = []
        for group in (*sharing, members):
            merged += group
        groups.append(merged)
    return [_request(group, names) for group in groups]


def _group_key(members: list[Attempt]) -> str:
    """Run key of several causes.

    It contains the members, because other slots of the same host are another run.
    """
    first = members[0].cause
    topologies = {f"{member.cause.topology_id}:{member.cause.generation}" for member in members}
    slots = digest(sorted(member.cause.key for member in members))[:12]
    place = f"{first.node}-{slots}" if first.kind == "lost_host" else slots
    number = max(member.number for member in members)
    return f"{'+'.join(sorted(topologies))}:{first.kind}@{place}:{number}"


def _request(members: list[Attempt], names: DagsterNames) -> dg.RunRequest:
    """The run of these attempts; tagged with the topology if all are of one."""
    key = members[0].run_key if len(members) == 1 else _group_key(members)
    if len(key) > _MAX_KEY_LENGTH:
        key = f"{key[:200]}:{digest(key)[:12]}"
    topology_names = sorted({member.cause.name for member in members})
    config: dict[str, Any] = {"causes": [member.cause.to_json() for member in members]}
    tags = {CAUSE_TAG: members[0].cause.kind, **HEALING_TAGS}
    if len(topology_names) == 1:
        tags[TOPOLOGY_TAG] = topology_names[0]
    run_config = {"ops": {names.name(REASSIGN_OP): {"config": config}}}
    return dg.RunRequest(
        run_key=key, job_name=names.name(REASSIGN_JOB), run_config=run_config, tags=tags
    )
