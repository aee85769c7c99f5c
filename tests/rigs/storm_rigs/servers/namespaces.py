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
        raise Unavailable(
            f"`ip {' '.join(arguments)}` fails: {done.stderr.strip()}: is this root, on Linux?"
        )


def _free_network() -> str:
    """A network of the range for benchmarks (RFC 2544), its third part from the pid, so that
    several live side by side: one that is not there, as it may be left by tests that were killed.
    """
    there = subprocess.run(
        ["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True
    ).stdout
    parts = ((os.getpid() + 61 * again) % 250 + 1 for again in range(250))
    return next(net for part in parts if f" {(net := f'198.18.{part}')}." not in there)


class Network:
    """``size`` hosts on a bridge of this machine. ``name`` (up to 6 characters) sets it apart from
    others.
    """

    def __init__(self, name: str, size: int) -> None:
        self._net = _free_network()
        self._name, self._size = f"{name[:6]}{os.getpid() % 10_000}", size

    def __enter__(self) -> Network:
        try:
            switch, here = self._switch, f"{self._name}h"
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            _ip("link", "add", here, "type", "veth", "peer", "name", "machine", "netns", switch)
            _ip("addr", "add", f"{self.gateway}/24", "dev", here)
            _ip("link", "set", here, "up")
            self._plug("machine")
            for host in range(self._size):
                space, link = self._space(host), self._link(host)
                _ip("netns", "add", space)
                _ip(
                    "-n",
                    switch,
                    "link",
                    "add",
                    link,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    space,
                )
                self._plug(link)
                _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
                _ip("-n", space, "link", "set", "lo", "up")
        except Unavailable:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for space in [*map(self._space, range(self._size)), self._switch]:
            _ip("netns", "del", space, check=False)
        _ip("link", "del", f"{self._name}h", check=False)

    def _plug(self, link: str) -> None:
        _ip("-n", self._switch, "link", "set", link, "master", "bridge")
        _ip("-n", self._switch, "link", "set", link, "up")

    @property
    def _switch(self) -> str:
        # The bridge has a namespace of its own: a container engine's firewall drops what crosses a
        # bridge of the machine.
        return f"{self._name}s"

    def _space(self, host: int) -> str:
        return f"{self._name}n{host}"

    def _link(self, host: int) -> str:
        return f"host{host}"

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
        _ip("-n", self._switch, "link", "set", self._link(host), "down")

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
        _ip("-n", self._switch, "link", "set", self._link(host), "up")
