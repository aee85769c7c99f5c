"""Memory of an observer between two polls of the cluster; :mod:`storm_dagster.zk.sensor_memory` stores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType


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
    """Number of workers that it lacks and free slots could take; unset when it lacks none, or is not complete."""


class LivenessMemory(msgspec.Struct, frozen=True):
    """All that an observer remembers. Empty at first, and after another boot of its machine."""

    boot_id: str = ""
    since: float = 0.0
    """Boot clock of the first look, or after an outage of the moment by which whoever lives has reconnected."""
    topologies: Mapping[str, TopologyMemory] = msgspec.field(default_factory=dict)
    supervisors: Mapping[str, FirstSeen] = msgspec.field(default_factory=dict)
    """Supervisor id -> its counter."""
    frozen_since: float | None = None
    lost: Mapping[str, float] | UnsetType = UNSET
    """``"node:port"`` -> boot clock at which its worker last counted as lost; unset when none was lost recently."""
    cold: bool = False
    """The first look was at a cluster that had just been started as a whole: lost hosts get a launch window."""
