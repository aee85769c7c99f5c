"""Storage layer below Storm's state in ZooKeeper: its ``ClusterState``."""

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError
from kazoo.protocol.states import WatchedEvent, ZnodeStat

from storm_dagster.model.errors import Conflict, InvalidRequest, Unavailable
from storm_dagster.model.records import MAX_NODE_BYTES
from storm_dagster.model.view import Versioned
from storm_dagster.security.zookeeper_access import worker_may_have_made
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.state_protocol import (
    CHILDREN_CHANGED,
    CREATED,
    DATA_CHANGED,
    DELETED,
    ClusterState,
)
from storm_dagster.zk.transaction import Transaction, conflict

_log = logging.getLogger(__name__)

_EVENTS = {
    "CREATED": CREATED,
    "DELETED": DELETED,
    "CHANGED": DATA_CHANGED,
    "CHILD": CHILDREN_CHANGED,
}
"""kazoo's type of an event -> ours; other types concern the connection."""
_ATTEMPTS = 10
"""Attempts at a read and the action on it; the last race that is lost is a ``Conflict``."""
_CLOSED_NODE = (b"", ZnodeStat(*[-1] * len(ZnodeStat._fields)))
"""Result of a read of a node that a worker has closed to this client."""


def parent_of(path: str) -> str:
    """Path of the parent node; ``/`` for a first-level node."""
    parent, _, _ = path.rstrip("/").rpartition("/")
    return parent or "/"


def _check_size(path: str, data: bytes) -> None:
    """Raise ``InvalidRequest`` for data that no node can hold."""
    if len(data) > MAX_NODE_BYTES:
        raise InvalidRequest(
            f"{path} would take {len(data)} bytes, a ZooKeeper node may hold {MAX_NODE_BYTES}: "
            "write less"
        )


