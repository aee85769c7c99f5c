"""CPUs and memory that this process may use: those of the machine, less what limits it.

A limit is the CPU affinity of the process, or that of a cgroup: of its own one and of each parent,
in both versions, at each place where the kernel shows them. In a container the parents above it may
be hidden, and do not count then. A limit that cannot be read is named in :attr:`Size.problem`, and
the size is that of the others.

Everything that needs such a number asks :func:`cpus`, :func:`whole_cpus` or :func:`memory_bytes`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from storm_dagster.host.cgroup_mounts import DELETED, CgroupMount, cgroup_mounts, groups_of

MACHINE = "the machine"
"""Source of a size without a limit."""
_ROOT = Path("/")


@dataclass(frozen=True)
class Size:
    """CPUs, or bytes of memory, and where the number comes from."""

    amount: float
    source: str
    """``the machine``, or the limit: ``CPU affinity``, or the file of a cgroup."""
    problem: str = ""
    """Sentence on the limits that could not be read; empty if all were."""

    @property
    def is_limited(self) -> bool:
        """True if the process may use less than the machine has."""
        return self.source != MACHINE


class _Limit(NamedTuple):
    """Limit of one file of a cgroup."""

    amount: float
    file: str


@dataclass(frozen=True)
class _LimitFile:
    """Files that hold a limit, by the version of the cgroups, and how to read them."""

    controller: str
    names: tuple[str, str]
    """File of version 1, and of version 2."""
    read: Callable[[Path], float | None]
    """Limit in a file; ``None``: no limit. ``OSError`` or ``ValueError`` if it is unreadable."""


def cpus(root: Path = _ROOT) -> Size:
    """CPUs that this process may use; a share of one is possible.

    ``root`` is the folder of ``proc`` and of mounted cgroups.
    """
    machine = float(os.cpu_count() or 1)
    size = Size(machine, MACHINE)
    if hasattr(os, "sched_getaffinity"):
        allowed = float(len(os.sched_getaffinity(0)))
        if allowed < machine:
            size = Size(allowed, "CPU affinity")
    return _smallest(size, _CPU, root)


def whole_cpus(root: Path = _ROOT) -> int:
    """CPUs that this process may use, rounded down; at least 1."""
    return max(1, int(cpus(root).amount))


def memory_bytes(root: Path = _ROOT) -> Size:
    """Bytes of memory that this process may use; 0 if the system does not say it."""
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        machine = 0
    return _smallest(Size(float(machine), MACHINE), _MEMORY, root)


def _smallest(size: Size, limit_file: _LimitFile, root: Path) -> Size:
    """The smallest of a size and the limits of the cgroups of this process."""
    if sys.platform != "linux":
        return size
    problems: list[str] = []
    for limit in _limits(limit_file, root, problems):
        if limit.amount < size.amount or not size.amount:
            size = Size(limit.amount, limit.file)
    if not problems:
        return size
    problem = (
        f"limits of cgroups cannot be read ({'; '.join(problems)}): "
        f"{size.source} counts in their place"
    )
    return Size(size.amount, size.source, problem)


def _limits(limit_file: _LimitFile, root: Path, problems: list[str]) -> Iterator[_Limit]:
    """Limits of the cgroups of this process; a sentence in ``problems`` for each unreadable one."""
    try:
        mounts = cgroup_mounts(root)
        own_groups = groups_of("self", root)
    except (OSError, ValueError) as error:
        problems.append(str(error))
        return
    for mount in mounts:
        # The one hierarchy of version 2 has no name.
        controller = limit_file.controller if mount.version == 1 else ""
        if mount.version == 1 and controller not in mount.controllers:
            continue
        if controller not in own_groups:
            continue
        name = limit_file.names[mount.version - 1]
        # The parents of a removed cgroup still count.
        own_group = own_groups[controller].removesuffix(DELETED)
        for folder in _folders(mount, own_group):
            try:
                amount = limit_file.read(root / folder.lstrip("/") / name)
            except FileNotFoundError:
                continue  # The root of a hierarchy, or a controller that is off.
            except (OSError, ValueError) as error:
                problems.append(f"{folder}/{name}: {getattr(error, 'strerror', None) or error}")
                continue
            if amount is not None:
                yield _Limit(amount, f"{folder}/{name}")


def _folders(mount: CgroupMount, path: str) -> Iterator[str]:
    """Folders of a cgroup and of its parents up to the top of the mount, the lowest first.

    Of a cgroup that is not below the mount, as that of a process which entered a container, the top
    alone.
    """
    top = mount.top.rstrip("/")
    below = path.removeprefix(top) if path == top or path.startswith(f"{top}/") else ""
    parts = [part for part in below.split("/") if part]
    if ".." in parts:
        parts = []
    folder = mount.folder.rstrip("/")
    for count in range(len(parts), -1, -1):
        yield "/".join([folder, *parts[:count]])


def _read_cpu_limit(file: Path) -> float | None:
    """Quota of a cgroup in CPUs."""
    words = file.read_text(encoding="ascii").split()
    if not words:
        raise ValueError("the file is empty")
    if len(words) == 1:
        # Version 1 has the period in a file of its own.
        words.append((file.with_name("cpu.cfs_period_us")).read_text(encoding="ascii").strip())
    quota_text, period_text = words
    if quota_text == "max" or int(quota_text) <= 0:
        return None
    period = int(period_text)
    if period <= 0:
        raise ValueError(f"a period of {period} us")
    return int(quota_text) / period


def _read_memory_limit(file: Path) -> float | None:
    """Memory limit of a cgroup in bytes.

    In version 1, a huge number stands for no limit, and -1 where the kernel is a sandbox's.
    """
    text = file.read_text(encoding="ascii").strip()
    if text == "max" or int(text) < 0:
        return None
    return float(int(text))


_CPU = _LimitFile("cpu", ("cpu.cfs_quota_us", "cpu.max"), _read_cpu_limit)
_MEMORY = _LimitFile("memory", ("memory.limit_in_bytes", "memory.max"), _read_memory_limit)
