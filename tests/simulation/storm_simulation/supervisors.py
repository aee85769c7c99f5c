"""Simulated supervisor processes: the real daemon, with simulated worker processes and
downloads.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx as real_httpx

from storm_dagster.core.slots.model import Work, Worker
from storm_dagster.model.errors import (
    Corrupt,
    KeyNotFound,
    StormDagsterError,
    Unavailable,
    error_from_document,
)
from storm_dagster.model.names import code_key, conf_key, jar_key
from storm_dagster.operations.live import spout_pause
from storm_dagster.supervisor import daemon, local_state, slots
from storm_dagster.supervisor.localizer import LocalCode
from storm_dagster.supervisor.processes import LiveWorker
from storm_dagster.supervisor.spares import Spares
from storm_simulation.disks import full_disk
from storm_simulation.kernel import Host, Process
from storm_simulation.network import HttpClient
from storm_simulation.threads import THREADS, Event

if TYPE_CHECKING:
    from storm_simulation.cluster import Cluster

_cluster: list[Cluster] = []


def use(cluster: Cluster) -> None:
    """From now on supervisors belong to that cluster."""
    _cluster[:] = [cluster]


def _here() -> Process:
    process = THREADS.get().process
    assert process is not None
    return process


@dataclass(frozen=True)
class SimulatedWorkerProcess:
    """Stands for :class:`storm_dagster.supervisor.processes.WorkerProcess`."""

    pid: int
    start_ticks: int
    boot_id: str
    child: object = None
    worker_id: str = ""
    cgroup: object = None

    def _found(self) -> Process | None:
        process = _cluster[-1].processes.get(self.pid)
        return None if process is None or process.dead else process

    def alive(self) -> bool:
        return self._found() is not None

    def signal(self, number: int) -> bool:
        process = self._found()
        if process is None:
            return False
        if number == signal.SIGTERM:
            worker = _cluster[-1].workers.get(self.pid)
            if worker is not None:
                process.deliver(worker.terminate)
        else:
            process.kill()
        return True

    def end(self) -> None:
        self.signal(signal.SIGKILL)


class ProcessWatch:
    """Reports the death of each watched process once, in the supervisor's own time."""

    def __init__(self, on_exit: Callable[[str, int | None], None]) -> None:
        self._on_exit = on_exit
        self._process = _here()
        self._closed = False

    def add(self, key: str, process: SimulatedWorkerProcess) -> None:
        def report(status: int | None) -> None:
            if not self._closed:
                self._process.deliver(
                    self._process.spawn, lambda: self._on_exit(key, status), "process-watch"
                )

        found = _cluster[-1].processes.get(process.pid)
        if found is None or found.dead:
            report(None if found is None else found.status)
        else:
            found.at_end.append(lambda: report(found.status))

    def close(self) -> None:
        self._closed = True


class HeartbeatFiles:
    """``HeartbeatFile``: the files are on the simulated disk."""

    @staticmethod
    def read(path: Path) -> Any:
        return _here().host.files.get("beats", {}).get(str(path))


class LogService:
    """None: nobody reads the logs of simulated hosts."""

    url = None
    announced = SimpleNamespace(run=lambda *_: None, failure=None)

    def start(self, workers: object, state: object, **probes: object) -> None:
        pass

    def stop(self) -> None:
        pass


class SimulatedLocalizer:
    """Downloads by the same routes and sources as the real one; archives are not unpacked."""

    removing = False

    def __init__(
        self,
        folder: Path,
        sources: Callable[[], Sequence[str]],
        conf: Mapping[str, Any],
        stop: Event,
        expected: Any,
    ) -> None:
        self._sources = sources
        self._tries = conf["supervisor.blobstore.download.max_retries"]
        self._host = _here().host
        self._http = HttpClient(real_httpx.Timeout(30.0, connect=5.0))

    @property
    def _codes(self) -> dict[str, dict[str, Any]]:
        return self._host.files.setdefault("code", {})

    def path_of(self, code_dir: str) -> Path:
        return Path(code_dir)

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        pass

    def local(self, code_dir: str) -> LocalCode | None:
        found = self._codes.get(code_dir)
        return None if found is None else LocalCode(Path(code_dir), found["sha256"])

    def distrust(self, code_dir: str) -> None:
        self._codes.pop(code_dir, None)

    def fetch(self, code_dir: str) -> LocalCode:
        found = self.local(code_dir)
        if found is not None:
            return found
        parts = {
            part: self._part(key(code_dir))
            for part, key in (("jar", jar_key), ("conf", conf_key), ("code", code_key))
        }
        if self._host.disk != "well":
            raise full_disk()
        self._codes[code_dir] = {"sha256": parts["jar"][1], "conf": json.loads(parts["conf"][0])}
        return LocalCode(Path(code_dir), parts["jar"][1])

    def _part(self, key: str) -> tuple[bytes, str]:
        failure: StormDagsterError = Unavailable("no nimbus is known")
        for round_ in range(self._tries):
            for base in self._sources():
                try:
                    answer = self._http.get(f"{base.rstrip('/')}/v1/blobs/{key}")
                except real_httpx.HTTPError as error:
                    failure = Unavailable(f"{base}: {error}")
                    continue
                if answer.status_code == 200:
                    return answer.body, answer.headers["X-Content-SHA256"]
                failure = error_from_document(answer.json())
            if round_ + 1 < self._tries:
                THREADS.get().sleep(0.5)
        if isinstance(failure, KeyNotFound | Corrupt):
            raise failure
        raise Unavailable(failure.message)

    def remove_unused(
        self, used: Callable[[], Collection[str]], now_secs: float | None = None
    ) -> list[str]:
        keep = used()
        gone = [code_dir for code_dir in self._codes if code_dir not in keep]
        for code_dir in gone:
            del self._codes[code_dir]
        return gone


