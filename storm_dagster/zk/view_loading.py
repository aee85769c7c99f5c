"""Loader of one immutable view of the whole cluster."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from storm_dagster.model import paths, records
from storm_dagster.model.errors import Conflict, Corrupt, Unavailable
from storm_dagster.model.healing_pause import HealingPause
from storm_dagster.model.records import RecordT, decode_record
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView, Versioned
from storm_dagster.zk.cluster_state import ClusterState
from storm_dagster.zk.shards import read_sharded, resolve
from storm_dagster.zk.worker_bounds import (
    MAX_FORMER_WORKERS,
    bounded_names,
    max_total_bytes,
)
from storm_dagster.zk.worker_nodes import parse_worker_name

_log = logging.getLogger(__name__)

_Node = tuple[bytes, Versioned] | None
"""Data and version of a node; ``None`` without the node."""
Decode = Callable[[type[Any], bytes, str], Any]
"""As :func:`decode_record`: class, bytes and path to a record, or ``Corrupt``."""


class _TopologyNodes(NamedTuple):
    """Nodes of one topology, as read; ``None`` for a missing one."""

    base: _Node
    tasks: _Node
    assignment: _Node
    beats: _Node


class _ReadTopology(NamedTuple):
    """Table and assignment of one topology; ``None`` for a missing or damaged one."""

    tasks: records.TaskTable | None
    assignment: records.Assignment | None
    assignment_at: Versioned | None

    @property
    def worker_names(self) -> list[str]:
        """Names of the nodes of its workers."""
        if self.assignment is None:
            return []
        return [f"{worker.node}-{worker.port}" for worker in self.assignment.workers]


class _Loading:
    """Decoder of one load, which collects the damage that it finds."""

    def __init__(self, state: ClusterState, decode: Decode) -> None:
        self.state = state
        self._decode = decode
        self.corrupt: dict[str, str] = {}
        """Path of a damaged record -> text of its error."""
        self.held_slots: set[Slot] = set()
        """Slots that may have a worker of a topology with damage."""

    def decode(self, cls: type[RecordT], node: _Node, path: str) -> RecordT | None:
        """The record; ``None`` for a missing, empty or damaged one.

        A damaged one is noted and logged.
        """
        if node is None:
            return None
        raw, _ = node
        if not raw:
            return None
        try:
            return self._decode(cls, raw, path)
        except Corrupt as error:
            self.note(path, error)
            return None

    def note(self, path: str, error: Corrupt) -> None:
        """Note and log a damaged record."""
        self.corrupt[path] = error.message
        _log.error("%s", error.message)

    def assignment(self, path: str, node: _Node) -> tuple[records.Assignment, Versioned] | None:
        """The assignment and its version; if it was cut, its parts are read.

        ``None`` for a missing, empty, removed or damaged one; a damaged one is noted.
        """
        if node is None:
            return None
        raw, version = node
        if not raw:
            return None
        try:
            record = resolve(self.state, path, raw)
            if record is None:
                # Replaced during this load. The newer assignment is correct, too, since the
                # assignments version was read before it.
                newer = read_sharded(self.state, path)
                if newer is None:
                    return None
                record, version = newer
            return self._decode(records.Assignment, record, path), version
        except Corrupt as error:
            self.note(path, error)
            return None

    def parts(self, topology_id: str, nodes: _TopologyNodes) -> _ReadTopology:
        """Decode the table and the assignment of a topology."""
        tasks = self.decode(records.TaskTable, nodes.tasks, paths.tasks(topology_id))
        versioned = self.assignment(paths.assignment(topology_id), nodes.assignment)
        if versioned is None:
            return _ReadTopology(tasks, None, None)
        assignment, assignment_at = versioned
        return _ReadTopology(tasks, assignment, assignment_at)

    def workers(
        self, topology_id: str, nodes: dict[str, _Node], max_bytes: int
    ) -> dict[Slot, records.WorkerNode]:
        """Slot -> record of each live worker.

        The slot of an empty or damaged record is held, since its process lives. So is one whose
        record exceeds the ``max_bytes`` of all records, which is not decoded.
        """
        parent = paths.workers(topology_id)
        live_workers: dict[Slot, records.WorkerNode] = {}
        total_bytes = 0
        for name, node in nodes.items():
            if node is None:
                continue
            path = f"{parent}/{name}"
            try:
                slot = parse_worker_name(name)
            except Corrupt as error:
                self.note(path, error)
                continue
            total_bytes += len(node[0])
            record = None
            if total_bytes > max_bytes:
                self.note(path, _too_large(path, max_bytes))
            else:
                record = self.decode(records.WorkerNode, node, path)
            if record is not None:
                live_workers[slot] = record
            else:
                self.held_slots.add(slot)
                self.corrupt.setdefault(path, "the record is empty")
        return live_workers

    def topology(
        self,
        topology_id: str,
        nodes: _TopologyNodes,
        parts: _ReadTopology,
        workers: dict[str, _Node],
    ) -> TopologyView | None:
        """The topology; ``None`` if it was removed or is damaged.

        If it is damaged, the slots of its live workers and of its assignment are held.
        """
        if nodes.base is None:
            return None
        base = self.decode(records.StormBase, nodes.base, paths.topology(topology_id))
        if base is None:
            self.corrupt.setdefault(paths.topology(topology_id), "the record is empty")
        tasks, assignment, assignment_at = parts
        max_bytes = max_total_bytes(tasks, len(parts.worker_names))
        live_workers = self.workers(topology_id, workers, max_bytes)
        own_paths = [paths.tasks(topology_id), paths.assignment(topology_id)]
        own_paths += [f"{paths.workers(topology_id)}/{name}" for name in workers]
        if base is None or not self.corrupt.keys().isdisjoint(own_paths):
            self.held_slots.update(live_workers)
            if assignment is not None:
                self.held_slots.update(worker.slot for worker in assignment.workers)
            return None
        # Damaged beats harm no other record: the topology master rewrites them.
        beats = self.decode(records.TaskBeats, nodes.beats, paths.taskbeats(topology_id))
        beats_at = None
        if beats is not None and nodes.beats is not None:
            _, beats_at = nodes.beats
        _, base_at = nodes.base
        return TopologyView(
            id=topology_id,
            base=base,
            base_at=base_at,
            tasks=tasks,
            assignment=assignment,
            assignment_at=assignment_at,
            beats=beats,
            beats_at=beats_at,
            live_workers=live_workers,
        )


def _too_large(path: str, max_bytes: int) -> Corrupt:
    return Corrupt(
        f"{path} is not decoded: the records of the topology's workers may have {max_bytes} bytes; "
        "its code writes them: kill the topology, or correct its code"
    )


def load_view(
    state: ClusterState,
    cluster_id: str,
    before_watch: Callable[[str], None] | None = None,
    decode: Decode = decode_record,
) -> ClusterView:
    """Read the whole cluster, in a few round trips for clusters of any size.

    The epoch and the assignments version (of ``/assignments``) are read first, so that a plan made
    from a view that changed during the read fails its compare and set. Nodes that vanish between a
    list and the read are left out. With ``before_watch`` every list, base, heartbeat record and
    ``/assignments`` are watched, after ``before_watch(path)`` was called for each. Raises
    ``Unavailable`` if the root is gone and ``Conflict`` if it belongs to another cluster than
    ``cluster_id``. ``decode`` may return a record that it has made from the same bytes before:
    records are immutable.
    """
    watch = before_watch is not None
    announce = before_watch or (lambda path: None)
    for path in (
        paths.EPOCH,
        paths.ASSIGNMENTS,
        paths.SUPERVISORS,
        paths.TOPOLOGY,
        paths.BLACKLIST,
        paths.HEALING_PAUSE,
    ):
        announce(path)
    _check_root(state, cluster_id)
    epoch_node, assignments_node, blacklist_node, pause_node = state.get_many(
        [paths.EPOCH, paths.ASSIGNMENTS, paths.BLACKLIST, paths.HEALING_PAUSE], watch
    )
    supervisor_names, topology_names = state.find_children_many(
        [paths.SUPERVISORS, paths.TOPOLOGY], watch
    )
    supervisor_ids = supervisor_names or []
    topology_ids = topology_names or []
    loading = _Loading(state, decode)
    topologies = _load_topologies(loading, topology_ids, watch, announce)
    supervisors = _read_supervisors(loading, supervisor_ids)
    assignments_version = -1
    assignment_changes = b""
    if assignments_node is not None:
        assignment_changes, at = assignments_node
        assignments_version = at.version
    blacklist = loading.decode(records.Blacklist, blacklist_node, paths.BLACKLIST)
    pause = loading.decode(HealingPause, pause_node, paths.HEALING_PAUSE)
    return ClusterView(
        cluster_id=cluster_id,
        epoch=_epoch_of(epoch_node),
        assignments_version=assignments_version,
        assignment_changes=assignment_changes,
        supervisors=supervisors,
        topologies=topologies,
        blacklist=frozenset(blacklist.hosts) if blacklist is not None else frozenset(),
        healing_pause=pause,
        corrupt=loading.corrupt,
        held_slots=frozenset(loading.held_slots),
    )


def _epoch_of(node: _Node) -> int:
    """Leadership epoch of its node; -1 before any leader."""
    if node is None:
        return -1
    record, version = node
    return version.version if record else -1


def _load_topologies(
    loading: _Loading, ids: list[str], watch: bool, announce: Callable[[str], None]
) -> dict[str, TopologyView]:
    """Read the topologies with their workers, by id.

    Removed and damaged ones are left out.
    """
    state = loading.state
    nodes = _read_topologies(state, ids, watch, announce)
    parts = {topology_id: loading.parts(topology_id, nodes[topology_id]) for topology_id in ids}
    # After the assignments, so that a worker of the assignment that just started is not missed.
    workers = _read_workers(state, parts, watch)
    topologies: dict[str, TopologyView] = {}
    for topology_id in ids:
        topology = loading.topology(
            topology_id, nodes[topology_id], parts[topology_id], workers[topology_id]
        )
        if topology is not None:
            topologies[topology_id] = topology
    return topologies


def _check_root(state: ClusterState, cluster_id: str) -> None:
    """Raise ``Unavailable`` without the root, ``Conflict`` if it is another cluster's."""
    stored_id = state.get_data(paths.CLUSTER_ID)
    if stored_id is None:
        raise Unavailable(
            f"the root of cluster {cluster_id} is gone from ZooKeeper, and an empty state is not a "
            "basis for decisions: restore it, or check storm.zookeeper.root and .servers"
        )
    if stored_id.decode("utf-8", "replace") != cluster_id:
        raise Conflict(
            f"the root holds cluster {stored_id!r:.80} now, this process belongs to {cluster_id}: "
            "check storm.zookeeper.root and .servers"
        )


