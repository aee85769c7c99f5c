"""Room on the disk of a folder."""

import shutil
from pathlib import Path
from typing import NamedTuple

_MIB = 2**20


class DiskRoom(NamedTuple):
    """Free room and size of a disk, in MiB; ``None``: they cannot be read."""

    free_mb: int | None = None
    total_mb: int | None = None


def disk_room(folder: Path) -> DiskRoom:
    """The room on the disk of an existing folder."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return DiskRoom()
    return DiskRoom(usage.free // _MIB, usage.total // _MIB)
