"""Nimbus of a local cluster that can be cut off from ZooKeeper: its connections run through fault
proxies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx

from storm_dagster.host.endpoints import cluster_addresses
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.chaos.faults import FaultContext, fault
from storm_rigs.servers.fault_proxy import FaultProxy
from storm_rigs.servers.ports import free_ports

_of_home: dict[Path, ProxiedNimbus] = {}


class ProxiedNimbus:
    """One more nimbus of ``cluster``, in the same HOME; a context manager. It may lead like any
    other.

    ``storm-dagster stop`` ends it as well. The other faults may kill it: :meth:`launch` starts it
    again.
    """

    def __init__(self, cluster: LocalCluster, id: str = "cut") -> None:
        self._cluster = cluster
        self._id = id
        self._http, self._thrift = free_ports(2)
        self._child: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()
        self._links: list[FaultProxy] = []

    def __enter__(self) -> ProxiedNimbus:
        for server in self._cluster.endpoints.zookeeper.split(","):
            host, _, port = server.rpartition(":")
            self._links.append(self._stack.enter_context(FaultProxy(host, int(port))))
        self.launch()
        eventually(self.role, 180, "the nimbus that can be cut off")
        _of_home[self._cluster.home] = self
        return self

    def __exit__(self, *_: object) -> None:
        _of_home.pop(self._cluster.home, None)
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._stack.close()

    def launch(self) -> None:
        """Start it unless it runs; without waiting."""
        if self._child is not None and self._child.poll() is None:
            return
        values = {
            **cluster_addresses(self._cluster.endpoints),
            "storm.zookeeper.auth.file": self._cluster.conf["storm.zookeeper.auth.file"],
            "storm.zookeeper.servers": [link.address for link in self._links],
            "nimbus.http.port": self._http,
            "nimbus.thrift.port": self._thrift,
        }
        home = self._cluster.home
        argv = [
            sys.executable,
            "-m",
            "storm_dagster",
            "daemon",
            "nimbus",
            "--home",
            str(home),
            "--id",
            self._id,
        ]
        for key, value in values.items():
            argv += ["-c", f"{key}={json.dumps(value)}"]
        with (home / "logs" / f"nimbus-{self._id}.out").open("ab") as output:
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "STORM_DAGSTER_HOME": str(home)},
            )

    def role(self) -> str | None:
        """``leader`` or ``follower``; ``None`` while it does not answer."""
        try:
            health = httpx.get(
                f"http://127.0.0.1:{self._http}/healthz", timeout=2.0, trust_env=False
            ).json()
        except (httpx.HTTPError, ValueError):
            return None
        return "leader" if health.get("leader") else "follower"

    def cut(self, seconds: float) -> Iterator[str | None]:
        """Its packets to and from ZooKeeper vanish for ``seconds``; nothing happens while it does
        not answer.
        """
        role = self.role()
        if role is None:
            self.launch()
            yield None
            return
        for link in self._links:
            link.cut()
        try:
            yield f"nimbus {self._id} ({role}) for {seconds:.0f} s"
            time.sleep(seconds)
        finally:
            for link in self._links:
                link.restore()


@fault("nimbus cut off", needs=lambda cluster: cluster.home in _of_home)
def nimbus_cut_off(ctx: FaultContext) -> Iterator[str | None]:
    """A nimbus and ZooKeeper do not reach each other, beyond its session."""
    yield from _of_home[ctx.cluster.home].cut(ctx.random.uniform(5, 12))
