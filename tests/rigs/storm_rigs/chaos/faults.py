"""Registry of the faults of a local cluster, to which other modules add their own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import httpx
import psutil

from storm_dagster.host.processes import RunFile
from storm_dagster.testing.cluster import LocalCluster


@dataclass(frozen=True)
class FaultContext:
    """Context of a fault: the cluster and the random numbers."""

    cluster: LocalCluster
    random: random.Random
    """Every choice is drawn from it, so that a seed repeats the programme."""

    def pick(self, *roles: str) -> RunFile | None:
        """A live process of one of these roles; ``None`` when there is none now."""
        found = [record for role in roles for record in self.cluster.processes(role)]
        return (
            self.random.choice(sorted(found, key=lambda record: (record.role, record.id)))
            if found
            else None
        )


_Inject = Callable[[FaultContext], AbstractContextManager[str | None]]


@dataclass(frozen=True)
class Fault:
    """One kind of fault. ``inject`` does it on entry and ends it, where that is not the cluster's
    business, on exit; it yields what was hit, or ``None`` when there was nothing to hit.
    """

    name: str
    inject: _Inject
    needs: Callable[[LocalCluster], bool] = lambda cluster: True
    """Whether the cluster is one that this can be done to (a follower, an ensemble...)."""


_registered: dict[str, Fault] = {}


def fault(
    name: str, needs: Callable[[LocalCluster], bool] | None = None
) -> Callable[[Callable[[FaultContext], Iterator[str | None]]], _Inject]:
    """Register a generator function as a fault; :class:`ValueError` when the name is taken."""

    def register(function: Callable[[FaultContext], Iterator[str | None]]) -> _Inject:
        if name in _registered:
            raise ValueError(f"fault {name!r} is registered already: give it a name of its own")
        inject = contextmanager(function)
        _registered[name] = Fault(name, inject, needs or (lambda cluster: True))
        return inject

    return register


def all_faults() -> Mapping[str, Fault]:
    """Name -> fault, of all that are registered."""
    return MappingProxyType(dict(sorted(_registered.items())))


def kill_process(record: RunFile | None) -> str | None:
    """``kill -9`` exactly that process; returns what was hit."""
    if record is None or not record.alive():
        return None
    os.kill(record.pid, signal.SIGKILL)
    return f"{record.role} {record.id} (pid {record.pid})"


def frozen_tree(record: RunFile) -> list[psutil.Process]:
    """The process and everything below it; empty when it is gone."""
    try:
        process = psutil.Process(record.pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def freeze(record: RunFile | None, seconds: float) -> Iterator[str | None]:
    """SIGSTOP the process with all below it, SIGCONT them ``seconds`` later."""
    group = frozen_tree(record) if record is not None and record.alive() else []
    for process in group:
        _quietly(process.suspend)
    try:
        yield (
            f"{record.role} {record.id} (pid {record.pid}){f' for {seconds:.0f} s' if seconds else ''}"
            if record and group
            else None
        )
        if group:
            time.sleep(seconds)
    finally:
        for process in group:
            _quietly(process.resume)


def _quietly(act: Callable[[], object]) -> None:
    try:
        act()
    except psutil.NoSuchProcess:
        return


def leader(cluster: LocalCluster) -> RunFile | None:
    """The nimbus that reports itself as leader; ``None`` while none does."""
    for record in cluster.processes("nimbus"):
        try:
            health = httpx.get(
                f"http://127.0.0.1:{record.ports['http']}/healthz", timeout=2.0, trust_env=False
            )
            if health.json().get("leader"):
                return record
        except (httpx.HTTPError, ValueError, KeyError):
            continue
    return None


def followers(cluster: LocalCluster) -> Sequence[RunFile]:
    """The nimbuses that do not lead now."""
    leading = leader(cluster)
    return [
        record
        for record in cluster.processes("nimbus")
        if leading is None or record.id != leading.id
    ]


def _several_nimbuses(cluster: LocalCluster) -> bool:
    return len(cluster.endpoints.nimbuses) > 1


@fault("worker killed")
def worker_killed(ctx: FaultContext) -> Iterator[str | None]:
    """kill -9 of a worker."""
    yield kill_process(ctx.pick("worker"))


@fault("worker frozen")
def worker_frozen(ctx: FaultContext) -> Iterator[str | None]:
    """SIGSTOP of a worker beyond its lease; it wakes when it has been replaced, and must end
    itself.
    """
    yield from freeze(ctx.pick("worker"), ctx.random.uniform(3, 12))


@fault("supervisor killed")
def supervisor_killed(ctx: FaultContext) -> Iterator[str | None]:
    """kill -9 of a supervisor; its workers go on."""
    yield kill_process(ctx.pick("supervisor"))


@fault("supervisor frozen")
def supervisor_frozen(ctx: FaultContext) -> Iterator[str | None]:
    """SIGSTOP of a supervisor (and what it started) beyond its session."""
    yield from freeze(ctx.pick("supervisor"), ctx.random.uniform(3, 12))


@fault("host lost")
def host_lost(ctx: FaultContext) -> Iterator[str | None]:
    """kill -9 of a supervisor and of all workers of its host at once."""
    supervisor = ctx.pick("supervisor")
    workers = [
        record
        for record in ctx.cluster.processes("worker")
        if supervisor is not None and record.id.rpartition("-")[0] == supervisor.id
    ]
    hit = kill_process(supervisor)
    for worker in workers:
        kill_process(worker)
    yield f"{hit} with {len(workers)} workers" if hit else None


@fault("leader killed")
def leader_killed(ctx: FaultContext) -> Iterator[str | None]:
    """kill -9 of the leading nimbus."""
    yield kill_process(leader(ctx.cluster))


@fault("leader frozen")
def leader_frozen(ctx: FaultContext) -> Iterator[str | None]:
    """SIGSTOP of the leading nimbus beyond its session: it wakes deposed, and nothing of it may
    land.
    """
    yield from freeze(leader(ctx.cluster), ctx.random.uniform(5, 12))


@fault("follower killed", needs=_several_nimbuses)
def follower_killed(ctx: FaultContext) -> Iterator[str | None]:
    """kill -9 of a nimbus that does not lead."""
    found = followers(ctx.cluster)
    yield kill_process(ctx.random.choice(list(found)) if found else None)


@fault("ZooKeeper frozen")
def zookeeper_frozen(ctx: FaultContext) -> Iterator[str | None]:
    """SIGSTOP of ZooKeeper beyond every session: data pauses, nothing is restarted."""
    yield from freeze(ctx.pick("zookeeper"), ctx.random.uniform(2, 10))


@fault("ZooKeeper killed")
def zookeeper_killed(ctx: FaultContext) -> Iterator[str | None]:
    """kill -9 of ZooKeeper; it comes back with its disk."""
    yield kill_process(ctx.pick("zookeeper"))


@fault("Dagster killed")
def dagster_killed(ctx: FaultContext) -> Iterator[str | None]:
    """kill -9 of Dagster's daemon, code server or webserver, with the runs below it."""
    record = ctx.pick("dagster-daemon", "dagster-code", "dagster-webserver")
    below = frozen_tree(record) if record is not None else []
    hit = kill_process(record)
    for process in below[1:]:
        _quietly(process.kill)
    yield hit


