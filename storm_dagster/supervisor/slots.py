"""Slots of one supervisor: the shell around the pure slot machine.

It collects the events of the machine and executes its instructions. Slow work (fetching, starting,
removing) runs in threads, and its result is posted as an event. Only the supervisor's loop calls
the methods, except :meth:`SlotTable.post` and :meth:`SlotTable.used_code`.
"""

import logging
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, replace

from storm_dagster.core.slots import model
from storm_dagster.core.slots.machine import extend_deadline, is_restarting, step
from storm_dagster.core.slots.model import DesiredSlots, SlotLimits, SupervisedSlot, Work
from storm_dagster.host.worker_spec import HeartbeatFile
from storm_dagster.model.errors import Corrupt, InvalidTopology, StormDagsterError
from storm_dagster.supervisor.local_state import KnownWorker, LocalState, WantedSlot
from storm_dagster.supervisor.localizer import LocalCode, Localizer
from storm_dagster.supervisor.processes import LiveWorker, ProcessWatch

_log = logging.getLogger(__name__)

_MAX_PASS_GAP_SECS = 5.0
"""A longer pause between two passes means that the machine or this process was suspended."""

Launch = Callable[[int, Work, LocalCode], LiveWorker]
"""``Launcher.launch``: start a worker in that slot; raises a :class:`StormDagsterError` or
``OSError``.
"""


