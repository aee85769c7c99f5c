"""Log of durable state: one folder per component or task.

The folders are below ``topology.state.dir``.

::

    <topology name>/<component>.state/000002.json     the second division: the number of tasks
    <topology name>/<component>.state/000002/1.4.log  state of the task with index 1, fourth opening
    <topology name>/<component>.letters/...           dead letters of a spout
    <topology name>/<component>/<task>.state/...      ``context.state`` of one task: always one log

A task that opens its state writes all of it into a new file and appends its checkpoints there, so
that a process that lost the task without noticing writes to a file that is not read. The cluster
knows the newest opening of each task (``last_positions``): a folder without it holds older state.
When the number of tasks changes, the first opener creates the ``.json`` of a new division: from
then on no checkpoint of the older one is acknowledged. The only requirement on the file system is
exclusive creation of a file (``link``), so that a shared one works for several hosts: no lock is
taken and no file is mapped into memory.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from storm_dagster.core.dataplane.keyed_state import (
    Checkpoint,
    Contents,
    Partitioning,
    frame,
    read_log,
)
from storm_dagster.host.files import sync_path
from storm_dagster.model.errors import Corrupt, Unavailable
from storm_dagster.worker.state.log_files import (
    LOG_NAME,
    copy_range,
    division_numbers,
    link_unless_taken,
    newest_logs,
    paced,
    read_contents,
    temporary_path,
)

_MIN_COMPACTED = 1 << 20
"""Bytes by which a log must have grown to be rewritten; a longer one must have doubled."""
_LAST_COPIED = 64 << 10
"""Bytes of a log that the loop copies at the end of a compaction, at most about: its thread copies
all before.
"""
Stamp = tuple[int, int]
"""(number of the submission, version of the assignment)."""
Position = tuple[int, int]
"""(division, opening)."""


class InitialContents(NamedTuple):
    """Contents of a file of an earlier format.

    They are valid from the opening ``opening`` on.
    """

    opening: int
    contents: Contents


def state_folder(root: Path, topology: str, component: str) -> Path:
    """Folder of a component's state."""
    return root / topology / f"{quote(component, safe='').replace('.', '%2E')}.state"


