"""The storage layer below everything that Storm keeps in ZooKeeper, its ``ClusterState``."""

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
# Races between reading a node and acting on it are run again this often before they are a Conflict.
_ATTEMPTS = 10
_CLOSED = (b"", ZnodeStat(*[-1] * len(ZnodeStat._fields)))


def parent_of(path: str) -> str:
    """The path of the parent node; ``/`` for a first-level node."""
    return path.rstrip("/").rpartition("/")[0] or "/"


def _check_size(path: str, data: bytes) -> None:
    if len(data) > MAX_NODE_BYTES:
        raise InvalidRequest(
            f"{path} would take {len(data)} bytes, a ZooKeeper node may hold {MAX_NODE_BYTES}: write less"
        )


class ZooKeeperClusterState(ClusterState):
    """:class:`ClusterState` on a :class:`ZkSession`."""

    def __init__(self, session: ZkSession) -> None:
        self.session = session
        self._active = True
        self._lock = threading.Lock()
        self._callbacks: dict[str, Callable[[str, str], None]] = {}
        # One bound method for all watches: kazoo keeps watchers in a set, so each event comes once.
        self._watcher = self._on_event
        self._newest_event: WatchedEvent | None = None

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
            # A failing callback is never called again for the same event (kazoo might), and stops
            # no other.
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
        full, watcher = self.session.full(path), self._watcher if watch else None
        return self.session.call(
            lambda c: c.exists_async(full, watch=watcher), f"a read of {path}", read=True
        )

    def get_version(self, path: str, watch: bool = False) -> int | None:
        stat = self._stat(path, watch)
        return None if stat is None else stat.version

    def owned(self, path: str) -> bool:
        mine = self.session.session_id
        stat = self._stat(path)
        return stat is not None and mine != 0 and stat.ephemeralOwner == mine

    def get_many(
        self, many: Sequence[str], watch: bool = False
    ) -> list[tuple[bytes, Versioned] | None]:
        answers = self._read_at_once(many, watch, "get_async", _CLOSED)
        return [
            answer and (answer[0], Versioned(answer[1].version, answer[1].mzxid))
            for answer in answers
        ]

    def find_children_many(
        self, many: Sequence[str], watch: bool = False
    ) -> list[list[str] | None]:
        answers = self._read_at_once(many, watch, "get_children_async", [])
        return [None if answer is None else sorted(answer) for answer in answers]

    def _read_at_once(
        self, many: Sequence[str], watch: bool, method: str, closed: Any
    ) -> list[Any]:
        """One request for many nodes, unless ``watch``. One that a worker has closed fails all of
        it: see the next method.
        """
        if len(many) > 1 and not watch:
            with contextlib.suppress(InvalidRequest):
                fulls = [self.session.full(path) for path in many]
                return self.session.read_nodes(
                    fulls, f"a read of {many[0]}", method == "get_children_async"
                )
        watcher = self._watcher if watch else None
        return self._read_many(
            many, lambda full, c: getattr(c, method)(full, watch=watcher), watch, closed
        )

    def _read_many(
        self, many: Sequence[str], begin: Callable[[str, Any], Any], watch: bool, closed: Any
    ) -> list[Any]:
        """Answers in order, ``None`` for a missing node, on which ``watch`` leaves an exists-watch
        if it is awaited.

        ``closed`` is the answer for a node that a worker has made and closed: it must not hide
        those of others.
        """
        fulls = [self.session.full(path) for path in many]
        answers: list[Any] = [None] * len(fulls)
        wanted = list(range(len(fulls)))
        for _ in range(_ATTEMPTS):
            what = f"a read of {many[wanted[0]]}" if wanted else "a read"
            found = self.session.pipeline([partial(begin, fulls[index]) for index in wanted], what)
            for index, answer in zip(wanted, found, strict=True):
                if isinstance(answer, NoNodeError):
                    answers[index] = None
                elif isinstance(answer, InvalidRequest) and worker_may_have_made(many[index]):
                    # Closed to this client alone, which must be able to read where it lies.
                    folder = self.session.full("/".join(many[index].split("/")[:3]))
                    self.session.call(
                        lambda client, folder=folder: client.get_children_async(folder),
                        what,
                        read=True,
                    )
                    answers[index] = closed
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    answers[index] = answer
            missing = [
                index
                for index in wanted
                if answers[index] is None and watch and self._awaits(many[index])
            ]
            stats = self._stats([fulls[i] for i in missing], what)
            # A node that came into being between the two reads is read again.
            wanted = [index for index, stat in zip(missing, stats, strict=True) if stat is not None]
            if not wanted:
                return answers
        raise conflict(
            f"{many[wanted[0]]} appears and vanishes all the time: read again", many[wanted[0]]
        )

    def _awaits(self, path: str) -> bool:
        """Whether a watch on a missing node waits until it is there."""
        return self.awaits_all or parent_of(path) == "/"

    def _stats(self, fulls: Sequence[str], what: str, watch: bool = True) -> list[ZnodeStat | None]:
        watcher = self._watcher if watch else None
        begins = [
            lambda client, full=full: client.exists_async(full, watch=watcher) for full in fulls
        ]
        stats = self.session.pipeline(begins, what)
        for stat in stats:
            if isinstance(stat, Exception):
                raise stat
        return stats

    def sync_path(self, path: str) -> None:
        full = self.session.full(path)
        self.session.call(lambda client: client.sync_async(full), f"a sync of {path}", read=True)

    # -- writing -----------------------------------------------------------------------------------

    def mkdirs(self, path: str) -> None:
        """Create the node and its parents where they are missing; racing creators do not disturb.

        The root itself is never created here: state that vanished as a whole must not come back as
        an empty tree. ``Unavailable`` when the root is absent.
        """
        if parent_of(path) == path or self.exists(path):
            return
        # From below: a worker may create nodes in a few places only.
        self.mkdirs(parent_of(path))
        try:
            self._create(path, b"")
        except NodeExistsError:
            return
        except NoNodeError:
            gone = conflict(f"{parent_of(path)} was deleted meanwhile: try again", path)
            raise (self._no_root() if parent_of(path) == "/" else gone) from None

    def _no_root(self) -> Unavailable:
        return Unavailable(
            f"the cluster root {self.session.root or '/'} does not exist in ZooKeeper at {self.session.hosts}: "
            "nothing was created; check storm.zookeeper.root and .servers, "
            "or create the root with storm-dagster daemon nimbus on an empty store, or dev"
        )

    def _create(
        self, path: str, data: bytes, *, ephemeral: bool = False, sequence: bool = False
    ) -> str:
        full, acl = self.session.full(path), self.session.acl(path)
        made = self.session.call(
            lambda client: client.create_async(
                full, data, acl, ephemeral=ephemeral, sequence=sequence
            ),
            f"the creation of {path}",
        )
        return self.session.strip(made)

    def _create_with_parents(self, path: str, data: bytes, **how: bool) -> str:
        for _ in range(_ATTEMPTS):
            try:
                return self._create(path, data, **how)
            except NoNodeError:
                if parent_of(path) == "/":
                    raise self._no_root() from None
                self.mkdirs(parent_of(path))
        raise conflict(f"the parent of {path} is deleted again and again: try again", path)

    def create_node(self, path: str, data: bytes = b"") -> None:
        _check_size(path, data)
        try:
            self._create_with_parents(path, data)
        except NodeExistsError:
            raise conflict(f"{path} exists already: read again", path) from None

    def create_sequential(self, path: str, data: bytes) -> str:
        """Create ``path`` + 10 digits; not for what must be unique: a lost answer may leave a
        node.
        """
        _check_size(path, data)
        return self._create_with_parents(path, data, sequence=True)

    def set_data(self, path: str, data: bytes, version: int | None = None) -> int:
        """Write the data; returns the new version.

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
                if error.path != path:
                    raise
            with contextlib.suppress(NodeExistsError):
                self._create_with_parents(path, data)
                return 0
        raise conflict(f"{path} appears and vanishes all the time: try again", path)

    def _set(self, path: str, data: bytes, version: int) -> ZnodeStat:
        full = self.session.full(path)
        try:
            return self.session.call(
                lambda client: client.set_async(full, data, version=version), f"a write of {path}"
            )
        except BadVersionError:
            raise conflict(
                f"{path} was changed meanwhile (version {version} was expected): read again", path
            ) from None
        except NoNodeError:
            raise conflict(f"{path} does not exist any more: read again", path) from None

    def set_ephemeral_node(self, path: str, data: bytes) -> None:
        """Make ``path`` an ephemeral node of this session that holds ``data``.

        An existing node is only written to when this very session owns it. One that an older
        session of the same process (or anybody else) owns is replaced in one transaction: writing
        to it would succeed, and the node would vanish with its owner. ``Conflict`` when the race
        for it is lost again and again, or when it has children.
        """
        _check_size(path, data)
        for _ in range(_ATTEMPTS):
            mine = self.session.session_id
            stat = self._stat(path)
            with contextlib.suppress(NodeExistsError, Conflict):
                if stat is None:
                    self._create_with_parents(path, data, ephemeral=True)
                elif mine and stat.ephemeralOwner == mine:
                    # Versions begin at 0 again in a node that was replaced meanwhile: check its
                    # owner.
                    if self._set(path, data, stat.version).ephemeralOwner != mine:
                        continue
                else:
                    self.transaction().delete(path, stat.version).create(
                        path, data, ephemeral=True
                    ).commit()
                return
        raise conflict(
            f"{path} cannot be made an ephemeral node: it has children, or others write it", path
        )

    def claim_ephemeral_node(self, path: str, data: bytes) -> bool:
        _check_size(path, data)
        for _ in range(_ATTEMPTS):
            mine = self.session.session_id
            try:
                self._create_with_parents(path, data, ephemeral=True)
                return True
            except NodeExistsError:
                if (stat := self._stat(path)) is not None:
                    return mine != 0 and stat.ephemeralOwner == mine
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
        raise conflict(f"{path} gets new children while it is deleted: try again", path)

    def transaction(self) -> Transaction:
        return Transaction(self.session)

    def close(self) -> None:
        self._active = False
        with self._lock:
            self._callbacks.clear()
        self.session.close()
