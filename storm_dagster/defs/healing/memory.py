"""Memory of the heartbeat sensor between its ticks, what it tells of restarts and recoveries, and
the run requests made from causes.

A recovery lasts from the poll that missed a worker to the one that saw all run again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import dagster as dg
import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from storm_dagster.core.dataplane.acking import BoundedMap
from storm_dagster.core.liveness.causes import Attempt, FirstSeen
from storm_dagster.core.liveness.step import HealingState
from storm_dagster.defs.keys import TOPOLOGY_TAG
from storm_dagster.defs.observe.sensors import digest
from storm_dagster.model.dagster_names import HEALING_TAGS, REASSIGN_JOB, DagsterNames
from storm_dagster.model.view import ClusterView
from storm_dagster.zk.sensor_memory import decode_memory, encode_memory, load_memory, store_memory
from storm_dagster.zk.storm_cluster_state import StormClusterState

REASSIGN_OP = f"{REASSIGN_JOB}_op"
CAUSE_TAG = "storm/cause"
_LONGEST_KEY = 240
_MOST_RECENT = 8
RecoveryMemory = Mapping[str, tuple[int, float | None]]
"""Topology id -> (version of its assignment when all ran last, boot clock since when some do
not).
"""
_EARLY_RUNS = 7
_LATE_RUN_SECS = 8 * 3600.0
_MOST_OBSERVED = 10
_OBSERVED_SECS = 3600.0
_DAY_SECS = 86_400.0
# A version that no heartbeat record has.
_UNSEEN = FirstSeen(-2, 0.0)


class HealingMemory(HealingState, frozen=True):
    """Memory of the sensor between two polls."""

    used: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Cause key -> highest attempt number that was ever in a run key, for the current
    assignments.
    """
    workers: Mapping[str, Mapping[str, str]] = msgspec.field(default_factory=dict)
    """Topology id -> ``"node:port"`` -> start token of the worker last seen there (8
    characters).
    """
    recovering: RecoveryMemory = msgspec.field(default_factory=dict)
    asked: Mapping[str, tuple[float, str]] = msgspec.field(default_factory=dict)
    """Cause key -> (boot clock of its last run request, capacity of the cluster then)."""
    observed: Mapping[str, tuple[int, float]] = msgspec.field(default_factory=dict)
    """Topology id -> (observations of restarts and recoveries today, boot clock of the last)."""

    def to_record(self) -> bytes:
        """All but what changes with every heartbeat: in a healthy cluster the same bytes after
        every poll.

        Counters that were seen to move are left out. Who reads the record sees them for the first
        time, and grants them one full timeout.
        """
        topologies = {
            topology_id: replace(part, beats=_UNSEEN)
            for topology_id, part in self.liveness.topologies.items()
        }
        # While something waits for a slot, arrivals must be noticed.
        supervisors = dict.fromkeys(self.liveness.supervisors if self.attempts else (), _UNSEEN)
        liveness = replace(self.liveness, topologies=topologies, supervisors=supervisors)
        return encode_memory(replace(self, liveness=liveness, polled_at=UNSET))


class _CursorText(msgspec.Struct, frozen=True):
    memory: str | None = None
    looked_at: float | None = None


class HealingCursor:
    """The sensor's cursor: which record in ZooKeeper holds its memory, and when it polled last.

    The code server's process keeps the newest memories as well, complete, so that counters are
    judged over ticks of any length without a write.
    """

    _recent: ClassVar[BoundedMap[str, HealingMemory]] = BoundedMap(_MOST_RECENT)

    def __init__(self, sensor: str, text: str | None) -> None:
        self._sensor = sensor
        self._text = text or ""
        found = decode_memory(_CursorText, text)
        self._record, self._polled_at = found.memory, found.looked_at

    def load(self, cluster: StormClusterState) -> HealingMemory:
        """The memory as it was at the end of that tick."""
        found = self._recent.get(self._text)
        if found is None:
            found = decode_memory(HealingMemory, load_memory(cluster, self._sensor, self._record))
            found = replace(found, polled_at=UNSET if self._polled_at is None else self._polled_at)
        return found

    def store(self, cluster: StormClusterState, memory: HealingMemory, epoch: int) -> None:
        """Write the record where it changed."""
        self._record = store_memory(
            cluster, self._sensor, memory.to_record(), self._record, epoch=epoch
        )

    def after(self, memory: HealingMemory) -> str:
        """The cursor that leads to ``memory``."""
        polled_at = None if memory.polled_at is UNSET else memory.polled_at
        text = encode_memory(_CursorText(self._record, polled_at)).decode()
        self._recent[text] = memory
        return text


@dataclass(frozen=True)
class Restart:
    """A worker that runs again in its slot as another process."""

    name: str
    topology_id: str
    node: str
    host: str
    port: int
    pid: int


def restarts(
    view: ClusterView, known: Mapping[str, Mapping[str, str]]
) -> tuple[list[Restart], dict[str, dict[str, str]]]:
    """Workers that were replaced in place since ``known``, and what to hand in next time.

    A slot that is empty just now keeps its last token, so that a restart is seen however long it
    took. Slots that the assignment no longer names are forgotten.
    """
    found: list[Restart] = []
    tokens: dict[str, dict[str, str]] = {}
    for topology_id, topology in view.topologies.items():
        slots: dict[str, str] = {}
        for worker in topology.workers:
            key = worker.slot.key
            before = known.get(topology_id, {}).get(key)
            live = topology.live_workers.get(worker.slot)
            token = live.token[:8] if live is not None else before
            if token is None:
                continue
            slots[key] = token
            if live is not None and before is not None and before != token:
                found.append(
                    Restart(
                        topology.base.name,
                        topology_id,
                        worker.node,
                        worker.host,
                        worker.port,
                        live.pid,
                    )
                )
        if slots:
            tokens[topology_id] = slots
    return found, tokens


