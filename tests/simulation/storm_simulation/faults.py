"""Faults: what fails, for how long, and how it is mended. All of it is chosen by the kernel's
chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from storm_simulation.kernel import Host, Process

if TYPE_CHECKING:
    from storm_simulation.cluster import Cluster
    from storm_simulation.workers import SimulatedWorker

Undo = Callable[[], object]
Fault = Callable[["Faults"], "Undo | None"]
KINDS: dict[str, Fault] = {}
"""Name -> the fault; it returns what mends it, or ``None`` when there is nothing that it could
hit.
"""
GROUPS: dict[str, str] = {}
"""Name -> what it concerns: processes, links, disks, clocks or services."""


def fault(kind: str, group: str) -> Callable[[Fault], Fault]:
    def keep(call: Fault) -> Fault:
        KINDS[kind], GROUPS[kind] = call, group
        return call

    return keep


class Faults:
    """Injects faults into one cluster and counts them by kind."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rng = cluster.kernel.rng
        self.counts: Counter[str] = Counter()
        self.open: dict[int, tuple[str, Undo]] = {}
        """Faults that are not mended yet."""
        self.over = False
        """Nothing fails any more."""
        self._number = 0
        self.log: list[str] = []

    def inject(self, kind: str, secs: float) -> bool:
        """Let it happen, and mend it after ``secs``; whether it could happen."""
        undo = KINDS[kind](self)
        if undo is None:
            return False
        self.happened(kind, secs, undo)
        return True

    def happened(self, kind: str, secs: float, undo: Undo) -> None:
        """Count a fault, and mend it after ``secs``."""
        self.counts[kind] += 1
        self.log.append(f"{self.cluster.kernel.now:.2f} {kind} for {secs:.1f} s: {self._what}")
        self.mend_after(secs, kind, undo)

    def mend_after(self, secs: float, kind: str, undo: Undo) -> None:
        """Mend it then, or when all is mended."""
        self._number += 1
        self.open[self._number] = (kind, undo)
        self.cluster.kernel.after(secs, self._mend, self._number)

    def inject_one_of(self, kinds: Sequence[str], secs: float) -> None:
        """One of several kinds: the first by chance that has something to hit now."""
        for kind in self.rng.sample(kinds, len(kinds)):
            if self.inject(kind, secs):
                return

    _what = ""

    def _mend(self, number: int) -> None:
        found = self.open.pop(number, None)
        if found is not None:
            found[1]()

    def mend_all(self) -> None:
        """Mend everything now; what was about to fail does not any more."""
        self.over = True
        self.cluster.dagster.next_run = None
        while self.open:
            self._mend(next(iter(self.open)))

    # -- choosing ----------------------------------------------------------------------------------

    def one(self, many: list[str]) -> str | None:
        chosen = self.rng.choice(sorted(many)) if many else None
        self._what = str(chosen)
        return chosen

    def process(self, prefix: str) -> Process | None:
        found = [p for p in self.cluster.processes.values() if p.name.startswith(prefix) and p.runs]
        chosen = self.rng.choice(sorted(found, key=lambda p: p.pid)) if found else None
        self._what = str(chosen)
        return chosen

    def host(self, *kinds: str) -> Host | None:
        name = self.one(
            [
                name
                for name in self.cluster.hosts
                if name[0] in kinds and name not in self.cluster.lost
            ]
        )
        return None if name is None else self.cluster.hosts[name]


def _nothing() -> None:
    pass


def _frozen(process: Process) -> Undo:
    process.freeze()
    return process.thaw


def _freeze(process: Process | None) -> Undo | None:
    return None if process is None else _frozen(process)


def _killer(prefix: str) -> Fault:
    def kill(faults: Faults) -> Undo | None:
        process = faults.process(prefix)
        if process is None:
            return None
        process.kill()
        return faults.cluster.start_missing

    return kill


def _freezer(prefix: str) -> Fault:
    return lambda faults: _freeze(faults.process(prefix))


