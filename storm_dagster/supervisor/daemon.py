"""Supervisor daemon: manages the workers in the slots of one host.

Its one loop polls events, steps the pure slot machine and executes the instructions.
:class:`~storm_dagster.supervisor.cluster_link.ClusterLink` reads the desired work in its own
thread; downloads, unpacking and starts run in threads too, so that no pass takes long. Workers have
their own sessions: they outlive this process, and the next supervisor of the same id adopts them.
Where that cannot be, as in a container, ``supervisor.on.term`` drains the host before the end.
"""

import functools
import logging
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from storm_dagster.core.slots.drain import OnTerm
from storm_dagster.core.slots.model import DesiredSlots, SlotLimits, Work, Worker, check_ports
from storm_dagster.core.upgrade.machine import SlotRun
from storm_dagster.host.capacity import load_capacity
from storm_dagster.host.clock import boot_clock, boot_id
from storm_dagster.host.files import hold_folder, probe_writing
from storm_dagster.host.orphans import reap_orphans
from storm_dagster.host.processes import RunFile
from storm_dagster.host.requirements import require_linux
from storm_dagster.http.probes import LoopPasses
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.records import SupervisorInfo
from storm_dagster.model.version import __version__
from storm_dagster.security.exposure import check_exposure
from storm_dagster.supervisor.cluster_link import ClusterLink
from storm_dagster.supervisor.drain_watch import DrainWatch
from storm_dagster.supervisor.health import HealthCheck
from storm_dagster.supervisor.host_measurements import HostMeasurements
from storm_dagster.supervisor.housekeeping import Housekeeper, remove_old_logs
from storm_dagster.supervisor.launcher import Launcher, heartbeat_path, log_path
from storm_dagster.supervisor.limits import MemoryGuard
from storm_dagster.supervisor.local_state import KnownWorker, LocalState, LocalStateFile
from storm_dagster.supervisor.localizer import Localizer
from storm_dagster.supervisor.log_rotation import rotate_logs
from storm_dagster.supervisor.log_service import LogService
from storm_dagster.supervisor.processes import LiveWorker, WorkerProcess
from storm_dagster.supervisor.running_workers import find_workers, remove_stale_folders
from storm_dagster.supervisor.slots import SlotTable
from storm_dagster.supervisor.upgrades import Upgrades

_log = logging.getLogger(__name__)

