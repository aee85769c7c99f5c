"""Mounted cgroups of both versions, and the cgroups of a process, as Linux lists them."""

import re
from pathlib import Path
from typing import NamedTuple

DELETED = " (deleted)"
"""Mark at the end of the path of a removed cgroup, in which a process still is."""
_ROOT = Path("/")


class CgroupMount(NamedTuple):
    """Mounted cgroups of one version, with the controllers of version 1."""

    top: str
    """Cgroup at its top."""
    folder: str
    version: int
    controllers: tuple[str, ...]


def cgroup_mounts(root: Path = _ROOT) -> list[CgroupMount]:
    """Mounts of cgroups that this process sees; see proc_pid_mountinfo(5).

    ``root`` is the folder of ``proc``. ``OSError`` or ``ValueError`` if the list is unreadable.
    """
    mounts: list[CgroupMount] = []
    for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        # Optional fields end at the lone dash.
        mount, _, system = line.partition(" - ")
        kind, _, source_and_options = system.partition(" ")
        if kind not in ("cgroup", "cgroup2"):
            continue
        fields = mount.split()
        if len(fields) < 5 or not source_and_options.strip():
            raise ValueError(f"mountinfo has a line of an unknown form: {line!r:.200}")
        options = source_and_options.split()[-1].split(",")
        version = 2 if kind == "cgroup2" else 1
        top = _plain(fields[3])
        folder = _plain(fields[4])
        mounts.append(CgroupMount(top, folder, version, tuple(options)))
    return mounts


def _plain(field: str) -> str:
    """A path of mountinfo, in which blanks are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def groups_of(pid: int | str, root: Path = _ROOT) -> dict[str, str]:
    """Controller -> path of the cgroup of a process; the empty name is that of version 2.

    ``self`` is this process. The path of a removed cgroup ends with :data:`DELETED`. ``root`` is
    the folder of ``proc``. ``OSError`` without the process, ``ValueError`` for an unknown form.
    """
    groups: dict[str, str] = {}
    for line in (root / f"proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups
