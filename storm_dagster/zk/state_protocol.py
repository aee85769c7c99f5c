"""Protocol ``ClusterState``: the operations of a store of cluster state, which are Storm's."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from storm_dagster.model.view import Versioned
from storm_dagster.zk.transaction import Transaction, conflict

CREATED = "created"
DELETED = "deleted"
DATA_CHANGED = "data-changed"
CHILDREN_CHANGED = "children-changed"


def read_children(
    state: "ClusterState", folder: str, watch: bool = False
) -> dict[str, tuple[bytes, Versioned]]:
    """Name -> data and version of every child, by name; one that goes meanwhile is left out.
    ``watch``: that list.
    """
    names = state.find_children(folder, watch) or []
    found = state.get_many([f"{folder}/{name}" for name in names])
    return {name: node for name, node in zip(names, found, strict=True) if node is not None}


@runtime_checkable
class ClusterState(Protocol):
    """A tree of small nodes with versions, ephemeral nodes, one-shot watches and transactions.

    Paths start with ``/`` and are below the state's root. ``watch=True`` arms a one-shot watch,
    whose event goes to every registered callback. Every method raises ``Unavailable`` when the
    store is out of reach; a write whose answer was lost may have landed.
    """

    awaits_all: bool = True
    """Whether a watch on a missing node fires at its creation, wherever it is; if not, on the first
    level only.
    """

    @property
    def connected(self) -> bool:
        """Whether the store can be reached at this moment."""
        ...

    def register(self, callback: Callable[[str, str], None]) -> str:
        """Call ``callback(type, path)`` for every watch event until :meth:`unregister`; returns its
        uuid.
        """
        ...

    def unregister(self, registration: str) -> None:
        """Undo :meth:`register`; an unknown uuid is ignored."""

    def set_ephemeral_node(self, path: str, data: bytes) -> None:
        """Make ``path`` an ephemeral node of this session with ``data``; see the implementation."""

    def claim_ephemeral_node(self, path: str, data: bytes) -> bool:
        """Create the ephemeral node if it is absent; whether it belongs to this session
        afterwards.
        """
        ...

    def delete_node(self, path: str) -> None:
        """Delete the node and everything below it; a missing node is no error."""

    def create_node(self, path: str, data: bytes = b"") -> None:
        """Create a persistent node and its parents; ``Conflict`` when it exists."""

    def create_sequential(self, path: str, data: bytes) -> str:
        """Create a persistent node whose name gets a rising 10-digit suffix; returns its path."""
        ...

    def set_data(self, path: str, data: bytes, version: int | None = None) -> int:
        """Write the data; returns the new version. With ``version``, only if the node has that
        one.
        """
        ...

    def get_data(self, path: str, watch: bool = False) -> bytes | None:
        """The data, ``None`` without the node; a watch on a missing node fires at its creation."""
        found = self.get_data_with_version(path, watch)
        return None if found is None else found[0]

    def get_data_with_version(
        self, path: str, watch: bool = False
    ) -> tuple[bytes, Versioned] | None:
        """The data and its version, ``None`` without the node."""
        return self.get_many([path], watch)[0]

    def get_version(self, path: str, watch: bool = False) -> int | None:
        """The data version, ``None`` without the node."""
        ...

    def get_children(self, path: str, watch: bool = False) -> list[str]:
        """Names of the children, sorted; ``Conflict`` without the node."""
        found = self.find_children(path, watch)
        if found is None:
            raise conflict(f"{path} does not exist: create it first", path)
        return found

    def find_children(self, path: str, watch: bool = False) -> list[str] | None:
        """Names of the children, sorted, ``None`` without the node (a watch then fires at its
        creation).
        """
        return self.find_children_many([path], watch)[0]

    def get_many(
        self, many: Sequence[str], watch: bool = False
    ) -> list[tuple[bytes, Versioned] | None]:
        """:meth:`get_data_with_version` of many nodes, without waiting for one after the other."""
        ...

    def find_children_many(
        self, many: Sequence[str], watch: bool = False
    ) -> list[list[str] | None]:
        """:meth:`find_children` of many nodes, without waiting for one after the other."""
        ...

    def mkdirs(self, path: str) -> None:
        """Create the node and its parents below the root where they are missing."""

    def exists(self, path: str, watch: bool = False) -> bool:
        """Whether the node exists."""
        return self.get_version(path, watch) is not None

    def owned(self, path: str) -> bool:
        """Whether the node is an ephemeral node of this session."""
        ...

    def sync_path(self, path: str) -> None:
        """Make the reads that follow see every write that was acknowledged before, by whomever."""

    def delete_node_blobstore(self, parent: str, host_port: str) -> None:
        """Delete the children of ``parent`` that are ``<host_port>-<sequence>``; no parent is no
        error.
        """
        for name in self.find_children(parent) or ():
            # The sequence number follows the last dash; host names may hold dashes too.
            if name.rpartition("-")[0] == host_port:
                self.delete_node(f"{parent}/{name}")

    def transaction(self) -> Transaction:
        """A new, empty transaction."""
        ...

    def add_listener(self, wake: Callable[[str], None]) -> None:
        """Call ``wake`` with CONNECTED, SUSPENDED or LOST on each change; it must not block."""

    def remove_listener(self, wake: Callable[[str], None]) -> None:
        """Undo :meth:`add_listener`."""

    def close(self) -> None:
        """Deliver no more events, and end the session; its ephemeral nodes vanish."""
