"""Read cache of rarely changing nodes, in memory and on disk, invalidated by watches.

Unlike JStorm's cache, whose entries simply aged, a value is served only while a watch on its node
is armed and has not fired. Before anything is served, the events that had arrived are processed:
what a caller reads here is at least as new as what it read from ZooKeeper before (the server sends
the event of a change before any answer that already knows of it). A connection that is interrupted
empties the memory level, for its watches may be gone; the values on disk are then proved by their
modification id, without being transferred again.

That a node is absent is known from the watched list of its folder. A watch on the node itself would
wait for ever: ids of topologies do not come back.
"""

import contextlib
import logging
import re
import sqlite3
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from storm_dagster.model.records import decode_record
from storm_dagster.model.view import ClusterView, Versioned
from storm_dagster.zk.cluster_state import ZooKeeperClusterState, parent_of
from storm_dagster.zk.disk_cache import DiskCache
from storm_dagster.zk.state_protocol import CHILDREN_CHANGED, DATA_CHANGED, DELETED
from storm_dagster.zk.view_loading import load_view

_log = logging.getLogger(__name__)

_RARELY_CHANGING = re.compile(
    r"/(topology|tasks|assignments|workers)/[^/]+(/[^/]+)?|/blobstoremaxkeysequencenumber/[^/]+"
    r"|/(epoch|assignments|blacklist)"
)
"""Nodes kept by value. Heartbeat records and supervisors' records are rewritten all the time."""
_RARELY_CHANGING_LISTS = re.compile(
    r"/(workers|blobstore|gray_upgrade)/[^/]+|/(supervisors|topology|blobstore|gray_upgrade)"
)
_MOST_BYTES = 32 << 20
_MOST_CHANGES = 100_000
# Much longer than a starved process takes: whoever reads everything again because it is slow, stays
# slow.
_BARRIER_SECS = 10.0

_Value = tuple[bytes, Versioned] | None


@dataclass
class CacheMetrics:
    """Number of reads of cacheable nodes since the start, by where they were answered."""

    memory: int = 0
    disk: int = 0
    zookeeper: int = 0
    invalidated: int = 0
    """Entries dropped because their watch fired or the connection was interrupted."""