for _kind, _prefix in {
    "nimbus": "nimbus-",
    "supervisor": "supervisor-",
    "worker": "worker-",
    "dagster": "dagster",
}.items():
    fault(f"{_kind} killed", "processes")(_killer(_prefix))
    fault(f"{_kind} frozen", "processes")(_freezer(_prefix))


def _killed(process: Process) -> Undo:
    process.kill()
    return _nothing


def _hit_run(kind: str, hit: Callable[[Process], Undo]) -> None:
    """A run of Dagster: that of a command, or the next one that heals, which is over soon."""

    def strike(faults: Faults, process: Process) -> None:
        if process.runs and not faults.over:
            faults.happened(kind, faults.rng.choice((0.3, 3.0, 15.0)), hit(process))

    def one(faults: Faults) -> Undo | None:
        commands, rng = faults.cluster.commands, faults.rng
        if rng.random() < 0.2:
            faults.cluster.dagster.next_run = lambda process: strike(faults, process)
        found = [
            c.process
            for c in commands
            if c.ended is None and c.process is not None and c.process.runs
        ]
        chosen = rng.choice(found) if found else None
        faults._what = str(chosen)
        return None if chosen is None else hit(chosen)

    fault(kind, "processes")(one)


_hit_run("run killed", _killed)
_hit_run("run frozen", _frozen)


def _hang(faults: Faults, found: list[SimulatedWorker]) -> Undo | None:
    loops = [worker.loop for worker in found if worker.loop is not None]
    for loop in loops:
        loop.hung += 1

    def resume() -> None:
        for loop in loops:
            loop.hung -= 1

    return resume if loops else None


@fault("worker hangs", "processes")
def _worker_hangs(faults: Faults) -> Undo | None:
    """A component blocks in every worker of its topology, and somebody rebalances it."""
    process, workers, rng = faults.process("worker-"), faults.cluster.workers, faults.rng
    if process is None:
        return None
    topology_id = workers[process.pid].spec.topology_id
    base, number, again = (
        faults.cluster.rules.bases.get(topology_id),
        rng.choice((1, 2, 3, 4)),
        rng.random() < 0.5,
    )
    if base is not None and rng.random() < 0.5:
        faults.cluster.command("rebalance", base.name, workers=number, reassign=again)
    return _hang(
        faults, [each for each in workers.values() if each.spec.topology_id == topology_id]
    )


@fault("workers hang, cut off", "links")
def _hung_and_cut(faults: Faults) -> Undo | None:
    """The loops of a host's workers stand still while it is cut off, and go on about when its slow
    link is back.
    """
    host, cluster = faults.host("s"), faults.cluster
    found = [_hang(faults, [worker]) for worker in cluster.workers.values() if worker.host is host]
    resumes = [resume for resume in found if resume is not None]
    if host is None or not resumes:
        return None
    cluster.links.cut_off(host.name)

    def mend() -> None:
        cluster.links.mend(host.name)
        cluster.links.slow[host.name] = faults.rng.choice((0.02, 0.5, 2.0))
        faults.mend_after(6.0, "slow link", lambda: cluster.links.slow.pop(host.name, None))
        for resume in resumes:
            faults.mend_after(4.0 * faults.rng.random(), "worker hangs", resume)

    # Mostly long enough for another worker to have the tasks by then.
    return lambda: faults.mend_after(
        faults.rng.choice((0.0, 8.0, 12.0)), "workers hang, cut off", mend
    )


@fault("leader killed", "processes")
def _leader_killed(faults: Faults) -> Undo | None:
    leader = faults.cluster.leader()
    if leader is None or leader.process is None:
        return None
    faults._what = leader.host.name
    leader.process.kill()
    return faults.cluster.start_missing


@fault("leader frozen", "processes")
def _leader_frozen(faults: Faults) -> Undo | None:
    leader = faults.cluster.leader()
    return None if leader is None else _freeze(leader.process)


