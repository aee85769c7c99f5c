"""Protocol ``ClusterState``: Storm's operations of a state store."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from storm_dagster.model.view import Versioned
from storm_dagster.zk.transaction import Transaction, conflict

# Types of watch events.
CREATED = "created"
DELETED = "deleted"
DATA_CHANGED = "data-changed"
CHILDREN_CHANGED = "children-changed"


def read_children(
    state: "ClusterState", folder: str, watch: bool = False
) -> dict[str, tuple[bytes, Versioned]]:
    """Name -> data and version of every child, by name.

    ``watch``: watch the list of children. A child that is deleted between the two reads is left
    out.
    """
    names = state.find_children(folder, watch) or []
    nodes = state.get_many([f"{folder}/{name}" for name in names])
    return {name: node for name, node in zip(names, nodes, strict=True) if node is not None}


@runtime_checkable
class ClusterState(Protocol):
    """A tree of small nodes with versions, watches and transactions.

    Nodes may be ephemeral. Paths start with ``/`` and are below the state's root.
    ``watch=True`` arms a one-shot watch, whose event goes to every registered callback. Every
    method raises ``Unavailable`` if the store is out of reach; a write whose response was lost may
    have landed.
    """

    awaits_all: bool = True
    """True if a watch on any missing node fires at its creation.

    False: only a watch on a missing node of the first level does.
    """

    @property
    def connected(self) -> bool:
        """True while the store is connected."""
        ...

    def register(self, callback: Callable[[str, str], None]) -> str:
        """Call ``callback(type, path)`` for every watch event.

        It is called until :meth:`unregister`. Returns the uuid of the registration.
        """
        ...

    def unregister(self, registration: str) -> None:
        """Undo :meth:`register`; an unknown uuid is ignored."""

    def set_ephemeral_node(self, path: str, data: bytes) -> None:
        """Make ``path`` an ephemeral node of this session with ``data``.

        See the implementation for a node of another session.
        """

    def claim_ephemeral_node(self, path: str, data: bytes) -> bool:
        """Create the ephemeral node if it is absent.

        Returns true if the node belongs to this session afterwards.
        """
        ...

    def delete_node(self, path: str) -> None:
        """Delete the node and all nodes below it.

        A missing node is not an error.
        """

    def create_node(self, path: str, data: bytes = b"") -> None:
        """Create a persistent node and its parents.

        Raises ``Conflict`` if it exists.
        """

    def create_sequential(self, path: str, data: bytes) -> str:
        """Create a persistent node, and return its path.

        The path gets a rising 10-digit suffix.
        """
        ...

    def set_data(self, path: str, data: bytes, version: int | None = None) -> int:
        """Write the data, and return the new version.

        With ``version``, only if the node has that one.
        """
        ...

    def get_data(self, path: str, watch: bool = False) -> bytes | None:
        """The data, ``None`` without the node.

        A watch on a missing node fires at its creation.
        """
        node = self.get_data_with_version(path, watch)
        return None if node is None else node[0]

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
        names = self.find_children(path, watch)
        if names is None:
            raise conflict(f"{path} does not exist: create it first", path)
        return names

    def find_children(self, path: str, watch: bool = False) -> list[str] | None:
        """Names of the children, sorted, ``None`` without the node.

        A watch on a missing node fires at its creation.
        """
        return self.find_children_many([path], watch)[0]

    def get_many(
        self, many: Sequence[str], watch: bool = False
    ) -> list[tuple[bytes, Versioned] | None]:
        """:meth:`get_data_with_version` of many nodes at once."""
        ...

    def find_children_many(
        self, many: Sequence[str], watch: bool = False
    ) -> list[list[str] | None]:
        """:meth:`find_children` of many nodes at once."""
        ...

    def mkdirs(self, path: str) -> None:
        """Create the missing ones of the node and its parents.

        The root is not created.
        """

    def exists(self, path: str, watch: bool = False) -> bool:
        """True if the node exists."""
        return self.get_version(path, watch) is not None

    def owned(self, path: str) -> bool:
        """True if the node is an ephemeral node of this session."""
        ...

    def sync_path(self, path: str) -> None:
        """Make later reads see every earlier acknowledged write.

        It may be the write of any client.
        """

    def delete_node_blobstore(self, parent: str, host_port: str) -> None:
        """Delete the children ``<host_port>-<sequence>`` of ``parent``.

        A missing parent is not an error.
        """
        for name in self.find_children(parent) or ():
            # The sequence number follows the last dash; host names may contain dashes, too.
            name_host_port, _, _ = name.rpartition("-")
            if name_host_port == host_port:
                self.delete_node(f"{parent}/{name}")

    def transaction(self) -> Transaction:
        """Begin an empty transaction."""
        ...

    def add_listener(self, wake: Callable[[str], None]) -> None:
        """Call ``wake`` with CONNECTED, SUSPENDED or LOST on each change.

        ``wake`` must not block.
        """

    def remove_listener(self, wake: Callable[[str], None]) -> None:
        """Undo :meth:`add_listener`."""

    def close(self) -> None:
        """Stop the events, and end the session; its ephemeral nodes vanish."""
