"""Faults: what fails, for how long, and how it is mended. All of it is chosen by the kernel's chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from storm_simulation.kernel import Host, Process

if TYPE_CHECKING:
    from storm_simulation.cluster import Cluster
    from storm_simulation.workers import SimulatedWorker

Undo = Callable[[], object]
Fault = Callable[["Faults"], "Undo | None"]
KINDS: dict[str, Fault] = {}
"""Name -> the fault; it returns what mends it, or ``None`` when there is nothing that it could hit."""


def fault(kind: str) -> Callable[[Fault], Fault]:
    def keep(call: Fault) -> Fault:
        KINDS[kind] = call
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
        self._number = 0
        self.log: list[str] = []

    def inject(self, kind: str, secs: float) -> bool:
        """Let it happen, and mend it after ``secs``; whether it could happen."""
        undo = KINDS[kind](self)
        if undo is None:
            return False
        self.counts[kind] += 1
        self._number += 1
        number = self._number
        self.log.append(f"{self.cluster.kernel.now:.2f} {kind} for {secs:.1f} s: {self._what}")
        self.open[number] = (kind, undo)
        self.cluster.kernel.after(secs, self._mend, number)
        return True

    _what = ""

    def _mend(self, number: int) -> None:
        found = self.open.pop(number, None)
        if found is not None:
            found[1]()

    def mend_all(self) -> None:
        for number in list(self.open):
            self._mend(number)

    # -- choosing --------------------------------------------------------------------------------------------------

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
        name = self.one([name for name in self.cluster.hosts if name[0] in kinds and name not in self.cluster.lost])
        return None if name is None else self.cluster.hosts[name]


def _nothing() -> None:
    pass


def _freeze(process: Process | None) -> Undo | None:
    if process is None:
        return None
    process.freeze()
    return process.thaw


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
    "run": "run-",
}.items():
    KINDS[f"{_kind} killed"] = _killer(_prefix)
    KINDS[f"{_kind} frozen"] = _freezer(_prefix)


def _hang(faults: Faults, found: list[SimulatedWorker]) -> Undo | None:
    loops = [worker.loop for worker in found if worker.loop is not None]
    for loop in loops:
        loop.hung += 1

    def resume() -> None:
        for loop in loops:
            loop.hung -= 1

    return resume if loops else None


@fault("worker hangs")
def _worker_hangs(faults: Faults) -> Undo | None:
    """A component blocks in every worker of its topology, and somebody rebalances it."""
    process, workers, rng = faults.process("worker-"), faults.cluster.workers, faults.rng
    if process is None:
        return None
    topology_id = workers[process.pid].spec.topology_id
    base, number, again = faults.cluster.rules.bases.get(topology_id), rng.choice((1, 2, 3, 4)), rng.random() < 0.5
    if base is not None and rng.random() < 0.5:
        faults.cluster.command("rebalance", base.name, workers=number, reassign=again)
    return _hang(faults, [each for each in workers.values() if each.spec.topology_id == topology_id])


@fault("workers hang, cut off")
def _hung_and_cut(faults: Faults) -> Undo | None:
    """The loops of a host's workers stand still while it is cut off, and go on about when its slow link is back."""
    host, cluster = faults.host("s"), faults.cluster
    found = [_hang(faults, [worker]) for worker in cluster.workers.values() if worker.host is host]
    resumes = [resume for resume in found if resume is not None]
    if host is None or not resumes:
        return None
    cluster.links.cut_off(host.name)

    def mend() -> None:
        cluster.links.mend(host.name)
        cluster.links.slow[host.name] = faults.rng.choice((0.02, 0.5, 2.0))
        cluster.kernel.after(6.0, cluster.links.slow.pop, host.name, None)
        for resume in resumes:
            cluster.kernel.after(4.0 * faults.rng.random(), resume)

    # Mostly long enough for another worker to have the tasks by then.
    return lambda: cluster.kernel.after(faults.rng.choice((0.0, 8.0, 12.0)), mend)


@fault("command killed")
def _command_killed(faults: Faults) -> Undo | None:
    found = [c for c in faults.cluster.commands if c.ended is None and c.process is not None and c.process.runs]
    if not found:
        return None
    chosen = faults.rng.choice(found)
    faults._what = str(chosen)
    assert chosen.process is not None
    chosen.process.kill()
    return _nothing


@fault("command frozen")
def _command_frozen(faults: Faults) -> Undo | None:
    found = [c.process for c in faults.cluster.commands if c.ended is None and c.process is not None and c.process.runs]
    return _freeze(faults.rng.choice(found) if found else None)


@fault("leader killed")
def _leader_killed(faults: Faults) -> Undo | None:
    leader = faults.cluster.leader()
    if leader is None or leader.process is None:
        return None
    faults._what = leader.host.name
    leader.process.kill()
    return faults.cluster.start_missing


@fault("leader frozen")
def _leader_frozen(faults: Faults) -> Undo | None:
    leader = faults.cluster.leader()
    return None if leader is None else _freeze(leader.process)


@fault("nimbus stopped")
def _nimbus_stopped(faults: Faults) -> Undo | None:
    name = faults.one([name for name, part in faults.cluster.nimbuses.items() if part.up])
    if name is None:
        return None
    faults.cluster.nimbuses[name].stop()
    return faults.cluster.start_missing


@fault("supervisor stopped")
def _supervisor_stopped(faults: Faults) -> Undo | None:
    name = faults.one([name for name, part in faults.cluster.supervisors.items() if part.up])
    if name is None:
        return None
    faults.cluster.supervisors[name].stop()
    return faults.cluster.start_missing