@fault("nimbus stopped", "processes")
def _nimbus_stopped(faults: Faults) -> Undo | None:
    name = faults.one([name for name, part in faults.cluster.nimbuses.items() if part.up])
    if name is None:
        return None
    faults.cluster.nimbuses[name].stop()
    return faults.cluster.start_missing


@fault("supervisor stopped", "processes")
def _supervisor_stopped(faults: Faults) -> Undo | None:
    name = faults.one([name for name, part in faults.cluster.supervisors.items() if part.up])
    if name is None:
        return None
    faults.cluster.supervisors[name].stop()
    return faults.cluster.start_missing


@fault("host lost", "processes")
def _host_lost(faults: Faults) -> Undo | None:
    host = faults.host("s")
    if host is None:
        return None
    faults.cluster.lose_host(host)
    return lambda: faults.cluster.boot_host(host)


@fault("host frozen", "processes")
def _host_frozen(faults: Faults) -> Undo | None:
    host = faults.host("s", "n")
    if host is None:
        return None
    frozen = [
        process
        for process in faults.cluster.processes.values()
        if process.host is host and process.runs
    ]
    for process in frozen:
        process.freeze()

    def thaw() -> None:
        for process in frozen:
            process.thaw()

    return thaw


@fault("host cut off", "links")
def _host_cut(faults: Faults) -> Undo | None:
    host = faults.host("s", "n", "d")
    if host is None:
        return None
    links = faults.cluster.links
    if links.is_cut(host.name, "z1"):
        return None
    links.cut_off(host.name)
    return lambda: links.mend(host.name)


@fault("link cut one way", "links")
def _one_way(faults: Faults) -> Undo | None:
    host = faults.host("s", "n", "d")
    if host is None:
        return None
    links = faults.cluster.links
    pair = (host.name, "*") if faults.rng.random() < 0.5 else ("*", host.name)
    if pair in links.cut:
        return None
    links.cut.add(pair)
    return lambda: links.cut.discard(pair)


@fault("link slow", "links")
def _slow(faults: Faults) -> Undo | None:
    host = faults.host("s", "n", "d")
    if host is None:
        return None
    links = faults.cluster.links
    if host.name in links.slow:
        return None
    links.slow[host.name] = faults.rng.choice((0.02, 0.2, 1.0, 3.0))
    return lambda: links.slow.pop(host.name, None)


@fault("replies lost", "links")
def _lossy(faults: Faults) -> Undo | None:
    host = faults.host("s", "n", "d")
    if host is None:
        return None
    links = faults.cluster.links
    if host.name in links.lossy:
        return None
    links.lossy[host.name] = faults.rng.choice((0.1, 0.3, 0.6))
    return lambda: links.lossy.pop(host.name, None)


@fault("address moves", "links")
def _moves(faults: Faults) -> Undo | None:
    """A machine of a nimbus joins another network: its name means another address, and its sockets
    are on the old one.
    """
    host = faults.host("n")
    if host is None:
        return None
    host.moves += 1
    return _nothing


@fault("client cut", "links")
def _client_cut(faults: Faults) -> Undo | None:
    many = [each for server in faults.cluster.ensemble.servers for each in server.connections]
    if not many:
        return None
    chosen = faults.rng.choice(many)
    faults._what = chosen.label
    chosen.drop()
    return _nothing


@fault("client cut off", "links")
def _client_cut_off(faults: Faults) -> Undo | None:
    """Nothing comes through between one process and ZooKeeper, while its neighbors are well."""
    many = [
        each.client for server in faults.cluster.ensemble.servers for each in server.connections
    ]
    found = [client for client in many if not client.silent]
    if not found:
        return None
    chosen = faults.rng.choice(found)
    faults._what = chosen.label
    chosen.silent = True
    return lambda: setattr(chosen, "silent", False)


@fault("session expired", "links")
def _expired(faults: Faults) -> Undo | None:
    ensemble = faults.cluster.ensemble
    if not ensemble.sessions or ensemble.leader is None:
        return None
    chosen = ensemble.sessions[faults.rng.choice(sorted(ensemble.sessions))]
    faults._what = chosen.label
    # The servers heard nothing of it for its whole timeout: so its owner was cut off at least as
    # long.
    owner = next(
        (w for w in faults.cluster.workers.values() if w.process.name == chosen.label), None
    )
    if owner is not None:
        return None
    ensemble.end_session(chosen)
    return _nothing


