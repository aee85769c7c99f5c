"""Where checkpoints of keyed state are kept: one folder for each component, below ``topology.state.dir``.

::

    <topology name>/<component>.state/000002.json     the second division: over how many tasks
    <topology name>/<component>.state/000002/1.4.log  state of the task with index 1, as of its fourth opening

A task that opens its state writes all of it into a new file and appends its checkpoints there; so a process
that lost the task, and does not know it yet, writes where nobody reads. When the number of tasks changes, a
new division begins, whose first opener makes its ``.json``: from then on no checkpoint of the older one is
acknowledged. Creating a file that must not exist yet (``link``) is the only thing that this asks of the file
system, so that a shared one serves several hosts.
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

from storm_dagster.core.keyed_state import Checkpoint, Contents, Division, frame, read_log
from storm_dagster.model.errors import Corrupt, Unavailable

__all__ = ["StateLog", "state_folder"]

_LOG = re.compile(r"(\d+)\.(\d+)\.log")
_LEAST_COMPACTED = 1 << 20
Stamp = tuple[int, int]


def state_folder(root: Path, topology: str, component: str) -> Path:
    """The folder of a component's state."""
    return root / topology / f"{quote(component, safe='').replace('.', '%2E')}.state"


class StateLog:
    """The state of one task while it is open.

    ``stamp`` orders assignments (when the topology was submitted, version of the assignment): a worker that
    has not heard of a new number of tasks yet must not bring the old one back.
    """

    def __init__(
        self,
        folder: Path,
        division: Division,
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

    def _read_division(self, number: int) -> tuple[Division, Stamp]:
        path = self._path(number)
        try:
            found = json.loads(path.read_bytes())
            return Division(int(found["tasks"]), bool(found["by_key"])), (
                int(found["stamp"][0]),
                int(found["stamp"][1]),
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise Corrupt(f"{path} does not say how state is divided ({error}): restore it") from None

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
                    f"the one that this worker knows, with {self.division.tasks}: it is opened when that is read"
                )
        document = {"tasks": self.division.tasks, "by_key": self.division.by_key, "stamp": list(stamp)}
        if not self._create(self._path(newest + 1), json.dumps(document).encode()):
            return self._enter(stamp)
        return newest + 1

    def _create(self, path: Path, raw: bytes) -> bool:
        """Write a whole file; ``False`` when there is one."""
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
            raise Unavailable(
                f"the state in {self.folder} is opened by another worker at the same time: again later"
            )
        self.close()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._full_size, self._size = len(raw), len(raw)
        for other in path.parent.glob(f"{self.index}.*.log"):
            match = _LOG.fullmatch(other.name)
            if match is not None and int(match[2]) < opening:
                other.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        # As soon as every task has its share, nobody looks into earlier divisions any more.
        if len(self._logs(self._number)) < self.division.tasks:
            return
        for number in self._numbers():
            if number < self._number:
                shutil.rmtree(self.folder / f"{number:06d}", ignore_errors=True)
                self._path(number).unlink(missing_ok=True)

    def append(self, record: Checkpoint) -> None:
        """Write a checkpoint. When this returns, it counts, and the tuples that it is of may be acked.

        Raises :class:`Unavailable` or ``OSError`` when it may not count; the state is to be opened again then.
        """
        raw = frame(record)
        self._check()
        try:
            rest = raw
            while rest:
                rest = rest[os.write(self._file, rest) :]
            # Again after the writing: whoever took the task or the keys over meanwhile may not have read it.
            self._check()
        except BaseException:
            # Nobody is told that this was saved; had a successor read it already, its tuples count twice.
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(raw)

    def _check(self) -> None:
        if not self._owns():
            raise Unavailable("the worker's lease ended while it saved state: its tuples will be replayed")
        if self._path(self._number + 1).exists():
            raise Unavailable(
                "the state was divided over another number of tasks: its tuples will be replayed"
            )

    def compact(self) -> None:
        """Write everything into a new file when the log has become much longer than that."""
        if self._size - self._full_size > max(_LEAST_COMPACTED, self._full_size):
            self._rewrite()

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
