"""What the heartbeat sensor keeps between its ticks, and how causes become run requests. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from storm_dagster.core.causes import Attempt, AttemptMemory
from storm_dagster.core.liveness_memory import LivenessMemory
from storm_dagster.defs.keys import TOPOLOGY_TAG
from storm_dagster.defs.recoveries import RecoveryMemory
from storm_dagster.model.view import ClusterView

__all__ = [
    "CAUSE_TAG",
    "REASSIGN_JOB",
    "REASSIGN_OP",
    "HealingMemory",
    "Restart",
    "numbered",
    "restarts",
    "run_requests",
]

REASSIGN_JOB = "reassign_topologies"
REASSIGN_OP = "reassign_topologies_op"
CAUSE_TAG = "storm/cause"
_LONGEST_KEY = 240


@dataclass(frozen=True)
class HealingMemory:
    """The sensor's cursor. Times are of the boot clock and mean nothing after another boot."""

    liveness: LivenessMemory = field(default_factory=LivenessMemory)
    attempts: AttemptMemory = field(default_factory=dict)
    looked_at: float | None = None
    """Boot clock of the last look at the cluster."""
    used: Mapping[str, int] = field(default_factory=dict)
    """Cause key -> highest attempt number that was ever in a run key, for the assignments of now."""
    workers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Topology id -> ``"node:port"`` -> start token of the worker last seen there (8 characters)."""
    alarm: str | None = None
    """Why healing pauses, as it was last observed."""
    recovering: RecoveryMemory = field(default_factory=dict)

    def to_cursor(self) -> str:
        """Compact JSON."""
        document = {
            "liveness": self.liveness.to_json(),
            "attempts": {key: list(value) for key, value in self.attempts.items()},
            "looked_at": self.looked_at,
            "used": self.used,
            "workers": self.workers,
            "alarm": self.alarm,
            "recovering": {key: list(value) for key, value in self.recovering.items()},
        }
        return json.dumps(document, separators=(",", ":"))

    @staticmethod
    def from_cursor(cursor: str | None) -> HealingMemory:
        """The memory of :meth:`to_cursor`; anything else is an empty memory, which only grants time."""
        try:
            document = json.loads(cursor or "{}")
            looked_at = document["looked_at"]
            return HealingMemory(
                liveness=LivenessMemory.from_json(document["liveness"]),
                attempts={
                    str(key): (int(made), float(not_before))
                    for key, (made, not_before) in document["attempts"].items()
                },
                looked_at=None if looked_at is None else float(looked_at),
                used={str(key): int(number) for key, number in document["used"].items()},
                workers={
                    str(topology_id): {str(slot): str(token) for slot, token in slots.items()}
                    for topology_id, slots in document["workers"].items()
                },
                alarm=None if document["alarm"] is None else str(document["alarm"]),
                recovering={
                    str(key): (int(version), None if since is None else float(since))
                    for key, (version, since) in document.get("recovering", {}).items()
                },
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return HealingMemory()


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

    A slot that is empty just now keeps its last token, so that a restart is seen however long it took.
    Slots that the assignment no longer names are forgotten.
    """
    found: list[Restart] = []
    tokens: dict[str, dict[str, str]] = {}
    for topology_id, topology in view.topologies.items():
        slots: dict[str, str] = {}
        for worker in topology.assignment.workers if topology.assignment else ():
            name = f"{worker.node}:{worker.port}"
            before = known.get(topology_id, {}).get(name)
            live = topology.live_workers.get(worker.slot)
            token = live.token[:8] if live is not None else before
            if token is None:
                continue
            slots[name] = token
            if live is not None and before is not None and before != token:
                found.append(
                    Restart(topology.base.name, topology_id, worker.node, worker.host, worker.port, live.pid)
                )
        if slots:
            tokens[topology_id] = slots
    return found, tokens


def numbered(
    view: ClusterView, attempts: Iterable[Attempt], used: Mapping[str, int]
) -> tuple[list[Attempt], dict[str, int]]:
    """The attempts under numbers that no run key of theirs had before, and what to hand in next time.

    A cause that was over and comes back in the same assignment begins its back-off anew, but Dagster
    remembers run keys for ever: its numbers go on. Assignments that are no longer in force are forgotten.
    """
    in_force = {
        f"{topology.id}:{topology.assignment_at.version}"
        for topology in view.topologies.values()
        if topology.assignment_at is not None
    }
    kept = {key: number for key, number in used.items() if key.rpartition(":")[0] in in_force}
    found = [Attempt(a.cause, max(a.number, kept.get(a.cause.key, 0) + 1)) for a in attempts]
    return found, {**kept, **{a.cause.key: a.number for a in found}}


def run_requests(attempts: Iterable[Attempt]) -> list[dg.RunRequest]:
    """One run for each cause, as a person would count them.

    A lost host is one cause however many topologies and slots it held; everything else is one cause for
    each topology. The run key is ``topology:generation:cause:attempt``, so that a tick that is repeated,
    after a code reload or a restart of the daemon, starts nothing twice.
    """
    groups: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        cause = attempt.cause
        group = (cause.kind, cause.node if cause.kind == "lost_host" else cause.topology_id)
        groups.setdefault(group, []).append(attempt)
    return [_request(members) for _, members in sorted(groups.items())]


def _request(members: list[Attempt]) -> dg.RunRequest:
    if len(members) == 1:
        key = members[0].run_key
    else:
        first = members[0].cause
        topologies = sorted({f"{m.cause.topology_id}:{m.cause.generation}" for m in members})
        # The members are part of the key: other slots of the same host are another run.
        slots = _digest(sorted(m.cause.key for m in members))
        where = f"{first.node}-{slots}" if first.kind == "lost_host" else slots
        key = f"{'+'.join(topologies)}:{first.kind}@{where}:{max(m.number for m in members)}"
    if len(key) > _LONGEST_KEY:
        key = f"{key[:200]}:{_digest(key)}"
    names = sorted({member.cause.name for member in members})
    config: dict[str, Any] = {"causes": [member.cause.to_json() for member in members]}
    tags = {CAUSE_TAG: members[0].cause.kind}
    if len(names) == 1:
        tags[TOPOLOGY_TAG] = names[0]
    return dg.RunRequest(
        run_key=key,
        job_name=REASSIGN_JOB,
        run_config={"ops": {REASSIGN_OP: {"config": config}}},
        tags=tags,
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
