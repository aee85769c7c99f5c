"""Supervisor daemon: manages the workers in the slots of one host.

Its one loop polls events, steps the pure slot machine and executes the instructions.
:class:`~storm_dagster.supervisor.cluster_link.ClusterLink` reads the desired work in its own
thread; downloads, unpacking and starts run in threads too, so that no pass takes long. Workers have
their own sessions: they outlive this process, and the next supervisor of the same id adopts them.
"""

import functools
import logging
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from storm_dagster.core.slots.model import DesiredSlots, SlotLimits, Work, Worker, check_ports
from storm_dagster.core.upgrade.machine import SlotRun
from storm_dagster.host.clock import boot_clock, boot_id
from storm_dagster.host.files import hold_folder
from storm_dagster.host.processes import RunFile
from storm_dagster.host.requirements import require_linux
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.records import SupervisorInfo
from storm_dagster.model.version import __version__
from storm_dagster.security.exposure import check_exposure
from storm_dagster.supervisor.cluster_link import ClusterLink
from storm_dagster.supervisor.health import HealthCheck
from storm_dagster.supervisor.housekeeping import LOG_BACKUPS, Housekeeper, remove_old_logs, rotate
from storm_dagster.supervisor.launcher import (
    Launcher,
    find_workers,
    heartbeat_path,
    log_path,
    remove_stale_folders,
)
from storm_dagster.supervisor.limits import MemoryGuard
from storm_dagster.supervisor.local_state import KnownWorker, LocalState, LocalStateFile, WantedSlot
from storm_dagster.supervisor.localizer import Localizer
from storm_dagster.supervisor.log_service import LogService
from storm_dagster.supervisor.processes import LiveWorker, WorkerProcess
from storm_dagster.supervisor.slots import SlotTable
from storm_dagster.supervisor.upgrades import Upgrades

_log = logging.getLogger(__name__)

_TIDY_SECS = 10.0
_PROBE_BYTES = 1 << 20
"""Room in HOME below which no worker can be started."""
_LOGS_SECS = 3600.0


