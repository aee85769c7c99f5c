"""Files as a source, on disks and in every file system of fsspec."""

import csv
import io
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, ClassVar, Literal

from storm_dagster.connectors.settings import assets_of, client_settings, file_system
from storm_dagster.connectors.sources import Lag, Source
from storm_dagster.connectors.tracking import PartitionEnd, SourceRecord
from storm_dagster.model.errors import InvalidTopology

_END = "end"
"""Position of a file that was read."""
_KINDS = {
    "jsonl": "lines",
    "ndjson": "lines",
    "txt": "lines",
    "log": "lines",
    "csv": "csv",
    "parquet": "parquet",
}
"""Ending of a file's name -> its format."""
_MAX_FILES = 8
"""Maximum number of files that one read takes records from."""
_RETRY_SECS = 10.0
"""Pause before a file that could not be read is tried once more."""
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "updated")
"""Names of the time of the last modification, in the different file systems."""


class FileSource(Source):
    """The records of all files that match a pattern.

    ``path`` is a pattern such as ``/in/*.jsonl`` or ``s3://bucket/in/*.csv``. Each file is a
    partition, and is read once, by its name. A late file is read regardless of its time; records
    that are appended to a file later are not read. So write a file under another name, and rename
    it when it is complete; names that begin with ``.`` or ``_`` are not read. A name may be reused
    after the file was missing for a week.

    ``format``: ``"lines"`` gives bytes (JSONL, text), ``"csv"`` and ``"parquet"`` a map from column
    names; by default it follows from the name. ``.gz`` and the like are decompressed. Keys of the
    conf that begin with ``files.`` are settings of fsspec's file system.
    """

    refresh_secs: ClassVar[float] = 5.0

    def __init__(
        self, path: str, *, format: Literal["lines", "csv", "parquet"] | None = None
    ) -> None:
        file_format = format or _format_of(path)
        if file_format not in set(_KINDS.values()):
            raise InvalidTopology(
                f'the format of {path!r} is not known: set format="lines", "csv" or "parquet"'
            )
        self.path = path
        self.format = file_format
        self.assets = assets_of("files", path.rpartition("/")[0] or path)

    def open(self, conf: Mapping[str, Any], context: Any) -> None:
        """Find the file system."""
        self._fs, self._pattern = file_system(self.path, client_settings(conf, "files."))
        self._times: dict[str, float | None] = {}
        """Files that match the pattern -> time of their last modification, ``None`` if unknown."""
        self._unread: dict[str, int] = {}
        """Files to read, in their order -> number of records that were read."""
        self._ended: set[str] = set()
        """Files that were read to their end."""
        self._rows: dict[str, Iterator[Any]] = {}
        """Files that are being read -> their next records."""
        self._retry_at: dict[str, float] = {}
        """Files that could not be read -> time of the next try."""

    def partitions(self) -> Collection[str]:
        """The names of the files."""
        self._fs.invalidate_cache()
        entries = self._fs.glob(self._pattern, detail=True)
        if all(info["type"] == "directory" for info in entries.values()):
            # For a pattern a folder that cannot be listed is empty: ls() raises the error.
            with suppress(FileNotFoundError):
                self._fs.ls(re.split(r"[^/]*[*?[]", self._pattern, maxsplit=1)[0])
        self._times = {}
        for path, info in entries.items():
            if self._is_source_file(path, info):
                self._times[path] = _modified_secs(info)
        return self._times.keys()

    def _is_source_file(self, path: str, info: Mapping[str, Any]) -> bool:
        """True if the entry is a file, or a link to one, whose name is not reserved."""
        name = path.rsplit("/", 1)[-1]
        if name[:1] in ("", ".", "_"):
            return False
        return info["type"] == "file" or bool(info.get("islink") and self._fs.isfile(path))

    def assign(self, mine: Mapping[str, Any]) -> None:
        """Read these files, each from its position; the oldest first.

        Files that are being read continue; those that were read to their end have no effect.
        """
        self._ended &= mine.keys()
        unread = {name: count for name, count in self._unread.items() if name in mine}
        new: list[str] = []
        for name, position in mine.items():
            if position != _END and name not in unread and name not in self._ended:
                new.append(name)
        new.sort(key=lambda name: (self._times.get(name) or 0.0, name))
        for name in new:
            unread[name] = mine[name] or 0
        self._unread = unread
        self._rows = {name: rows for name, rows in self._rows.items() if name in mine}

    def read(
        self, most: int, full: Collection[str]
    ) -> Sequence[SourceRecord | PartitionEnd | Exception]:
        """The next records of the first files that are not full, and the ends of files.

        A file that cannot be read is retried after 10 s, and its error is among the records.
        """
        records: list[SourceRecord | PartitionEnd | Exception] = []
        for name in self._readable_files(full):
            try:
                is_complete = self._read_file(name, most, records)
            except Exception as error:
                # Opened once more by the retry, which skips the records that were read.
                self._rows.pop(name, None)
                self._retry_at[name] = time.monotonic() + _RETRY_SECS
                records.append(
                    RuntimeError(f"file {name} cannot be read: {type(error).__name__}: {error}")
                )
                continue
            if is_complete:
                records.append(PartitionEnd(name, _END, closed=True))
                self._ended.add(name)
                self._unread.pop(name, None)
                self._rows.pop(name, None)
                self._retry_at.pop(name, None)
            if len(records) >= most:
                break
        return records

    def _readable_files(self, full: Collection[str]) -> list[str]:
        """The first unread files.

        Left out: full ones (:meth:`Source.read`), and those that wait for a retry.
        """
        now = time.monotonic()
        names: list[str] = []
        for name in self._unread:
            if name not in full and self._retry_at.get(name, 0.0) <= now:
                names.append(name)
                if len(names) == _MAX_FILES:
                    break
        return names

    def _read_file(self, name: str, most: int, records: list[Any]) -> bool:
        """Add at most ``most`` records of a file to ``records``. True at the end of the file.

        The position after a record is the number of records up to it.
        """
        if name not in self._rows:
            self._rows[name] = islice(self._values(name), self._unread[name], None)
        modified_secs = self._times.get(name)
        at_ms = None if modified_secs is None else int(modified_secs * 1000)
        for _ in range(most):
            value = next(self._rows[name], _END)
            if value is _END:
                return True
            self._unread[name] += 1
            records.append(SourceRecord(value, name, self._unread[name], at_ms=at_ms))
        return False

    def _values(self, name: str) -> Iterator[Any]:
        """All records of a file from its beginning, by the format; empty lines are no records."""
        with self._fs.open(name, "rb", compression="infer") as file:
            if self.format == "lines":
                for line in file:
                    text = line.rstrip(b"\r\n")
                    if text:
                        yield text
            elif self.format == "csv":
                # "utf-8-sig" drops a byte order mark.
                yield from csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""))
            else:
                from pyarrow.parquet import ParquetFile

                # 1000 rows at a time bound the memory.
                for batch in ParquetFile(file).iter_batches(1000):
                    yield from batch.to_pylist()

    def lag(self) -> Mapping[str, Lag]:
        """Number of unread files, and the age of the oldest one."""
        now = time.time()
        ages: list[float] = []
        for name in self._unread:
            modified_secs = self._times.get(name)
            if modified_secs is not None:
                ages.append(now - modified_secs)
        return {"files": Lag(len(self._unread), round(max(ages, default=0.0), 3))}


def _format_of(path: str) -> str | None:
    """The format by the endings of a file's name, such as ``csv`` of ``a.csv.gz``."""
    endings = path.rsplit("/", 1)[-1].lower().split(".")[1:]
    for ending in endings:
        if ending in _KINDS:
            return _KINDS[ending]
    return None


def _modified_secs(info: Mapping[str, Any]) -> float | None:
    """Time of the last modification in seconds since 1970; ``None`` if unknown."""
    for key in _TIME_KEYS:
        modified = info.get(key)
        if modified:
            if hasattr(modified, "timestamp"):
                return modified.timestamp()
            return float(modified) if isinstance(modified, int | float) else None
    return None
