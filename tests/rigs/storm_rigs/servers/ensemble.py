"""Real ZooKeeper ensemble for tests: three servers as child processes, each killed, frozen or cut
off by itself.

with ZooKeeperEnsemble(tmp_path) as ensemble:
    StormClusterState.open({"storm.zookeeper.servers": ensemble.addresses, ...}, create_root=True)
    ensemble.kill(ensemble.leader())
"""

from __future__ import annotations

import atexit
import os
import signal
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

from storm_dagster.model.errors import Unavailable
from storm_dagster.security.authority import CertificateFolder
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.embedded import Member, ServerFiles, ensemble_command, server_status
from storm_rigs.servers.ports import free_ports


def server_mode(
    host: str, port: int, timeout: float = 1.0, tls: ssl.SSLContext | None = None
) -> str | None:
    """``leader``, ``follower`` or ``standalone``; ``None`` while the server there serves nobody."""
    answer = server_status(host, port, timeout, tls)
    for line in answer.decode("ascii", "replace").splitlines():
        if line.startswith("Mode:"):
            return line.partition(":")[2].strip()
    return None


class ZooKeeperEnsemble:
    """``size`` servers in ``folder``; a context manager that leaves no process behind. Ids count
    from 1.

    ``hosts`` gives each server an address of its own, and ``prefixes`` a command in front of its
    own (such as ``ip netns exec NAME``): how :mod:`storm_rigs.servers.namespaces` puts each into a
    network of its own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        size: int = 3,
        tick_ms: int = 500,
        hosts: Sequence[str] | None = None,
        prefixes: Sequence[Sequence[str]] | None = None,
    ) -> None:
        ports = free_ports(3 * size)
        self._folder = folder
        self._tick_ms = tick_ms
        self._prefixes = [list(prefix) for prefix in prefixes or [()] * size]
        self.members: list[Member] = [
            Member(
                number + 1,
                ports[3 * number],
                ports[3 * number + 1],
                ports[3 * number + 2],
                hosts[number] if hosts else "127.0.0.1",
            )
            for number in range(size)
        ]
        """Its servers, in the order of their ids."""
        self.passwords: dict[int, str] = {}
        """What a server shows the others, where it is not what they expect."""
        self.certificates = CertificateFolder.of(folder)
        """Certificates of the members, and those of an authority for clients."""
        self.identities: dict[int, ServerFiles | None] = {}
        """Certificate of a server for the others, where it is none of a member; None: no TLS."""
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def addresses(self) -> list[str]:
        """``host:port`` of every server, for ``storm.zookeeper.servers``."""
        return [member.address for member in self.members]

    def log(self, id: int) -> Path:
        """Log of the server."""
        return self._folder / str(id) / "server.log"

    def __enter__(self) -> ZooKeeperEnsemble:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout: float = 120.0) -> ZooKeeperEnsemble:
        """Start all, and wait until all serve; :class:`Unavailable` when they do not within
        ``timeout`` seconds.
        """
        atexit.register(self.stop)
        self.certificates.prepare()
        self.certificates.prepare_members()
        for member in self.members:
            self.launch(member.id)
        try:
            eventually(
                lambda: all(self.mode(member.id) for member in self.members),
                timeout,
                "service of all",
            )
        except AssertionError:
            tails = [
                self.log(member.id).read_bytes()[-400:].decode("utf-8", "replace")
                for member in self.members
            ]
            self.stop()
            raise Unavailable(
                f"the ZooKeeper ensemble does not come up, its servers say: {tails}"
            ) from None
        return self

    def launch(self, id: int) -> None:
        """Start one server (again), without waiting."""
        if self.alive(id):
            return
        folder = self._folder / str(id)
        password = self.passwords.get(id, "together")
        command = ensemble_command(
            self.members,
            id,
            folder,
            tick_ms=self._tick_ms,
            durable=False,
            password=password,
            member_tls=self.identities.get(id, ServerFiles.of_members(self.certificates)),
        )
        with self.log(id).open("ab") as log:
            self._children[id] = subprocess.Popen(
                [*self._prefixes[id - 1], *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def alive(self, id: int) -> bool:
        """Whether its process lives."""
        child = self._children.get(id)
        return child is not None and child.poll() is None

    def mode(self, id: int) -> str | None:
        """``leader``, ``follower``, or ``None`` while it serves nobody (it is dead, frozen or
        without a quorum).
        """
        member = self.members[id - 1]
        return server_mode(member.host, member.client)

    def leader(self, timeout: float = 60.0) -> int:
        """Id of the server that leads, once one does."""
        found = eventually(
            lambda: [member.id for member in self.members if self.mode(member.id) == "leader"],
            timeout,
            "a leader of the ensemble",
        )
        return found[0]

    def followers(self) -> list[int]:
        """Ids of the servers that follow now."""
        return [member.id for member in self.members if self.mode(member.id) == "follower"]

    # -- harming it --------------------------------------------------------------------------------
    def kill(self, id: int) -> None:
        """``kill -9``; :meth:`launch` starts it again on the same disk."""
        child = self._children[id]
        child.kill()
        child.wait()

    def freeze(self, id: int) -> None:
        """SIGSTOP: it keeps its connections and answers nobody."""
        os.kill(self._children[id].pid, signal.SIGSTOP)

    def thaw(self, id: int) -> None:
        """SIGCONT."""
        if self.alive(id):
            os.kill(self._children[id].pid, signal.SIGCONT)

    def heal(self, timeout: float = 120.0) -> None:
        """Wake the frozen, start the dead, and wait until all serve."""
        for member in self.members:
            self.thaw(member.id)
            self.launch(member.id)
        eventually(
            lambda: all(self.mode(m.id) for m in self.members), timeout, "service of all servers"
        )

    def stop(self) -> None:
        """End all of them. Stopping twice does nothing."""
        children, self._children = self._children, {}
        for child in children.values():
            child.kill()
        for child in children.values():
            child.wait()
        atexit.unregister(self.stop)