_TIDY_SECS = 10.0
"""Interval of removing unused code and orphans, testing the disk and starting spares."""
_MAX_REASON = 300
"""Characters of the reason why slots are withdrawn."""
_LOGS_SECS = 3600.0
"""Interval of removing old logs."""
_DRAIN_POLL_SECS = 0.25
"""Longest pause between two passes of a supervisor that drains or ends its workers."""
_WORKERS_END_SECS = 6.0
"""Longest wait for the end of workers after their KILL, which is sent twice in this time."""


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
        """Adopt the workers of the former process; :meth:`serve` connects to the cluster.

        ``launcher`` replaces the one of ``conf``.
        """
        self.id = supervisor_id
        self._log_service = logs
        self._conf = conf
        self._home = home
        self._ports = tuple(sorted(ports))
        self._capacity = load_capacity(conf)
        self._folder = home / "supervisor" / supervisor_id
        self._started = int(time.time())
        """Start in epoch seconds, for the record of the supervisor."""
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = self._folder.stat()
        self._place = f"{self._folder} ({folder.st_dev:x}:{folder.st_ino:x}, boot {boot_id()})"
        """Folder and boot, by which a second supervisor of the same id is recognized."""
        self._wake = threading.Event()
        """Wakes the loop."""
        self._passes = 0
        """Completed passes of the loop: the heartbeat requires new ones."""
        self._loop = LoopPasses()
        self._logs_checked_at = 0.0
        """Epoch seconds at which old logs were last removed."""
        self._stopping = threading.Event()
        """Set when the loop has ended: downloads fail."""
        self._file = LocalStateFile(self._folder / "localstate")
        # Before the housekeeper's thread exists, which writes the file.
        former_state = self._file.read()
        self._housekeeper = Housekeeper(self._file)
        self._upgrades = Upgrades(
            supervisor_id, self._runs, boot_clock, float(conf["nimbus.task.launch.secs"])
        )
        self._link = self._cluster_link()
        self._measurements = HostMeasurements(conf.values, home, self._link.nimbus_urls)
        self._localizer = Localizer(
            self._folder, self._link.nimbus_urls, conf.values, self._stopping, self._link.code_hash
        )
        launcher = launcher or Launcher(
            home, supervisor_id, conf["storm.local.hostname"], conf.values
        )
        self._spares = launcher.spares
        self.table: SlotTable = self._slot_table(launcher)
        self._memory = MemoryGuard(conf.values, self._link.report)
        self._restarting: tuple[int, ...] = ()
        """Ports with a worker that is being restarted, for the record of the supervisor."""
        self._offered = self._ports
        """Ports that the record of the supervisor offers."""
        self._disk_problem = ""
        """Error of the disk while HOME cannot be written."""
        self._on_term: OnTerm = conf["supervisor.on.term"]
        self._draining = False
        """True from the begin of a drain: the supervisor gets no new work."""
        self._ends_workers = False
        """True while the workers end, since this process ends: no work is wanted."""
        self._health = self._health_check()
        self._adopt_workers(former_state)

    def _slot_table(self, launcher: Launcher) -> SlotTable:
        """Slots of this supervisor, with the limits of the conf; ``launcher`` starts workers."""
        return SlotTable(
            self._ports,
            SlotLimits(
                start_timeout=self._conf["supervisor.worker.start.timeout.secs"],
                silence_timeout=self._conf["supervisor.worker.timeout.secs"],
                kill_after=self._conf["supervisor.worker.shutdown.sleep.secs"],
            ),
            self._localizer,
            launcher.launch,
            wake=self._wake.set,
            clean=self._clean,
            report=self._link.report,
            failed=self._upgrades.on_failure,
        )

    def _cluster_link(self) -> ClusterLink:
        """Connection to the cluster, which begins with the stored id of the cluster."""
        return ClusterLink(
            self._conf,
            self.id,
            cluster_id=self._file.read_cluster_id(),
            save_cluster_id=self._file.write_cluster_id,
            info=self._info,
            passes=lambda: self._passes,
            wake=self._wake.set,
            upgrades=self._upgrades,
        )

    def _health_check(self) -> HealthCheck:
        """Check of the host by the operators' scripts, if the conf names their folder."""
        scripts = self._conf["storm.health.check.dir"]
        folder = Path(scripts) if scripts else None
        timeout_secs = self._conf["storm.health.check.timeout.ms"] / 1000
        return HealthCheck(folder, timeout_secs, self._wake.set)

    def _adopt_workers(self, former_state: LocalState | None) -> None:
        """Restore the slots of the former process, and adopt the running workers."""
        self._localizer.prepare()
        now = boot_clock()
        workers = {
            live.worker.id: live for live in find_workers(self._home, self.id, self._conf.values)
        }
        if former_state is not None:
            for record in former_state.workers:
                process = WorkerProcess(
                    record.pid, record.start_ticks, record.boot_id, None, record.worker_id
                )
                # A live worker that was not found is one whose spec cannot be read.
                if record.worker_id not in workers and process.alive():
                    workers[record.worker_id] = self._recorded_worker(record, process, now)
            for slot in former_state.wanted:
                work = Work(slot.topology_id, slot.code_dir, slot.restarts)
                self.table.restore(slot.port, work, ran=slot.ran, crashes=slot.crashes)
        for live in sorted(workers.values(), key=_start_order):
            _log.info(
                "worker %s in slot %d runs already, pid %d",
                live.worker.id,
                live.port,
                live.process.pid,
            )
            self.table.adopt(live, now)
        remove_stale_folders(self._home, self.id, workers)

    def _recorded_worker(
        self, record: KnownWorker, process: WorkerProcess, now: float
    ) -> LiveWorker:
        """Worker of a record of the state file, which still runs."""
        work = Work(record.topology_id, record.code_dir, record.restarts)
        return LiveWorker(
            record.port,
            Worker(record.worker_id, work),
            process,
            heartbeat_path(self._home / "workers" / record.worker_id),
            log_path(self._home, record.topology_id, record.port),
            now,
        )

    def serve(self, stop: threading.Event, hurry: threading.Event | None = None) -> None:
        """Run until ``stop`` is set, and do with the workers as ``supervisor.on.term`` says.

        ``hurry`` ends a drain early. If this host's address is no longer its own, the workers
        continue in any case: no host reaches them, and this process has to be replaced.
        """
        self._loop.passed()
        self._log_service.start(
            self.table.workers,
            self._link.state,
            live=self._loop.problems,
            ready=lambda: self._readiness_problems(stop),
        )
        self._start_threads(stop)
        # A full disk must withdraw the free slots before work is placed on them.
        self._housekeeper.do(self._probe)
        max_pause = min(1.0, float(self._conf["supervisor.monitor.frequency.secs"]))
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
                self._wake.wait(self.table.pause(now, max_pause))
            keeps_address = self._log_service.announced.failure is None
            if self._on_term != "leave" and keeps_address:
                if self._on_term == "drain":
                    self._drain(hurry or threading.Event())
                self._end_workers()
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

    def _start_threads(self, stop: threading.Event) -> None:
        """Start the threads beside the loop; they end with the process or :attr:`_stopping`."""
        self._link.start()
        self._health.start()
        self._measurements.start(self._stopping)
        # Sets ``stop`` once the address that this supervisor announces is no longer its own.
        watch = self._log_service.announced
        threading.Thread(
            target=watch.run, args=(self._stopping, stop), name="address", daemon=True
        ).start()
        rotation = functools.partial(
            rotate_logs, self.table.workers, self._conf["worker.log.max.bytes"], self._stopping
        )
        threading.Thread(target=rotation, name="logs", daemon=True).start()
        threading.Thread(target=self._wake_at_stop, args=(stop,), name="stop", daemon=True).start()

    def _readiness_problems(self, stop: threading.Event) -> list[str]:
        """Reasons why this supervisor gets no new work: its end, and those of the link."""
        problems = self._link.readiness_problems()
        if stop.is_set():
            problems.append("this supervisor ends, and takes no new work")
        return problems

    def _wake_at_stop(self, stop: threading.Event) -> None:
        stop.wait()
        self._wake.set()

    def _drain(self, hurry: threading.Event) -> None:
        """Take no new work, and wait until the leader has moved the tasks.

        It waits at most ``supervisor.drain.secs``. The record of this supervisor asks the leader.
        The supervisor does its work until the end: a worker that crashes is restarted.
        """
        watch = DrainWatch(boot_clock(), float(self._conf["supervisor.drain.secs"]))
        self._draining = True
        _log.info("SIGTERM: draining, at most %g s; no new work is taken", watch.max_secs)
        reason: str | None = None
        while reason is None:
            self._wake.clear()
            now = boot_clock()
            self.run_pass(now)
            # After the pass, whose record names the drain. The own record is written once; those
            # of the other supervisors are read each time.
            self._link.request_heartbeat()
            reason = watch.end(now, self.table, self._link, is_hurried=hurry.is_set())
            if reason is None:
                self._wake.wait(self.table.pause(now, _DRAIN_POLL_SECS))
        _log.info("the drain is over: %s", reason)

    def _end_workers(self) -> None:
        """End the workers by SIGTERM, and wait for them.

        Before the cluster was read they may be those of another supervisor, and continue.
        """
        number = len(self.table.workers())
        if self._link.desired is None:
            if number:
                _log.warning("the cluster was never read: %d workers continue", number)
            return
        self._ends_workers = True
        began = boot_clock()
        max_secs = self.table.limits.kill_after + _WORKERS_END_SECS
        while True:
            self._wake.clear()
            now = boot_clock()
            self.run_pass(now)
            if not self.table.used_ports():
                break
            if now - began > max_secs:
                _log.error("%d workers have not ended after KILL", len(self.table.workers()))
                return
            self._wake.wait(self.table.pause(now, _DRAIN_POLL_SECS))
        if number:
            _log.info("%d workers have ended, and this supervisor ends", number)

    def run_pass(self, now: float) -> None:
        """Run one pass of the loop.

        It applies the desired work (none on an unhealthy host or at the end), steps the slots, ends
        workers over their memory limit, and saves the state. A change of the offered or restarting
        ports is reported to the cluster at once.
        """
        desired = self._link.desired
        healthy = self._health.problem is None
        if not healthy or self._ends_workers:
            self.table.apply(DesiredSlots(work={}, contested={}), now)
        elif desired is not None:
            self.table.apply(desired, now)
        if desired is not None:
            # Before the cluster was read, the workers may be those of another supervisor: HOME may
            # be a copy.
            self.table.poll(now)
        placed_workers = {} if desired is None else desired.workers
        self._memory.check(self.table.workers(), now, placed_workers)
        self._save()
        self._passes += 1
        self._loop.passed()
        restarting = self.table.restarting()
        offered = self._offered_ports(healthy)
        if restarting != self._restarting or offered != self._offered:
            self._restarting = restarting
            self._offered = offered
            self._link.request_heartbeat()

    def _offered_ports(self, healthy: bool) -> tuple[int, ...]:
        """Ports for new work: none on an unhealthy host, no free one on a full disk.

        A supervisor that drains offers no free one either: a leader of an earlier release does not
        know the field ``draining``, and must not place work here.
        """
        if not healthy or self._ends_workers:
            return ()
        if not self._disk_problem and not self._draining:
            return self._ports
        # A running worker needs no room on the disk; a new one could not be started.
        slots = sorted(self.table.slots.items())
        return tuple(port for port, slot in slots if slot.wanted is not None)

    def _runs(self) -> list[SlotRun]:
        """Worker processes of this supervisor, from the link's thread.

        A process that is ending, or not desired in its slot, does not count as running.
        """
        runs: list[SlotRun] = []
        for live in self.table.workers():
            work = live.worker.work
            slot = self.table.slots.get(live.port)
            stable = slot is not None and slot.state == "running" and slot.wanted == work
            running = stable and live.status == "running"
            runs.append(
                SlotRun(
                    live.port,
                    work.topology_id,
                    work.code_dir,
                    live.started,
                    running,
                    live.failure if stable else "",
                )
            )
        return runs

    def _info(self, count: int) -> SupervisorInfo:
        """Record of this supervisor for heartbeat number ``count``; from the link's thread."""
        return SupervisorInfo(
            host=str(self._conf["storm.local.hostname"]),
            ports=self._offered,
            started=self._started,
            count=count,
            version=__version__,
            cpu=self._capacity.cpu,
            memory_mb=self._capacity.memory_mb,
            rack=self._conf["supervisor.rack"],
            restarting=self._restarting,
            http=self._log_service.url,
            place=self._place,
            withdrawn=self._withdrawn(),
            clock_ahead_secs=self._measurements.clock_ahead_secs,
            disk_free_mb=self._measurements.disk.free_mb,
            disk_mb=self._measurements.disk.total_mb,
            cpu_source=self._capacity.cpu_source,
            memory_source=self._capacity.memory_source,
            draining=self._draining,
        )

    def _withdrawn(self) -> str:
        """Reason why fewer slots are offered than there are, or no further work is taken."""
        if self._offered == self._ports and not self._draining:
            return ""
        problem = self._health.problem
        if problem is not None:
            return f"its health check fails: {problem}"[:_MAX_REASON]
        if self._draining:
            obstacles = self._link.drain_obstacles
            text = f"it drains, and waits: {obstacles}" if obstacles else "it drains"
            return text[:_MAX_REASON]
        if self._disk_problem:
            return f"{self._home} cannot be written ({self._disk_problem})"[:_MAX_REASON]
        return ""

    def _save(self) -> None:
        """Queue a write of the workers and the wanted work to the state file."""
        self._housekeeper.save(self.table.local_state(self.id))

    def _clean(self, live: LiveWorker, last: bool) -> None:
        """Remove the folder of a dead worker, and with ``last`` the run file of its slot."""
        if last:
            # Not in the background: the next worker in the slot writes its own file.
            run_file = RunFile(
                role="worker",
                id=f"{self.id}-{live.port}",
                pid=live.process.pid,
                start_ticks=live.process.start_ticks,
            )
            with suppress(OSError):
                run_file.remove(self._home)
        folder = self._home / "workers" / live.worker.id
        self._housekeeper.do(functools.partial(shutil.rmtree, folder, ignore_errors=True))

    def _probe(self) -> None:
        """Test writing to HOME. While that fails, no free slot is offered."""
        error = _write_error(self._housekeeper, self._folder)
        was_full = bool(self._disk_problem)
        self._disk_problem = "" if error is None else str(error.strerror or error)
        if bool(self._disk_problem) == was_full:
            return
        if self._disk_problem:
            _log.error(
                "%s cannot be written (%s): free slots are not offered, its workers continue",
                self._home,
                error,
            )
        else:
            _log.info("%s is writable again: all slots are offered", self._home)
        self._wake.set()

    def _tidy(self) -> None:
        """Remove unused code, old logs and dead orphans."""
        reap_orphans()
        if self._link.desired is not None:
            # Not before the cluster was read: until then, used code is not known.
            for code_dir in self._localizer.remove_unused(self.table.used_code):
                _log.info("code %s is no longer used and was removed", code_dir)
        now = time.time()
        if now - self._logs_checked_at > _LOGS_SECS:
            self._logs_checked_at = now
            used = {live.log_path.parent for live in self.table.workers()}
            max_bytes = self._conf["supervisor.logs.max.bytes"]
            for folder in remove_old_logs(self._home, now, used=used, max_bytes=max_bytes):
                _log.info("old worker logs removed: %s", folder)


