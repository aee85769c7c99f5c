"""TCP proxy that can behave like a broken network between a client and a server.

with FaultProxy("127.0.0.1", server.port) as link:
    connect(link.address)
    link.cut()      # packets vanish, both sides still believe in their connection
    link.restore()     # what was held is delivered, as a network does that resends
    link.reset()    # every connection ends at once
    link.forget()   # packets of the connections vanish for ever, new connections work
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from storm_dagster.model.errors import Unavailable

_CHUNK = 1 << 16


class FaultProxy:
    """One proxied address on loopback, in a thread of its own; a context manager. Safe to steer
    from any thread.

    While it is cut, new connections are accepted and stay silent, and connections that were ended
    by one side stay open for the other: neither side can tell a lost network from a slow peer.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._open: asyncio.Event | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._forgotten: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0
        self._ready = threading.Event()
        self._done: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"fault-proxy-{port}", daemon=True)

    def __enter__(self) -> FaultProxy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> FaultProxy:
        """Listen on a free port."""
        self._thread.start()
        if not self._ready.wait(30):
            raise Unavailable("the fault proxy does not start: see its thread's traceback")
        return self

    @property
    def port(self) -> int:
        """Port that it listens on, on 127.0.0.1."""
        return self._port

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self._port}"

    def cut(self) -> None:
        """Stop all traffic in both directions."""
        self._steer(lambda: self._open.clear() if self._open else None)

    def restore(self) -> None:
        """Restore all traffic; held data is delivered first."""
        self._steer(lambda: self._open.set() if self._open else None)

    def reset(self) -> None:
        """End all connections; new ones are made."""
        self._steer(self._abort)

    def forget(self) -> None:
        """Drop what the connections of now carry, as a firewall does that has lost its table."""
        self._steer(lambda: self._forgotten.update(self._writers))

    def close(self) -> None:
        """End all connections and stop listening."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: self._done.set() if self._done else None)
            self._thread.join(10)

    # -- in the proxy's thread ---------------------------------------------------------------------
    def _steer(self, act: Callable[[], object]) -> None:
        done = threading.Event()

        def step() -> None:
            act()
            done.set()

        self._loop.call_soon_threadsafe(step)
        done.wait(10)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._open, self._done = asyncio.Event(), asyncio.Event()
        self._open.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._port = int(server.sockets[0].getsockname()[1])
        self._ready.set()
        await self._done.wait()
        server.close()
        self._abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _abort(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None and self._open is not None
        self._tasks.add(task)
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            far, other = await asyncio.open_connection(*self._target)
            self._writers.add(other)
            pumps = [
                asyncio.ensure_future(self._pump(reader, other)),
                asyncio.ensure_future(self._pump(far, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            # The target is down, or the proxy ends: the client sees its connection end.
            pass
        finally:
            for each in (writer, other):
                if each is not None:
                    self._writers.discard(each)
                    with contextlib.suppress(OSError, RuntimeError):
                        each.close()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._open is not None
        try:
            while True:
                part = await reader.read(_CHUNK)
                # An end is news as well: it does not pass either while the link is cut.
                await self._open.wait()
                if not part:
                    return
                if writer in self._forgotten:
                    continue
                writer.write(part)
                await writer.drain()
        except OSError:
            await self._open.wait()