class Supervisor:
    """One supervisor process. :meth:`serve` blocks until it is stopped."""

    def __init__(
        self,
        conf: ClusterConf,
        home: Path,
        supervisor_id: str,
        ports: Sequence[int],
        logs: LogService,
        launcher: Launcher | None = None,
    ) -> None:
        self.id = supervisor_id
        self._log_service = logs
        self._conf = conf
        self._home = home
        self._ports = tuple(sorted(ports))
        self._folder = home / "supervisor" / supervisor_id
        self._started = int(time.time())
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = self._folder.stat()
        self._place = f"{self._folder} ({folder.st_dev:x}:{folder.st_ino:x}, boot {boot_id()})"
        self._wake = threading.Event()
        self._passes = 0
        self._logs_checked_at = 0.0
        self._stopping = threading.Event()
        self._file = LocalStateFile(self._folder / "localstate")
        before = self._file.read()
        self._housekeeper = Housekeeper(self._file)
        self._upgrades = Upgrades(
            supervisor_id, self._runs, boot_clock, float(conf["nimbus.task.launch.secs"])
        )
        self._link = ClusterLink(
            conf,
            supervisor_id,
            cluster_id=self._file.read_cluster_id(),
            save_cluster_id=self._file.write_cluster_id,
            info=self._info,
            passes=lambda: self._passes,
            wake=self._wake.set,
            upgrades=self._upgrades,
        )
        self._localizer = Localizer(
            self._folder, self._link.nimbus_urls, conf.values, self._stopping, self._link.code_hash
        )
        launcher = launcher or Launcher(
            home, supervisor_id, conf["storm.local.hostname"], conf.values
        )
        self._spares = launcher.spares
        self.table: SlotTable = SlotTable(
            self._ports,
            SlotLimits(
                start_timeout=conf["supervisor.worker.start.timeout.secs"],
                silence_timeout=conf["supervisor.worker.timeout.secs"],
                kill_after=conf["supervisor.worker.shutdown.sleep.secs"],
            ),
            self._localizer,
            launcher.launch,
            wake=self._wake.set,
            clean=self._clean,
            report=self._link.report,
            failed=self._upgrades.on_failure,
        )
        self._memory = MemoryGuard(conf.values, self._link.report)
        self._restarting: tuple[int, ...] = ()
        self._offered = self._ports
        self._full = False
        scripts = conf["storm.health.check.dir"]
        timeout_secs = conf["storm.health.check.timeout.ms"] / 1000
        self._health = HealthCheck(Path(scripts) if scripts else None, timeout_secs, self._wake.set)
        self._take_over(before)

    def _take_over(self, before: LocalState | None) -> None:
        """Adopt the running workers, and restore the slots."""
        self._localizer.prepare()
        now = boot_clock()
        found = {
            live.worker.id: live for live in find_workers(self._home, self.id, self._conf.values)
        }
        for known in before.workers if before is not None else ():
            process = WorkerProcess(known.pid, known.start_ticks, known.boot_id)
            if known.worker_id not in found and process.alive():
                found[known.worker_id] = LiveWorker(
                    known.port,
                    Worker(
                        known.worker_id, Work(known.topology_id, known.code_dir, known.restarts)
                    ),
                    process,
                    heartbeat_path(self._home / "workers" / known.worker_id),
                    log_path(self._home, known.topology_id, known.port),
                    now,
                )
        for wanted in before.wanted if before is not None else ():
            work = Work(wanted.topology_id, wanted.code_dir, wanted.restarts)
            self.table.restore(wanted.port, work, ran=wanted.ran, crashes=wanted.crashes)
        for live in sorted(found.values(), key=lambda each: (each.port, each.process.start_ticks)):
            _log.info(
                "worker %s in slot %d runs already, pid %d",
                live.worker.id,
                live.port,
                live.process.pid,
            )
            self.table.adopt(live, now)
        remove_stale_folders(self._home, self.id, found)

    def serve(self, stop: threading.Event) -> None:
        """Run until ``stop`` is set. The workers continue."""
        self._log_service.start(self.table.workers)
        self._link.start()
        self._health.start()
        watch = self._log_service.announced
        threading.Thread(
            target=watch.run, args=(self._stopping, stop), name="address", daemon=True
        ).start()
        threading.Thread(
            target=lambda: (stop.wait(), self._wake.set()), name="stop", daemon=True
        ).start()
        longest = min(1.0, float(self._conf["supervisor.monitor.frequency.secs"]))
        tidied_at = boot_clock()
        try:
            while not stop.is_set():
                self._wake.clear()
                now = boot_clock()
                self.run_pass(now)
                if now - tidied_at >= _TIDY_SECS:
                    tidied_at = now
                    self._housekeeper.do(self._tidy)
                    self._housekeeper.do(self._probe)
                    self._housekeeper.do(self._spares.refill)
                self._wake.wait(self.table.pause(now, longest))
        finally:
            self._stopping.set()
            self._log_service.stop()
            self._health.close()
            self.table.close()
            self._link.close()
            self._save()
            self._housekeeper.close()
            self._spares.close()
            self._localizer.close()

    def run_pass(self, now: float) -> None:
        """Run one pass of the loop."""
        claims = self._link.claims
        healthy = self._health.problem is None
        if not healthy:
            self.table.apply(DesiredSlots(work={}, contested={}), now)
        elif claims is not None:
            self.table.apply(claims, now)
        if claims is not None:
            # Before the cluster was read, the workers may be those of another supervisor: HOME may
            # be a copy.
            self.table.poll(now)
        self._memory.check(self.table.workers(), now, {} if claims is None else claims.workers)
        self._save()
        self._passes += 1
        restarting, offered = self.table.restarting(), self._ports if healthy else ()
        if offered and self._full:
            # Those that run need no disk; no other could be started.
            offered = tuple(
                port for port, slot in sorted(self.table.slots.items()) if slot.wanted is not None
            )
        if (restarting, offered) != (self._restarting, self._offered):
            self._restarting, self._offered = restarting, offered
            self._link.request_heartbeat()

    def _runs(self) -> list[SlotRun]:
        """Worker processes here. One that is ending, or not desired in its slot, does not count as
        running.
        """
        found = []
        for live in self.table.workers():
            work, slot = live.worker.work, self.table.slots.get(live.port)
            stable = slot is not None and slot.state == "running" and slot.wanted == work
            running = stable and live.status == "running"
            found.append(SlotRun(live.port, work.topology_id, work.code_dir, live.started, running))
        return found

    def _info(self, count: int) -> SupervisorInfo:
        return SupervisorInfo(
            host=str(self._conf["storm.local.hostname"]),
            ports=self._offered,
            started=self._started,
            count=count,
            version=__version__,
            cpu=self._conf["supervisor.cpu.capacity"],
            memory_mb=self._conf["supervisor.memory.capacity.mb"],
            rack=self._conf["supervisor.rack"],
            restarting=self._restarting,
            http=self._log_service.url,
            place=self._place,
        )

    def _save(self) -> None:
        workers = tuple(
            KnownWorker(
                port=live.port,
                worker_id=live.worker.id,
                **live.worker.work._asdict(),
                pid=live.process.pid,
                start_ticks=live.process.start_ticks,
                boot_id=live.process.boot_id,
            )
            for live in self.table.workers()
        )
        wanted = tuple(
            WantedSlot(
                port=port, **slot.wanted._asdict(), ran=slot.ran is not None, crashes=slot.crashes
            )
            for port, slot in self.table.slots.items()
            if slot.wanted is not None
        )
        self._housekeeper.save(LocalState(supervisor_id=self.id, workers=workers, wanted=wanted))

    def _clean(self, live: LiveWorker, last: bool) -> None:
        if last:
            # Not in the background: the next worker in the slot writes its own file.
            process, name = live.process, f"{self.id}-{live.port}"
            with suppress(OSError):
                RunFile(
                    role="worker", id=name, pid=process.pid, start_ticks=process.start_ticks
                ).remove(self._home)
        folder = self._home / "workers" / live.worker.id
        self._housekeeper.do(functools.partial(shutil.rmtree, folder, ignore_errors=True))

    def _probe(self) -> None:
        """Find out whether HOME can be written; until then no free slot is offered."""
        probe, error = self._folder / "probe", None
        try:
            self._housekeeper.save_again()
            probe.write_bytes(bytes(_PROBE_BYTES))
        except OSError as failure:
            error = failure
        with suppress(
            OSError
        ):  # A disk that became read-only refuses this too, even where there is no file.
            probe.unlink(missing_ok=True)
        if (error is not None) != self._full:
            self._full = error is not None
            if error is not None:
                full = "%s cannot be written (%s): free slots are not offered, its workers continue"
                _log.error(full, self._home, error)
            else:
                _log.info("%s can be written again: all slots are offered", self._home)
            self._wake.set()

    def _tidy(self) -> None:
        if self._link.claims is not None:
            # Not before the cluster was read: until then, used code is not known.
            for code_dir in self._localizer.remove_unused(self.table.used_code):
                _log.info("code %s is used no more and was removed", code_dir)
        now = time.time()
        if now - self._logs_checked_at > _LOGS_SECS:
            self._logs_checked_at = now
            used = {live.log_path.parent for live in self.table.workers()}
            most = self._conf["supervisor.logs.max.bytes"]
            for folder in remove_old_logs(self._home, now, used=used, most_bytes=most):
                _log.info("old worker logs removed: %s", folder)
        for live in self.table.workers():
            try:
                rotate(
                    live.log_path,
                    self._conf["worker.log.max.bytes"],
                    LOG_BACKUPS,
                )
            except OSError as error:
                _log.error("log %s cannot be rotated (%s)", live.log_path, error)


