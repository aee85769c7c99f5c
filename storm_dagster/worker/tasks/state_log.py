"""Checkpoint files of keyed state: one folder per component, below ``topology.state.dir``.

::

    <topology name>/<component>.state/000002.json     the second division: over how many tasks
    <topology name>/<component>.state/000002/1.4.log  state of the task with index 1, as of its fourth opening

A task that opens its state writes all of it into a new file and appends its checkpoints there, so that a process
that lost the task without noticing writes to a file that is not read. When the number of tasks changes, the first
opener creates the ``.json`` of a new division: from then on no checkpoint of the older one is acknowledged. The only
requirement on the file system is exclusive creation of a file (``link``), so that a shared one works for several hosts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from storm_dagster.core.keyed_state import Checkpoint, Contents, Partitioning, frame, read_log
from storm_dagster.model.errors import Corrupt, Unavailable

_LOG = re.compile(r"(\d+)\.(\d+)\.log")
_LEAST_COMPACTED = 1 << 20
Stamp = tuple[int, int]


def state_folder(root: Path, topology: str, component: str) -> Path:
    """Folder of a component's state."""
    return root / topology / f"{quote(component, safe='').replace('.', '%2E')}.state"


class StateLog:
    """Open state of one task.

    ``stamp`` orders assignments (number of the submission, version of the assignment): a worker with a stale
    assignment must not restore the old number of tasks.
    """

    def __init__(
        self,
        folder: Path,
        division: Partitioning,
        index: int,
        stamp: Stamp,
        merge: Callable[[Any, list[Any]], Any],
        owns: Callable[[], bool],
    ) -> None:
        self.folder = folder
        self.division = division
        self.index = index
        self._owns = owns
        self._merge = merge
        self._file = -1
        folder.mkdir(parents=True, exist_ok=True)
        self._number = self._enter(stamp)
        self.contents: Contents = self._load(self._number, index)
        self._rewrite()
        self._remove_old()

    # -- divisions ----------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("[0-9]*.json"))

    def _read_division(self, number: int) -> tuple[Partitioning, Stamp]:
        path = self._path(number)
        try:
            found = json.loads(path.read_bytes())
            return Partitioning(int(found["tasks"]), bool(found["by_key"])), (
                int(found["stamp"][0]),
                int(found["stamp"][1]),
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise Corrupt(f"{path} is not a valid division of state ({error}): restore it") from None

    def _enter(self, stamp: Stamp) -> int:
        numbers = self._numbers()
        newest = numbers[-1] if numbers else 0
        if numbers:
            division, since = self._read_division(newest)
            if division == self.division:
                return newest
            if stamp < since:
                raise Unavailable(
                    f"the state in {self.folder} is divided over {division.tasks} tasks by a newer assignment than "
                    f"the one that this worker has read, with {self.division.tasks}: it opens after the next read"
                )
        document = {"tasks": self.division.tasks, "by_key": self.division.by_key, "stamp": list(stamp)}
        if not self._create(self._path(newest + 1), json.dumps(document).encode()):
            return self._enter(stamp)
        return newest + 1

    def _create(self, path: Path, raw: bytes) -> bool:
        """Create a file with this content; ``False`` if it exists."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        temporary.write_bytes(raw)
        try:
            os.link(temporary, path)
            return True
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)

    # -- reading ------------------------------------------------------------------------------------------

    def _logs(self, number: int) -> dict[int, tuple[int, Path]]:
        """Index -> (opening, path) of the newest log of each task of a division."""
        found: dict[int, tuple[int, Path]] = {}
        try:
            paths = list((self.folder / f"{number:06d}").iterdir())
        except FileNotFoundError:
            return found
        for path in paths:
            match = _LOG.fullmatch(path.name)
            if match is not None:
                index, opening = int(match[1]), int(match[2])
                if opening > found.get(index, (0, path))[0]:
                    found[index] = (opening, path)
        return found

    def _load(self, number: int, index: int) -> Contents:
        log = self._logs(number).get(index)
        if log is not None:
            contents = Contents()
            for record in read_log(log[1].read_bytes(), str(log[1])):
                contents.apply(record)
            return contents
        earlier = [one for one in self._numbers() if one < number]
        if not earlier:
            return Contents()
        division, _ = self._read_division(number)
        before, _ = self._read_division(earlier[-1])

        def old() -> Iterator[tuple[int, Contents]]:
            for other in range(before.tasks):
                yield other, self._load(earlier[-1], other)

        return division.share(index, old(), self._merge)

    # -- writing ------------------------------------------------------------------------------------------

    def _rewrite(self) -> None:
        raw = frame(self.contents.snapshot())
        opening = self._logs(self._number).get(self.index, (0, None))[0] + 1
        path = self.folder / f"{self._number:06d}" / f"{self.index}.{opening}.log"
        if not self._owns() or not self._create(path, raw):
            raise Unavailable(f"the state in {self.folder} is opened by another worker at the same time: retried later")
        self.close()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._full_size, self._size = len(raw), len(raw)
        for other in path.parent.glob(f"{self.index}.*.log"):
            match = _LOG.fullmatch(other.name)
            if match is not None and int(match[2]) < opening:
                other.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        # Earlier divisions are not read once every task has its share.
        if len(self._logs(self._number)) < self.division.tasks:
            return
        for number in self._numbers():
            if number < self._number:
                shutil.rmtree(self.folder / f"{number:06d}", ignore_errors=True)
                self._path(number).unlink(missing_ok=True)

    def append(self, record: Checkpoint) -> None:
        """Write a checkpoint. When this returns it is durable, and its tuples may be acked.

        Raises :class:`Unavailable` or ``OSError`` otherwise; then the state must be reopened.
        """
        raw = frame(record)
        self._check()
        try:
            rest = raw
            while rest:
                rest = rest[os.write(self._file, rest) :]
            # Again after the write: a new owner of the task or its keys may not have read it.
            self._check()
        except BaseException:
            # Not acknowledged; if a successor has read it already, its tuples count twice.
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(raw)

    def _check(self) -> None:
        if not self._owns():
            raise Unavailable("the worker's lease ended while it saved state: its tuples will be replayed")
        if self._path(self._number + 1).exists():
            raise Unavailable("the state was divided over another number of tasks: its tuples will be replayed")

    def compact(self) -> None:
        """Rewrite the log into a new file, if it is much longer than the state."""
        if self._size - self._full_size > max(_LEAST_COMPACTED, self._full_size):
            self._rewrite()

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