def _write_error(housekeeper: Housekeeper, folder: Path) -> OSError | None:
    """Write the state file and a probe.

    Returns the error, if there is one.
    """
    try:
        housekeeper.save_again()
    except OSError as error:
        return error
    return probe_writing(folder)


def _start_order(live: LiveWorker) -> tuple[int, int]:
    return (live.port, live.process.start_ticks)


def run(
    conf: ClusterConf,
    home: Path,
    supervisor_id: str,
    stop: threading.Event,
    ports: Sequence[int] | None = None,
    hurry: threading.Event | None = None,
) -> int:
    """Run a supervisor until ``stop`` is set, and return the exit code.

    ``ports`` default to ``supervisor.slots.ports``. ``supervisor.on.term`` decides what its end
    does to the workers; by default they continue, and are adopted at the next start of
    ``supervisor_id`` in ``home``. ``hurry`` ends a drain early. Raises :class:`InvalidRequest` for
    invalid ports or an invalid id, and :class:`Conflict` if that supervisor runs already. It waits
    for an unreachable ZooKeeper.
    """
    require_linux("a supervisor")
    if conf["storm.cluster.mode"] == "local":
        raise InvalidRequest(
            "storm.cluster.mode is local: daemons run in mode distributed; remove the key"
        )
    check_exposure(conf, "the supervisor's workers", "secret")
    home = home.resolve()
    slot_ports = tuple(ports if ports is not None else conf["supervisor.slots.ports"])
    problem = check_ports(slot_ports)
    if problem:
        raise InvalidRequest(problem)
    with hold_folder(home, "supervisor", supervisor_id):
        logs = LogService(conf, home, supervisor_id)
        run_file = RunFile.write(
            home, "supervisor", supervisor_id, ports={"http": logs.port}, required=False
        )
        _log.info(
            "supervisor %s starts, ports %s, boot %s", supervisor_id, list(slot_ports), boot_id()
        )
        try:
            Supervisor(conf, home, supervisor_id, slot_ports, logs).serve(stop, hurry)
        finally:
            logs.stop()
            run_file.remove(home)
    if logs.announced.failure is not None:
        raise logs.announced.failure
    return 0
