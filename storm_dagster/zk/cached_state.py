"""Read cache of rarely changing nodes, in memory and on disk.

Watches invalidate it. Unlike JStorm's cache, whose entries simply aged, a value is served only
while a watch on its node is armed and has not fired. Before a value is served, the events that have
arrived are processed: a caller reads values that are at least as new as those that it read from
ZooKeeper before (the server sends the event of a change before any response that includes the
change). An interruption of the connection empties the memory level, because the watches may be
lost; the values on disk are then proved by their modification id, without a second transfer.

The absence of a node is proved by the watched list of its folder. A watch on the node itself would
never fire: ids of topologies are not reused.
"""

import contextlib
import logging
import re
import sqlite3
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from kazoo.protocol.states import ZnodeStat

from storm_dagster.model.records import decode_record
from storm_dagster.model.view import ClusterView, Versioned
from storm_dagster.zk.cluster_state import ZooKeeperClusterState, parent_of
from storm_dagster.zk.disk_cache import DiskCache
from storm_dagster.zk.state_protocol import CHILDREN_CHANGED, DATA_CHANGED, DELETED
from storm_dagster.zk.view_loading import load_view

_log = logging.getLogger(__name__)

_RARELY_CHANGING = re.compile(
    r"/(topology|tasks|assignments|workers)/[^/]+(/[^/]+)?|/blobstoremaxkeysequencenumber/[^/]+"
    r"|/(epoch|assignments|blacklist|healing_pause)"
)
"""Nodes whose value is cached. Heartbeat and supervisor records are rewritten all the time."""
_RARELY_CHANGING_LISTS = re.compile(
    r"/(workers|blobstore|gray_upgrade)/[^/]+|/(supervisors|topology|blobstore|gray_upgrade)"
)
"""Nodes whose list of children is cached."""
_MAX_BYTES = 32 << 20
"""Bytes of the values in memory; lists do not count."""
_MAX_CHANGES = 100_000
"""Nodes whose events are counted; with more, the memory level is emptied."""
_BARRIER_SECS = 10.0
"""Much longer than a starved process takes: dropping the cache would make it even slower."""

_Value = tuple[bytes, Versioned] | None
"""Data and version of a node; ``None`` without the node."""
_Stamp = tuple[int, int]
"""Number of interruptions of the connection, and number of events of a node."""


@dataclass
class CacheMetrics:
    """Number of reads of cacheable nodes since the start, by source."""

    memory: int = 0
    disk: int = 0
    zookeeper: int = 0
    invalidated: int = 0
    """Entries dropped because their watch fired or the connection was interrupted."""


