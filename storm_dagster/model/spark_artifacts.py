"""Python archives for the session of a Spark Connect server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def add_python_archive(session: Any, archive: Path) -> None:
    """Send the archive to the session's server, whose Python workers import from it.

    pyspark also puts it first on this process's own ``sys.path``, which processes of ``multiprocessing`` take over. It is
    taken off again: this process has these modules, the archive of this package holds only what Spark's workers need,
    and a temporary file is gone a moment later.
    """
    before = list(sys.path)
    try:
        session.addArtifacts(str(archive), pyfile=True)
    finally:
        if str(archive) not in before:
            sys.path[:] = [entry for entry in sys.path if entry != str(archive)]