class Starter:
    """``Launcher``: starts simulated workers on the supervisor's machine."""

    def __init__(self, cluster: Cluster, host: Host) -> None:
        self._cluster = cluster
        self._host = host
        self.spares = Spares(0, lambda _: NotImplemented)

    def launch(self, port: int, work: Work, code: LocalCode) -> LiveWorker:
        if self._host.disk != "well":
            raise full_disk()
        known = self._host.files.get("code", {}).get(work.code_dir)
        if known is None:
            raise Corrupt(f"code {work.code_dir} is gone: it is fetched again")
        THREADS.get().sleep(0.02)
        worker = self._cluster.start_worker(self._host, port, work, known)
        return LiveWorker(
            port,
            Worker(worker.worker_id, work),
            SimulatedWorkerProcess(worker.process.pid, worker.ticks, worker.boot_id),  # type: ignore[arg-type]
            worker.heartbeat_path,
            Path("/dev/null"),
            worker.started,
        )


def _find_workers(home: Path, supervisor_id: str, conf: object) -> list[LiveWorker]:
    found = [
        LiveWorker(
            worker.spec.port,
            Worker(worker.worker_id, worker.work),
            SimulatedWorkerProcess(worker.process.pid, worker.ticks, worker.boot_id),  # type: ignore[arg-type]
            worker.heartbeat_path,
            Path("/dev/null"),
            worker.started,
        )
        for worker in _cluster[-1].workers.values()
        if worker.spec.node == supervisor_id and not worker.process.dead
    ]
    return sorted(found, key=lambda each: (each.port, each.process.start_ticks))


def _write_atomically(path: Path, text: str, *, mode: int = 0o666, sync: bool = False) -> None:
    if _here().host.disk != "well":
        raise full_disk()
    path.write_text(text, encoding="utf-8")


def _ask_statistics(
    host: str, port: int, token: str, link_key: str, trusted: object
) -> list[dict[str, object]] | None:
    """Replacement of ``spout_pause._ask_statistics``: statistics of a worker, often idle.

    ``None`` when it does not answer.
    """
    cluster, process = _cluster[-1], _here()
    kernel = cluster.kernel
    there, back = (
        cluster.links.delay(process.host.name, host),
        cluster.links.delay(host, process.host.name),
    )
    worker = cluster.worker_at(host, port)
    answers = there is not None and back is not None and worker is not None and worker.process.runs
    secs = (there or 0.0) + (back or 0.0)
    if not answers or secs > 0.5 or worker is None or worker.spec.token != token:
        kernel.sleep(0.5)
        return None
    kernel.sleep(secs)
    is_idle = kernel.rng.random() < 0.7
    placement = None if worker.loop is None else worker.loop.placement
    version = -1 if placement is None else placement.version
    return [{"version": version, "system": {"open_trees": int(not is_idle)}}]


def install() -> None:
    """Put the simulated processes and files in the place of the system's."""
    for module, replaced in (
        (slots, {"ProcessWatch": ProcessWatch, "HeartbeatFile": HeartbeatFiles}),
        (spout_pause, {"_ask_statistics": _ask_statistics}),
        (local_state, {"write_atomically": _write_atomically}),
        (
            daemon,
            {
                "find_workers": _find_workers,
                "WorkerProcess": SimulatedWorkerProcess,
                "Localizer": SimulatedLocalizer,
                "remove_stale_folders": lambda *_: [],
                "remove_old_logs": lambda *_, **__: [],
                "rotate_logs": lambda *_: None,
            },
        ),
    ):
        for name, value in replaced.items():
            assert hasattr(module, name), f"{module.__name__} has no {name} any more"
            setattr(module, name, value)


class SimulatedSupervisor:
    """One supervisor; its workers outlive it, on the same machine."""

    def __init__(self, cluster: Cluster, host: Host, ports: tuple[int, ...]) -> None:
        self.cluster = cluster
        self.host = host
        self.ports = ports
        self.process: Process | None = None
        self.daemon: daemon.Supervisor | None = None
        self._stop: Event | None = None

    @property
    def up(self) -> bool:
        return self.process is not None and self.process.runs

    def start(self) -> None:
        if self.process is not None and not self.process.dead:
            # A process that is about to end is started after its end, once for all faults that
            # want it to run.
            is_ending = self._stop is not None and self._stop.is_set()
            if is_ending and self._start_soon not in self.process.at_end:
                self.process.at_end.append(self._start_soon)
            return
        conf = self.cluster.conf(**{"storm.local.hostname": self.host.name})
        home = self.cluster.home(self.host)
        process = self.process = self.cluster.process(f"supervisor-{self.host.name}", self.host)
        stop = self._stop = Event()
        launcher = Starter(self.cluster, self.host)
        process.at_end.append(self._ended)

        def main() -> None:
            logs: Any = LogService()
            starter: Any = launcher
            self.daemon = daemon.Supervisor(conf, home, self.host.name, self.ports, logs, starter)
            self.daemon.serve(stop)  # type: ignore[arg-type]
            process.kill(0)

        process.spawn(main)

    def _start_soon(self) -> None:
        self.cluster.kernel.after(0.1, self.cluster.start_missing)

    def _ended(self) -> None:
        """Whoever supervises it starts a daemon again that ended by an error; a fault that ends it
        does that itself.
        """
        if self.process is not None and (self.process.status or 0) > 0:
            self.cluster.kernel.after(2.0, self.cluster.start_missing)

    def stop(self) -> None:
        """An ordered end; the workers go on."""
        if self.process is not None and self._stop is not None:
            self.process.deliver(self._stop.set)
