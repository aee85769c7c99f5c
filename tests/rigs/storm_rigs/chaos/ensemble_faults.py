"""Faults of clusters with several nimbuses and a ZooKeeper ensemble: ``dev --nimbuses 3
--zookeepers 3``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from storm_dagster.host.processes import RunFile
from storm_dagster.security.settings import zookeeper_tls
from storm_dagster.testing.cluster import LocalCluster
from storm_rigs.chaos.faults import FaultContext, fault, followers, freeze, kill_process, leader
from storm_rigs.servers.ensemble import server_mode


def has_ensemble(cluster: LocalCluster) -> bool:
    """Whether its ZooKeeper has more than one server."""
    return "," in cluster.endpoints.zookeeper


def _three_nimbuses(cluster: LocalCluster) -> bool:
    return len(cluster.processes("nimbus")) > 2


def server_in_mode(ctx: FaultContext, mode: str) -> RunFile | None:
    """One of the ZooKeeper servers that lead or follow now; ``None`` when there is none."""
    tls = zookeeper_tls(ctx.cluster.conf)
    found = [
        record
        for record in ctx.cluster.processes("zookeeper")
        if server_mode("127.0.0.1", record.ports["client"], tls=tls) == mode
    ]
    return ctx.random.choice(sorted(found, key=lambda record: record.id)) if found else None


@fault("ZooKeeper leader killed", needs=has_ensemble)
def zookeeper_leader_killed(ctx: FaultContext) -> Iterator[str | None]:
    """kill -9 of the server that leads: the others elect, sessions go on."""
    yield kill_process(server_in_mode(ctx, "leader"))


@fault("ZooKeeper follower killed", needs=has_ensemble)
def zookeeper_follower_killed(ctx: FaultContext) -> Iterator[str | None]:
    """kill -9 of a server that follows: its clients go to the others."""
    yield kill_process(server_in_mode(ctx, "follower"))


@fault("ZooKeeper leader frozen", needs=has_ensemble)
def zookeeper_leader_frozen(ctx: FaultContext) -> Iterator[str | None]:
    """SIGSTOP of the server that leads, until the others have elected; it wakes up deposed."""
    yield from freeze(server_in_mode(ctx, "leader"), ctx.random.uniform(5, 12))


@fault("ZooKeeper follower frozen", needs=has_ensemble)
def zookeeper_follower_frozen(ctx: FaultContext) -> Iterator[str | None]:
    """SIGSTOP of a server that follows."""
    yield from freeze(server_in_mode(ctx, "follower"), ctx.random.uniform(3, 12))


@fault("ZooKeeper quorum lost", needs=has_ensemble)
def zookeeper_quorum_lost(ctx: FaultContext) -> Iterator[str | None]:
    """SIGSTOP of all servers but one: no write is possible, workers pause, nothing restarts."""
    servers = sorted(ctx.cluster.processes("zookeeper"), key=lambda record: record.id)
    with ExitStack() as stack:
        hit = [
            stack.enter_context(_frozen(record))
            for record in ctx.random.sample(servers, max(0, len(servers) // 2 + 1))
        ]
        seconds = ctx.random.uniform(5, 12)
        yield f"{' and '.join(filter(None, hit))}, {seconds:.0f} s" if any(hit) else None
        time.sleep(seconds)


_frozen = contextmanager(lambda record: freeze(record, 0.0))


@fault("follower frozen", needs=_three_nimbuses)
def follower_frozen(ctx: FaultContext) -> Iterator[str | None]:
    """SIGSTOP of a nimbus that does not lead, beyond its session."""
    found = followers(ctx.cluster)
    yield from freeze(ctx.random.choice(list(found)) if found else None, ctx.random.uniform(5, 12))


@fault("two leaders in turn", needs=_three_nimbuses)
def leader_after_leader(ctx: FaultContext) -> Iterator[str | None]:
    """The leader freezes, another nimbus takes over and is killed; then the first one wakes up
    between the two.
    """
    first = leader(ctx.cluster)
    with _frozen(first) as hit:
        second = None
        deadline = time.monotonic() + 20
        while hit and second is None and time.monotonic() < deadline:
            time.sleep(0.3)
            second = leader(ctx.cluster)
            if second is not None and first is not None and second.id == first.id:
                second = None
        killed = kill_process(second)
        yield f"{hit}; then {killed}" if hit and killed else hit