@fault("host lost")
def _host_lost(faults: Faults) -> Undo | None:
    host = faults.host("s")
    if host is None:
        return None
    faults.cluster.lose_host(host)
    return lambda: faults.cluster.boot_host(host)


@fault("host frozen")
def _host_frozen(faults: Faults) -> Undo | None:
    host = faults.host("s", "n")
    if host is None:
        return None
    frozen = [process for process in faults.cluster.processes.values() if process.host is host and process.runs]
    for process in frozen:
        process.freeze()

    def thaw() -> None:
        for process in frozen:
            process.thaw()

    return thaw


@fault("host cut off")
def _host_cut(faults: Faults) -> Undo | None:
    host = faults.host("s", "n", "d")
    if host is None:
        return None
    links = faults.cluster.links
    links.cut_off(host.name)
    return lambda: links.mend(host.name)


@fault("link cut one way")
def _one_way(faults: Faults) -> Undo | None:
    host = faults.host("s", "n", "d")
    if host is None:
        return None
    links = faults.cluster.links
    pair = (host.name, "*") if faults.rng.random() < 0.5 else ("*", host.name)
    links.cut.add(pair)
    return lambda: links.cut.discard(pair)


@fault("link slow")
def _slow(faults: Faults) -> Undo | None:
    host = faults.host("s", "n", "d")
    if host is None:
        return None
    links = faults.cluster.links
    links.slow[host.name] = faults.rng.choice((0.02, 0.2, 1.0, 3.0))
    return lambda: links.slow.pop(host.name, None)


@fault("replies lost")
def _lossy(faults: Faults) -> Undo | None:
    host = faults.host("s", "n", "d")
    if host is None:
        return None
    links = faults.cluster.links
    links.lossy[host.name] = faults.rng.choice((0.1, 0.3, 0.6))
    return lambda: links.lossy.pop(host.name, None)


@fault("client cut")
def _client_cut(faults: Faults) -> Undo | None:
    many = [each for server in faults.cluster.ensemble.servers for each in server.connections]
    if not many:
        return None
    chosen = faults.rng.choice(many)
    faults._what = chosen.label
    chosen.drop()
    return _nothing


@fault("session expired")
def _expired(faults: Faults) -> Undo | None:
    ensemble = faults.cluster.ensemble
    if not ensemble.sessions or ensemble.leader is None:
        return None
    chosen = ensemble.sessions[faults.rng.choice(sorted(ensemble.sessions))]
    faults._what = chosen.label
    # The servers heard nothing of it for its whole timeout: so its owner was cut off at least as long.
    owner = next((w for w in faults.cluster.workers.values() if w.process.name == chosen.label), None)
    if owner is not None:
        return None
    ensemble.end_session(chosen)
    return _nothing


@fault("server killed")
def _server_killed(faults: Faults) -> Undo | None:
    ensemble = faults.cluster.ensemble
    well = [server for server in ensemble.servers if server.up and not server.cut]
    if len(well) < len(ensemble.servers):
        return None
    server = faults.rng.choice(well)
    faults._what = server.name
    ensemble.kill_server(server)
    return lambda: ensemble.revive_server(server)


@fault("server cut off")
def _server_cut(faults: Faults) -> Undo | None:
    ensemble = faults.cluster.ensemble
    well = [server for server in ensemble.servers if server.up and not server.cut]
    if len(ensemble.servers) == 1 or len(well) < len(ensemble.servers):
        return None
    server = faults.rng.choice(well)
    ensemble.cut_server(server)
    return lambda: ensemble.mend_server(server)


@fault("follower lags")
def _lags(faults: Faults) -> Undo | None:
    ensemble = faults.cluster.ensemble
    followers = [server for server in ensemble.servers if server is not ensemble.leader and server.up]
    if not followers or any(server.lag for server in ensemble.servers):
        return None
    server = faults.rng.choice(followers)
    server.lag = faults.rng.choice((0.05, 0.5, 2.0))
    return lambda: setattr(server, "lag", 0.0)


@fault("disk full")
def _disk_full(faults: Faults) -> Undo | None:
    return _disk(faults, "full", "n", "s")


@fault("disk broken")
def _disk_broken(faults: Faults) -> Undo | None:
    return _disk(faults, "broken", "n")


def _disk(faults: Faults, state: str, *kinds: str) -> Undo | None:
    host = faults.host(*kinds)
    if host is None or host.disk != "well":
        return None
    host.disk = state
    return lambda: setattr(host, "disk", "well")


@fault("local state damaged")
def _damaged(faults: Faults) -> Undo | None:
    name = faults.one([name for name, part in faults.cluster.supervisors.items() if part.up])
    if name is None:
        return None
    part = faults.cluster.supervisors[name]
    path = faults.cluster.home(part.host) / "supervisor" / name / "localstate" / "state.json"
    assert part.process is not None
    part.process.kill()
    if path.exists():
        path.write_text(path.read_text(encoding="utf-8")[: faults.rng.randrange(200)], encoding="utf-8")
    return faults.cluster.start_missing


@fault("wall clock jumps")
def _wall(faults: Faults) -> Undo | None:
    host = faults.host("s", "n", "d")
    if host is None:
        return None
    before = host.wall_offset
    host.wall_offset += faults.rng.choice((-86400.0, -3600.0, -5.0, 5.0, 3600.0, 86400.0))
    return lambda: setattr(host, "wall_offset", before)


@fault("Dagster's storage is silent")
def _silent(faults: Faults) -> Undo | None:
    storage = faults.cluster.dagster.storage
    storage.silent = True
    return lambda: setattr(storage, "silent", False)


@fault("runs do not start")
def _no_runs(faults: Faults) -> Undo | None:
    storage = faults.cluster.dagster.storage
    storage.starts_runs = False
    return lambda: setattr(storage, "starts_runs", True)
