"""Dead letters of one task of a spout: entries of a state log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from storm_dagster.core.dataplane.keyed_state import Checkpoint, Partitioning, encode_value
from storm_dagster.model.errors import Corrupt, Unavailable
from storm_dagster.worker.state.former import FormerLetters, letter_indexes, read_letters
from storm_dagster.worker.state.log import Stamp, StateLog, state_folder
from storm_dagster.worker.state.log_files import division_numbers

_log = logging.getLogger(__name__)
_IMPORTED = "former"
"""Key of the checksums of files that are in the log and still have to be renamed."""


def letters_folder(root: Path, topology: str, component: str) -> Path:
    """Folder of a spout's dead letters."""
    return state_folder(root, topology, component).with_suffix(".letters")


class _Mark(msgspec.Struct):
    """The field of a letter that a replay sets."""

    replayed_ms: Any = None


_mark_of = msgspec.json.Decoder(_Mark).decode


def _is_replayed(raw: bytes) -> bool:
    """True if a letter, as JSON, was replayed."""
    return _mark_of(raw).replayed_ms is not None


@dataclass(eq=False)
class DeadLetterLog:
    """Dead letters by number, of at most ``max_bytes`` in all.

    The oldest are dropped first, and the newest is always kept. Without ``drops_unreplayed`` only
    those that were replayed are dropped, and the others may need more than ``max_bytes``. The log
    is created with the first letter. It is divided over the tasks of the spout: a task that no
    longer exists leaves its letters to another.
    """

    folder: Path
    division: Partitioning
    index: int
    """Index of the task in its component."""
    stamp: Stamp
    """As in :class:`StateLog`."""
    owns: Callable[[], bool]
    """True if the task may write now."""
    max_bytes: int
    """Limit of the letters as JSON, without the replaced values that the file may hold."""
    report: Callable[[Exception], None] = lambda error: None
    """Called with the errors of files that could not be read, for the operator."""
    drops_unreplayed: bool = True
    """True if letters that were not replayed may be dropped for newer ones."""

    def __post_init__(self) -> None:
        self._log: StateLog | None = None
        self._closed = True
        """True before :meth:`open` and after :meth:`close`: no method opens the log."""
        self._sizes: dict[int, int] = {}
        """Number -> bytes of the letter, oldest first."""
        self._bytes = 0
        """Sum of :attr:`_sizes`."""
        self._replayed: set[int] = set()
        """Numbers of the letters that were replayed."""

    # -- opening -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the log, if there is one.

        Dead letters of earlier releases are taken over. Raises :class:`Unavailable` while another
        worker opens it, ``OSError`` or :class:`Corrupt`. Then :meth:`read` and :meth:`put` open it.
        """
        self._release()
        self._closed = False
        self._open_existing()

    @property
    def is_open(self) -> bool:
        """True if there is a log, and it could be opened."""
        return self._log is not None

    def _open_existing(self) -> None:
        if self._log is None and not self._closed and self._exists():
            self._open_log()

    def _exists(self) -> bool:
        return bool(division_numbers(self.folder) or self._former_indexes())

    def _former_indexes(self) -> list[int]:
        """Indexes of the tasks of earlier releases whose letters this task takes over."""
        return [
            index
            for index in letter_indexes(self.folder)
            if index % self.division.tasks == self.index
        ]

    def _open_log(self) -> None:
        self._log = StateLog(
            self.folder,
            self.division,
            self.index,
            self.stamp,
            lambda key, values: values,
            self.owns,
            take_older=True,
        )
        try:
            self._measure()
            self._renumber()
            for index in self._former_indexes():
                self._take_over(index)
        except BaseException:
            self._release()
            raise

    def _measure(self) -> None:
        """Set the sizes of all letters.

        A list of letters is left out: :meth:`_renumber` separates it.
        """
        entries = self._entries()
        self._sizes = {
            number: len(entries[number])
            for number in sorted(entries)
            if isinstance(entries[number], bytes)
        }
        self._bytes = sum(self._sizes.values())
        self._replayed = {number for number in self._sizes if _is_replayed(entries[number])}

    def unreplayed_bytes(self) -> int:
        """Bytes of the letters that were not replayed."""
        return self._bytes - sum(self._sizes[number] for number in self._replayed)

    def _entries(self) -> dict[int, Any]:
        """Number -> letter as JSON, or a list of letters of several tasks."""
        if self._log is None:
            return {}
        values = self._log.contents.values
        return {number: values[number] for number in values if isinstance(number, int)}

    def _renumber(self) -> None:
        """Give separate numbers to letters with the same number.

        They come from several tasks.
        """
        entries = self._entries()
        newest = max(entries, default=0)
        separate: dict[int, bytes] = {}
        for number, letters in entries.items():
            if isinstance(letters, list):
                separate[number] = letters[0]
                for raw in letters[1:]:
                    newest += 1
                    letter = {**msgspec.json.decode(raw), "number": newest}
                    separate[newest] = msgspec.json.encode(letter)
        if separate:
            self._put_all(separate)
            self._measure()

    def _take_over(self, index: int) -> None:
        """Put the letters in a former task's files into the log, and rename these.

        Damaged lines are left out and reported.
        """
        former: FormerLetters = read_letters(self.folder, index)
        assert self._log is not None
        if not set(former.checksums) <= self._imported_checksums():
            entries: dict[int, bytes] = {}
            number = self._newest()
            for letter in former.letters:
                number = max(number + 1, int(letter["number"]))
                entries[number] = msgspec.json.encode({**letter, "number": number})
            # One checkpoint: after a crash before the files are renamed, their checksums show that
            # they are taken over.
            self._put_all(entries, imported=former.checksums)
        names = ", ".join(path.name for path in former.set_aside())
        self._append(Checkpoint(removed=[_IMPORTED]))
        _log.info(
            "%d dead letters in %s are in its log now; the files are kept as %s",
            len(former.letters),
            self.folder,
            names,
        )
        if former.unreadable:
            error = Corrupt(
                f"{former.unreadable} lines of the dead letters in {self.folder} are damaged: "
                f"the other letters were taken over, and the files are kept as {names}. Look "
                "into these, or delete them"
            )
            self.report(error)

    def _imported_checksums(self) -> set[str]:
        """Checksums of files that are in the log, although they are not renamed yet."""
        assert self._log is not None
        marks = self._log.contents.values.get(_IMPORTED, "")
        # A list, if several tasks had crashed then.
        checksums: set[str] = set()
        for mark in [marks] if isinstance(marks, str) else marks:
            checksums.update(mark.split())
        return checksums

    # -- letters -----------------------------------------------------------------------------------

    def read(self) -> dict[int, dict[str, Any]]:
        """Return number -> letter, in order of the numbers. Empty without a log.

        Raises as :meth:`open`.
        """
        self._open_existing()
        entries = self._entries()
        return {number: msgspec.json.decode(entries[number]) for number in sorted(entries)}

    def get(self, number: int) -> dict[str, Any] | None:
        """Return the letter of this number, or ``None``: it may have been dropped.

        Raises as :meth:`open`.
        """
        self._open_existing()
        raw = self._log.contents.values.get(number) if self._log is not None else None
        return None if raw is None else msgspec.json.decode(raw)

    def next_number(self, lowest: int) -> int:
        """Return a number for a new letter: at least ``lowest``, and above all others.

        Raises as :meth:`open`.
        """
        self._open_existing()
        return max(lowest, self._newest() + 1)

    def _newest(self) -> int:
        if not self._sizes:
            return 0
        return next(reversed(self._sizes))

    def put(self, number: int, letter: dict[str, Any]) -> list[dict[str, Any]]:
        """Store a letter, or a change of a stored one.

        It is durable when this returns. Returns the letters that were dropped for it. Raises
        :class:`Unavailable` if the task runs elsewhere by now, or ``OSError``.
        """
        if self._closed:
            raise Unavailable("the task is closed, its dead letters may be another worker's by now")
        if self._log is None:
            self._open_log()
        try:
            return self._put_all({number: msgspec.json.encode(letter)})
        except (Unavailable, OSError):
            # Its number of tasks has changed, another worker had it, or the file system failed: the
            # log is reopened for the next letter.
            self._release()
            raise

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete letters, durably. Raises as :meth:`put`."""
        if self._closed:
            raise Unavailable("the task is closed, its dead letters may be another worker's by now")
        self._open_existing()
        stored = [number for number in numbers if number in self._sizes]
        if not stored:
            return
        try:
            self._append(Checkpoint(removed=stored))
        except (Unavailable, OSError):
            self._release()
            raise
        for number in stored:
            self._bytes -= self._sizes.pop(number)
        self._replayed.difference_update(stored)

    def _put_all(
        self, entries: dict[int, bytes], imported: tuple[str, ...] = ()
    ) -> list[dict[str, Any]]:
        """Store letters as one checkpoint, and return those that were dropped for them.

        ``entries``: number -> letter as JSON. ``imported``: checksums of the files that they were
        read from. The log must be open.
        """
        log = self._log
        assert log is not None
        total = self._bytes
        for number, raw in entries.items():
            total += len(raw) - self._sizes.get(number, 0)
        values: list[tuple[Any, msgspec.Raw]] = [
            (number, encode_value(raw, number)) for number, raw in entries.items()
        ]
        if imported:
            values.append((_IMPORTED, encode_value(" ".join(imported), _IMPORTED)))
        dropped: list[int] = []
        for number in self._sizes:
            if total <= self.max_bytes:
                break
            if number not in entries and (self.drops_unreplayed or number in self._replayed):
                dropped.append(number)
                total -= self._sizes[number]
        letters = [msgspec.json.decode(log.contents.values[number]) for number in dropped]
        self._append(Checkpoint(values=values, removed=dropped))
        for number in dropped:
            del self._sizes[number]
        self._sizes.update((number, len(raw)) for number, raw in entries.items())
        self._replayed.difference_update(dropped, entries)
        self._replayed.update(number for number, raw in entries.items() if _is_replayed(raw))
        self._bytes = total
        return letters

    def _append(self, record: Checkpoint) -> None:
        log = self._log
        assert log is not None
        # It raises the error of an earlier compaction. So it comes before the checkpoint: if
        # `put` raises, the letters must not have changed.
        log.compact()
        log.append(record)
        log.contents.apply(record)

    # -- closing -----------------------------------------------------------------------------------

    def _release(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def close(self) -> None:
        """Close the log; no letter is stored until it is reopened."""
        self._closed = True
        self._release()