class CachedReads(ZooKeeperClusterState):
    """A :class:`ClusterState` on the session of another one, for readers; it never writes.

    It has watches of its own, so that events of its nodes do not issue callbacks of the other.
    Thread-safe.
    """

    def __init__(
        self, state: ZooKeeperClusterState, disk: DiskCache | None, most_bytes: int = _MOST_BYTES
    ) -> None:
        super().__init__(state.session)
        self.awaits_all = False
        self._disk = disk
        self._most_bytes = most_bytes
        self._guard = threading.Lock()
        self._memory: OrderedDict[str, _Value] = OrderedDict()
        self._bytes = 0
        self._lists: dict[str, list[str] | None] = {}
        # Folder -> nodes whose absence its list proves.
        self._absent: dict[str, set[str]] = {}
        self._gone: set[str] = set()
        """Nodes that went; their values on disk go with the next that is written there."""
        # Nodes whose armed watch has been silent, and the modification id of the value it watches.
        self._sure: dict[str, int] = {}
        # Rises with each event of a node, and with each interruption: what was asked for before
        # proves nothing.
        self._changes: dict[str, int] = {}
        self._interruptions = 0
        self.metrics: CacheMetrics = CacheMetrics()
        self._decoded: dict[str, tuple[bytes, Any]] = {}
        """Node -> bytes and record of the newest view."""
        self.register(self._on_change)
        self.add_listener(self._on_interruption)

    def load_view(self, cluster_id: str) -> ClusterView:
        """The whole cluster (:func:`~storm_dagster.zk.view_loading.load_view`); what did not change
        is not decoded again.
        """
        known, used = self._decoded, dict[str, tuple[bytes, Any]]()

        def decode(cls: type[Any], raw: bytes, path: str) -> Any:
            found = known.get(path)
            if found is None or found[0] != raw or type(found[1]) is not cls:
                found = raw, decode_record(cls, raw, path)
            used[path] = found
            return found[1]

        view = load_view(self, cluster_id, decode=decode)
        # What is gone would be kept for ever.
        self._decoded = used
        return view

    # -- invalidation ------------------------------------------------------------------------------

    def _on_change(self, kind: str, path: str) -> None:
        with self._guard:
            self._changes[path] = self._changes.get(path, 0) + 1
            if kind != CHILDREN_CHANGED:
                self._drop_value(path)
            if kind == DELETED and self._disk is not None:
                self._gone.add(path)
            if kind != DATA_CHANGED:
                self._drop_list(path)
            crowded = len(self._changes) > _MOST_CHANGES
        if crowded:
            self._on_interruption("CROWDED")

    def _on_interruption(self, connection: str) -> None:
        if connection == "CONNECTED":
            return
        with self._guard:
            self._interruptions += 1
            self.metrics.invalidated += len(self._memory) + len(self._lists)
            self._memory.clear()
            self._bytes = 0
            self._lists.clear()
            self._absent.clear()
            self._sure.clear()
            self._changes.clear()

    def _drop_value(self, path: str) -> None:
        if self._sure.pop(path, None) is not None:
            self.metrics.invalidated += 1
        self._forget(path)

    def _drop_list(self, path: str) -> None:
        if path in self._lists:
            self.metrics.invalidated += 1
            del self._lists[path]
        for absent in self._absent.pop(path, ()):
            self._drop_value(absent)
            self._drop_list(absent)

    def _forget(self, path: str) -> None:
        if (value := self._memory.pop(path, None)) is not None:
            self._bytes -= len(value[0])

    def _drain_events(self) -> None:
        """Wait until the events that have arrived are processed."""
        done = threading.Event()
        self.session.dispatch(done.set)
        if not done.wait(_BARRIER_SECS):
            self._on_interruption("BUSY")

    def _stamp(self, path: str) -> tuple[int, int]:
        return self._interruptions, self._changes.get(path, 0)

    # -- reading -----------------------------------------------------------------------------------

    def get_many(self, many: Sequence[str], watch: bool = False) -> list[_Value]:
        """As the state itself; only nodes that change rarely are kept, and only without
        ``watch``.
        """
        mine = dict.fromkeys(path for path in many if _RARELY_CHANGING.fullmatch(path))
        if watch or not mine:
            return super().get_many(many, watch)
        rest = [path for path in many if path not in mine]
        found = {**dict(zip(rest, super().get_many(rest), strict=True)), **self._get_kept(mine)}
        return [found[path] for path in many]

    def _get_kept(self, wanted: Iterable[str]) -> dict[str, _Value]:
        self._drain_events()
        found: dict[str, _Value] = {}
        lacking: list[str] = []
        with self._guard:
            for path in wanted:
                if path in self._sure and path in self._memory:
                    self._memory.move_to_end(path)
                    found[path] = self._memory[path]
                else:
                    lacking.append(path)
            self.metrics.memory += len(found)
            stamps = {path: self._stamp(path) for path in lacking}
            sure = {path: self._sure[path] for path in lacking if path in self._sure}
        if lacking:
            read = self._fetch(lacking, sure)
            self._keep(read, stamps)
            found.update(read)
        return found

    def _fetch(self, wanted: list[str], sure: dict[str, int]) -> dict[str, _Value]:
        """From disk what is still true there, the rest from ZooKeeper with a watch."""
        kept = self._from_disk(wanted)
        proven: dict[str, _Value] = {
            path: value for path, value in kept.items() if sure.get(path) == value[1].mzxid
        }
        doubtful = [path for path in kept if path not in proven]
        # First without: nothing would take a watch from a node that has gone.
        for watch in (False, True):
            stats = self._stats(
                [self.session.full(path) for path in doubtful], "a read of versions", watch
            )
            alive = [
                (path, stat) for path, stat in zip(doubtful, stats, strict=True) if stat is not None
            ]
            doubtful = [path for path, _ in alive]
        for path, stat in alive:
            if Versioned(stat.version, stat.mzxid) == kept[path][1]:
                proven[path] = kept[path]
        rest = [path for path in wanted if path not in proven]
        read = dict(zip(rest, super().get_many(rest, True), strict=True))
        self._list_folders(path for path, value in read.items() if value is None)
        with self._guard:
            self.metrics.disk += len(proven)
            self.metrics.zookeeper += len(read)
        self._to_disk(read)
        return {**proven, **read}

    def _keep(self, found: dict[str, _Value], stamps: dict[str, tuple[int, int]]) -> None:
        with self._guard:
            for path, value in found.items():
                if self._stamp(path) != stamps[path] or (
                    value is None and not self._is_absent(path)
                ):
                    continue
                self._forget(path)
                self._memory[path] = value
                self._bytes += 0 if value is None else len(value[0])
                self._sure[path] = -1 if value is None else value[1].mzxid
            while self._bytes > self._most_bytes and self._memory:
                # Its watch stays armed, so that the disk level answers for it without asking.
                self._forget(next(iter(self._memory)))

    def find_children_many(
        self, many: Sequence[str], watch: bool = False
    ) -> list[list[str] | None]:
        """As the state itself; the lists that change rarely are kept, without ``watch``."""
        mine = {path for path in many if _RARELY_CHANGING_LISTS.fullmatch(path)}
        if watch or not mine:
            return super().find_children_many(many, watch)
        self._drain_events()
        plain = [path for path in many if path not in mine]
        found = dict(zip(plain, super().find_children_many(plain), strict=True))
        known, read = self._find_lists(mine)
        with self._guard:
            self.metrics.memory += len(known)
            self.metrics.zookeeper += len(read)
        found.update({**known, **read})
        return [found[path] for path in many]

    def _find_lists(
        self, wanted: Iterable[str]
    ) -> tuple[dict[str, list[str] | None], dict[str, list[str] | None]]:
        """Lists that were known, and those that were read."""
        with self._guard:
            known = {path: self._lists[path] for path in wanted if path in self._lists}
            stamps = {path: self._stamp(path) for path in wanted if path not in known}
        read = dict(zip(stamps, super().find_children_many([*stamps], True), strict=True))
        self._list_folders(path for path, names in read.items() if names is None)
        with self._guard:
            for path, names in read.items():
                if self._stamp(path) == stamps[path] and (
                    names is not None or self._is_absent(path)
                ):
                    self._lists[path] = names
        return known, read

    def _list_folders(self, absent: Iterable[str]) -> None:
        """Read the lists that prove the absence of these nodes from now on."""
        if folders := {parent_of(path) for path in absent if not self._awaits(path)}:
            self._find_lists(folders)

    def _is_absent(self, path: str) -> bool:
        """Whether a watch will tell when the missing node comes; it is noted where."""
        if self._awaits(path):
            return True
        folder, _, name = path.rpartition("/")
        names = self._lists.get(folder, [name]) or []
        at = bisect_left(names, name)
        if names[at : at + 1] == [name]:
            return False
        self._absent.setdefault(folder, set()).add(path)
        return True

    def _from_disk(self, many: list[str]) -> dict[str, tuple[bytes, Versioned]]:
        if self._disk is None:
            return {}
        try:
            rows = self._disk.get_many(many)
        except (OSError, sqlite3.Error) as error:
            _log.warning("the disk cache cannot be read: %s", error)
            return {}
        found: dict[str, tuple[bytes, Versioned]] = {}
        for path, row in rows.items():
            # What is damaged, or of an earlier release, is read again.
            with contextlib.suppress(msgspec.MsgspecError):
                found[path] = msgspec.msgpack.decode(row, type=tuple[bytes, Versioned])
        return found

    def _to_disk(self, read: dict[str, _Value]) -> None:
        if self._disk is None or not read:
            return
        try:
            kept = {
                path: msgspec.msgpack.encode(value)
                for path, value in read.items()
                if value is not None
            }
            self._disk.put_many(kept)
            with self._guard:
                gone, self._gone = self._gone.union(read).difference(kept), set()
            if gone:
                self._disk.remove([*gone])
        except (OSError, sqlite3.Error) as error:
            _log.warning("the disk cache cannot be written: %s", error)

    def close(self) -> None:
        """Forget everything; the session belongs to the other state and stays open."""
        self._active = False
        self.remove_listener(self._on_interruption)
        self._on_interruption("CLOSED")
        if self._disk is not None:
            self._disk.close()
