"""Stand-ins for ``threading``, ``queue``, ``time`` and ``concurrent.futures`` on a
:class:`~storm_simulation.kernel.Kernel`.
"""

from __future__ import annotations

import queue as real_queue
import time as real_time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent import futures as real_futures
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit, getcurrent

from storm_simulation.kernel import TIMED_OUT, Fiber, Kernel, SimulationError, Waiter


class Threads:
    """The classes, bound to one kernel after the other; code that runs outside of a simulation may
    not use them.
    """

    def __init__(self) -> None:
        self.kernel: Kernel | None = None

    def get(self) -> Kernel:
        if self.kernel is None or self.kernel.over:
            raise GreenletExit
        return self.kernel


THREADS = Threads()
_kernel = THREADS.get


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Waiter] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.fire(True)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._set:
            return True
        waiter = _kernel().waiter()
        self._waiters.append(waiter)
        if waiter.wait(timeout) is TIMED_OUT:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            return self._set
        return True


class Lock:
    _again = False

    def __init__(self) -> None:
        self._owner: object = None
        self._depth = 0
        self._waiters: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = _kernel()
        found = getcurrent()
        me: object = found if isinstance(found, Fiber) else kernel
        if self._owner is None:
            self._owner, self._depth = me, 1
            return True
        if self._again and self._owner is me:
            self._depth += 1
            return True
        if not blocking:
            return False
        waiter = kernel.waiter()
        self._waiters.append(waiter)
        if waiter.wait(None if timeout < 0 else timeout) is TIMED_OUT:
            self._waiters.remove(waiter)
            return False
        return True

    def release(self) -> None:
        if self._owner is None:
            if THREADS.kernel is None or THREADS.kernel.over:
                return
            raise RuntimeError("release of a free lock")
        self._depth -= 1
        if self._depth:
            return
        self._owner = None
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.fire(True):
                self._owner, self._depth = waiter.fiber, 1
                return

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    _again = True


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str = "thread",
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self.name = name
        self.daemon = bool(daemon)
        self._fiber: Fiber | None = None

    @property
    def ident(self) -> int | None:
        return None if self._fiber is None else id(self._fiber)

    def start(self) -> None:
        process = _kernel().process
        if process is None:
            raise SimulationError(f"thread {self.name} outside of all processes")
        self._fiber = process.spawn(self.run, self.name)
        self._fiber.thread = self  # type: ignore[attr-defined]

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.finished

    def join(self, timeout: float | None = None) -> None:
        if self._fiber is None or self._fiber.finished:
            return
        waiter = _kernel().waiter()
        self._fiber.waiters.append(waiter)
        waiter.wait(timeout)


class SimpleQueue:
    def __init__(self, maxsize: int = 0) -> None:
        self._most = maxsize
        self._items: deque[Any] = deque()
        self._waiters: deque[Waiter] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if self._most and len(self._items) >= self._most:
            raise real_queue.Full
        self._items.append(item)
        while self._waiters:
            if self._waiters.popleft().fire(None):
                break

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while not self._items:
            if not block:
                raise real_queue.Empty
            waiter = _kernel().waiter()
            self._waiters.append(waiter)
            if waiter.wait(timeout) is TIMED_OUT and not self._items:
                raise real_queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class Future:
    """A result that is yet to come."""

    def __init__(self) -> None:
        self._done = Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self.cancelled_early = False
        self._told: list[Callable[[Future], object]] = []

    def set_result(self, result: Any) -> None:
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def cancel(self) -> bool:
        """Only what has not begun: the pool drops it."""
        if self.done():
            return self.cancelled_early
        return False

    def drop(self) -> None:
        """It will never run."""
        self.cancelled_early = True
        self.set_exception(real_futures.CancelledError())

    def add_done_callback(self, call: Callable[[Future], object]) -> None:
        if self.done():
            call(self)
        else:
            self._told.append(call)

    def _end(self) -> None:
        self._done.set()
        for call in self._told:
            call(self)
        self._told.clear()

    def done(self) -> bool:
        return self._done.is_set()

    def cancelled(self) -> bool:
        return self.cancelled_early

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._done.wait(timeout)
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result


class ThreadPoolExecutor:
    def __init__(self, max_workers: int = 8, thread_name_prefix: str = "pool") -> None:
        self._free = max_workers
        self._name = thread_name_prefix
        self._waiting: deque[tuple[Future, Callable[[], Any]]] = deque()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future = Future()
        self._waiting.append((future, lambda: call(*args, **kwargs)))
        if self._free:
            self._free -= 1
            Thread(target=self._work, name=self._name).start()
        return future

    def _work(self) -> None:
        while self._waiting:
            future, call = self._waiting.popleft()
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
        self._free += 1

    def map(self, call: Callable[..., Any], *many: Iterable[Any]) -> list[Any]:
        return [
            future.result()
            for future in [self.submit(call, *each) for each in zip(*many, strict=False)]
        ]

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        while cancel_futures and self._waiting:
            self._waiting.popleft()[0].drop()

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def wait(
    many: Iterable[Future],
    timeout: float | None = None,
    return_when: str = real_futures.ALL_COMPLETED,
) -> tuple[set[Future], set[Future]]:
    """As ``concurrent.futures.wait``; the sets are in the order given, so that a seed repeats."""
    asked = list(many)
    kernel = _kernel()
    deadline = None if timeout is None else kernel.now + timeout
    first = return_when == real_futures.FIRST_COMPLETED
    while True:
        done = [each for each in asked if each.done()]
        if len(done) == len(asked) or (first and done):
            break
        left = None if deadline is None else deadline - kernel.now
        if left is not None and left <= 0:
            break
        waiter = kernel.waiter()
        for each in asked:
            if not each.done():
                each._done._waiters.append(waiter)
        waiter.wait(left)
    return dict.fromkeys(done), dict.fromkeys(each for each in asked if each not in done)  # type: ignore[return-value]


def _current_thread() -> Any:
    return getattr(_kernel().fiber, "thread", None)


threading = SimpleNamespace(
    Event=Event,
    Lock=Lock,
    RLock=RLock,
    Thread=Thread,
    current_thread=_current_thread,
    get_ident=lambda: id(_kernel().fiber),
)
queue = SimpleNamespace(
    Queue=SimpleQueue, SimpleQueue=SimpleQueue, Empty=real_queue.Empty, Full=real_queue.Full
)


class Time:
    """``time`` in the clocks of the host of the process that asks."""

    def time(self) -> float:
        return _kernel().wall()

    def time_ns(self) -> int:
        return int(_kernel().wall() * 1e9)

    def monotonic(self) -> float:
        return _kernel().boot()

    def monotonic_ns(self) -> int:
        return int(_kernel().boot() * 1e9)

    perf_counter = monotonic
    process_time = monotonic

    def sleep(self, secs: float) -> None:
        _kernel().sleep(secs)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_time, name)


time = Time()