@dataclass(eq=False)
class StateLog:
    """Open state of one task.

    Opening reads and writes all of it: do it in a thread. Older state is refused. With
    ``take_older`` it is opened, and :attr:`older` is set.
    """

    folder: Path
    division: Partitioning
    """The number of tasks now, and how keys are divided over them."""
    index: int
    """Index of the task in its component; 0 for state that is not divided."""
    stamp: InitVar[Stamp]
    """Orders assignments: a worker with a stale assignment must not restore the old number of
    tasks.
    """
    merge: Callable[[Any, list[Any]], Any]
    """(key, values of several tasks) -> value, when the number of tasks changes."""
    owns: Callable[[], bool]
    """True if the task may write now: the worker's lease is valid, and the task is not closed."""
    last_positions: Mapping[int, Position] = field(default_factory=dict)
    """Index of a task -> (division, opening) of its last opening, anywhere. Division 0 is the only
    division of state that is not divided.
    """
    take_older: bool = False
    initial: InitialContents | None = None
    """Contents at the first opening; ignored if the log was opened at least as often."""
    encoded: bool = False
    """True if the values of :attr:`contents` stay encoded."""
    durable: bool = False
    """True if each new file is on the disk before it replaces another, as :meth:`sync` needs it."""
    subject: str = ""
    """Owner of the state, for errors; by default the number of the task."""

    def __post_init__(self, stamp: Stamp) -> None:
        self.older = ""
        """Description of the difference, if the state is older than the cluster knows."""
        self.size = 0
        """Bytes of the file: of the values, and of replaced values until it is compacted."""
        self._file = -1
        """Descriptor of the file that checkpoints are appended to; -1 if closed."""
        self._folders_synced = False
        self._compaction: _Compaction | None = None
        """The running compaction, or a finished one whose file is not taken yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._number = self._enter_division(stamp)
        """Number of the division."""
        self._opening = 0
        """Number of the file that is open, 0 before the first; :meth:`_load` sets the last one."""
        self.contents: Contents = self._load(self._number, self.index)
        # With `take_older` the folder may have an earlier opening. The new one must be the newest.
        last_division, last_opening = self.last_positions.get(self.index, (0, 0))
        if last_division in (0, self._number):
            self._opening = max(self._opening, last_opening)
        self._publish(self._write(self.contents.snapshot()))
        folder = self._path(self._number).with_suffix("")
        for temporary in folder.glob(f".{self.index}.*.tmp"):
            temporary.unlink(missing_ok=True)
        self._remove_old()

    @property
    def position(self) -> Position:
        """Number of the division, and opening."""
        return self._number, self._opening

    @property
    def is_open(self) -> bool:
        """True if checkpoints can be appended."""
        return self._file >= 0

    def _refuse_older(self, current: str, newest: str) -> None:
        """Raise :class:`Unavailable`, since the state is older than the cluster knows.

        With ``take_older`` only :attr:`older` is set.
        """
        text = f"{self.folder} has {current}, and {newest} is known"
        if not self.take_older:
            subject = self.subject or f"task number {self.index}"
            raise Unavailable(
                f"the state of {subject} here is older than the last that was acknowledged: "
                f"{text}. Make topology.state.dir the storage that has it, or set "
                "topology.state.local: true to continue with this one"
            )
        self.older = text

    # -- divisions ---------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"

    def _division_numbers(self) -> list[int]:
        return division_numbers(self.folder)

    def _read_division(self, number: int) -> tuple[Partitioning, Stamp]:
        """Read a division, and the stamp of the assignment that it is from.

        :class:`Corrupt` if its file is damaged.
        """
        path = self._path(number)
        try:
            document = json.loads(path.read_bytes())
            division = replace(
                self.division, tasks=int(document["tasks"]), by_key=bool(document["by_key"])
            )
            return division, (int(document["stamp"][0]), int(document["stamp"][1]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise Corrupt(
                f"{path} is not a valid division of state ({error}): restore it"
            ) from None

    def _enter_division(self, stamp: Stamp) -> int:
        """Return the number of the task's division.

        It is created if there is none, or if the newest one is divided in another way. Refuses a
        folder that lacks the newest known division, and raises :class:`Unavailable` for an
        assignment that is older than that of the newest division.
        """
        numbers = self._division_numbers()
        newest = numbers[-1] if numbers else 0
        last = max((number for number, _ in self.last_positions.values()), default=0)
        if newest < last:
            self._refuse_older(f"division {newest}", f"division {last}")
        if numbers:
            division, since = self._read_division(newest)
            if division == self.division and newest >= last:
                return newest
            if stamp < since:
                raise Unavailable(
                    f"the state in {self.folder} is divided over {division.tasks} tasks by a newer "
                    "assignment than the one that this worker has read, with "
                    f"{self.division.tasks}: it opens after the next read"
                )
        document = {
            "tasks": self.division.tasks,
            "by_key": self.division.by_key,
            "stamp": list(stamp),
        }
        number = max(newest, last) + 1
        temporary = temporary_path(self._path(number))
        temporary.write_bytes(json.dumps(document).encode())
        if not link_unless_taken(temporary, self._path(number)):
            # Another task has created a division with this number.
            return self._enter_division(stamp)
        return number

    # -- reading -----------------------------------------------------------------------------------

    def _logs(self, number: int) -> dict[int, tuple[int, Path]]:
        """Index -> (opening, path) of each task's newest log in a division."""
        return newest_logs(self.folder, number)

    def _load(self, number: int, index: int) -> Contents:
        """Read the contents of a task in a division.

        They are in its log, or in the logs of the earlier division, which are shared out; empty if
        there is none. For the task of this log, :attr:`initial` may be newer than its log, and
        :attr:`_opening` is set. Refuses contents that are older than the last opening.
        """
        log = self._logs(number).get(index)
        last_division, last_opening = self.last_positions.get(index, (0, 0))
        opening, path = log if log is not None else (0, None)
        is_own = (number, index) == (self._number, self.index)
        initial = self.initial if is_own else None
        if initial is not None and initial.opening <= opening:
            initial = None
        if initial is not None:
            opening = initial.opening
        if last_division in (0, number) and opening < last_opening:
            self._refuse_older(f"opening {opening}", f"opening {last_opening}")
        if is_own:
            self._opening = opening
        if initial is not None:
            return initial.contents
        if path is not None:
            return read_contents(path, self.encoded)
        earlier = [former for former in self._division_numbers() if former < number]
        if not earlier:
            return Contents(encoded=self.encoded)
        division, _ = self._read_division(number)
        former_division, _ = self._read_division(earlier[-1])
        # A generator, so that one former task at a time is in memory.
        former_contents = (
            (former_index, self._load(earlier[-1], former_index))
            for former_index in range(former_division.tasks)
        )
        return division.share(index, former_contents, self.merge)

    # -- writing -----------------------------------------------------------------------------------

    def _write(
        self, records: Iterable[Checkpoint], stopped: Callable[[], bool] = lambda: False
    ) -> Path:
        """Write checkpoints to a temporary file, for :meth:`_publish`.

        The file is incomplete if ``stopped`` returned True.
        """
        path = temporary_path(
            self.folder / f"{self._number:06d}" / f"{self.index}.{self._opening + 1}.log"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for record in paced(records):
                if stopped():
                    break
                file.write(frame(record))
        return path

    def _publish(self, temporary: Path) -> None:
        """Make the file the task's next opening. Older files of the task are removed.

        From then on, checkpoints are appended to it. :class:`Unavailable` without the lease, or if
        another worker has just published this opening; then the file is removed.
        """
        path = self.folder / f"{self._number:06d}" / f"{self.index}.{self._opening + 1}.log"
        size = temporary.stat().st_size
        if self.durable:
            sync_path(temporary)
        if not self.owns() or not link_unless_taken(temporary, path):
            temporary.unlink(missing_ok=True)
            raise Unavailable(
                f"the state in {self.folder} is opened by another worker at the same time: retried "
                "later"
            )
        self.close()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._file_path = path
        """Path of :attr:`_file`."""
        self._opening += 1
        self._full_size = size
        """Bytes of the file after the last rewriting."""
        self.size = size
        if self.durable:
            # Before the older file is removed: the name of this one must survive a power cut.
            self._sync_folders()
        for log_path in path.parent.glob(f"{self.index}.*.log"):
            match = LOG_NAME.fullmatch(log_path.name)
            if match is not None and int(match[2]) < self._opening:
                log_path.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        # Earlier divisions are not read once every task has its share.
        if len(self._logs(self._number)) < self.division.tasks:
            return
        for number in self._division_numbers():
            if number < self._number:
                shutil.rmtree(self.folder / f"{number:06d}", ignore_errors=True)
                self._path(number).unlink(missing_ok=True)

    def append(self, record: Checkpoint) -> None:
        """Write a checkpoint. When this returns, it survives the end of the process.

        Its tuples may be acked then; it survives a power cut only after :meth:`sync`. If it cannot
        be written, this raises :class:`Unavailable` or ``OSError``, and the state must be reopened.
        """
        raw = frame(record)
        self._check()
        try:
            unwritten = raw
            while unwritten:
                unwritten = unwritten[os.write(self._file, unwritten) :]
            # Checked after the write, too: a new owner of the task or its keys may have read the
            # log before it.
            self._check()
        except BaseException:
            # Not acknowledged; if a successor has read it already, its tuples count twice.
            try:
                os.ftruncate(self._file, self.size)
            except OSError:
                # The rejected bytes would be before the next checkpoint: no further one is
                # appended.
                self.close()
            raise
        self.size += len(raw)

    def sync(self) -> None:
        """Bring all appended checkpoints to the disk.

        They survive a power cut then.
        """
        os.fsync(self._file)

    def _sync_folders(self) -> None:
        sync_path(self._file_path.parent)
        if not self._folders_synced:
            sync_path(self._path(self._number))
            # The folder, the component's and the topology's.
            for folder in (self.folder, *self.folder.parents[:3]):
                sync_path(folder)
            self._folders_synced = True

    def _check(self) -> None:
        """Raise :class:`Unavailable` if another process may have the state by now."""
        if not self.owns():
            raise Unavailable(
                "the worker's lease ended while it saved state: its tuples will be replayed"
            )
        if self._path(self._number + 1).exists():
            raise Unavailable(
                "the state was divided over another number of tasks: its tuples will be replayed"
            )
        if not os.fstat(self._file).st_nlink:
            raise Unavailable("another worker has run the task since: its tuples will be replayed")

    def compact(self) -> bool:
        """Rewrite the log, if it is much longer than the state.

        Returns True if that was completed now. A thread does it, from the log itself; a later call
        takes its file. That call raises the error of the thread as :class:`Unavailable`, or raises
        as :meth:`append`; another compaction begins when the log has grown by the same size.
        """
        running = self._compaction
        if running is None:
            if self.size - self._full_size > max(_MIN_COMPACTED, self._full_size):
                self._compaction = _Compaction(self)
            return False
        if running.thread.is_alive():
            return False
        self._compaction = None
        # If this one has failed, the next one begins at this size. Else `_publish` sets another.
        self._full_size = self.size
        if running.error is not None or running.temporary is None:
            raise Unavailable(
                f"the state in {self.folder} could not be rewritten, its log only grows: "
                f"{running.error}"
            )
        with running.temporary.open("ab") as file:
            # The entries that were appended since the thread ended.
            copy_range(self._file_path, running.copied_bytes, self.size, file)
        self._publish(running.temporary)
        return True

    def writers(self) -> list[threading.Thread]:
        """Return the thread that rewrites the log, if one does.

        :meth:`close` only asks it to stop.
        """
        return [] if self._compaction is None else [self._compaction.thread]

    def close(self) -> None:
        """Close the file."""
        if self._compaction is not None:
            self._compaction.stopped = True
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Compaction:
    """Compaction of a log in a thread, which begins at once.

    It begins with the log as far as it reached at the start, and appends the entries since.
    """

    def __init__(self, log: StateLog) -> None:
        self._log = log
        self._path = log._file_path
        self.copied_bytes = log.size
        """Bytes of the log that are in the new file."""
        self.temporary: Path | None = None
        """The new file, once it is complete up to :attr:`copied_bytes`."""
        self.error: BaseException | None = None
        self.stopped = False
        """Set by the loop when the log is closed: the thread must end."""
        self.thread = threading.Thread(target=self._run, name="state-compaction", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        # Runs in the thread. An error is kept for `StateLog.compact`, which raises it.
        contents = Contents(encoded=True)
        try:
            with self._path.open("rb") as file:
                for record in paced(read_log(file, str(self._path))):
                    if self.stopped or file.tell() > self.copied_bytes:
                        break
                    contents.apply(record)
            temporary = self._log._write(contents.snapshot(), lambda: self.stopped)
            with temporary.open("ab") as file:
                while not self.stopped:
                    size = self._log.size
                    if size - self.copied_bytes <= _LAST_COPIED:
                        break
                    copy_range(self._path, self.copied_bytes, size, file)
                    self.copied_bytes = size
            if self._log.durable and not self.stopped:
                # Here, not in the loop, which then syncs only the entries appended until then.
                sync_path(temporary)
            if self.stopped:
                temporary.unlink(missing_ok=True)
            else:
                self.temporary = temporary
        except Exception as error:
            self.error = error
        # Freed at once, a large map would hold the interpreter's lock.
        for table in (
            contents.values,
            contents.ids,
            contents.old_ids,
            contents.held,
            contents.results,
        ):
            table.clear()