def _read_supervisors(loading: _Loading, ids: list[str]) -> dict[str, records.SupervisorInfo]:
    """Supervisor id -> its record; missing and damaged ones are left out."""
    nodes = loading.state.get_many([paths.supervisor(supervisor_id) for supervisor_id in ids])
    supervisors: dict[str, records.SupervisorInfo] = {}
    for supervisor_id, node in zip(ids, nodes, strict=True):
        info = loading.decode(records.SupervisorInfo, node, paths.supervisor(supervisor_id))
        if info is not None:
            supervisors[supervisor_id] = info
    return supervisors


def _read_topologies(
    state: ClusterState, ids: list[str], watch: bool, announce: Callable[[str], None]
) -> dict[str, _TopologyNodes]:
    """Topology id -> its nodes; ``announce`` is called with each path before it is watched."""
    for topology_id in ids:
        announce(paths.topology(topology_id))
        announce(paths.taskbeats(topology_id))
        announce(paths.workers(topology_id))
    bases = state.get_many([paths.topology(topology_id) for topology_id in ids], watch)
    tables = state.get_many([paths.tasks(topology_id) for topology_id in ids])
    assignments = state.get_many([paths.assignment(topology_id) for topology_id in ids])
    beats = state.get_many([paths.taskbeats(topology_id) for topology_id in ids], watch)
    nodes: dict[str, _TopologyNodes] = {}
    for index, topology_id in enumerate(ids):
        nodes[topology_id] = _TopologyNodes(
            base=bases[index],
            tasks=tables[index],
            assignment=assignments[index],
            beats=beats[index],
        )
    return nodes


def _read_workers(
    state: ClusterState, parts: Mapping[str, _ReadTopology], watch: bool
) -> dict[str, dict[str, _Node]]:
    """Topology id -> name -> node of each live worker.

    Those of the assigned slots are first. A worker may create any number of nodes: of the others a
    few are read.
    """
    ids = list(parts)
    lists = state.find_children_many([paths.workers(topology_id) for topology_id in ids], watch)
    locations: list[tuple[str, str]] = []
    for topology_id, names in zip(ids, lists, strict=True):
        expected = parts[topology_id].worker_names
        folder = paths.workers(topology_id)
        kept = bounded_names(folder, names or (), expected, MAX_FORMER_WORKERS)
        locations.extend((topology_id, name) for name in kept)
    nodes = state.get_many(
        [f"{paths.workers(topology_id)}/{name}" for topology_id, name in locations]
    )
    workers: dict[str, dict[str, _Node]] = {topology_id: {} for topology_id in ids}
    for (topology_id, name), node in zip(locations, nodes, strict=True):
        workers[topology_id][name] = node
    return workers
