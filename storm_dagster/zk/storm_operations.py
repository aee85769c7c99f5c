"""Operations of Storm's ``StormClusterState``, each on its path."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from storm_dagster.model import names, paths, records
from storm_dagster.model.errors import Conflict, InvalidRequest, NotAlive
from storm_dagster.model.ranges import decode_ranges
from storm_dagster.model.slot import Slot
from storm_dagster.zk import shards
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_dagster.zk.transaction import Transaction, conflict

Executor = tuple[int, int]
"""First and last task id."""

T = TypeVar("T")

_ATTEMPTS = 20
"""Attempts at a read and the write that depends on it."""


def _retry(path: str, attempt: Callable[[], T], message: str = "") -> T:
    """Retry ``attempt`` after every lost race, and return its result.

    At last, raises a ``Conflict`` about ``path``, with the ``message`` if there is one.
    """
    for _ in range(_ATTEMPTS):
        try:
            return attempt()
        except NotAlive:
            raise
        except Conflict:
            continue
    raise conflict(message or f"others write {path} all the time: retry", path)


class StormOperations(StormClusterState):
    """All operations of Storm's ``StormClusterState``, by their names there.

    They are for tools that use these names, not for daemons: a write is fenced only with the
    leadership ``epoch`` of its writer, and then raises ``Fenced`` once that epoch is over. A
    ``callback`` is one-shot: it is called once, at the next change, or when events may have been
    lost, and the next read must pass it once more. A later callback for the same path replaces it.
    It runs in ZooKeeper's thread and must only set an event.
    """

    def _begin(self, epoch: int | None) -> Transaction:
        """Begin a transaction, fenced if an epoch is given."""
        return self.state.transaction() if epoch is None else self.fenced(epoch)

    # -- assignments -------------------------------------------------------------------------------

    def assignments(self, callback: Callable[[], object] | None = None) -> list[str]:
        """``/assignments``: ids of the assigned topologies, sorted."""
        watch = self._callback(paths.ASSIGNMENTS, callback)
        return self.state.find_children(paths.ASSIGNMENTS, watch) or []

    def set_assignment(
        self, topology_id: str, info: records.Assignment, *, epoch: int | None = None
    ) -> int:
        """``/assignments/<id>``: write the assignment, and return its version.

        The same transaction raises the assignments version (the version of ``/assignments``).
        """
        path = paths.assignment(topology_id)
        raw = records.encode_record(info, limit=None)

        def attempt() -> int:
            transaction = self._raise_assignments_version(epoch)
            node = self.state.get_data_with_version(path)
            at = None
            if node is not None:
                former_raw, former_at = node
                # An empty node is not a record.
                if former_raw:
                    at = former_at
            # The first operation of put_ops writes the node; the others delete former parts.
            index = len(transaction)
            shards.put_ops(self.state, transaction, path, raw, at)
            version = transaction.commit()[index]
            # The result of a creation is the path.
            return version if isinstance(version, int) else 0

        return _retry(
            path,
            attempt,
            f"others write assignments all the time, {path} was not written: retry",
        )

    def _raise_assignments_version(self, epoch: int | None) -> Transaction:
        """Begin a transaction that raises the assignments version by compare and set."""
        version = self.state.get_version(paths.ASSIGNMENTS)
        return self._begin(epoch).set(paths.ASSIGNMENTS, b"", -1 if version is None else version)

    # -- topologies --------------------------------------------------------------------------------

    def activate_storm(
        self, topology_id: str, base: records.StormBase, *, epoch: int | None = None
    ) -> None:
        """``/topology/<id>``: create the topology, or replace its record."""
        self._put(paths.topology(topology_id), records.encode_record(base), epoch)

    def update_storm(
        self, topology_id: str, elems: Mapping[str, Any], *, epoch: int | None = None
    ) -> records.StormBase:
        """``/topology/<id>``: replace the fields in ``elems``.

        It is a compare and set. ``executors`` are merged per component: a new number wins, unnamed
        components keep theirs. Raises ``NotAlive`` without the topology, ``InvalidRequest`` for
        unknown fields and wrong values.
        """
        path = paths.topology(topology_id)

        def attempt() -> records.StormBase:
            versioned = self._read_versioned(records.StormBase, path)
            if versioned is None:
                raise NotAlive(f"topology {topology_id} does not exist: nothing was updated")
            base, at = versioned
            fields = {**base.model_dump(), **elems}
            if isinstance(elems.get("executors"), Mapping):
                fields["executors"] = {**base.executors, **elems["executors"]}
            try:
                updated = records.StormBase.model_validate(fields)
            except ValidationError as error:
                problem = error.errors()[0]
                field = ".".join(str(part) for part in problem["loc"])
                raise InvalidRequest(
                    f"cannot update {topology_id}: {field}: {problem['msg']}"
                ) from None
            if updated != base:
                transaction = self._begin(epoch)
                transaction.set(path, records.encode_record(updated), at.version)
                transaction.commit()
            return updated

        return _retry(path, attempt)

    def remove_storm_base(self, topology_id: str, *, epoch: int | None = None) -> None:
        """``/topology/<id>``: remove the topology and the nodes below it.

        A missing topology is not an error.
        """
        path = paths.topology(topology_id)

        def attempt() -> None:
            version = self.state.get_version(path)
            if version is None:
                self._check_epoch(epoch)
                return
            transaction = self._begin(epoch)
            for child in self.state.find_children(path) or ():
                transaction.delete(f"{path}/{child}")
            transaction.delete(path, version).commit()

        _retry(path, attempt)

    def remove_storm(self, topology_id: str, *, epoch: int | None = None) -> None:
        """Remove all records of the topology.

        The assignment is removed first (this raises the assignments version), then tasks,
        heartbeats, errors, metrics, gray upgrade and worker folder. The base is last, so that an
        interrupted removal is visible. The backup of the assignment, which has the name of the
        topology, stays.
        """

        def unassign() -> None:
            transaction = self._raise_assignments_version(epoch)
            if shards.delete_ops(self.state, transaction, paths.assignment(topology_id)):
                transaction.commit()

        _retry(
            topology_id,
            unassign,
            f"others write assignments all the time, {topology_id} was not removed",
        )
        parts = (
            paths.tasks,
            paths.taskbeats,
            paths.task_errors,
            paths.metrics,
            paths.gray_upgrade,
            paths.workers,
        )
        for path_of in parts:
            self._check_epoch(epoch)
            self.state.delete_node(path_of(topology_id))
        self.remove_storm_base(topology_id, epoch=epoch)

    def _check_epoch(self, epoch: int | None) -> None:
        """Raise ``Fenced`` if an epoch is given and over."""
        if epoch is not None:
            self._begin(epoch).commit()

    def _put(self, path: str, data: bytes, epoch: int | None) -> None:
        """Create the node, or replace its data."""

        def attempt() -> None:
            self._begin(epoch).put(path, data, self.state.get_version(path)).commit()

        _retry(path, attempt)

    # -- heartbeats --------------------------------------------------------------------------------

    def get_worker_heartbeat(
        self, topology_id: str, node: str, port: int
    ) -> records.WorkerBeat | None:
        """``/taskbeats/<id>``: that slot's entry; ``None`` without one."""
        beats = self._read(records.TaskBeats, paths.taskbeats(topology_id))
        return None if beats is None else beats.workers.get(Slot(node, port).key)

    def executor_beats(
        self, topology_id: str, executor_node_port: Mapping[Executor, tuple[str, int]]
    ) -> dict[Executor, records.WorkerBeat]:
        """``/taskbeats/<id>``: the beat of each executor's slot.

        The result has only executors that the current assignment places in that slot, and that have
        no dead task: reports of a stale worker about other executors are ignored.
        """
        record = self._read(records.TaskBeats, paths.taskbeats(topology_id))
        assignment = self.assignment_info(topology_id)
        if record is None or assignment is None:
            return {}
        highest = max((last for _, last in executor_node_port), default=0)
        dead_tasks = set(decode_ranges(record.dead, highest))
        task_slots = assignment.task_slots()
        beats: dict[Executor, records.WorkerBeat] = {}
        for (first, last), slot in executor_node_port.items():
            beat = record.workers.get(Slot(*slot).key)
            if beat is None:
                continue
            tasks = range(first, last + 1)
            if all(task_slots.get(task) == slot and task not in dead_tasks for task in tasks):
                beats[first, last] = beat
        return beats

    def setup_heartbeats(self, topology_id: str) -> None:
        """``/taskbeats/<id>``: create the record if it is missing.

        It has no worker.
        """
        path = paths.taskbeats(topology_id)
        if self._read(records.TaskBeats, path) is None:
            self._put(path, records.encode_record(self._no_beats(topology_id)), None)

    def _no_beats(self, topology_id: str) -> records.TaskBeats:
        """Heartbeat record without a worker; its topology master is 0 if it has no task."""
        table = self.read_tasks(topology_id)
        master = None if table is None else table.components.get(names.TOPOLOGY_MASTER)
        master_task = master.ids[0] if master is not None and master.ids else 0
        return records.TaskBeats(topology_id=topology_id, topology_master=master_task)

    def teardown_heartbeats(self, topology_id: str) -> None:
        """``/taskbeats/<id>``: delete the record; no error without one."""
        self.state.delete_node(paths.taskbeats(topology_id))

    def heartbeat_storms(self) -> list[str]:
        """``/taskbeats``: ids of the topologies with a record, sorted."""
        return self.state.find_children(paths.TASKBEATS) or []

    def worker_heartbeat(
        self, topology_id: str, node: str, port: int, info: records.WorkerBeat
    ) -> None:
        """``/taskbeats/<id>``: merge that slot's entry by compare and set.

        A missing record is created.
        """
        self._change_beats(topology_id, Slot(node, port).key, info)

    def remove_worker_heartbeat(self, topology_id: str, node: str, port: int) -> None:
        """``/taskbeats/<id>``: drop that slot's entry.

        A missing entry is not an error.
        """
        self._change_beats(topology_id, Slot(node, port).key, None)

    def _change_beats(self, topology_id: str, slot: str, beat: records.WorkerBeat | None) -> None:
        """Replace the entry of a slot (its key), or remove it without a ``beat``."""
        path = paths.taskbeats(topology_id)

        def attempt() -> None:
            versioned = self._read_versioned(records.TaskBeats, path)
            if versioned is None and beat is None:
                return
            if versioned is None:
                former = self._no_beats(topology_id)
                version = None
            else:
                former, at = versioned
                version = at.version
            workers = dict(former.workers)
            if beat is None:
                workers.pop(slot, None)
            else:
                workers[slot] = beat
            record = former.model_copy(update={"workers": workers})
            if version is None:
                self.state.create_node(path, records.encode_record(record))
            elif record != former:
                self.state.set_data(path, records.encode_record(record), version)

        _retry(path, attempt)

    # -- supervisors -------------------------------------------------------------------------------

    def supervisors(self, callback: Callable[[], object] | None = None) -> list[str]:
        """``/supervisors``: ids of the live supervisors, sorted."""
        watch = self._callback(paths.SUPERVISORS, callback)
        return self.state.find_children(paths.SUPERVISORS, watch) or []

    def supervisor_info(self, supervisor_id: str) -> records.SupervisorInfo | None:
        """``/supervisors/<id>``: record of a live supervisor.

        ``None`` if it is gone.
        """
        return self._read(records.SupervisorInfo, paths.supervisor(supervisor_id))

    # -- errors ------------------------------------------------------------------------------------

    def errors(self, topology_id: str, task: int | None = None) -> list[records.TaskError]:
        """``/taskerrors/<id>``: errors of a task, newest first.

        Without ``task``, those of all tasks.
        """
        selected: list[records.TaskError] = []
        for errors in self.errors_by_component(topology_id).values():
            selected.extend(error for error in errors if task is None or error.task == task)
        return sorted(selected, key=lambda error: -error.time)

    def error_topologies(self) -> list[str]:
        """``/taskerrors``: ids of the topologies that have errors, sorted."""
        return self.state.find_children(paths.TASKERRORS) or []

    def teardown_topology_errors(self, topology_id: str) -> None:
        """``/taskerrors/<id>``: delete all errors of the topology."""
        self.state.delete_node(paths.task_errors(topology_id))
