"""Virtual time: fibers in the place of threads, run one at a time in an order that a seed
decides.
"""

from __future__ import annotations

import heapq
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

EPOCH = 1_600_000_000.0
"""Wall clock at virtual time 0: before any file of this machine, whose times are real ones."""
_JITTER = 2e-5
TIMED_OUT: Any = object()
"""Result of a wait whose time passed."""


class SimulationError(AssertionError):
    """The simulator itself is at fault."""


@dataclass(eq=False)
class Host:
    """A machine: its clocks and its disk."""

    name: str
    wall_offset: float = 0.0
    wall_jumped_at: float = -1000.0
    """Virtual time at which its wall clock jumped last."""
    boot_offset: float = 0.0
    drift: float = 0.0
    """Seconds that its clocks gain in each second."""
    files: dict[str, Any] = field(default_factory=dict)
    """What survives its processes."""
    observers: list[Callable[[Host, str], None]] = field(default_factory=list)
    """Told of each blob that is removed from its disk."""
    moves: int = 0
    """How often it got another address."""
    disk: str = "well"
    """``well``, ``full`` (nothing can be written) or ``broken`` (nothing can be read either)."""

    @property
    def address(self) -> str:
        return f"{self.name}/{self.moves}"


class Process:
    """A simulated process: its fibers run, stand still together, or are gone."""

    def __init__(self, kernel: Kernel, name: str, host: Host) -> None:
        self.kernel = kernel
        self.name = name
        self.host = host
        kernel.last_pid += 1
        self.pid = kernel.last_pid
        self.started = kernel.now
        self.dead = False
        self.frozen = False
        self.status: int | None = None
        self.mind_preemption = True
        self.fibers: set[Fiber] = set()
        self.at_end: list[Callable[[], None]] = []
        self._late: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def __repr__(self) -> str:
        return f"<{self.name} {'dead' if self.dead else 'frozen' if self.frozen else 'up'}>"

    @property
    def runs(self) -> bool:
        return not self.dead and not self.frozen

    def spawn(self, target: Callable[[], object], name: str = "main") -> Fiber:
        """A new thread of the process."""
        fiber = Fiber(self, target, name)
        self.kernel.ready(fiber, None)
        return fiber

    def deliver(self, call: Callable[..., object], *args: Any) -> None:
        """Run what comes from outside; a frozen process gets it when it goes on."""
        if self.dead:
            return
        if self.frozen or self._late:
            self._late.append((call, args))
            return
        self._run(call, args)

    def _run(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        before = self.kernel.outside
        self.kernel.outside = self
        try:
            call(*args)
        finally:
            self.kernel.outside = before

    def kill(self, status: int = -9) -> None:
        """End it at once: nothing of it runs any more, no ``finally`` either."""
        if self.dead:
            return
        self.dead = True
        self.status = status
        self.kernel.graveyard.extend(self.fibers)
        self.fibers = set()
        self._late.clear()
        for call in self.at_end:
            call()
        self.at_end.clear()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        if not self.frozen or self.dead:
            return
        self.frozen = False
        while self._late and self.runs:
            call, args = self._late.pop(0)
            self._run(call, args)


class Fiber(greenlet):
    """A thread of a process."""

    def __init__(self, process: Process, target: Callable[[], object], name: str) -> None:
        super().__init__(self._main, process.kernel.hub)
        self.process = process
        self.name = name
        self.target = target
        self.finished = False
        self.waiters: list[Waiter] = []
        process.fibers.add(self)

    def _main(self, _: object) -> None:
        try:
            self.target()
        except GreenletExit:
            return
        except Exception:
            # As in a real process: the thread ends, the others go on.
            self.process.kernel.crashes.append(
                f"{self.process.name}/{self.name}: {traceback.format_exc()}"
            )
        finally:
            self.finished = True
            self.process.fibers.discard(self)
            for waiter in self.waiters:
                waiter.fire(None)


class Waiter:
    """One wait of a fiber, ended once."""

    __slots__ = ("_kernel", "_timer", "fiber", "fired")

    def __init__(self, kernel: Kernel, fiber: Fiber) -> None:
        self._kernel = kernel
        self.fiber = fiber
        self.fired = False
        self._timer: list[Any] | None = None

    def fire(self, value: Any) -> bool:
        """End the wait; whether this did it."""
        if self.fired or self._kernel.over:
            return False
        self.fired = True
        if self._timer is not None:
            self._timer[2] = None
        self._kernel.ready(self.fiber, value)
        return True

    def wait(self, timeout: float | None = None) -> Any:
        """Stand still until it is fired; its value, or ``TIMED_OUT``."""
        if timeout is not None:
            self._timer = self._kernel.after(max(0.0, timeout), self.fire, TIMED_OUT)
        return self._kernel.hub.switch()


def _kept(files: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """These files and all folders below, each with a copy of what is in it."""
    return [
        (files, {**files}),
        *(each for part in files.values() if isinstance(part, dict) for each in _kept(part)),
    ]


class Kernel:
    """The clock, the queue of what happens next, and the only source of chance."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.hub = getcurrent()
        # Above what a system gives: none of them may ever name a real process.
        self.last_pid = 10_000_000
        self.graveyard: list[Fiber] = []
        self.crashes: list[str] = []
        """Threads that ended by an exception nobody caught."""
        self.outside: Process | None = None
        self.steps = 0
        self.preemption = 0.0
        """Chance that a thread is descheduled before it sends something."""
        self.preemptions = 0
        self.hosts: dict[str, Host] = {}
        self._queue: list[list[Any]] = []
        self._number = 0
        self.over = False

    # -- what happens when -------------------------------------------------------------------------

    def at(self, when: float, call: Callable[..., object], *args: Any) -> list[Any]:
        if self.over:
            return [when, 0, None, args]
        self._number += 1
        entry = [when, self._number, call, args]
        heapq.heappush(self._queue, entry)
        return entry

    def after(self, secs: float, call: Callable[..., object], *args: Any) -> list[Any]:
        return self.at(self.now + secs, call, *args)

    def ready(self, fiber: Fiber, value: Any) -> None:
        """Let the fiber go on; which of several goes first is chance."""
        self.at(self.now + self.rng.random() * _JITTER, self._resume, fiber, value)

    def _resume(self, fiber: Fiber, value: Any) -> None:
        process = fiber.process
        if process.frozen and not process.dead:
            process.deliver(self._resume, fiber, value)
        elif not process.dead and not fiber.dead:
            fiber.switch(value)

    def run(self, until: float) -> None:
        """Run everything up to that time. Called outside of all fibers."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            when, _, call, args = heapq.heappop(queue)
            if call is None:
                continue
            self.now = max(self.now, when)
            self.steps += 1
            call(*args)
            if self.graveyard:
                self._bury()
        self.now = max(self.now, until)

    def _bury(self) -> None:
        """Free what the threads of killed processes hold: they unwind while nothing that they do
        has an effect.
        """
        dead, self.graveyard = self.graveyard, []
        kept = [
            each
            for host in {fiber.process.host: None for fiber in dead}
            for each in _kept(host.files)
        ]
        chance, pid, crashes = self.rng.getstate(), self.last_pid, len(self.crashes)
        self.over = True
        for fiber in dead:
            self.end(fiber)
        self.over = False
        self.rng.setstate(chance)
        self.last_pid = pid
        del self.crashes[crashes:]
        for files, before in kept:
            files.clear()
            files.update(before)

    def close(self) -> None:
        """End all fibers, so that nothing of this run is left."""
        self.over = True
        left, self.graveyard = self.graveyard, []
        for _, _, call, args in self._queue:
            if call == self._resume and not args[0].dead:
                left.append(args[0])
        self._queue.clear()
        for fiber in left:
            self.end(fiber)

    def end(self, fiber: Fiber) -> None:
        """Unwind one fiber while no simulated call works any more."""
        for _ in range(100):
            if fiber.dead:
                return
            try:
                fiber.throw(GreenletExit)
            except BaseException:
                continue

    # -- inside fibers -----------------------------------------------------------------------------

    @property
    def fiber(self) -> Fiber:
        found = getcurrent()
        if self.over:
            raise GreenletExit
        if not isinstance(found, Fiber):
            raise SimulationError("this would block, and no thread is running")
        return found

    @property
    def process(self) -> Process | None:
        found = getcurrent()
        return found.process if isinstance(found, Fiber) else self.outside

    def waiter(self) -> Waiter:
        return Waiter(self, self.fiber)

    def sleep(self, secs: float) -> None:
        self.waiter().wait(secs)

    def preempt(self) -> None:
        """A point at which the system may take the processor away from the thread."""
        if self.over or not self.preemption or not isinstance(getcurrent(), Fiber):
            return
        process = self.process
        if process is None or not process.mind_preemption or self.rng.random() >= self.preemption:
            return
        self.preemptions += 1
        self.sleep(self.rng.choice((0.001, 0.01, 0.1, 1.0, 3.0)) * self.rng.random())

    # -- clocks ------------------------------------------------------------------------------------

    def set_drift(self, host: Host, drift: float) -> None:
        """Another rate of its clocks; what they show now stays."""
        gained = self.now * (host.drift - drift)
        host.drift = drift
        host.wall_offset += gained
        host.boot_offset += gained

    def wall(self) -> float:
        process = self.process
        if process is None:
            return EPOCH + self.now
        host = process.host
        return EPOCH + self.now * (1 + host.drift) + host.wall_offset

    def boot(self, process: Process | None = None) -> float:
        process = process or self.process
        if process is None:
            return self.now + 1000.0
        host = process.host
        return self.now * (1 + host.drift) + host.boot_offset + 1000.0
