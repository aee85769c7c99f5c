"""Socket of the code server of a local cluster."""

import hashlib
import os
import tempfile
from pathlib import Path

from storm_dagster.host.processes import run_dir

_MAX_SOCKET_BYTES = 100
"""Length of a unix socket's path that every kernel accepts; Linux takes 107 bytes, macOS 103."""


def code_socket(home: Path) -> Path:
    """Socket of the code server, in a folder that only this user can open.

    It is not in HOME if its path there is too long for the kernel.
    """
    path = run_dir(home) / "code.sock"
    if len(os.fsencode(path)) <= _MAX_SOCKET_BYTES:
        return path
    mark = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"storm-dagster-{mark}", "code.sock")
