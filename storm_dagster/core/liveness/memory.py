"""Memory of an observer of the cluster between two checks; a frozen value with a strict JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LivenessMemory", "MissingSlot", "StartingWorker", "TopologyMemory"]


@dataclass(frozen=True)
class MissingSlot:
    """A slot of an assignment whose worker's node is absent."""

    since: float
    """Boot clock at which the observer first saw it absent."""
    gone: bool
    """It was there before (a crash), and did not only fail to come yet (a launch)."""
    started: int
    """Newest start of its tasks: another value means another placement with a limit of its own."""


@dataclass(frozen=True)
class StartingWorker:
    """A worker whose tasks have not all reported that they run."""

    since: float
    """Boot clock at which the observer first saw it so."""
    token: str
    """First characters of its start token: another process has its own time."""


@dataclass(frozen=True)
class TopologyMemory:
    """Last known state of one topology, with the boot clock at which each part was first seen so."""

    generation: int
    generation_since: float
    beats: int
    """mzxid of its heartbeat record; -1 when it has none."""
    beats_since: float
    missing: Mapping[str, MissingSlot] = field(default_factory=dict)
    """``"node:port"`` -> absent worker."""
    starting: Mapping[str, StartingWorker] = field(default_factory=dict)
    """``"node:port"`` -> worker that is there and does not run all its tasks yet."""


@dataclass(frozen=True)
class LivenessMemory:
    """Memory of one observer. Empty at first, and after a reboot of its machine."""

    boot_id: str = ""
    since: float = 0.0
    """Boot clock of the first check."""
    topologies: Mapping[str, TopologyMemory] = field(default_factory=dict)
    supervisors: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Supervisor id -> (counter, boot clock when first seen so)."""
    frozen_since: float | None = None
    cold: bool = False
    """Whether the first check found a cluster that had just been started: lost hosts get a launch window."""

    def to_json(self) -> dict[str, Any]:
        """The form for a sensor's cursor."""
        return {
            "boot_id": self.boot_id,
            "since": self.since,
            "topologies": {
                topology_id: {
                    "assignment": [part.generation, part.generation_since],
                    "beats": [part.beats, part.beats_since],
                    "missing": {
                        slot: [entry.since, entry.gone, entry.started] for slot, entry in part.missing.items()
                    },
                    "starting": {
                        slot: [worker.since, worker.token] for slot, worker in part.starting.items()
                    },
                }
                for topology_id, part in self.topologies.items()
            },
            "supervisors": {key: list(value) for key, value in self.supervisors.items()},
            "frozen_since": self.frozen_since,
            "cold": self.cold,
        }

    @staticmethod
    def from_json(document: Any) -> LivenessMemory:
        """The memory of :meth:`to_json`; anything else is an empty memory, which only grants time."""
        try:
            frozen_since = document["frozen_since"]
            return LivenessMemory(
                boot_id=str(document["boot_id"]),
                since=float(document["since"]),
                topologies={
                    str(topology_id): TopologyMemory(
                        generation=int(part["assignment"][0]),
                        generation_since=float(part["assignment"][1]),
                        beats=int(part["beats"][0]),
                        beats_since=float(part["beats"][1]),
                        missing={
                            str(slot): MissingSlot(float(since), bool(gone), int(started))
                            for slot, (since, gone, started) in part["missing"].items()
                        },
                        starting={
                            str(slot): StartingWorker(float(since), str(token))
                            for slot, (since, token) in part["starting"].items()
                        },
                    )
                    for topology_id, part in document["topologies"].items()
                },
                supervisors={
                    str(key): (int(count), float(since))
                    for key, (count, since) in document["supervisors"].items()
                },
                frozen_since=None if frozen_since is None else float(frozen_since),
                cold=bool(document["cold"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            return LivenessMemory()
