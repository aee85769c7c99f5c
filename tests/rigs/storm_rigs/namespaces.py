"""Separate networks for tests, in which a host is really cut off: Linux namespaces on one bridge.

with Network("ha", 3) as network:
    network.prefix(0)               # command line in front of what is to run on host 0
    network.address(0)              # its address, in reach of this machine and of the other hosts
    network.cut(0); network.restore(0) # pull its cable, plug it in again

Needs root and ``ip`` (iproute2) on Linux: :func:`missing_requirement` names what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from storm_dagster.model.errors import Unavailable


def missing_requirement() -> str | None:
    """Reason why no network namespace can be made here; ``None`` when one can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if shutil.which("ip") is None:
        return "`ip` is not installed (iproute2)"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    name = f"sd-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"`ip netns add` fails: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise Unavailable(f"`ip {' '.join(arguments)}` fails: {done.stderr.strip()}: is this root, on Linux?")


class Network:
    """``size`` hosts on a bridge of this machine. ``name`` (up to 6 characters) sets it apart from others."""

    def __init__(self, name: str, size: int) -> None:
        # A network of the range for benchmarks (RFC 2544), its third part from the pid: several can live side by side.
        self._net = f"198.18.{os.getpid() % 250 + 1}"
        self._name, self._size = f"{name[:6]}{os.getpid() % 10_000}", size

    def __enter__(self) -> Network:
        try:
            bridge = f"{self._name}b"
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{self._net}.254/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for host in range(self._size):
                space, mine, theirs = self._space(host), self._link(host), f"{self._name}i{host}"
                _ip("netns", "add", space)
                _ip("link", "add", mine, "type", "veth", "peer", "name", theirs)
                _ip("link", "set", theirs, "netns", space)
                _ip("link", "set", mine, "master", bridge)
                _ip("link", "set", mine, "up")
                _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", theirs)
                _ip("-n", space, "link", "set", theirs, "up")
                _ip("-n", space, "link", "set", "lo", "up")
        except Unavailable:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(self._size):
            _ip("link", "del", self._link(host), check=False)
            _ip("netns", "del", self._space(host), check=False)
        _ip("link", "del", f"{self._name}b", check=False)

    def _space(self, host: int) -> str:
        return f"{self._name}n{host}"

    def _link(self, host: int) -> str:
        return f"{self._name}o{host}"

    @property
    def gateway(self) -> str:
        """This machine's own address in the network."""
        return f"{self._net}.254"

    def address(self, host: int) -> str:
        """The address of a host, from 0."""
        return f"{self._net}.{host + 1}"

    def prefix(self, host: int) -> list[str]:
        """Prefix of a command that is to run on that host."""
        return ["ip", "netns", "exec", self._space(host)]

    def cut(self, host: int) -> None:
        """Stop all traffic to and from the host."""
        _ip("link", "set", self._link(host), "down")

    def part(self, host: int, *others: int) -> None:
        """Stop traffic between the host and these others; this machine reaches all."""
        for other in others:
            _ip("-n", self._space(host), "route", "add", "blackhole", f"{self.address(other)}/32")

    def join(self, host: int, *others: int) -> None:
        """Undo :meth:`part`."""
        for other in others:
            _ip("-n", self._space(host), "route", "del", "blackhole", f"{self.address(other)}/32")

    def restore(self, host: int) -> None:
        """Undo :meth:`cut`."""
        _ip("link", "set", self._link(host), "up")
