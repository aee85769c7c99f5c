"""The ephemeral nodes of live workers: ``/workers/<topology id>/<node>-<port>``."""

from contextlib import suppress

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt
from storm_dagster.model.records import WorkerNode, decode_record, encode_record
from storm_dagster.model.slot import Slot
from storm_dagster.zk.state_protocol import ClusterState
from storm_dagster.zk.transaction import conflict
from storm_dagster.zk.watches import Wake, WatchSlots

_ATTEMPTS = 10


def parse_worker_name(name: str) -> Slot:
    """The slot of ``<node>-<port>``; the id may hold dashes. ``Corrupt`` for anything else."""
    node, dash, port = name.rpartition("-")
    if not dash or not node or not port.isascii() or not port.isdigit():
        raise Corrupt(f"worker node {name!r:.80} is not of the form <supervisor>-<port>: remove it")
    return Slot(node, int(port))


class WorkerNodes:
    """The part of the cluster's state that live workers are in."""

    state: ClusterState
    watches: WatchSlots

    def watch(self, path: str, wake: Wake | None) -> bool:
        """Call ``wake`` at the next event of ``path``, whose watch the read that follows has to
        arm; whether there is one.
        """
        if wake is not None:
            self.watches.add_wake(path, wake)
        return wake is not None

    def write_worker_node(
        self, topology_id: str, node: str, port: int, record: WorkerNode, *, assignment_version: int
    ) -> None:
        """Make the slot's node an ephemeral node of this session with ``record``, if the assignment
        still has ``assignment_version``.

        The check and the write are one transaction. A node that another session owns is replaced:
        its process must be known to be dead, which is the supervisor's business. An unchanged one
        of this session is not written. Raises ``Conflict`` with the assignment's path when its
        version moved or it is gone.
        """
        state, path, data = self.state, paths.worker(topology_id, node, port), encode_record(record)
        assigned = paths.assignment(topology_id)
        for _ in range(_ATTEMPTS):
            if state.get_version(assigned) != assignment_version:
                raise conflict(
                    f"the assignment of {topology_id} moved on from version {assignment_version}: read it again",
                    assigned,
                )
            transaction = state.transaction().check(assigned, assignment_version)
            # The folder is made in the transaction too: a topology that was just removed gets none.
            if not state.exists(paths.workers(topology_id)):
                transaction.create(paths.workers(topology_id))
            found = state.get_data_with_version(path)
            if found is None:
                transaction.create(path, data, ephemeral=True)
            elif not state.owned(path):
                transaction.delete(path, found[1].version).create(path, data, ephemeral=True)
            elif found[0] != data:
                transaction.set(path, data, found[1].version)
            try:
                transaction.commit()
            except Conflict as error:
                if error.path == assigned:
                    raise
                continue
            # Versions begin at 0 again in a node that was replaced meanwhile: check its owner.
            if state.owned(path):
                return
        raise conflict(
            f"{path} is written by others all the time: two processes hold this slot", path
        )

    def remove_worker_node(self, topology_id: str, node: str, port: int) -> bool:
        """Remove the slot's node if this session owns it; whether it did."""
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

        A worker that ends between the list and the read is left out. ``Corrupt`` for a record that
        cannot be read: its process lives, so that it must not be taken for absent. ``wake`` is
        called when one comes, goes or rewrites its record.
        """
        parent = paths.workers(topology_id)
        watch = self.watch(parent, wake)
        found = [f"{parent}/{name}" for name in self.state.find_children(parent, watch) or ()]
        for path in found:
            self.watch(path, wake)
        return {
            parse_worker_name(path.rpartition("/")[2]): decode_record(WorkerNode, node[0], path)
            for path, node in zip(found, self.state.get_many(found, watch), strict=True)
            if node is not None
        }
