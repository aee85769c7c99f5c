"""One attack on any listener: bytes of all kinds from several connections, while another client
goes on asking.

``FUZZ_SECS`` is the time for each listener, by default 10 s. ``FUZZ_SEED`` repeats an attack.
``make test`` pauses between two connections, for the sake of the tests that run beside it; ``make
fuzz`` does not.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from storm_dagster.testing.waiting import patience

SEARCHING = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
SECS = float(os.environ.get("FUZZ_SECS", "10"))
_PAUSE = 0.0 if SEARCHING else 0.1
"""Seconds between two connections of an attacker, and between two questions of the other client."""
DEADLINE = 10.0
"""Seconds within which the other client must be answered: ten times the second that a user may
wait.
"""
MOST_GROWTH_MIB = 64
_ATTACKERS = 2

Message = Callable[[random.Random], bytes]


@dataclass(frozen=True)
class Listener:
    """A listener of another process, and how it is talked to."""

    name: str
    pid: int
    connect: Callable[[], socket.socket]
    message: Message
    """What a client might send, more or less: the attack breaks it further."""
    ask: Callable[[], object]
    """What an honest client does, on a connection of its own; an exception unless it is answered in
    :data:`DEADLINE`.
    """
    held: int = 240
    """Most connections that are left open."""
    pause: float = 0.0
    """Seconds between two connections of an attacker, where each costs much more than its
    message.
    """


@dataclass
class FuzzResult:
    """How the attack went."""

    name: str
    seed: str
    connections: int = 0
    sent: int = 0
    asked: int = 0
    longest: float = 0.0
    idle_mib: float = 0.0
    peak_mib: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.connections} connections, {self.sent / 2**20:.1f} MiB sent, the other client asked "
            f"{self.asked} times and waited {self.longest * 1000:.0f} ms at most; {self.idle_mib:.0f} MiB idle, "
            f"{self.peak_mib:.0f} MiB at most; FUZZ_SEED={self.seed}"
        )


def fuzz(listener: Listener, secs: float = SECS) -> FuzzResult:
    """Attack the listener; ``AssertionError`` when it ends, grows, or lets the other client
    wait.
    """
    seed = os.environ.get("FUZZ_SEED") or (secrets.token_hex(4) if SEARCHING else "1")
    result, process = FuzzResult(listener.name, seed), psutil.Process(listener.pid)

    def look() -> float:
        assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE, (
            f"{listener.name} has ended: {result}"
        )
        return process.memory_info().rss / 2**20

    def ask() -> None:
        began = time.monotonic()
        try:
            listener.ask()
        except Exception as error:
            raise AssertionError(
                f"another client was not answered ({error!r}): {result}"
            ) from error
        result.longest = max(result.longest, time.monotonic() - began)
        result.asked += 1

    for _ in range(20):
        listener.ask()
    result.idle_mib = result.peak_mib = look()
    stop = threading.Event()
    lock = threading.Lock()
    attackers = [
        threading.Thread(
            target=_attack, args=(listener, random.Random(f"{seed} {number}"), stop, result, lock)
        )
        for number in range(_ATTACKERS)
    ]
    for attacker in attackers:
        attacker.start()
    try:
        until = time.monotonic() + secs
        while time.monotonic() < until:
            ask()
            result.peak_mib = max(result.peak_mib, look())
            stop.wait(max(0.01, _PAUSE, listener.pause))
    finally:
        stop.set()
        for attacker in attackers:
            attacker.join(60)
    ask()
    result.peak_mib = max(result.peak_mib, look())
    print(result)
    assert result.connections > 3, f"there was no attack: {result}"
    assert result.peak_mib - result.idle_mib <= MOST_GROWTH_MIB, str(result)
    return result


def _attack(
    listener: Listener,
    draw: random.Random,
    stop: threading.Event,
    result: FuzzResult,
    lock: threading.Lock,
) -> None:
    held: list[socket.socket] = []
    try:
        while not stop.wait(max(listener.pause, _PAUSE)):
            sent = 0
            try:
                link = listener.connect()
            except OSError:
                continue
            held.append(link)
            link.settimeout(0.2)
            # It was dropped, or is not read from any more: as intended.
            with suppress(OSError):
                for part in _parts(listener.message, draw):
                    link.sendall(part)
                    sent += len(part)
                if draw.random() < 0.5:
                    link.recv(draw.choice((1, 4096)))
            with lock:
                result.connections += 1
                result.sent += sent
            if len(held) > listener.held // _ATTACKERS or draw.random() < 0.6:
                _leave(held.pop(draw.randrange(len(held))), draw)
    finally:
        for link in held:
            link.close()


def _leave(link: socket.socket, draw: random.Random) -> None:
    if draw.random() < 0.3:
        # Not with a farewell but with a reset.
        with suppress(OSError):
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


def _parts(message: Message, draw: random.Random) -> Iterator[bytes]:
    """What one connection sends."""
    kind = draw.random()
    if kind < 0.05:
        return
    if kind < 0.15:
        yield draw.randbytes(draw.choice((1, 10, 1000, 70_000)))
    elif kind < 0.20:
        # Without an end.
        part = message(draw)[:200] + draw.choice((b"\0", b"a", b"[", b"\xff", b"\x91")) * 65_536
        for _ in range(draw.randrange(1, 60)):
            yield part
    elif kind < 0.30:
        for _ in range(draw.randrange(2, 60)):
            yield message(draw)
    elif kind < 0.35:
        for byte in message(draw)[:40]:
            yield bytes([byte])
    elif kind < 0.65:
        yield message(draw)
    else:
        yield _broken(message(draw), message, draw)


def _broken(raw: bytes, message: Message, draw: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(6)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at : at + 1] = draw.randbytes(1)
        elif kind == 2:
            data[at : at + 4] = draw.choice(
                (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0")
            )
        elif kind == 3:
            data[at:at] = data[draw.randrange(len(data) + 1) :][:1000] * draw.choice((1, 2, 50))
        elif kind == 4:
            data[at:] = message(draw)
        else:
            del data[at : at + draw.randrange(1, 20)]
    return bytes(data)


def tcp(port: int) -> Callable[[], socket.socket]:
    """Connections to a port of this machine."""
    return lambda: socket.create_connection(("127.0.0.1", port), timeout=5)


def within(call: Callable[[], object], secs: float = DEADLINE) -> None:
    """Make a call that knows no timeout, in a thread; its exception, or ``TimeoutError``."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(secs)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {secs:g} s")
    if raised:
        raise raised[0]


@contextmanager
def listening_process(
    program: str, *arguments: str, folder: Path
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs ``program`` and writes a line when it listens; the process and that
    line.
    """
    with (folder / "listener.log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert child.stdin is not None and child.stdout is not None
    try:
        line = child.stdout.readline().strip()
        assert line, (folder / "listener.log").read_text()[-3000:]
        yield child, line
    finally:
        # At the end of its input it ends itself.
        child.stdin.close()
        try:
            child.wait(patience(20))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