class CachedReads(ZooKeeperClusterState):
    """Cached reads of a :class:`ClusterState`, on its session.

    It never writes. It has its own watches, so that events of its nodes do not issue callbacks of
    the other state. Thread-safe.
    """

    def __init__(
        self, state: ZooKeeperClusterState, disk: DiskCache | None, max_bytes: int = _MAX_BYTES
    ) -> None:
        super().__init__(state.session)
        # The absence of a node is proved by the list of its folder.
        self.awaits_all = False
        self._disk = disk
        self._max_bytes = max_bytes
        self._guard = threading.Lock()
        """Guards the fields that follow, up to the metrics; not held during a request."""
        self._memory: OrderedDict[str, _Value] = OrderedDict()
        """Node -> value, the least recently used first."""
        self._bytes = 0
        """Bytes of the values in memory."""
        self._lists: dict[str, list[str] | None] = {}
        """Folder -> names of its children; ``None`` for a missing folder."""
        self._absent: dict[str, set[str]] = {}
        """Folder -> nodes whose absence its list proves."""
        self._deleted: set[str] = set()
        """Deleted nodes. Their values on disk are removed with the next write to the disk."""
        self._watched: dict[str, int] = {}
        """Node whose armed watch has not fired -> modification id of the value that it watches."""
        self._changes: dict[str, int] = {}
        """Node -> number of its events. A value that was requested before an event may be old."""
        self._interruptions = 0
        """Number of interruptions: a value that was requested before one may be old."""
        self.metrics: CacheMetrics = CacheMetrics()
        self._decoded: dict[str, tuple[bytes, Any]] = {}
        """Node -> bytes and record of the newest view."""
        self.register(self._on_change)
        self.add_listener(self._on_interruption)

    def load_view(self, cluster_id: str) -> ClusterView:
        """The whole cluster.

        See :func:`~storm_dagster.zk.view_loading.load_view`. A record that has not changed since
        the last view is not decoded a second time.
        """
        former = self._decoded
        current: dict[str, tuple[bytes, Any]] = {}

        def decode(cls: type[Any], raw: bytes, path: str) -> Any:
            former_raw, record = former.get(path, (None, None))
            if former_raw != raw or type(record) is not cls:
                record = decode_record(cls, raw, path)
            current[path] = (raw, record)
            return record

        view = load_view(self, cluster_id, decode=decode)
        # Replaced as a whole, so that the records of removed nodes are dropped.
        self._decoded = current
        return view

    # -- invalidation ------------------------------------------------------------------------------

    def _on_change(self, kind: str, path: str) -> None:
        """Drop the value and the list that an event makes invalid."""
        with self._guard:
            self._changes[path] = self._changes.get(path, 0) + 1
            if kind != CHILDREN_CHANGED:
                self._drop_value(path)
            if kind == DELETED and self._disk is not None:
                self._deleted.add(path)
            if kind != DATA_CHANGED:
                self._drop_list(path)
            crowded = len(self._changes) > _MAX_CHANGES
        if crowded:
            self._on_interruption("CROWDED")

    def _on_interruption(self, event: str) -> None:
        """Empty the memory level, because watches may be lost; a value on disk stays.

        ``event`` is the new state of the connection (``CONNECTED`` has no effect), or another
        reason.
        """
        if event == "CONNECTED":
            return
        with self._guard:
            self._interruptions += 1
            self.metrics.invalidated += len(self._memory) + len(self._lists)
            self._memory.clear()
            self._bytes = 0
            self._lists.clear()
            self._absent.clear()
            self._watched.clear()
            self._changes.clear()

    def _drop_value(self, path: str) -> None:
        """Drop a value whose watch has fired: its value on disk is not valid by it, either."""
        if self._watched.pop(path, None) is not None:
            self.metrics.invalidated += 1
        self._forget(path)

    def _drop_list(self, path: str) -> None:
        """Drop a list, and the absence of nodes that it proves."""
        if path in self._lists:
            self.metrics.invalidated += 1
            del self._lists[path]
        for absent in self._absent.pop(path, ()):
            self._drop_value(absent)
            self._drop_list(absent)

    def _forget(self, path: str) -> None:
        """Remove a value from memory; its watch stays armed."""
        value = self._memory.pop(path, None)
        if value is not None:
            data, _ = value
            self._bytes -= len(data)

    def _drain_events(self) -> None:
        """Wait until the events that have arrived are processed; if it takes long, drop all."""
        drained = threading.Event()
        self.session.dispatch(drained.set)
        if not drained.wait(_BARRIER_SECS):
            self._on_interruption("BUSY")

    def _stamp(self, path: str) -> _Stamp:
        """Mark of this moment: a response to an older request is valid only with the same one."""
        return self._interruptions, self._changes.get(path, 0)

    # -- reading -----------------------------------------------------------------------------------

    def get_many(self, many: Sequence[str], watch: bool = False) -> list[_Value]:
        """As the state itself, with a cache of the nodes that change rarely.

        With ``watch``, no value is taken from the cache.
        """
        cacheable = dict.fromkeys(path for path in many if _RARELY_CHANGING.fullmatch(path))
        if watch or not cacheable:
            return super().get_many(many, watch)
        uncached = [path for path in many if path not in cacheable]
        values = dict(zip(uncached, super().get_many(uncached), strict=True))
        values.update(self._get_cached(cacheable))
        return [values[path] for path in many]

    def _get_cached(self, cacheable: Iterable[str]) -> dict[str, _Value]:
        """Values from memory, and the missing ones by :meth:`_fetch`, which are then kept."""
        self._drain_events()
        values: dict[str, _Value] = {}
        missing: list[str] = []
        with self._guard:
            for path in cacheable:
                if path in self._watched and path in self._memory:
                    self._memory.move_to_end(path)
                    values[path] = self._memory[path]
                else:
                    missing.append(path)
            self.metrics.memory += len(values)
            stamps = {path: self._stamp(path) for path in missing}
            watched = {path: self._watched[path] for path in missing if path in self._watched}
        if missing:
            fetched = self._fetch(missing, watched)
            self._store(fetched, stamps)
            values.update(fetched)
        return values

    def _fetch(self, missing: list[str], watched: dict[str, int]) -> dict[str, _Value]:
        """Valid values from the disk, other ones from ZooKeeper, which are watched.

        ``watched`` is the modification id of each value that an armed watch guards.
        """
        on_disk = self._load_from_disk(missing)
        valid = self._valid_values(on_disk, watched)
        invalid = [path for path in missing if path not in valid]
        from_zookeeper = dict(zip(invalid, super().get_many(invalid, True), strict=True))
        self._list_folders(path for path, value in from_zookeeper.items() if value is None)
        with self._guard:
            self.metrics.disk += len(valid)
            self.metrics.zookeeper += len(from_zookeeper)
        self._save_to_disk(from_zookeeper)
        return {**valid, **from_zookeeper}

    def _valid_values(
        self, on_disk: Mapping[str, tuple[bytes, Versioned]], watched: Mapping[str, int]
    ) -> dict[str, _Value]:
        """Values on disk that the node still has.

        Its watch or its stat proves it.
        """
        valid: dict[str, _Value] = {}
        unproved: list[str] = []
        for path, (data, at) in on_disk.items():
            if watched.get(path) == at.mzxid:
                valid[path] = (data, at)
            else:
                unproved.append(path)
        # First without a watch: a watch on a node that does not exist would never be removed.
        existing = self._existing(unproved, watch=False)
        stats = self._existing([*existing], watch=True)
        for path, stat in stats.items():
            if Versioned(stat.version, stat.mzxid) == on_disk[path][1]:
                valid[path] = on_disk[path]
        return valid

    def _existing(self, many: Sequence[str], *, watch: bool) -> dict[str, ZnodeStat]:
        """Path -> stat of those nodes that exist."""
        fulls = [self.session.full(path) for path in many]
        stats = self._stats(fulls, "a read of versions", watch)
        pairs = zip(many, stats, strict=True)
        return {path: stat for path, stat in pairs if stat is not None}

    def _store(self, values: dict[str, _Value], stamps: dict[str, _Stamp]) -> None:
        """Keep the values in memory that no event has concerned since the ``stamps``."""
        with self._guard:
            for path, value in values.items():
                if self._stamp(path) != stamps[path]:
                    continue
                if value is None and not self._is_absent(path):
                    continue
                self._forget(path)
                self._memory[path] = value
                if value is None:
                    # No node has -1: an absent one is never taken from the disk.
                    self._watched[path] = -1
                else:
                    data, at = value
                    self._bytes += len(data)
                    self._watched[path] = at.mzxid
            while self._bytes > self._max_bytes and self._memory:
                # The watch of the oldest one stays armed: it proves the value on disk.
                oldest = next(iter(self._memory))
                self._forget(oldest)

    def find_children_many(
        self, many: Sequence[str], watch: bool = False
    ) -> list[list[str] | None]:
        """As the state itself, with a cache of the lists that change rarely.

        With ``watch``, no list is taken from the cache.
        """
        cacheable = {path for path in many if _RARELY_CHANGING_LISTS.fullmatch(path)}
        if watch or not cacheable:
            return super().find_children_many(many, watch)
        self._drain_events()
        uncached = [path for path in many if path not in cacheable]
        lists = dict(zip(uncached, super().find_children_many(uncached), strict=True))
        from_memory, from_zookeeper = self._find_lists(cacheable)
        with self._guard:
            self.metrics.memory += len(from_memory)
            self.metrics.zookeeper += len(from_zookeeper)
        lists.update(from_memory)
        lists.update(from_zookeeper)
        return [lists[path] for path in many]

    def _find_lists(
        self, folders: Iterable[str]
    ) -> tuple[dict[str, list[str] | None], dict[str, list[str] | None]]:
        """The lists in memory, and the other ones, which are read with a watch.

        Those that no event has concerned since are kept in memory.
        """
        with self._guard:
            in_memory = {path: self._lists[path] for path in folders if path in self._lists}
            stamps = {path: self._stamp(path) for path in folders if path not in in_memory}
        lists = dict(zip(stamps, super().find_children_many([*stamps], True), strict=True))
        self._list_folders(path for path, names in lists.items() if names is None)
        with self._guard:
            for path, names in lists.items():
                if self._stamp(path) != stamps[path]:
                    continue
                if names is not None or self._is_absent(path):
                    self._lists[path] = names
        return in_memory, lists

    def _list_folders(self, absent: Iterable[str]) -> None:
        """Read the lists that prove the absence of these nodes from now on."""
        folders = {parent_of(path) for path in absent if not self._awaits(path)}
        if folders:
            self._find_lists(folders)

    def _is_absent(self, path: str) -> bool:
        """True if an armed watch notices the creation of the missing node.

        A node whose absence its folder's list proves is noted in :attr:`_absent`.
        """
        if self._awaits(path):
            return True
        folder, _, name = path.rpartition("/")
        if folder not in self._lists:
            return False
        names = self._lists[folder] or []
        at = bisect_left(names, name)
        if names[at : at + 1] == [name]:
            return False
        self._absent.setdefault(folder, set()).add(path)
        return True

    def _load_from_disk(self, many: list[str]) -> dict[str, tuple[bytes, Versioned]]:
        """Values that the disk has; none if it cannot be read."""
        if self._disk is None:
            return {}
        try:
            rows = self._disk.get_many(many)
        except (OSError, sqlite3.Error) as error:
            _log.warning("the disk cache cannot be read: %s", error)
            return {}
        values: dict[str, tuple[bytes, Versioned]] = {}
        for path, row in rows.items():
            # A damaged value, or one of an earlier release, is read from ZooKeeper.
            with contextlib.suppress(msgspec.MsgspecError):
                values[path] = msgspec.msgpack.decode(row, type=tuple[bytes, Versioned])
        return values

    def _save_to_disk(self, values: dict[str, _Value]) -> None:
        """Write the existing nodes, and remove the absent ones and the deleted ones so far."""
        if self._disk is None or not values:
            return
        existing = {path: value for path, value in values.items() if value is not None}
        try:
            self._disk.put_many(
                {path: msgspec.msgpack.encode(value) for path, value in existing.items()}
            )
            with self._guard:
                absent = self._deleted.union(values).difference(existing)
                self._deleted = set()
            if absent:
                self._disk.remove([*absent])
        except (OSError, sqlite3.Error) as error:
            _log.warning("the disk cache cannot be written: %s", error)

    def close(self) -> None:
        """Empty the cache.

        The session belongs to the other state and stays open.
        """
        self._active = False
        self.remove_listener(self._on_interruption)
        self._on_interruption("CLOSED")
        if self._disk is not None:
            self._disk.close()