@fault("server killed", "processes")
def _server_killed(faults: Faults) -> Undo | None:
    ensemble = faults.cluster.ensemble
    well = [server for server in ensemble.servers if server.up and not server.cut]
    if len(well) < len(ensemble.servers):
        return None
    server = faults.rng.choice(well)
    faults._what = server.name
    ensemble.kill_server(server)
    return lambda: ensemble.revive_server(server)


@fault("server cut off", "links")
def _server_cut(faults: Faults) -> Undo | None:
    ensemble = faults.cluster.ensemble
    well = [server for server in ensemble.servers if server.up and not server.cut]
    if len(ensemble.servers) == 1 or len(well) < len(ensemble.servers):
        return None
    server = faults.rng.choice(well)
    ensemble.cut_server(server)
    return lambda: ensemble.mend_server(server)


@fault("follower lags", "links")
def _lags(faults: Faults) -> Undo | None:
    ensemble = faults.cluster.ensemble
    followers = [
        server for server in ensemble.servers if server is not ensemble.leader and server.up
    ]
    if not followers or any(server.lag for server in ensemble.servers):
        return None
    server = faults.rng.choice(followers)
    server.lag = faults.rng.choice((0.05, 0.5, 2.0))
    return lambda: setattr(server, "lag", 0.0)


@fault("disk full", "disks")
def _disk_full(faults: Faults) -> Undo | None:
    return _disk(faults, "full", "n", "s")


@fault("disk broken", "disks")
def _disk_broken(faults: Faults) -> Undo | None:
    return _disk(faults, "broken", "n")


def _disk(faults: Faults, state: str, *kinds: str) -> Undo | None:
    host = faults.host(*kinds)
    if host is None or host.disk != "well":
        return None
    host.disk = state
    return lambda: setattr(host, "disk", "well")


@fault("local state damaged", "disks")
def _damaged(faults: Faults) -> Undo | None:
    name = faults.one([name for name, part in faults.cluster.supervisors.items() if part.up])
    if name is None:
        return None
    part = faults.cluster.supervisors[name]
    path = faults.cluster.home(part.host) / "supervisor" / name / "localstate" / "state.json"
    assert part.process is not None
    part.process.kill()
    if path.exists():
        path.write_text(
            path.read_text(encoding="utf-8")[: faults.rng.randrange(200)], encoding="utf-8"
        )
    return faults.cluster.start_missing


@fault("wall clock jumps", "clocks")
def _wall(faults: Faults) -> Undo | None:
    host = faults.host("s", "n", "d")
    if host is None:
        return None
    before = host.wall_offset

    def jump(offset: float) -> None:
        host.wall_offset = offset
        host.wall_jumped_at = faults.cluster.kernel.now

    jump(before + faults.rng.choice((-86400.0, -3600.0, -5.0, 5.0, 3600.0, 86400.0)))
    return lambda: jump(before)


@fault("clock runs fast or slow", "clocks")
def _drift(faults: Faults) -> Undo | None:
    """By another rate, from now on: at most as much as leases allow for."""
    host = faults.host("s", "n", "d")
    if host is None:
        return None
    faults.cluster.kernel.set_drift(host, faults.rng.uniform(-0.003, 0.003))
    return _nothing


@fault("Dagster's storage is silent", "services")
def _silent(faults: Faults) -> Undo | None:
    storage = faults.cluster.dagster.storage
    if storage.silent:
        return None
    storage.silent = True
    return lambda: setattr(storage, "silent", False)


@fault("runs do not start", "services")
def _no_runs(faults: Faults) -> Undo | None:
    storage = faults.cluster.dagster.storage
    if not storage.starts_runs:
        return None
    storage.starts_runs = False
    return lambda: setattr(storage, "starts_runs", True)