def run(
    conf: ClusterConf,
    home: Path,
    supervisor_id: str,
    stop: threading.Event,
    ports: Sequence[int] | None = None,
) -> int:
    """Run the supervisor ``supervisor_id`` of ``home`` until ``stop`` is set, and return the exit
    code.

    ``ports`` default to ``supervisor.slots.ports``. Workers continue when it ends, and are adopted
    at the next start. Raises :class:`InvalidRequest` for invalid ports or an invalid id, and
    :class:`Conflict` if that supervisor runs already. It waits for an unreachable ZooKeeper.
    """
    require_linux("a supervisor")
    if conf["storm.cluster.mode"] == "local":
        raise InvalidRequest(
            "storm.cluster.mode is local: daemons run in mode distributed; remove the key"
        )
    check_exposure(conf, "the supervisor's workers", "secret")
    home = home.resolve()
    chosen = tuple(ports if ports is not None else conf["supervisor.slots.ports"])
    if wrong := check_ports(chosen):
        raise InvalidRequest(wrong)
    with hold_folder(home, "supervisor", supervisor_id):
        logs = LogService(conf, home, supervisor_id)
        run_file = RunFile.write(home, "supervisor", supervisor_id, ports={"http": logs.port})
        _log.info("supervisor %s starts, ports %s, boot %s", supervisor_id, list(chosen), boot_id())
        try:
            Supervisor(conf, home, supervisor_id, chosen, logs).serve(stop)
        finally:
            logs.stop()
            run_file.remove(home)
    if logs.announced.failure is not None:
        raise logs.announced.failure
    return 0
