"""Files of a state log: their names, and reading them.

See :mod:`storm_dagster.worker.state.log`.
"""

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from storm_dagster.core.dataplane.keyed_state import Checkpoint, Contents, read_log

LOG_NAME = re.compile(r"(\d+)\.(\d+)\.log")
"""File name of a log: index of the task, and opening."""
_BLOCK = 1 << 20
"""Bytes that are copied at once."""
_SLICE = 1000
"""Entries between two pauses of :func:`paced`."""
_YIELD_SECS = 0.0001
_READ_ATTEMPTS = 20
"""Tries to read a log that its writer may replace at the same time."""


def division_numbers(folder: Path) -> list[int]:
    """Numbers of the divisions of a log, ascending.

    The list is empty if the log was never opened.
    """
    return sorted(int(path.stem) for path in folder.glob("[0-9]*.json"))


def newest_logs(folder: Path, number: int) -> dict[int, tuple[int, Path]]:
    """Index -> (opening, path) of each task's newest log in a division; may be empty."""
    newest: dict[int, tuple[int, Path]] = {}
    try:
        paths = list((folder / f"{number:06d}").iterdir())
    except FileNotFoundError:
        return newest
    for path in paths:
        match = LOG_NAME.fullmatch(path.name)
        if match is not None:
            index = int(match[1])
            opening = int(match[2])
            if opening > newest.get(index, (0, path))[0]:
                newest[index] = (opening, path)
    return newest


def read_contents(path: Path, encoded: bool) -> Contents:
    """Read a log; with ``encoded`` its values stay encoded.

    :class:`Corrupt` if it is damaged before its end.
    """
    contents = Contents(encoded=encoded)
    with path.open("rb") as file:
        for record in paced(read_log(file, str(path))):
            contents.apply(record)
    return contents


def newest_opening(folder: Path, index: int) -> int:
    """Opening of a task's newest log in the newest division.

    0 if there is none.
    """
    numbers = division_numbers(folder)
    if not numbers:
        return 0
    opening, _ = newest_logs(folder, numbers[-1]).get(index, (0, None))
    return opening


def read_newest(folder: Path, index: int) -> Contents:
    """Read a task's newest log, beside the process that writes it.

    Its values stay encoded. The log is only read: the task continues undisturbed. Empty if there is
    no log.
    """
    for attempt in range(_READ_ATTEMPTS):
        numbers = division_numbers(folder)
        log = newest_logs(folder, numbers[-1]).get(index) if numbers else None
        if log is None:
            break
        _, path = log
        try:
            return read_contents(path, encoded=True)
        except FileNotFoundError:
            # Its writer has just replaced it.
            if attempt + 1 == _READ_ATTEMPTS:
                raise
    return Contents(encoded=True)


def paced(records: Iterable[Checkpoint]) -> Iterator[Checkpoint]:
    """Pause regularly, so that the loop gets the interpreter's lock."""
    entries = 0
    for record in records:
        yield record
        entries += 1
        entries += len(record.values) + len(record.ids) + len(record.held) + len(record.results)
        if entries >= _SLICE:
            entries = 0
            time.sleep(_YIELD_SECS)


def copy_range(path: Path, begin: int, end: int, target: BinaryIO) -> None:
    """Append the bytes from ``begin`` up to ``end`` of a file to an open one."""
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end:
            raw = file.read(min(_BLOCK, end - begin))
            if not raw:
                break
            target.write(raw)
            begin += len(raw)


def temporary_path(path: Path) -> Path:
    """Hidden name beside ``path``, for this thread only."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")


def link_unless_taken(temporary: Path, path: Path) -> bool:
    """Give the file its name, and return True; False if that name is taken.

    The temporary name is removed in any case.
    """
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        # NFS also responds so when a request is resent because its first reply was lost.
        return temporary.stat().st_nlink > 1
    except FileNotFoundError:
        # Another task has removed the folder of the division.
        return False
    finally:
        temporary.unlink(missing_ok=True)
