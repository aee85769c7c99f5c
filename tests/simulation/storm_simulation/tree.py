"""ZooKeeper's data tree: what each request does to it, and which watches it sets off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kazoo import exceptions
from kazoo.protocol.serialization import CheckVersion, Create, Delete, SetData, Transaction
from kazoo.protocol.states import ZnodeStat

_EPHEMERAL, _SEQUENCE = 1, 2
Happening = tuple[str, str]
"""(CREATED, DELETED, CHANGED or CHILD; path)."""


@dataclass(eq=False)
class Node:
    data: bytes
    owner: int
    czxid: int
    mzxid: int
    pzxid: int
    ctime: int
    mtime: int
    version: int = 0
    made: int = 0
    """Children created so far: ZooKeeper's own cversion, and the next sequence number."""
    children: set[str] = field(default_factory=set)

    def stat(self) -> ZnodeStat:
        return ZnodeStat(
            self.czxid,
            self.mzxid,
            self.ctime,
            self.mtime,
            self.version,
            2 * self.made - len(self.children),
            0,
            self.owner,
            len(self.data),
            len(self.children),
            self.pzxid,
        )


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


class Tree:
    """One replica of the state. The same requests in the same order make the same tree."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {"/": Node(b"", 0, 0, 0, 0, 0, 0)}
        self.zxid = 0
        self.owned: dict[int, set[str]] = {}
        """Session -> its ephemeral nodes."""

    def get(self, path: str) -> Node:
        node = self.nodes.get(path)
        if node is None:
            raise exceptions.NoNodeError()
        return node

    # -- writing -----------------------------------------------------------------------------------

    def apply(
        self, request: Any, session: int, zxid: int, millis: int
    ) -> tuple[Any, list[Happening]]:
        """The answer to a write (an exception when it is refused) and what happened, in order."""
        self.zxid = zxid
        happened: list[Happening] = []
        if not isinstance(request, Transaction):
            try:
                return self._one(request, session, zxid, millis, happened), happened
            except exceptions.KazooException as error:
                return error, []
        return self._all(request.operations, session, zxid, millis)

    def _all(
        self, many: Sequence[Any], session: int, zxid: int, millis: int
    ) -> tuple[Any, list[Happening]]:
        before: dict[str, Node | None] = {}
        happened: list[Happening] = []
        answers: list[Any] = []

        def note(path: str) -> None:
            if path not in before:
                node = self.nodes.get(path)
                before[path] = (
                    None if node is None else Node(**{**vars(node), "children": set(node.children)})
                )

        for at, each in enumerate(many):
            parent = _parent(each.path)
            note(each.path)
            note(parent)
            if isinstance(each, Create) and each.flags & _SEQUENCE and parent in self.nodes:
                note(each.path + f"{self.nodes[parent].made:010d}")
            try:
                answers.append(self._one(each, session, zxid, millis, happened))
            except exceptions.KazooException as error:
                for path, node in before.items():
                    self._put_back(path, node)
                undone = [exceptions.RolledBackError() for _ in range(at)]
                return [
                    *undone,
                    error,
                    *(exceptions.RuntimeInconsistency() for _ in many[at + 1 :]),
                ], []
        return answers, happened

    def _put_back(self, path: str, node: Node | None) -> None:
        now = self.nodes.pop(path, None)
        if now is not None and now.owner:
            self.owned.get(now.owner, set()).discard(path)
        if node is not None:
            self.nodes[path] = node
            if node.owner:
                self.owned.setdefault(node.owner, set()).add(path)

    def _one(
        self, request: Any, session: int, zxid: int, millis: int, happened: list[Happening]
    ) -> Any:
        path = request.path
        if isinstance(request, Create):
            return self._create(request, session, zxid, millis, happened)
        if isinstance(request, Delete):
            return self._delete(path, request.version, zxid, happened)
        node = self.get(path)
        if request.version not in (-1, node.version):
            raise exceptions.BadVersionError()
        if isinstance(request, CheckVersion):
            return True
        assert isinstance(request, SetData)
        node.data, node.version, node.mzxid, node.mtime = (
            request.data,
            node.version + 1,
            zxid,
            millis,
        )
        happened.append(("CHANGED", path))
        return node.stat()

    def _create(
        self, request: Create, session: int, zxid: int, millis: int, happened: list[Happening]
    ) -> str:
        parent_path = _parent(request.path)
        parent = self.get(parent_path)
        path = request.path + (f"{parent.made:010d}" if request.flags & _SEQUENCE else "")
        if path in self.nodes:
            raise exceptions.NodeExistsError()
        if parent.owner:
            raise exceptions.NoChildrenForEphemeralsError()
        owner = session if request.flags & _EPHEMERAL else 0
        self.nodes[path] = Node(request.data or b"", owner, zxid, zxid, zxid, millis, millis)
        parent.children.add(path.rpartition("/")[2])
        parent.made += 1
        parent.pzxid = zxid
        if owner:
            self.owned.setdefault(owner, set()).add(path)
        happened += [("CREATED", path), ("CHILD", parent_path)]
        return path

    def _delete(self, path: str, version: int, zxid: int, happened: list[Happening]) -> bool:
        node = self.get(path)
        if path == "/":
            raise exceptions.BadArgumentsError()
        if version not in (-1, node.version):
            raise exceptions.BadVersionError()
        if node.children:
            raise exceptions.NotEmptyError()
        self._remove(path, zxid, happened)
        return True

    def _remove(self, path: str, zxid: int, happened: list[Happening]) -> None:
        node = self.nodes.pop(path)
        parent = self.nodes[_parent(path)]
        parent.children.discard(path.rpartition("/")[2])
        parent.pzxid = zxid
        if node.owner:
            mine = self.owned.get(node.owner, set())
            mine.discard(path)
            if not mine:
                self.owned.pop(node.owner, None)
        happened += [("DELETED", path), ("CHILD", _parent(path))]

    def end_session(self, session: int, zxid: int) -> list[Happening]:
        """Remove the ephemeral nodes of a session that is over."""
        self.zxid = zxid
        happened: list[Happening] = []
        for path in sorted(self.owned.get(session, ())):
            self._remove(path, zxid, happened)
        return happened


class Watches:
    """The watches of the connections of one server: each is set off once."""

    def __init__(self) -> None:
        self.data: dict[str, dict[Any, None]] = {}
        self.child: dict[str, dict[Any, None]] = {}

    def set_off(self, kind: str, path: str) -> list[Any]:
        """The connections that are told, each once."""
        found: dict[Any, None] = {}
        if kind != "CHILD":
            found.update(self.data.pop(path, {}))
        if kind in ("CHILD", "DELETED"):
            found.update(self.child.pop(path, {}))
        return list(found)

    def forget(self, connection: Any) -> None:
        for table in (self.data, self.child):
            for path in [path for path, of in table.items() if connection in of]:
                del table[path][connection]
                if not table[path]:
                    del table[path]

    def count(self, connection: Any) -> int:
        return sum(connection in of for table in (self.data, self.child) for of in table.values())