@fault("Spark killed")
def spark_killed(ctx: FaultContext) -> Iterator[str | None]:
    """kill -9 of the Spark Connect server: placements wait or are made without it, data goes on."""
    yield kill_process(ctx.pick("spark"))


@fault("all CPU taken")
def cpu_taken(ctx: FaultContext) -> Iterator[str | None]:
    """Four processes for each core compute for longer than a session: whoever holds one must get
    his turn in time.
    """
    secs, count = ctx.random.uniform(6, 15), 4 * (os.cpu_count() or 1)
    # They end by themselves, also when nobody is left to end them.
    code = f"import time; until = time.monotonic() + {secs}\nwhile time.monotonic() < until: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield f"{count} processes for {secs:.0f} s"
        time.sleep(secs)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@fault("run killed")
def run_killed(ctx: FaultContext) -> Iterator[str | None]:
    """kill -9 of the process of a Dagster run; nothing where none runs now."""
    runs = _forked_runs(ctx.pick("dagster-code"))
    run = ctx.random.choice(runs) if runs else None
    if run is not None:
        _quietly(run.kill)
    yield f"run of Dagster (pid {run.pid})" if run is not None else None


def _forked_runs(code_server: RunFile | None) -> list[psutil.Process]:
    """Processes of the runs that the code server has started."""
    below = frozen_tree(code_server)[1:] if code_server is not None else []
    runs: list[psutil.Process] = []
    for process in below:
        try:
            is_fork_server = "multiprocessing.forkserver" in " ".join(process.cmdline())
            # A fork has the command line of the process that it was forked from.
            if is_fork_server and process.ppid() in {each.pid for each in below}:
                runs.append(process)
        except psutil.NoSuchProcess:
            continue
    return runs
