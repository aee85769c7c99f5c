"""Free ports for tests, apart from those that the kernel and `dev` hand out."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 5
# Below the ports that the kernel gives to connections, and those of `dev --ports auto`; each worker
# of pytest has its own.
_ports = itertools.cycle(
    [10_000 + 2_000 * _WORKER + (os.getpid() + number) % 2_000 for number in range(2_000)]
)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that no process listens on at this moment. No two calls return the same."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return port
    raise AssertionError("unreachable")


def free_ports(number: int, host: str = "127.0.0.1") -> list[int]:
    """So many different free ports."""
    return [free_port(host) for _ in range(number)]
