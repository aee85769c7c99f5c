"""Files below one folder, reached by names that are not trusted.

A name is resolved one part at a time with open folders, and links are never followed. So no file
outside of the folder is opened, even if parts are replaced at the same time. A file that does not
exist and one that is not readable give the same error.
"""

import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from storm_dagster.model.errors import KeyNotFound

_MAX_PARTS = 16
"""Maximum depth of a name: each part is an open folder during the request."""
_MAX_ENTRIES = 10_000
"""Maximum number of entries of one listing, so that its memory is bounded."""
_FOLDER_SIZE = 4096
"""Size that a listing shows for every folder."""
# Flags for a folder; ``O_NOFOLLOW``: it must not be a link.
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for a file. ``O_NONBLOCK``: the open of a named pipe would wait for a writer."""


@dataclass(frozen=True)
class Entry:
    """One file or folder of a listing."""

    name: str
    is_folder: bool
    modified_ms: int
    """Time of the last change, in milliseconds since 1970."""
    size: int
    """Bytes of a file; of a folder always the same number."""


def _not_found() -> KeyNotFound:
    return KeyNotFound("this log does not exist: list them with cmd=listDir")


class LogTree:
    """The regular files below ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str) -> tuple[BinaryIO, int]:
        """The open file and its size now.

        :class:`KeyNotFound` for a name that is not a regular file below the root.
        """
        parts = _parts(name)
        if not parts:
            raise _not_found()
        with ExitStack() as stack:
            folder = self._walk(parts[:-1], stack)
            try:
                descriptor = os.open(parts[-1], _FILE, dir_fd=folder)
            except (OSError, ValueError):
                raise _not_found() from None
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                os.close(descriptor)
                raise _not_found()
            # Not buffered: a page is one read.
            return os.fdopen(descriptor, "rb", buffering=0), status.st_size  # type: ignore[return-value]

    def list(self, name: str = "") -> list[Entry]:
        """Files and folders in a folder, sorted by name, without links and devices.

        Of more than 10 000 the first ones that the file system returns, in no order. Raises
        :class:`KeyNotFound` if there is no such folder below the root.
        """
        rows: list[Entry] = []
        with ExitStack() as stack:
            folder = self._walk(_parts(name), stack)
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        # Removed while the folder is read.
                        continue
                    is_folder = stat.S_ISDIR(status.st_mode)
                    if is_folder or stat.S_ISREG(status.st_mode):
                        size = _FOLDER_SIZE if is_folder else status.st_size
                        modified_ms = status.st_mtime_ns // 10**6
                        rows.append(Entry(entry.name, is_folder, modified_ms, size))
                    if len(rows) >= _MAX_ENTRIES:
                        break
        return sorted(rows, key=lambda row: row.name)

    def _walk(self, parts: tuple[str, ...], stack: ExitStack) -> int:
        """Descriptor of the folder of these parts; ``stack`` closes it and its parents.

        :class:`KeyNotFound` if it does not exist, or a part is a link.
        """
        try:
            # The root itself is the operator's choice, and may be a link.
            folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, folder)
            for part in parts:
                folder = os.open(part, _FOLDER, dir_fd=folder)
                stack.callback(os.close, folder)
        except (OSError, ValueError):
            raise _not_found() from None
        return folder


def _parts(name: str) -> tuple[str, ...]:
    """The parts of a name, none if it is empty; :class:`KeyNotFound` if it is not valid."""
    parts = tuple(name.split("/")) if name else ()
    if len(parts) > _MAX_PARTS or not all(_is_valid_part(part) for part in parts):
        raise _not_found()
    return parts


def _is_valid_part(part: str) -> bool:
    return part not in ("", ".", "..") and "\0" not in part and "\\" not in part
