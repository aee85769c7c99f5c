"""A whole simulated cluster: machines, ZooKeeper, nimbuses, supervisors, workers, Dagster."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storm_dagster.core.slots.model import Work
from storm_dagster.model.conf import ClusterConf, default_conf
from storm_dagster.model.wire import WorkerReport
from storm_dagster.zk import session
from storm_simulation import names, nimbuses, supervisors
from storm_simulation.client import SimulatedClient
from storm_simulation.commands import Command, begin
from storm_simulation.dagster_side import SimulatedDagster
from storm_simulation.drains import DRAIN_SECS, Drains
from storm_simulation.ensemble import Ensemble
from storm_simulation.kernel import Host, Kernel, Process
from storm_simulation.known import known
from storm_simulation.links import Links
from storm_simulation.network import HttpClient, Web
from storm_simulation.nimbuses import SimulatedNimbus
from storm_simulation.owners import Owners
from storm_simulation.rules import Rules
from storm_simulation.supervisors import SimulatedSupervisor
from storm_simulation.threads import THREADS
from storm_simulation.workers import SimulatedWorker

_installed: list[bool] = []
PORTS = (6900, 6901, 6902, 6903)


def install() -> None:
    """Replace the product's names once; from then on this process only simulates."""
    if not _installed:
        names.install()
        nimbuses.install()
        supervisors.install()
        _installed.append(True)


class Violation(AssertionError):
    """An invariant does not hold."""


