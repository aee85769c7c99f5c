"""Folder of a daemon below HOME: named by its id, locked by one process, its files replaced atomically."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import IO

from storm_dagster.model.errors import Conflict, InvalidRequest
from storm_dagster.model.host import lock_file

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def hold_folder(home: Path, role: str, id: str) -> IO[str]:
    """Hold ``HOME/<role>/<id>`` until the result is closed or the process ends; :class:`Conflict` when another does.

    :class:`InvalidRequest` when the id cannot name a folder.
    """
    if not _ID.fullmatch(id) or id == "id":
        raise InvalidRequest(f"{role} id {id!r:.120} may hold 1 to 100 letters, digits and any of ._- : choose another")
    folder = home / role / id
    folder.mkdir(parents=True, exist_ok=True)
    stream = (folder / "lock").open("a+", encoding="utf-8")
    try:
        lock_file(stream, wait=False)
    except BlockingIOError:
        stream.close()
        raise Conflict(f"another {role} {id!r} runs in {home}: stop it first, or choose another id") from None
    return stream


def write_atomically(path: Path, text: str, *, mode: int = 0o666, sync: bool = False) -> None:
    """Replace a file: readers see the old or the new one, never a part. ``sync``: it outlives the machine, too."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as stream:
        stream.write(text)
        if sync:
            stream.flush()
            os.fsync(stream.fileno())
    os.replace(temporary, path)