class ZooKeeperClusterState(ClusterState):
    """:class:`ClusterState` on a :class:`ZkSession`."""

    def __init__(self, session: ZkSession) -> None:
        self.session = session
        self._active = True
        """False once closed: events are ignored."""
        self._lock = threading.Lock()
        """Guards :attr:`_callbacks`."""
        self._callbacks: dict[str, Callable[[str, str], None]] = {}
        """uuid of a registration -> its callback."""
        # One bound method for all watches: kazoo keeps watchers in a set, so each event comes once.
        self._watcher = self._on_event
        self._newest_event: WatchedEvent | None = None
        """Last event that was issued, to recognize its second delivery."""

    @property
    def connected(self) -> bool:
        return self.session.connected

    # -- events ------------------------------------------------------------------------------------

    def register(self, callback: Callable[[str, str], None]) -> str:
        registration = str(uuid.uuid4())
        with self._lock:
            self._callbacks[registration] = callback
        return registration

    def unregister(self, registration: str) -> None:
        with self._lock:
            self._callbacks.pop(registration, None)

    def _on_event(self, event: WatchedEvent) -> None:
        """Call every registered callback with an event of a node, once; kazoo's watcher."""
        # A lost connection drops all watches and sends an event of no type; code that relies on
        # watches is notified through add_listener.
        kind = _EVENTS.get(event.type)
        if kind is None or not self._active:
            return
        # The deletion of a node that was watched for data and for children is one event, delivered
        # twice.
        if event is self._newest_event:
            return
        self._newest_event = event
        path = self.session.strip(event.path)
        if not self.session.connected:
            _log.warning(
                "event %s of %s came while ZooKeeper is disconnected (%s)", kind, path, event.state
            )
        with self._lock:
            callbacks = list(self._callbacks.values())
        for callback in callbacks:
            # A failing callback is called once for an event (kazoo might repeat it), and does not
            # stop the other ones.
            try:
                callback(kind, path)
            except Exception:
                _log.exception("a callback failed at the event %s of %s", kind, path)

    def add_listener(self, wake: Callable[[str], None]) -> None:
        self.session.add_listener(wake)

    def remove_listener(self, wake: Callable[[str], None]) -> None:
        self.session.remove_listener(wake)

    # -- reading -----------------------------------------------------------------------------------

    def _stat(self, path: str, watch: bool = False) -> ZnodeStat | None:
        """Stat of the node; ``None`` without the node, whose creation the watch then notices."""
        full = self.session.full(path)
        watcher = self._watcher if watch else None
        return self.session.call(
            lambda client: client.exists_async(full, watch=watcher),
            f"a read of {path}",
            read=True,
        )

    def get_version(self, path: str, watch: bool = False) -> int | None:
        stat = self._stat(path, watch)
        return None if stat is None else stat.version

    def owned(self, path: str) -> bool:
        own_id = self.session.session_id
        stat = self._stat(path)
        return stat is not None and own_id != 0 and stat.ephemeralOwner == own_id

    def get_many(
        self, many: Sequence[str], watch: bool = False
    ) -> list[tuple[bytes, Versioned] | None]:
        nodes: list[tuple[bytes, Versioned] | None] = []
        for result in self._read_at_once(many, watch, "get_async", _CLOSED_NODE):
            if result is None:
                nodes.append(None)
            else:
                data, stat = result
                nodes.append((data, Versioned(stat.version, stat.mzxid)))
        return nodes

    def find_children_many(
        self, many: Sequence[str], watch: bool = False
    ) -> list[list[str] | None]:
        lists = self._read_at_once(many, watch, "get_children_async", [])
        return [None if names is None else sorted(names) for names in lists]

    def _read_at_once(
        self, many: Sequence[str], watch: bool, method: str, closed: Any
    ) -> list[Any]:
        """Read many nodes by kazoo's ``method``, without ``watch`` in one request.

        A node that a worker has closed fails the whole request. Then, and with ``watch``, see
        :meth:`_read_many`, also for ``closed``.
        """
        if len(many) > 1 and not watch:
            with contextlib.suppress(InvalidRequest):
                fulls = [self.session.full(path) for path in many]
                return self.session.read_nodes(
                    fulls, f"a read of {many[0]}", method == "get_children_async"
                )
        watcher = self._watcher if watch else None

        def begin(full: str, client: Any) -> Any:
            return getattr(client, method)(full, watch=watcher)

        return self._read_many(many, begin, watch, closed)

    def _read_many(
        self, many: Sequence[str], begin: Callable[[str, Any], Any], watch: bool, closed: Any
    ) -> list[Any]:
        """Read many nodes, one request each.

        Results are in order, ``None`` without the node. ``watch`` leaves an exists-watch on a
        missing node that is awaited. ``closed`` is the result for a node that a worker has made and
        closed: it must not hide the other nodes.
        """
        fulls = [self.session.full(path) for path in many]
        results: list[Any] = [None] * len(fulls)
        pending = list(range(len(fulls)))
        for _ in range(_ATTEMPTS):
            action = f"a read of {many[pending[0]]}" if pending else "a read"
            begins = [partial(begin, fulls[index]) for index in pending]
            for index, result in zip(pending, self.session.pipeline(begins, action), strict=True):
                results[index] = self._checked_result(many[index], result, action, closed)
            missing = [
                index
                for index in pending
                if results[index] is None and watch and self._awaits(many[index])
            ]
            stats = self._stats([fulls[index] for index in missing], action)
            # A node that was created between the two reads is reread.
            pending = [
                index for index, stat in zip(missing, stats, strict=True) if stat is not None
            ]
            if not pending:
                return results
        path = many[pending[0]]
        raise conflict(f"{path} appears and vanishes all the time: read again", path)

    def _checked_result(self, path: str, result: Any, action: str, closed: Any) -> Any:
        """The result of a read: ``None`` without the node, ``closed`` for one that is closed.

        Raises any other error that the result is.
        """
        if isinstance(result, NoNodeError):
            return None
        if isinstance(result, InvalidRequest) and worker_may_have_made(path):
            self._check_readable_folder(path, action)
            return closed
        if isinstance(result, Exception):
            raise result
        return result

    def _check_readable_folder(self, path: str, action: str) -> None:
        """Check that this client may read the folder of a closed node.

        Raises an error if it may not. Otherwise only the node is closed, by its worker.
        """
        folder = self.session.full("/".join(path.split("/")[:3]))
        self.session.call(lambda client: client.get_children_async(folder), action, read=True)

    def _awaits(self, path: str) -> bool:
        """True if a watch on a missing node waits for its creation."""
        return self.awaits_all or parent_of(path) == "/"

    def _stats(
        self, fulls: Sequence[str], action: str, watch: bool = True
    ) -> list[ZnodeStat | None]:
        """Stat of each node on the server, ``None`` without the node; raises the first error."""
        watcher = self._watcher if watch else None
        begins = [
            lambda client, full=full: client.exists_async(full, watch=watcher) for full in fulls
        ]
        stats = self.session.pipeline(begins, action)
        for stat in stats:
            if isinstance(stat, Exception):
                raise stat
        return stats

    def sync_path(self, path: str) -> None:
        full = self.session.full(path)
        self.session.call(lambda client: client.sync_async(full), f"a sync of {path}", read=True)

    # -- writing -----------------------------------------------------------------------------------

    def mkdirs(self, path: str) -> None:
        """Create the missing ones of the node and its parents.

        Concurrent creators do not disturb. The root itself is never created here: state that
        vanished as a whole must not come back as an empty tree. ``Unavailable`` when the root is
        absent.
        """
        parent = parent_of(path)
        if parent == path or self.exists(path):
            return
        # From below: a worker may create nodes in a few places only.
        self.mkdirs(parent)
        try:
            self._create(path, b"")
        except NodeExistsError:
            return
        except NoNodeError:
            if parent == "/":
                raise self._no_root() from None
            raise conflict(f"{parent} was deleted at the same time: retry", path) from None

    def _no_root(self) -> Unavailable:
        return Unavailable(
            f"the cluster root {self.session.root or '/'} does not exist in ZooKeeper at "
            f"{self.session.hosts}: nothing was created; check storm.zookeeper.root and .servers, "
            "or create the root with storm-dagster daemon nimbus on an empty store, or dev"
        )

    def _create(
        self, path: str, data: bytes, *, ephemeral: bool = False, sequence: bool = False
    ) -> str:
        """Create a node below an existing parent, and return its path; kazoo's errors pass."""
        full = self.session.full(path)
        acl = self.session.acl(path)
        created = self.session.call(
            lambda client: client.create_async(
                full, data, acl, ephemeral=ephemeral, sequence=sequence
            ),
            f"the creation of {path}",
        )
        return self.session.strip(created)

    def _create_with_parents(
        self, path: str, data: bytes, *, ephemeral: bool = False, sequence: bool = False
    ) -> str:
        """As :meth:`_create`, with the missing parents; ``Unavailable`` without the root."""
        for _ in range(_ATTEMPTS):
            try:
                return self._create(path, data, ephemeral=ephemeral, sequence=sequence)
            except NoNodeError:
                if parent_of(path) == "/":
                    raise self._no_root() from None
                self.mkdirs(parent_of(path))
        raise conflict(f"the parent of {path} is deleted all the time: retry", path)

    def create_node(self, path: str, data: bytes = b"") -> None:
        _check_size(path, data)
        try:
            self._create_with_parents(path, data)
        except NodeExistsError:
            raise conflict(f"{path} exists already: read again", path) from None

    def create_sequential(self, path: str, data: bytes) -> str:
        """Create a node ``path`` + 10 digits, and return its path.

        Not for a record that must be unique: a lost response may leave a node.
        """
        _check_size(path, data)
        return self._create_with_parents(path, data, sequence=True)

    def set_data(self, path: str, data: bytes, version: int | None = None) -> int:
        """Write the data, and return the new version.

        Without ``version`` a missing node is created with its parents, and existing data is
        replaced. With it (0 included), ``Conflict`` unless the node exists and has that version.
        """
        _check_size(path, data)
        if version is not None:
            return self._set(path, data, version).version
        for _ in range(_ATTEMPTS):
            try:
                return self._set(path, data, -1).version
            except Conflict as error:
                # One that names the path: the node does not exist.
                if error.path != path:
                    raise
            with contextlib.suppress(NodeExistsError):
                self._create_with_parents(path, data)
                return 0
        raise conflict(f"{path} appears and vanishes all the time: retry", path)

    def _set(self, path: str, data: bytes, version: int) -> ZnodeStat:
        """Replace the data, and return the new stat.

        ``version`` -1 means any. ``Conflict`` for another version and without the node.
        """
        full = self.session.full(path)
        try:
            return self.session.call(
                lambda client: client.set_async(full, data, version=version), f"a write of {path}"
            )
        except BadVersionError:
            raise conflict(
                f"{path} has changed (version {version} was expected): read again", path
            ) from None
        except NoNodeError:
            raise conflict(f"{path} no longer exists: read again", path) from None

    def set_ephemeral_node(self, path: str, data: bytes) -> None:
        """Make ``path`` an ephemeral node of this session that holds ``data``.

        An existing node is written to only if this session owns it. A node of another session, even
        an older one of the same process, is replaced in one transaction: a write to it would
        succeed, and the node would vanish with its owner. ``Conflict`` when the race for it is lost
        repeatedly, or when it has children.
        """
        _check_size(path, data)
        for _ in range(_ATTEMPTS):
            own_id = self.session.session_id
            stat = self._stat(path)
            # Both errors are lost races: the next attempt reads the node once more.
            with contextlib.suppress(NodeExistsError, Conflict):
                if stat is None:
                    self._create_with_parents(path, data, ephemeral=True)
                elif own_id and stat.ephemeralOwner == own_id:
                    written = self._set(path, data, stat.version)
                    if written.ephemeralOwner != own_id:
                        # Replaced after the read: versions of the new node begin at 0, too.
                        continue
                else:
                    transaction = self.transaction().delete(path, stat.version)
                    transaction.create(path, data, ephemeral=True)
                    transaction.commit()
                return
        raise conflict(
            f"{path} cannot be made an ephemeral node: it has children, or others write it", path
        )

    def claim_ephemeral_node(self, path: str, data: bytes) -> bool:
        _check_size(path, data)
        for _ in range(_ATTEMPTS):
            own_id = self.session.session_id
            try:
                self._create_with_parents(path, data, ephemeral=True)
                return True
            except NodeExistsError:
                stat = self._stat(path)
                if stat is not None:
                    return own_id != 0 and stat.ephemeralOwner == own_id
        return False

    def delete_node(self, path: str) -> None:
        if path.strip("/") == "":
            raise InvalidRequest(
                "the root of the cluster state is never deleted: name a node below it"
            )
        full = self.session.full(path)
        for _ in range(_ATTEMPTS):
            try:
                with contextlib.suppress(NoNodeError):
                    self.session.call(
                        lambda client: client.delete_async(full), f"the deletion of {path}"
                    )
                return
            except NotEmptyError:
                for name in self.find_children(path) or ():
                    self.delete_node(f"{path}/{name}")
        raise conflict(f"{path} gets new children while it is deleted: retry", path)

    def transaction(self) -> Transaction:
        return Transaction(self.session)

    def close(self) -> None:
        self._active = False
        with self._lock:
            self._callbacks.clear()
        self.session.close()
