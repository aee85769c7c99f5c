"""ZooKeeper servers: sessions, quorum, replicas that lag, and connections of clients."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kazoo import exceptions
from kazoo.protocol.serialization import Exists, GetACL, GetChildren, GetData, Sync, Transaction
from kazoo.security import OPEN_ACL_UNSAFE

from storm_dagster.zk.connection import MultiRead
from storm_simulation.kernel import Kernel
from storm_simulation.tree import Happening, Tree, Watches

_READS = (Exists, GetData, GetChildren, GetACL)
_SYNC_TICKS = 5
"""Ticks after which a follower that lost its leader drops its clients (ZooKeeper's syncLimit)."""


@dataclass(eq=False)
class Session:
    id: int
    label: str
    timeout: float
    heard: float
    over: bool = False


@dataclass(eq=False)
class Server:
    """One server. A follower answers reads and pings from what it has."""

    name: str
    tree: Tree = field(default_factory=Tree)
    watches: Watches = field(default_factory=Watches)
    connections: dict[Any, None] = field(default_factory=dict)
    up: bool = True
    cut: bool = False
    """It is out of reach of the other servers, and does not know yet."""
    serving: bool = True
    lag: float = 0.0
    busy_until: float = 0.0
    """Its replica is behind until then: what it learns is applied in order."""


Observer = Callable[["Commit"], None]


@dataclass(frozen=True)
class Commit:
    """A write that landed."""

    session: Session | None
    """``None``: the end of a session."""
    operations: tuple[Any, ...]
    happened: tuple[Happening, ...]
    tree: Tree


class Ensemble:
    """Servers on one kernel. Writes are ordered by the leader, whose tree is the truth."""

    def __init__(self, kernel: Kernel, servers: int = 1, tick: float = 2.0) -> None:
        self.kernel = kernel
        self.tick = tick
        self.servers = [Server(f"z{number + 1}") for number in range(servers)]
        self.leader: Server | None = self.servers[0]
        self.sessions: dict[int, Session] = {}
        self.zxid = 0
        self.observers: list[Observer] = []
        self.reads = 0
        self.writes = 0
        self.counts: dict[str, list[int]] = {}
        """Label of a client -> [reads, writes that landed] so far."""
        self._digest = hashlib.sha256()
        self._next_session = 0x1000

    @property
    def hosts(self) -> str:
        return ",".join(f"{server.name}:2181" for server in self.servers)

    @property
    def tree(self) -> Tree:
        """The truth: the leader's tree, or the newest one while there is none."""
        return (
            self.leader.tree
            if self.leader is not None
            else max(self.servers, key=lambda s: s.tree.zxid).tree
        )

    def digest(self) -> str:
        return self._digest.hexdigest()[:16]

    # -- sessions ----------------------------------------------------------------------------------

    def open_session(self, label: str, timeout: float) -> Session:
        self._next_session += 1
        granted = min(max(timeout, 2 * self.tick), 20 * self.tick)
        session = Session(self._next_session, label, granted, self.kernel.now)
        self.sessions[session.id] = session
        self._watch(session)
        return session

    def _watch(self, session: Session) -> None:
        # The server looks at the end of each tick.
        end = (int((session.heard + session.timeout) / self.tick) + 1) * self.tick
        self.kernel.at(max(end, self.kernel.now), self._look_at, session)

    def _look_at(self, session: Session) -> None:
        if session.over:
            return
        if (
            self.leader is None
            or not self.quorum()
            or self.kernel.now < session.heard + session.timeout
        ):
            if self.leader is None or not self.quorum():
                session.heard = max(session.heard, self.kernel.now - session.timeout + self.tick)
            self._watch(session)
        else:
            self.end_session(session)

    def hear(self, session: Session, server: Server) -> None:
        """The leader hears of a session through the server that its client talks to."""
        if not server.cut:
            session.heard = self.kernel.now

    def end_session(self, session: Session) -> None:
        """Close or expire it: its ephemeral nodes vanish."""
        if session.over:
            return
        session.over = True
        self.sessions.pop(session.id, None)
        self.zxid += 1
        zxid, number = self.zxid, session.id
        happened = self._replicate(lambda tree: ((), tree.end_session(number, zxid)))[1]
        if happened:
            self._tell(Commit(None, (), tuple(happened), self.tree), f"end {session.label}")
        for server in self.servers:
            for connection in [each for each in server.connections if each.session is session]:
                connection.drop(expired=True)

    # -- requests ----------------------------------------------------------------------------------

    def quorum(self) -> bool:
        return 2 * sum(server.up and not server.cut for server in self.servers) > len(self.servers)

    def read(self, server: Server, request: Any, connection: Any) -> Any:
        """The answer of that server's replica."""
        self.reads += 1
        self._count(connection.label, 0)
        if isinstance(request, MultiRead):
            kind = GetChildren if request.children else GetData
            found = [self._read(server, kind(path, None), connection) for path in request.paths]
            return [None if isinstance(each, exceptions.NoNodeError) else each for each in found]
        return self._read(server, request, connection)

    @staticmethod
    def _read(server: Server, request: Any, connection: Any) -> Any:
        node = server.tree.nodes.get(request.path)
        watch = getattr(request, "watcher", None)
        if watch and (node is not None or isinstance(request, Exists)):
            table = (
                server.watches.child if isinstance(request, GetChildren) else server.watches.data
            )
            table.setdefault(request.path, {})[connection] = None
        if isinstance(request, Exists):
            return None if node is None else node.stat()
        if node is None:
            return exceptions.NoNodeError()
        if isinstance(request, GetData):
            return node.data, node.stat()
        if isinstance(request, GetChildren):
            return sorted(node.children)
        return OPEN_ACL_UNSAFE, node.stat()

    def write(self, server: Server, request: Any, session: Session) -> Any:
        """Order the write and apply it everywhere; the answer (an exception when refused)."""
        self._catch_up(server)
        if isinstance(request, Sync):
            return request.path
        self.writes += 1
        self.zxid += 1
        zxid, millis = self.zxid, int(self.kernel.now * 1000)
        answer, happened = self._replicate(
            lambda tree: tree.apply(request, session.id, zxid, millis), first=server
        )
        if happened:
            self._count(session.label, 1)
            operations = (
                tuple(request.operations) if isinstance(request, Transaction) else (request,)
            )
            self._tell(Commit(session, operations, tuple(happened), self.tree), session.label)
        return answer

    def _replicate(
        self, change: Callable[[Tree], tuple[Any, list[Happening]]], first: Server | None = None
    ) -> tuple[Any, list[Happening]]:
        leader = self.leader
        assert leader is not None
        result = change(leader.tree)
        self._fire(leader, result[1])
        # What is acknowledged is in a majority; only who is not needed for it may lag.
        spare = sum(each.up and not each.cut for each in self.servers) > len(self.servers) // 2 + 1
        for server in self.servers:
            if server is leader:
                continue
            if not server.up or server.cut:
                continue
            if server is first or not server.lag or not spare:
                if server.tree.zxid < self.zxid - 1 and server.tree.zxid < leader.tree.zxid - 1:
                    self.copy(server)
                else:
                    self._fire(server, change(server.tree)[1])
            else:
                server.busy_until = max(
                    server.busy_until, self.kernel.now + server.lag * self.kernel.rng.random()
                )
                self.kernel.at(server.busy_until, self._apply_late, server, change, self.zxid)
        return result

    def _apply_late(
        self, server: Server, change: Callable[[Tree], tuple[Any, list[Happening]]], zxid: int
    ) -> None:
        if server.up and not server.cut and server.tree.zxid < zxid:
            self._fire(server, change(server.tree)[1])

    def _catch_up(self, server: Server) -> None:
        """Whoever writes through a follower, or syncs, sees everything that was before."""
        leader = self.leader
        assert leader is not None
        if server.tree.zxid < leader.tree.zxid:
            self.copy(server)

    def copy(self, server: Server) -> None:
        """Bring a replica to the leader's state at once; watches of what differs are set off."""
        leader = self.leader
        assert leader is not None
        old, new = server.tree.nodes, leader.tree.nodes
        happened: list[Happening] = []
        for path in sorted(old.keys() | new.keys()):
            before, after = old.get(path), new.get(path)
            if before is None or after is None or before.czxid != after.czxid:
                happened.append(
                    (
                        "DELETED" if after is None else "CREATED" if before is None else "CHANGED",
                        path,
                    )
                )
            elif before.mzxid != after.mzxid:
                happened.append(("CHANGED", path))
            if after is not None and before is not None and before.children != after.children:
                happened.append(("CHILD", path))
        server.tree = copy.deepcopy(leader.tree)
        self._fire(server, happened)

    def _fire(self, server: Server, happened: list[Happening]) -> None:
        for kind, path in happened:
            for connection in server.watches.set_off(kind, path):
                connection.notify(kind, path)

    def _count(self, label: str, which: int) -> None:
        counts = self.counts.get(label)
        if counts is None:
            counts = self.counts[label] = [0, 0]
        counts[which] += 1

    def _tell(self, commit: Commit, label: str) -> None:
        line = f"{self.kernel.now:.6f} {label} {commit.happened}"
        self._digest.update(line.encode())
        for observer in self.observers:
            observer(commit)

    # -- servers come and go -----------------------------------------------------------------------

    def kill_server(self, server: Server) -> None:
        server.up = False
        self._drop_all(server)
        if server is self.leader or not self.quorum():
            self._no_leader()

    def revive_server(self, server: Server) -> None:
        server.up, server.cut, server.serving = True, False, True
        if self.leader is not None:
            self.copy(server)
        elif self.quorum():
            self._elect_soon()

    def cut_server(self, server: Server) -> None:
        """Its links to the other servers are cut; its clients notice only after the sync limit."""
        if len(self.servers) == 1:
            return
        server.cut = True
        if server is self.leader:
            self._no_leader(besides=server)
        self.kernel.after(
            _SYNC_TICKS * self.tick * self.kernel.rng.uniform(0.4, 1.0), self._notice, server
        )

    def mend_server(self, server: Server) -> None:
        if server.cut:
            server.cut = False
            server.serving = True
            if self.leader is not None and self.leader is not server:
                self._drop_all(server)
                self.copy(server)
            elif self.leader is None and self.quorum():
                self._elect_soon()

    def _notice(self, server: Server) -> None:
        if server.cut:
            server.serving = False
            self._drop_all(server)

    def _drop_all(self, server: Server) -> None:
        for connection in list(server.connections):
            connection.drop()

    def _no_leader(self, besides: Server | None = None) -> None:
        self.leader = None
        for server in self.servers:
            if server is not besides:
                self._drop_all(server)
        self._elect_soon()

    def _elect_soon(self) -> None:
        self.kernel.after(self.kernel.rng.uniform(0.2, 2.0), self._elect)

    def _elect(self) -> None:
        if self.leader is not None or not self.quorum():
            return
        well = [server for server in self.servers if server.up and not server.cut]
        # Who has the most leads: what was acknowledged is in a majority of them.
        self.leader = max(well, key=lambda server: server.tree.zxid)
        for server in well:
            server.serving = True
            if server is not self.leader:
                self.copy(server)
        # Every session gets its whole time from a new leader.
        for session in self.sessions.values():
            session.heard = self.kernel.now
