"""Immutable view of the cluster, the input of decisions.

A daemon or a run loads it once, hands it to ``core``, and executes the plan that comes back. Every
part carries the data version that it was read at, so that the write of the plan can compare and
set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from storm_dagster.model import records
from storm_dagster.model.healing_pause import HealingPause
from storm_dagster.model.ranges import decode_ranges, highest_id
from storm_dagster.model.slot import Slot


@dataclass(frozen=True)
class Versioned:
    """Data version and modification zxid of a node when it was read."""

    version: int
    mzxid: int


@dataclass(frozen=True)
class UpgradeState:
    """State below ``/gray_upgrade/<id>``.

    The lists are valid only if there is a ``record``.
    """

    at: int = -1
    """Data version of ``/gray_upgrade/<id>``: raised by changes of the record, checked by moves of
    a worker.
    """
    record: records.GrayUpgrade | None = None
    upgrading: Mapping[str, records.GrayWorker] = field(default_factory=dict)
    """``host:port`` of the workers that are to change their code now."""
    upgraded: Mapping[str, records.GrayWorker] = field(default_factory=dict)
    """``host:port`` of the workers that run the new code."""


def highest_task(table: records.TaskTable | None) -> int:
    """The highest task id of a topology; 0 without a table."""
    if table is None:
        return 0
    return highest_id(part.tasks for part in table.components.values())


@dataclass(frozen=True)
class TopologyView:
    """State of one topology. A part that does not exist is ``None``."""

    id: str
    base: records.StormBase
    base_at: Versioned
    tasks: records.TaskTable | None = None
    assignment: records.Assignment | None = None
    assignment_at: Versioned | None = None
    beats: records.TaskBeats | None = None
    beats_at: Versioned | None = None
    live_workers: Mapping[Slot, records.WorkerNode] = field(default_factory=dict)
    """Slot -> the record of a worker whose session lives."""

    @property
    def code_dir(self) -> str:
        """Prefix of the blob keys of the code, which gray upgrades change."""
        return self.assignment.code_dir if self.assignment is not None else self.id

    @property
    def workers(self) -> tuple[records.WorkerSlot, ...]:
        """Workers of the assignment; none without one."""
        return self.assignment.workers if self.assignment is not None else ()

    @property
    def missing_workers(self) -> tuple[records.WorkerSlot, ...]:
        """Workers of the assignment that do not live now."""
        return tuple(worker for worker in self.workers if worker.slot not in self.live_workers)

    @property
    def dead_tasks(self) -> frozenset[int]:
        """Tasks that the topology master reports dead.

        A report about a former assignment does not count.
        """
        if self.beats is None or self.beats_at is None or self.assignment_at is None:
            return frozenset()
        if self.beats_at.mzxid <= self.assignment_at.mzxid:
            return frozenset()
        if self.beats.version not in (-1, self.assignment_at.version):
            return frozenset()
        return self.own_tasks(self.beats.dead)

    def own_tasks(self, ranges: str) -> frozenset[int]:
        """Task ids of a record that a worker wrote.

        Ids above the topology's own are left out, however many the record names: a rebalance may
        have removed them, or the worker invented them.
        """
        return frozenset(decode_ranges(ranges, highest_task(self.tasks)))


@dataclass(frozen=True)
class ClusterView:
    """The cluster at one moment.

    ``assignments_version`` lets one placement commit at a time.
    """

    cluster_id: str
    epoch: int
    """Data version of ``/epoch``."""
    assignments_version: int
    """Data version of ``/assignments``: every assignment transaction checks and raises it."""
    supervisors: Mapping[str, records.SupervisorInfo]
    topologies: Mapping[str, TopologyView]
    """Topology id -> view."""
    blacklist: frozenset[str] = frozenset()
    """Hosts."""
    healing_pause: HealingPause | None = None
    """Pause of healing by operators."""
    assignment_changes: bytes = b""
    """Data of ``/assignments``: the newest changes."""
    corrupt: Mapping[str, str] = field(default_factory=dict)
    """Path of a damaged record -> its problem. If placement needs the record, the topology is left
    out of ``topologies``: no decision concerns it, and its slots are in ``held_slots``.
    """
    held_slots: frozenset[Slot] = frozenset()
    """Slots that topologies use which are left out of ``topologies``, as far as they are known."""

    def topology_named(self, name: str) -> TopologyView | None:
        """The topology of that name in any status, or ``None``."""
        for topology in self.topologies.values():
            if topology.base.name == name:
                return topology
        return None

    def drains(self, supervisor_id: str) -> bool:
        """True if that supervisor is registered and drains."""
        info = self.supervisors.get(supervisor_id)
        return info is not None and info.draining

    def used_ports(self, without: frozenset[str] = frozenset()) -> dict[str, set[int]]:
        """Supervisor id -> ports that assignments hold.

        The assignments of the topology ids ``without`` are left out.
        """
        used: dict[str, set[int]] = {}
        for topology in self.topologies.values():
            if topology.id in without:
                continue
            for worker in topology.workers:
                used.setdefault(worker.node, set()).add(worker.port)
        for node, port in self.held_slots:
            used.setdefault(node, set()).add(port)
        return used
