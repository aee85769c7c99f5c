"""Loader of one immutable view of the whole cluster."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from storm_dagster.model import paths, records
from storm_dagster.model.errors import Conflict, Corrupt, Unavailable
from storm_dagster.model.records import Record, decode_record
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView, Versioned
from storm_dagster.zk.cluster_state import ClusterState
from storm_dagster.zk.shards import read_sharded, resolve
from storm_dagster.zk.worker_nodes import parse_worker_name

_log = logging.getLogger(__name__)

RecordT = TypeVar("RecordT", bound=Record)
_Found = tuple[bytes, Versioned] | None
Decode = Callable[[type[Any], bytes, str], Any]
"""As :func:`decode_record`: class, bytes and path to a record, or ``Corrupt``."""


class _Loading:
    """State of one load: records that were read, and damage that was found."""

    def __init__(self, state: ClusterState, decode: Decode) -> None:
        self.state = state
        self._decode = decode
        self.corrupt: dict[str, str] = {}
        self.held: set[Slot] = set()

    def decode(self, cls: type[RecordT], found: _Found, path: str) -> RecordT | None:
        """The record; ``None`` for a missing, empty or damaged one, the last noted and logged."""
        if found is None or not found[0]:
            return None
        try:
            return self._decode(cls, found[0], path)
        except Corrupt as error:
            self.note(path, error)
            return None

    def note(self, path: str, error: Corrupt) -> None:
        self.corrupt[path] = error.message
        _log.error("%s", error.message)

    def assignment(self, path: str, found: _Found) -> tuple[records.Assignment, Versioned] | None:
        """The assignment, its parts read where it was cut."""
        if found is None or not found[0]:
            return None
        try:
            whole = resolve(self.state, path, found[0])
            # Replaced while this view was read: the newer one is fine, since the version was read
            # before.
            read = read_sharded(self.state, path) if whole is None else (whole, found[1])
            return read and (self._decode(records.Assignment, read[0], path), read[1])
        except Corrupt as error:
            self.note(path, error)
            return None

    def workers(self, topology_id: str, named: dict[str, _Found]) -> dict[Slot, records.WorkerNode]:
        parent, live = paths.workers(topology_id), {}
        for name, found in named.items():
            if found is None:
                continue
            try:
                slot = parse_worker_name(name)
            except Corrupt as error:
                self.note(f"{parent}/{name}", error)
                continue
            if (record := self.decode(records.WorkerNode, found, f"{parent}/{name}")) is not None:
                live[slot] = record
            else:
                self.held.add(slot)
                self.corrupt.setdefault(f"{parent}/{name}", "the record is empty")
        return live

    def topology(self, topology_id: str, parts: dict[str, Any]) -> TopologyView | None:
        """The topology; ``None`` when it vanished meanwhile, or has damage that placement must not
        ignore.
        """
        before = len(self.corrupt)
        if parts["base"] is None:
            return None
        base = self.decode(records.StormBase, parts["base"], paths.topology(topology_id))
        if base is None:
            self.corrupt.setdefault(paths.topology(topology_id), "the record is empty")
        tasks = self.decode(records.TaskTable, parts["tasks"], paths.tasks(topology_id))
        assigned = self.assignment(paths.assignment(topology_id), parts["assignment"])
        live = self.workers(topology_id, parts["workers"])
        if base is None or len(self.corrupt) > before:
            self.held.update(live)
            if assigned is not None:
                self.held.update(worker.slot for worker in assigned[0].workers)
            return None
        # Damaged beats harm only themselves: the topology master writes them again.
        beats = self.decode(records.TaskBeats, parts["beats"], paths.taskbeats(topology_id))
        return TopologyView(
            id=topology_id,
            base=base,
            base_at=parts["base"][1],
            tasks=tasks,
            assignment=None if assigned is None else assigned[0],
            assignment_at=None if assigned is None else assigned[1],
            beats=beats,
            beats_at=None if beats is None else parts["beats"][1],
            live_workers=live,
        )


def load_view(
    state: ClusterState,
    cluster_id: str,
    before_watch: Callable[[str], None] | None = None,
    decode: Decode = decode_record,
) -> ClusterView:
    """Read everything, in a handful of round trips for clusters of any size.

    The epoch and the assignments version (of ``/assignments``) are read first, so that a plan made
    from a view that changed while it was read fails its compare and set. Nodes that vanish between
    a list and the read are left out. With ``before_watch`` every list, base, heartbeat record and
    ``/assignments`` are watched, after ``before_watch(path)`` was called for each. Raises
    ``Unavailable`` when the root is gone and ``Conflict`` when it belongs to another cluster than
    ``cluster_id``. ``decode`` may return a record that was made of the same bytes before: records
    are immutable.
    """
    watch = before_watch is not None
    announce = before_watch or (lambda path: None)
    for path in (
        paths.EPOCH,
        paths.ASSIGNMENTS,
        paths.SUPERVISORS,
        paths.TOPOLOGY,
        paths.BLACKLIST,
    ):
        announce(path)
    identity = state.get_data(paths.CLUSTER_ID)
    if identity is None:
        raise Unavailable(
            f"the root of cluster {cluster_id} is gone from ZooKeeper: nothing is decided from an empty "
            "state; restore it, or check storm.zookeeper.root and .servers"
        )
    if identity.decode("utf-8", "replace") != cluster_id:
        raise Conflict(
            f"the root holds cluster {identity!r:.80} now, this process belongs to {cluster_id}: "
            "check storm.zookeeper.root and .servers"
        )
    epoch, parent, blacklist = state.get_many(
        [paths.EPOCH, paths.ASSIGNMENTS, paths.BLACKLIST], watch
    )
    lists = state.find_children_many([paths.SUPERVISORS, paths.TOPOLOGY], watch)
    supervisor_ids, topology_ids = (found or [] for found in lists)
    loading = _Loading(state, decode)
    parts = _read_topologies(state, topology_ids, watch, announce)
    infos = state.get_many([paths.supervisor(each) for each in supervisor_ids])
    supervisors = {
        each: loading.decode(records.SupervisorInfo, found, paths.supervisor(each))
        for each, found in zip(supervisor_ids, infos, strict=True)
    }
    topologies = {each: loading.topology(each, parts[each]) for each in topology_ids}
    listed = loading.decode(records.Blacklist, blacklist, paths.BLACKLIST)
    return ClusterView(
        cluster_id=cluster_id,
        epoch=epoch[1].version if epoch is not None and epoch[0] else -1,
        assignments_version=parent[1].version if parent is not None else -1,
        assignment_changes=parent[0] if parent is not None else b"",
        supervisors={each: info for each, info in supervisors.items() if info is not None},
        topologies={
            each: topology for each, topology in topologies.items() if topology is not None
        },
        blacklist=frozenset(listed.hosts) if listed is not None else frozenset(),
        corrupt=loading.corrupt,
        held_slots=frozenset(loading.held),
    )


def _read_topologies(
    state: ClusterState, ids: list[str], watch: bool, announce: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    for each in ids:
        announce(paths.topology(each))
        announce(paths.taskbeats(each))
        announce(paths.workers(each))
    bases = state.get_many([paths.topology(each) for each in ids], watch)
    tables = state.get_many([paths.tasks(each) for each in ids])
    assignments = state.get_many([paths.assignment(each) for each in ids])
    beats = state.get_many([paths.taskbeats(each) for each in ids], watch)
    # After the assignments: a worker of the assignment read is then not missed because it just
    # started.
    names = [
        found or []
        for found in state.find_children_many([paths.workers(each) for each in ids], watch)
    ]
    flat = [(each, name) for each, listed in zip(ids, names, strict=True) for name in listed]
    found_workers = state.get_many([f"{paths.workers(each)}/{name}" for each, name in flat])
    workers: dict[str, dict[str, _Found]] = {each: {} for each in ids}
    for (each, name), record in zip(flat, found_workers, strict=True):
        workers[each][name] = record
    return {
        each: {
            "base": base,
            "tasks": table,
            "assignment": assignment,
            "beats": beat,
            "workers": workers[each],
        }
        for each, base, table, assignment, beat in zip(
            ids, bases, tables, assignments, beats, strict=True
        )
    }