class Cluster:
    """Everything of one run. Use it as a context manager, one at a time."""

    def __init__(
        self,
        seed: int,
        *,
        servers: int = 1,
        nimbus_count: int = 2,
        supervisor_count: int = 4,
        ports: tuple[int, ...] = PORTS,
        conf: dict[str, Any] | None = None,
    ) -> None:
        install()
        self.kernel = Kernel(seed)
        THREADS.kernel = self.kernel
        self.links = Links(self.kernel)
        self.web = Web(self.kernel, self.links)
        HttpClient.web = self.web
        nimbuses.use(self)
        supervisors.use(self)
        self.ensemble = Ensemble(self.kernel, servers, tick=1.0)
        session.make_client = self._make_client  # type: ignore[assignment]
        self._folder = tempfile.TemporaryDirectory(prefix="simulation-", dir=_quick_folder())
        self._conf = {"topology.min.replication.count": min(2, nimbus_count), **(conf or {})}
        self._confs: dict[tuple[tuple[str, Any], ...], ClusterConf] = {}
        self.violations: list[str] = []
        self.stop_at_violation = True
        self.overlook_known = True
        self.known: Counter[str] = Counter()
        self.rules = Rules(self)
        self.owners = Owners(self)
        self.drains = Drains(self)
        self.processes: dict[int, Process] = {}
        self.workers: dict[int, SimulatedWorker] = {}
        self._ports: dict[tuple[str, int], SimulatedWorker] = {}
        self.hosts = self.kernel.hosts
        self.nimbuses: dict[str, SimulatedNimbus] = {}
        self.supervisors: dict[str, SimulatedSupervisor] = {}
        for number in range(nimbus_count):
            host = self.host(f"n{number + 1}")
            host.observers.append(self.rules.blob_dropped)
            self.nimbuses[host.name] = SimulatedNimbus(self, host)
        for number in range(supervisor_count):
            host = self.host(f"s{number + 1}")
            self.supervisors[host.name] = SimulatedSupervisor(self, host, ports)
        self.dagster = SimulatedDagster(self, self.host("d1"))
        self.commands: list[Command] = []
        self.crashed_at_steps = 0
        self.leaders_changed_at_steps = 0
        self.steps_of: dict[str, int] = {}
        """Command -> steps of the newest one that ended."""
        self.lost: set[str] = set()
        """Machines that are off now."""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        left = [fiber for process in self.processes.values() for fiber in process.fibers]
        self.kernel.close()
        for fiber in left:
            self.kernel.end(fiber)
        self._folder.cleanup()

    # -- parts -------------------------------------------------------------------------------------

    def host(self, name: str) -> Host:
        rng = self.kernel.rng
        host = Host(name, boot_offset=rng.uniform(0, 1e6), wall_offset=rng.uniform(-1, 1))
        self.hosts[name] = host
        return host

    def home(self, host: Host) -> Path:
        path = Path(self._folder.name, host.name)
        path.mkdir(exist_ok=True)
        return path

    def conf(self, **more: Any) -> ClusterConf:
        key = tuple(sorted(more.items()))
        if key not in self._confs:
            values = {
                **default_conf(),
                "storm.zookeeper.servers": [each.name for each in self.ensemble.servers],
                "storm.zookeeper.root": "/storm",
                "storm.local.hostname": "client",
                # It would measure processes of this machine.
                "supervisor.worker.memory.enforce": False,
                "supervisor.drain.secs": DRAIN_SECS,
                **self._conf,
                **more,
            }
            self._confs[key] = ClusterConf(values, dict.fromkeys(values, "simulation"))
        return self._confs[key]

    def process(self, name: str, host: Host) -> Process:
        process = Process(self.kernel, name, host)
        self.processes[process.pid] = process
        process.at_end.append(lambda: self.processes.pop(process.pid, None) and None)
        return process

    def job(self, name: str, work: Callable[[], None], host: Host | None = None) -> Process:
        """A process that does one thing and ends."""
        process = self.process(name, host or self.dagster.host)

        def main() -> None:
            work()
            process.kill(0)

        process.spawn(main)
        return process

    def _make_client(
        self,
        hosts: str,
        session_timeout_ms: int,
        auth: str | None = None,
        tls: Any = None,
        trusted: Any = None,
    ) -> tuple[SimulatedClient, Any]:
        process = self.kernel.process
        assert process is not None
        client = SimulatedClient(self.ensemble, self.links, process, session_timeout_ms / 1000.0)
        return client, client.lease_view

    # -- workers -----------------------------------------------------------------------------------

    def start_worker(
        self, host: Host, port: int, work: Work, code: dict[str, Any]
    ) -> SimulatedWorker:
        worker = SimulatedWorker(self, host, port, work, code)
        self.workers[worker.process.pid] = worker
        return worker

    def bind(self, worker: SimulatedWorker, secs: float) -> bool:
        """Bind the slot's port, once no other process of the machine has it."""
        slot = (worker.host.name, worker.spec.port)
        end = self.kernel.now + secs
        while slot in self._ports:
            if self.kernel.now >= end:
                return False
            self.kernel.sleep(0.05)
        self._ports[slot] = worker
        return True

    def worker_at(self, host: str, port: int) -> SimulatedWorker | None:
        """The worker that has bound that port."""
        return self._ports.get((host, port))

    def worker_ended(self, worker: SimulatedWorker) -> None:
        self.workers.pop(worker.process.pid, None)
        slot = (worker.host.name, worker.spec.port)
        if self._ports.get(slot) is worker:
            del self._ports[slot]

    def send_report(
        self, worker: SimulatedWorker, slot: tuple[str, int], report: WorkerReport
    ) -> None:
        """From worker to worker."""
        target = self._ports.get(slot)
        delay = self.links.delay(worker.host.name, slot[0])
        if target is None or delay is None or target.spec.topology_id != worker.spec.topology_id:
            return
        if target.loop is not None:
            self.kernel.after(delay, target.process.deliver, target.loop.receive, report)

    # -- running -----------------------------------------------------------------------------------

    def start(self) -> None:
        for nimbus in self.nimbuses.values():
            nimbus.start()
        self.run(1.0)
        for supervisor in self.supervisors.values():
            supervisor.start()
        self.dagster.start()

    def run(self, secs: float) -> None:
        """Let virtual time pass; :class:`Violation` as soon as an invariant breaks."""
        end = self.kernel.now + secs
        while self.kernel.now < end:
            self.kernel.run(min(end, self.kernel.now + 1.0))
            if self.kernel.crashes:
                self.violations.append(f"crash: {self.kernel.crashes.pop(0)}")
            if self.violations and self.stop_at_violation:
                raise Violation(self.violations[0])

    def command(self, verb: str, name: str, **options: Any) -> Command:
        """Begin a command; it ends in virtual time."""
        self.commands.append(begin(self, verb, name, **options))
        return self.commands[-1]

    def leader(self) -> SimulatedNimbus | None:
        """The nimbus that holds ``/nimbus_master``, if its process runs."""
        node = self.ensemble.tree.nodes.get("/storm/nimbus_master")
        part = None if node is None else self.nimbuses.get(node.data.decode().partition(":")[0])
        return part if part is not None and part.up else None

    def epoch(self) -> int:
        """Number of the present epoch."""
        node = self.ensemble.tree.nodes.get("/storm/epoch")
        return -1 if node is None else node.version

    # -- what fails and comes back -----------------------------------------------------------------

    def start_missing(self) -> None:
        """Start every daemon whose process is gone and whose machine is on."""
        for part in (*self.nimbuses.values(), *self.supervisors.values(), self.dagster):
            if part.host.name not in self.lost:
                part.start()

    def lose_host(self, host: Host) -> None:
        """The machine stops: its processes are gone, its disk stays."""
        self.lost.add(host.name)
        for process in [process for process in self.processes.values() if process.host is host]:
            process.kill()

    def boot_host(self, host: Host) -> None:
        """It comes back, with another boot."""
        self.lost.discard(host.name)
        host.files["boots"] = host.files.get("boots", 0) + 1
        host.boot_offset = -self.kernel.now * (1 + host.drift)
        self.start_missing()

    def until(self, condition: Callable[[], bool], secs: float) -> bool:
        """Run until the condition holds, at most that long; whether it does."""
        end = self.kernel.now + secs
        while not condition():
            if self.kernel.now >= end:
                return False
            self.run(0.5)
        return True

    def violated(self, invariant: str, text: str) -> None:
        sentence = f"{invariant} at {self.kernel.now:.3f} s: {text}"
        name = known(sentence) if self.overlook_known else None
        if name is None:
            self.violations.append(sentence)
        else:
            self.known[name] += 1


def _quick_folder() -> str | None:
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() else None
