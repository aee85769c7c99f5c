"""Ephemeral nodes of live workers.

They are ``/workers/<topology id>/<node>-<port>``.
"""

from contextlib import suppress

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt
from storm_dagster.model.records import WorkerNode, decode_record, encode_record
from storm_dagster.model.slot import Slot
from storm_dagster.zk.state_protocol import ClusterState
from storm_dagster.zk.transaction import conflict
from storm_dagster.zk.watches import Wake, WatchSlots

_ATTEMPTS = 10
"""Attempts at a read and the write that depends on it."""


def parse_worker_name(name: str) -> Slot:
    """Slot of ``<node>-<port>``, whose node may contain dashes.

    Raises ``Corrupt`` for any other name.
    """
    node, dash, port = name.rpartition("-")
    if not dash or not node or not port.isascii() or not port.isdigit():
        raise Corrupt(f"worker node {name!r:.80} is not of the form <supervisor>-<port>: remove it")
    return Slot(node, int(port))


class WorkerNodes:
    """Part of the cluster's state: live workers."""

    state: ClusterState
    watches: WatchSlots

    def watch(self, path: str, wake: Wake | None) -> bool:
        """Call ``wake`` at the next event of ``path``.

        Returns true if the read that follows must arm a watch on ``path``: if there is a ``wake``.
        """
        if wake is not None:
            self.watches.add_wake(path, wake)
        return wake is not None

    def write_worker_node(
        self, topology_id: str, node: str, port: int, record: WorkerNode, *, assignment_version: int
    ) -> None:
        """Write the slot's ephemeral node.

        The assignment must have ``assignment_version``. The check and the write are one
        transaction; afterwards this session owns the node. A node of another session is replaced:
        the supervisor guarantees that its process is dead. An unchanged node of this session is not
        written. Raises ``Conflict`` with the assignment's path if its version has changed or it is
        gone.
        """
        state = self.state
        path = paths.worker(topology_id, node, port)
        data = encode_record(record)
        assignment_path = paths.assignment(topology_id)
        for _ in range(_ATTEMPTS):
            if state.get_version(assignment_path) != assignment_version:
                raise conflict(
                    f"the assignment of {topology_id} moved on from version {assignment_version}: "
                    "read it again",
                    assignment_path,
                )
            transaction = state.transaction().check(assignment_path, assignment_version)
            # The transaction also creates the folder: a removed topology gets none.
            if not state.exists(paths.workers(topology_id)):
                transaction.create(paths.workers(topology_id))
            former = state.get_data_with_version(path)
            if former is None:
                transaction.create(path, data, ephemeral=True)
            else:
                former_data, at = former
                if not state.owned(path):
                    transaction.delete(path, at.version)
                    transaction.create(path, data, ephemeral=True)
                elif former_data != data:
                    transaction.set(path, data, at.version)
            try:
                transaction.commit()
            except Conflict as error:
                if error.path == assignment_path:
                    raise
                continue
            # A node that was replaced after the read begins at version 0, too: check its owner.
            if state.owned(path):
                return
        raise conflict(
            f"{path} is written by others all the time: two processes hold this slot", path
        )

    def remove_worker_node(self, topology_id: str, node: str, port: int) -> bool:
        """Remove the slot's node if this session owns it; true if it did.

        After ten lost races the node stays, and the result is false.
        """
        path = paths.worker(topology_id, node, port)
        for _ in range(_ATTEMPTS):
            version = self.state.get_version(path)
            if version is None or not self.state.owned(path):
                return False
            with suppress(Conflict):
                self.state.transaction().delete(path, version).commit()
                return True
        return False

    def live_workers(self, topology_id: str, wake: Wake | None = None) -> dict[Slot, WorkerNode]:
        """Slot -> record of every live worker of the topology.

        A worker that ends between the list and the read is left out. ``Corrupt`` for a damaged
        record: its process lives, so that it must not be taken for absent. ``wake`` is called when
        a worker comes, goes or rewrites its record.
        """
        parent = paths.workers(topology_id)
        watch = self.watch(parent, wake)
        names = self.state.find_children(parent, watch) or []
        worker_paths = [f"{parent}/{name}" for name in names]
        for path in worker_paths:
            self.watch(path, wake)
        nodes = self.state.get_many(worker_paths, watch)
        workers: dict[Slot, WorkerNode] = {}
        for name, path, node in zip(names, worker_paths, nodes, strict=True):
            if node is not None:
                workers[parse_worker_name(name)] = decode_record(WorkerNode, node[0], path)
        return workers