@dataclass(eq=False)
class SlotTable:
    """All slots of one supervisor."""

    ports: InitVar[Iterable[int]]
    limits: SlotLimits
    localizer: Localizer
    launch: Launch
    wake: Callable[[], None]
    """Wakes the loop."""
    clean: Callable[[LiveWorker, bool], None]
    """(worker, last): removes the files of a dead worker (``last``: no other one follows in its
    slot now).
    """
    report: Callable[[str, int, str], None]
    """(topology id, port, text): a failure, for the topology's errors."""
    failed: Callable[[int, Work, str], None]
    """(port, work, text): a failure, for its upgrade."""

    def __post_init__(self, ports: Iterable[int]) -> None:
        self._events: queue.SimpleQueue[tuple[int, model.Event]] = queue.SimpleQueue()
        """(port, event) that the next pass feeds to the machine."""
        self.slots: dict[int, SupervisedSlot] = {
            port: SupervisedSlot(port) for port in sorted(ports)
        }
        """Port -> slot. A worker that was found and an assignment add slots of other ports."""
        self._lock = threading.Lock()
        """Guards :attr:`_workers` and :attr:`_fetching`, which other threads use, too."""
        self._workers: dict[str, LiveWorker] = {}
        """Worker id -> process, until the loop has processed its exit."""
        self._fetching: dict[str, set[int]] = {}
        """Code folder -> ports that wait for its fetch."""
        self._starts: set[threading.Thread] = set()
        """Threads that start a worker."""
        self._contested: Mapping[int, tuple[str, ...]] = {}
        """Contested slots of the last :meth:`apply`, each of which is logged once."""
        self._polled_at: float | None = None
        """Time of the last pass; ``None`` before the first."""
        self._watch = ProcessWatch(self._on_exit)

    # -- any thread --------------------------------------------------------------------------------

    def post(self, port: int, event: model.Event) -> None:
        """Queue an event for the loop, from any thread."""
        self._events.put((port, event))
        self.wake()

    def used_code(self) -> set[str]:
        """Code folders that a slot wants or runs, from any thread."""
        code_dirs: set[str] = set()
        for slot in list(self.slots.values()):
            if slot.wanted is not None:
                code_dirs.add(slot.wanted.code_dir)
            if slot.worker is not None:
                code_dirs.add(slot.worker.work.code_dir)
        with self._lock:
            code_dirs.update(live.worker.work.code_dir for live in self._workers.values())
            code_dirs.update(self._fetching)
        return code_dirs

    # -- the loop ----------------------------------------------------------------------------------

    def workers(self) -> list[LiveWorker]:
        """Live worker processes, by port."""
        with self._lock:
            return sorted(self._workers.values(), key=lambda worker: worker.port)

    def used_ports(self) -> tuple[int, ...]:
        """Ports with wanted work, with a process, or with one that is being started; ascending."""
        used = {live.port for live in self.workers()}
        for port, slot in self.slots.items():
            if slot.wanted is not None or slot.worker is not None or slot.launching:
                used.add(port)
        return tuple(sorted(used))

    def restarting(self) -> tuple[int, ...]:
        """Ports whose worker is being restarted in place."""
        return tuple(port for port, slot in self.slots.items() if is_restarting(slot))

    def local_state(self, supervisor_id: str) -> LocalState:
        """The workers and the wanted work, for the state file."""
        workers = tuple(
            KnownWorker(
                port=live.port,
                worker_id=live.worker.id,
                **live.worker.work._asdict(),
                pid=live.process.pid,
                start_ticks=live.process.start_ticks,
                boot_id=live.process.boot_id,
            )
            for live in self.workers()
        )
        wanted: list[WantedSlot] = []
        for port, slot in self.slots.items():
            if slot.wanted is not None:
                work = slot.wanted._asdict()
                ran = slot.ran is not None
                wanted.append(WantedSlot(port=port, **work, ran=ran, crashes=slot.crashes))
        return LocalState(supervisor_id=supervisor_id, workers=workers, wanted=tuple(wanted))

    def restore(self, port: int, work: Work, *, ran: bool, crashes: int = 0) -> None:
        """Restore a slot of the former supervisor process, before the first pass.

        ``work`` was wanted here, and is not wanted until it is applied. ``ran``: a worker of its
        topology ran here. ``crashes``: its crashes in a row.
        """
        slot = self.slots.get(port, SupervisedSlot(port))
        self.slots[port] = replace(
            slot, ran=work if ran else slot.ran, crashes=crashes, counted=work
        )

    def adopt(self, live: LiveWorker, now: float) -> None:
        """Adopt a running worker.

        Its work counts as wanted until the cluster is read. A second worker in a slot is ended.
        """
        if self.slots.setdefault(live.port, SupervisedSlot(live.port)).wanted is None:
            self._feed(live.port, model.Assigned(live.worker.work), now)
        # Before the machine knows it, which may order its end at once.
        self._register(live)
        self._feed(live.port, model.Launched(live.worker, beating=True), now)
        self._watch.add(live.worker.id, live.process)

    def apply(self, desired: DesiredSlots, now: float) -> None:
        """Apply the desired work to every slot, except the contested ones."""
        for port, topologies in desired.contested.items():
            if self._contested.get(port) != topologies:
                _log.error(
                    "slot %d is claimed by %s at once: it keeps its worker until only one claims "
                    "it",
                    port,
                    " and ".join(topologies),
                )
        self._contested = desired.contested
        for port in sorted({*self.slots, *desired.work}):
            if port not in desired.contested:
                work = desired.work.get(port)
                self._feed(port, model.Assigned(work, lazy=port in desired.lazy), now)

    def poll(self, now: float) -> None:
        """Run one pass: queued events, then heartbeats of the workers, then the time."""
        gap = now - self._polled_at if self._polled_at is not None else 0.0
        self._polled_at = now
        if gap > _MAX_PASS_GAP_SECS:
            _log.warning("no pass for %.1f s: the deadlines of the workers are extended", gap)
            self.slots = {port: extend_deadline(slot, gap) for port, slot in self.slots.items()}
        # Events that are posted during the pass wait for the next one.
        for _ in range(self._events.qsize()):
            port, event = self._events.get_nowait()
            self._feed(port, event, now)
            if isinstance(event, model.Exited):
                # The machine orders the cleaning of its own worker, which is forgotten by now, but
                # not of a second one that was found at the start.
                self._forget(event.worker_id, last=False)
        for live in self.workers():
            beat = HeartbeatFile.read(live.heartbeat_path)
            if beat is not None and beat.count != live.count:
                live.count = beat.count
                live.status = beat.status
                live.failure = beat.failure
                self._feed(live.port, model.Beat(live.worker.id), now)
        for port in list(self.slots):
            self._feed(port, model.Tick(), now)

    def pause(self, now: float, max_pause: float) -> float:
        """Seconds that the loop may sleep, unless it is woken."""
        pause = max_pause
        for slot in self.slots.values():
            if slot.state == "waiting-for-start" and slot.worker is not None:
                # Its first heartbeat is found only by polling.
                pause = min(pause, 0.05)
            elif slot.state in ("killing", "killing-to-relaunch"):
                # The KILL that follows a TERM is due between two events.
                pause = min(pause, 0.25)
            elif slot.wanted is not None and slot.not_before > now:
                pause = min(pause, slot.not_before - now)
        return max(pause, 0.01)

    def close(self, deadline_secs: float = 2.0) -> None:
        """Stop watching.

        Each process that is being started is waited for, at most ``deadline_secs``, so that none is
        lost.
        """
        for thread in list(self._starts):
            thread.join(timeout=deadline_secs)
        self._watch.close()

    # -- feeding and executing ---------------------------------------------------------------------

    def _feed(self, port: int, event: model.Event, now: float) -> None:
        """Step the slot's machine with an event, and execute its instructions."""
        before = self.slots.setdefault(port, SupervisedSlot(port))
        after, instructions = step(before, event, now, self.limits)
        self.slots[port] = after
        if after.state != before.state:
            topology = after.wanted.topology_id if after.wanted else "nothing wanted"
            reason = f": {after.reason}" if after.reason else ""
            _log.info("slot %d: %s -> %s (%s)%s", port, before.state, after.state, topology, reason)
        for instruction in instructions:
            self._execute(port, instruction)
            if isinstance(instruction, model.Report):
                # The failure is that of the process, which the slot may have dropped in this step.
                work = before.worker.work if before.worker is not None else before.wanted
                if work is not None:
                    self.failed(port, work, instruction.text)

    def _execute(self, port: int, instruction: model.Instruction) -> None:
        """Execute an instruction of the slot's machine; slow work is begun in a thread."""
        if isinstance(instruction, model.Fetch):
            self._fetch(port, instruction.code_dir)
        elif isinstance(instruction, model.Launch):
            self._start(port, instruction.work)
        elif isinstance(instruction, model.Terminate | model.Kill):
            with self._lock:
                live = self._workers.get(instruction.worker_id)
            if live is not None:
                is_terminate = isinstance(instruction, model.Terminate)
                live.process.signal(signal.SIGTERM if is_terminate else signal.SIGKILL)
        elif isinstance(instruction, model.Clean):
            # A launch in progress writes the files of the slot at the same time.
            self._forget(instruction.worker_id, last=not self.slots[port].launching)
        else:
            assert isinstance(instruction, model.Report)
            topology_id = instruction.topology_id
            _log.error(
                "slot %d, %s: %s",
                port,
                topology_id,
                instruction.text,
                extra={"topology": topology_id},
            )
            self.report(topology_id, port, instruction.text)

    def _forget(self, worker_id: str, last: bool) -> None:
        """Drop a dead worker and clean its files; no effect for a worker already forgotten."""
        with self._lock:
            live = self._workers.pop(worker_id, None)
        if live is not None:
            self.clean(live, last)

    def _fetch(self, port: int, code_dir: str) -> None:
        """Post that the code is here, or fetch it in a thread for all slots that want it."""
        # Code that is being removed may still look complete: then fetch in the thread, which waits
        # for the removal.
        if not self.localizer.removing and self.localizer.local(code_dir) is not None:
            self.post(port, model.CodeReady(code_dir))
            return
        with self._lock:
            is_fetched = code_dir in self._fetching
            self._fetching.setdefault(code_dir, set()).add(port)
        if is_fetched:
            # By the thread of another slot, or of this one, which wanted other work since.
            return
        threading.Thread(
            target=self._fetch_in_thread, args=(code_dir,), name=f"fetch-{code_dir}", daemon=True
        ).start()

    def _fetch_in_thread(self, code_dir: str) -> None:
        """Fetch the code, and post the result to all slots that wait for it by then."""
        event: model.Event
        try:
            self.localizer.fetch(code_dir)
            event = model.CodeReady(code_dir)
        except Exception as error:
            # Damaged blobs, an archive that breaks a rule, or an error of this disk.
            lasting = isinstance(error, InvalidTopology | Corrupt | OSError)
            event = model.CodeFailed(code_dir, _text(error), lasting)
        with self._lock:
            ports = self._fetching.pop(code_dir, set())
        for port in sorted(ports):
            self.post(port, event)

    def _start(self, port: int, work: Work) -> None:
        thread = threading.Thread(
            target=self._start_in_thread, args=(port, work), name=f"start-{port}", daemon=True
        )
        self._starts.add(thread)
        thread.start()

    def _start_in_thread(self, port: int, work: Work) -> None:
        """Start a worker, and post the result. Damaged code is marked, to be fetched again."""
        try:
            code = self.localizer.local(work.code_dir)
            if code is None:
                raise Corrupt(
                    f"code {work.code_dir} is no longer complete on this disk: it is fetched again"
                )
            live = self.launch(port, work, code)
        except Exception as error:
            damaged = isinstance(error, Corrupt)
            if damaged:
                self.localizer.distrust(work.code_dir)
            self.post(port, model.LaunchFailed(work, _text(error), code_missing=damaged))
        else:
            self._register(live)
            self.post(port, model.Launched(live.worker))
            # After Launched, so that its exit event cannot come first.
            self._watch.add(live.worker.id, live.process)
        finally:
            self._starts.discard(threading.current_thread())

    def _register(self, live: LiveWorker) -> None:
        with self._lock:
            self._workers[live.worker.id] = live

    def _on_exit(self, worker_id: str, status: int | None) -> None:
        with self._lock:
            live = self._workers.get(worker_id)
        if live is not None:
            _log.info("worker %s in slot %d ended, status %s", worker_id, live.port, status)
            self.post(live.port, model.Exited(worker_id, status))


def _text(error: Exception) -> str:
    if isinstance(error, StormDagsterError):
        return error.message
    return f"{type(error).__name__}: {error}"
