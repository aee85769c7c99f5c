"""Watch of one ZooKeeper node at any path: its state now, and a wait until it changes."""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kazoo.exceptions import NoNodeError

from storm_dagster.model.conf import default_conf
from storm_dagster.zk.storm_cluster_state import open_session


@dataclass(frozen=True)
class NodeState:
    """A node at one moment. An absent one has no data, no children, and -1 everywhere else."""

    path: str
    data: bytes | None = None
    children: tuple[str, ...] = ()
    version: int = -1
    czxid: int = -1
    mzxid: int = -1
    pzxid: int = -1

    @property
    def exists(self) -> bool:
        """Whether the node is there."""
        return self.data is not None


class PathWatch(AbstractContextManager["PathWatch"]):
    """Watches of one absolute path, with a session of their own. Use it as a context manager.

    A change after :meth:`snapshot` returned ends the next :meth:`wait`: the watches are set before
    the node is read. A reconnection ends it too, because watches may have been lost with the
    connection.
    """

    def __init__(self, conf: Mapping[str, Any], path: str, *, children: bool) -> None:
        self._session = open_session({**default_conf(), **conf, "storm.zookeeper.root": "/"})
        self._path = self._session.full(path)
        self._children = children
        self._changed = threading.Event()
        self._session.add_listener(lambda state: self._changed.set())

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def snapshot(self) -> NodeState:
        """The node as it is now, with its watches armed; :class:`Unavailable` when no server
        answers.
        """
        self._changed.clear()
        path, what = self._path, f"a read of {self._path}"

        def woken(_: object) -> None:
            self._changed.set()

        # The watch of `exists` also sees a node that is yet to be created.
        if self._session.call(lambda c: c.exists_async(path, watch=woken), what, read=True) is None:
            return NodeState(path)
        names: list[str] = []
        try:
            if self._children:
                names = self._session.call(
                    lambda c: c.get_children_async(path, watch=woken), what, read=True
                )
            data, stat = self._session.call(lambda c: c.get_async(path), what, read=True)
        except NoNodeError:
            return NodeState(path)
        pzxid = stat.pzxid if self._children else -1
        return NodeState(
            path, data, tuple(sorted(names)), stat.version, stat.czxid, stat.mzxid, pzxid
        )

    def wait(self, seconds: float) -> None:
        """Sleep until something may have changed, at most ``seconds``."""
        self._changed.wait(max(0.0, seconds))