@dataclass(frozen=True)
class Recovery:
    """A topology all of whose workers run again."""

    topology_id: str
    name: str
    seconds: float
    moved: bool
    """Tasks were moved; otherwise the workers came back in place."""


_Seen = TypeVar("_Seen", Restart, Recovery)


def recoveries(
    view: ClusterView, memory: RecoveryMemory, boot_now: float
) -> tuple[list[Recovery], dict[str, tuple[int, float | None]]]:
    """Topologies that are complete again, and what to hand in next time.

    A change of the assignment while all workers live (rebalance, deploy) is none: a recovery begins
    only when a worker is missing under the assignment under which all ran.
    """
    found: list[Recovery] = []
    known: dict[str, tuple[int, float | None]] = {}
    for topology in view.topologies.values():
        if topology.assignment_at is None:
            continue
        version = topology.assignment_at.version
        before = memory.get(topology.id)
        running = {
            slot for slot, worker in topology.live_workers.items() if worker.status == "running"
        }
        if topology.assignment is not None and all(
            worker.slot in running for worker in topology.workers
        ):
            known[topology.id] = (version, None)
            if before is not None and before[1] is not None and boot_now >= before[1]:
                found.append(
                    Recovery(
                        topology.id, topology.base.name, boot_now - before[1], version != before[0]
                    )
                )
        elif before is not None:
            if before[1] is not None:
                known[topology.id] = before
            elif before[0] == version and topology.base.status in ("ACTIVE", "INACTIVE"):
                known[topology.id] = (version, boot_now)
    return found, known


def assign_attempt_numbers(
    view: ClusterView, attempts: Iterable[Attempt], used: Mapping[str, int]
) -> tuple[list[Attempt], dict[str, int]]:
    """The attempts under numbers that no run key of theirs had before, and what to hand in next
    time.

    A cause that was over and comes back in the same assignment restarts its back-off, but Dagster
    remembers run keys for ever: its numbers go on. Assignments that are no longer in force are
    forgotten.
    """
    in_force = {
        f"{one.id}:{one.assignment_at.version}"
        for one in view.topologies.values()
        if one.assignment_at
    }
    kept = {key: number for key, number in used.items() if key.rpartition(":")[0] in in_force}
    found = [Attempt(a.cause, max(a.number, kept.get(a.cause.key, 0) + 1)) for a in attempts]
    return found, {**kept, **{a.cause.key: a.number for a in found}}


def spare_runs(
    view: ClusterView, attempts: Iterable[Attempt], memory: HealingMemory, now: float
) -> tuple[list[Attempt], dict[str, tuple[float, str]]]:
    """The attempts that are worth a run, and what to hand in next time.

    While the cluster offers nothing else than when it was tried last, a cause that persists gets at
    most ten runs a day: the first seven as they come, then one every eight hours.
    """
    used, supervisors = view.used_ports(), view.supervisors.items()
    ports = {
        node: [*info.ports, info.started, *sorted(used.get(node, ()))] for node, info in supervisors
    }
    capacity = digest([view.epoch, sorted(ports.items()), sorted(view.blacklist)])[:12]
    found: list[Attempt] = []
    asked = {key: each for key, each in memory.asked.items() if key in memory.attempts}
    for attempt in attempts:
        last, offered = asked.get(attempt.cause.key, (0.0, ""))
        if (
            attempt.number <= _EARLY_RUNS
            or offered != capacity
            or not 0 <= now - last < _LATE_RUN_SECS
        ):
            asked[attempt.cause.key] = now, capacity
            found.append(attempt)
    return found, asked


def spare_observations(
    found: Iterable[_Seen], observed: Mapping[str, tuple[int, float]], now: float
) -> tuple[list[_Seen], dict[str, tuple[int, float]]]:
    """Restarts or recoveries that are worth an observation, and what to hand in next time.

    A topology whose workers crash all the time gets the first ten of a day, then one an hour.
    """
    known = {key: each for key, each in observed.items() if 0 <= now - each[1] < _DAY_SECS}
    kept: list[_Seen] = []
    for each in found:
        count, last = known.get(each.topology_id, (0, now))
        # What is seen at one moment is one observation.
        if count < _MOST_OBSERVED or now - last >= _OBSERVED_SECS or (count and last == now):
            known[each.topology_id] = (count + (last != now or not count), now)
            kept.append(each)
    return kept, known


def run_requests(attempts: Iterable[Attempt], names: DagsterNames) -> list[dg.RunRequest]:
    """One run for each cause, as a person would count them.

    A lost host is one cause however many topologies and slots it held; everything else is one cause
    for each topology. The run key is ``topology:generation:cause:attempt``, so that a tick that is
    repeated, after a code reload or a restart of the daemon, starts nothing twice.
    """
    groups: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        cause = attempt.cause
        group = (cause.kind, cause.node if cause.kind == "lost_host" else cause.topology_id)
        groups.setdefault(group, []).append(attempt)
    return [_request(members, names) for _, members in sorted(groups.items())]


def _request(members: list[Attempt], names: DagsterNames) -> dg.RunRequest:
    if len(members) == 1:
        key = members[0].run_key
    else:
        first = members[0].cause
        topologies = sorted({f"{m.cause.topology_id}:{m.cause.generation}" for m in members})
        # The members are part of the key: other slots of the same host are another run.
        slots = digest(sorted(m.cause.key for m in members))[:12]
        where = f"{first.node}-{slots}" if first.kind == "lost_host" else slots
        key = f"{'+'.join(topologies)}:{first.kind}@{where}:{max(m.number for m in members)}"
    if len(key) > _LONGEST_KEY:
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
