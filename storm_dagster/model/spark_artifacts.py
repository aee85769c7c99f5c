"""Sessions of a Spark Connect server: their ids, and the Python archives that they get."""

from __future__ import annotations

import sys
import uuid
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


def query_session_id(code: str, number: int) -> str:
    """Id of the session that the queries of a topology's code share; the one after it when the server has closed this.

    ``code`` is the topology's id, with the number of its version. A server refuses the id of a closed session for ever.
    """
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"storm_dagster/{code}/{number}"))


def remote_with_session(remote: str, session_id: str, user: str = "storm") -> str:
    """The Spark Connect URL that attaches to the session; a URL that names one itself is left as it is."""
    if ";session_id=" in remote:
        return remote
    base, slash, parameters = remote.partition("/;")
    named = [part for part in parameters.split(";") if part] if slash else []
    named.append(f"session_id={session_id}")
    if not any(part.startswith("user_id=") for part in named):
        named.append(f"user_id={user}")
    return f"{base.rstrip('/')}/;{';'.join(named)}"
