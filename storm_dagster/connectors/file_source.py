"""Files as a source, on disks and in every file system of fsspec."""

import io
import logging
import re
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Literal

import msgspec

from storm_dagster.connectors.compressed import open_decompressed
from storm_dagster.connectors.file_rows import (
    FileRow,
    ShortRows,
    TextOptions,
    csv_rows,
    line_rows,
    parquet_rows,
)
from storm_dagster.connectors.file_versions import (
    HEAD_BYTES,
    Change,
    FileVersion,
    change_of,
    hash_of,
    listed_version,
    stored_version,
)
from storm_dagster.connectors.settings import assets_of, client_settings, file_system
from storm_dagster.connectors.sources import Lag, Source
from storm_dagster.connectors.tracking import PartitionEnd, SourceRecord
from storm_dagster.model.errors import InvalidTopology

_log = logging.getLogger(__name__)
_END = "end"
"""Position of a file that was read."""
_KINDS = {
    "jsonl": "lines",
    "ndjson": "lines",
    "txt": "lines",
    "log": "lines",
    "csv": "csv",
    "tsv": "csv",
    "parquet": "parquet",
}
"""Ending of a file's name -> its format."""
_MAX_FILES = 8
"""Maximum number of files that one read takes records from."""
_RETRY_SECS = 10.0
"""Pause before a file that could not be read is tried once more."""


class FileSource(Source):
    """The records of all files that match a pattern.

    ``path`` is a pattern such as ``/in/*.jsonl`` or ``s3://bucket/in/*.csv``. Each file is a
    partition, and is read once. A late file is read regardless of its time. Records that are
    appended to a file later are read, and a file that is replaced under its name is a new file: its
    ETag, or its size, time and first bytes tell. So write a file under another name, and rename it
    when it is complete; names that begin with ``.`` or ``_`` are not read.

    ``format``: ``"lines"`` gives bytes (JSONL, text), ``"csv"`` and ``"parquet"`` a map from column
    names; by default it follows from the name. ``.gz`` and the like are decompressed. ``encoding``
    is that of lines and CSV; lines of another one than UTF-8 are text. ``delimiter`` is that of
    CSV, a comma by default, in ``.tsv`` a tab. ``short_rows="none"`` fills a row of CSV that has
    fewer fields than the header with ``None``; by default it is a dead letter, as is a longer one.
    Keys of the conf that begin with ``files.`` are settings of fsspec's file system.
    """

    refresh_secs: ClassVar[float] = 5.0

    def __init__(
        self,
        path: str,
        *,
        format: Literal["lines", "csv", "parquet"] | None = None,
        encoding: str = "utf-8",
        delimiter: str | None = None,
        short_rows: ShortRows = "reject",
    ) -> None:
        ending = _ending_of(path)
        file_format = format or _KINDS.get(ending)
        if file_format not in set(_KINDS.values()):
            raise InvalidTopology(
                f'the format of {path!r} is not known: set format="lines", "csv" or "parquet"'
            )
        if delimiter is None and ending == "tsv":
            delimiter = "\t"
        _check_options(encoding, delimiter, short_rows)
        self.path = path
        self.format = file_format
        self.text = TextOptions(encoding, delimiter, short_rows)
        self.assets = assets_of("files", path.rpartition("/")[0] or path)

    def open(self, conf: Mapping[str, Any], context: Any) -> None:
        """Find the file system."""
        self._fs, self._pattern = file_system(self.path, client_settings(conf, "files."))
        self._listed: dict[str, FileVersion] = {}
        """Files that match the pattern -> their versions, by the last list."""
        self._versions: dict[str, FileVersion] = {}
        """Own files -> versions that were read, or to which their positions belong."""
        self._replaced: set[str] = set()
        """Files that were replaced since the last call of :meth:`recreated`."""
        self._changes: deque[Exception] = deque(maxlen=100)
        """Errors of the comparison of versions, which the next :meth:`read` returns."""
        self._unread: dict[str, int] = {}
        """Files to read, in their order -> number of records that were read."""
        self._ended: set[str] = set()
        """Files that were read to their end."""
        self._rows: dict[str, Iterator[FileRow]] = {}
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
        self._listed = {}
        for path, info in entries.items():
            if self._is_source_file(path, info):
                self._listed[path] = listed_version(info)
        for name in self._versions.keys() & self._listed.keys():
            try:
                self._notice_change(name)
            except Exception as error:
                self._changes.append(_unreadable(name, error))
        return self._listed.keys()

    def _is_source_file(self, path: str, info: Mapping[str, Any]) -> bool:
        """True if the entry is a file, or a link to one, whose name is not reserved."""
        name = path.rsplit("/", 1)[-1]
        if name[:1] in ("", ".", "_"):
            return False
        return info["type"] == "file" or bool(info.get("islink") and self._fs.isfile(path))

    # -- versions ----------------------------------------------------------------------------------

    def _notice_change(self, name: str) -> None:
        """Read a file on that was appended to, and a replaced one from its beginning."""
        version = self._versions[name]
        listed = self._listed[name]
        change = self._change_of(name, version)
        if change == "replaced":
            _log.info("file %s was replaced: it is read from its beginning", name)
            self._replaced.add(name)
            del self._versions[name]
            self._rows.pop(name, None)
            self._ended.discard(name)
            self._unread[name] = 0
        elif change == "appended" and name in self._ended:
            self._unread[name] = self._rows_before(name, version)
            self._ended.discard(name)
        elif change == "same" and version.size == listed.size:
            # Its bytes are not compared once more.
            self._versions[name] = msgspec.structs.replace(version, time=listed.time)

    def _change_of(self, name: str, version: FileVersion) -> Change:
        change = change_of(version, self._listed[name], partial(self._read_head, name))
        if change == "appended" and self._is_whole(name):
            return "replaced"
        return change

    def _is_whole(self, name: str) -> bool:
        """True if no records can be appended to a file of this format."""
        return self.format == "parquet" or _compression_of(name) == "zip"

    def _read_head(self, name: str, count: int) -> bytes:
        with self._fs.open(name, "rb") as file:
            return file.read(count)

    def _rows_before(self, name: str, version: FileVersion) -> int:
        """Number of records in the part of a file that was read."""
        if version.rows is not None:
            return version.rows
        # The position is of an earlier release, which has stored no number.
        assert version.size is not None
        return sum(1 for _ in self._values(name, FileVersion(), version.size))

    def resume(self, partition: str, position: Any, identity: Any) -> Any:
        """Position in the file that has the name now; ``None`` if it was replaced."""
        if partition in self._versions or partition in self._unread:
            # It is being read, or was read to its end.
            return position
        version = stored_version(identity)
        if version is None:
            self._versions[partition] = self._listed[partition]
            return position
        try:
            change = self._change_of(partition, version)
            if change == "appended" and position == _END:
                position = self._rows_before(partition, version)
        except Exception as error:
            # It stops no other file. The next list of files notices the change.
            self._changes.append(_unreadable(partition, error))
            change = "same"
        if change == "replaced":
            _log.info("file %s was replaced: it is read from its beginning", partition)
            return None
        self._versions[partition] = version
        return position

    def identity(self, partition: str) -> Any:
        """Version of the file that is read; it reads the first bytes if they are not known."""
        version = self._versions.get(partition)
        if version is None:
            return None
        if not version.has_identity():
            head = self._read_head(partition, min(version.size or 0, HEAD_BYTES))
            version = _with_head(version, head)
            self._versions[partition] = version
        return msgspec.to_builtins(version)

    def recreated(self) -> Collection[str]:
        """Files that were replaced under their names; each is returned once."""
        names = self._replaced
        self._replaced = set()
        return names

    # -- reading -----------------------------------------------------------------------------------

    def assign(self, mine: Mapping[str, Any]) -> None:
        """Read these files, each from its position; the oldest first.

        Files that are being read continue; those that were read to their end have no effect.
        """
        self._ended &= mine.keys()
        unread = {name: count for name, count in self._unread.items() if name in mine}
        at_end = {name for name, position in mine.items() if position == _END}
        self._ended |= at_end - unread.keys()
        new = [name for name in mine if name not in unread and name not in self._ended]
        new.sort(key=lambda name: (self._modified_secs(name) or 0.0, name))
        for name in new:
            unread[name] = mine[name] or 0
        self._unread = unread
        self._rows = {name: rows for name, rows in self._rows.items() if name in mine}
        for name in self._versions.keys() - mine.keys():
            del self._versions[name]

    def read(
        self, most: int, full: Collection[str]
    ) -> Sequence[SourceRecord | PartitionEnd | Exception]:
        """The next records of the first files that are not full, and the ends of files.

        A file that cannot be read is retried after 10 s, and its error is among the records.
        """
        records: list[SourceRecord | PartitionEnd | Exception] = [*self._changes]
        self._changes.clear()
        for name in self._readable_files(full):
            try:
                is_complete = self._read_file(name, most, records)
            except Exception as error:
                # Opened once more by the retry, which skips the records that were read.
                self._rows.pop(name, None)
                self._retry_at[name] = time.monotonic() + _RETRY_SECS
                records.append(self._unreadable_at(name, error))
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
            self._rows[name] = self._rows_from(name, self._unread[name])
        modified_secs = self._modified_secs(name)
        at_ms = None if modified_secs is None else int(modified_secs * 1000)
        for row in islice(self._rows[name], most):
            self._unread[name] += 1
            error = ""
            if row.error:
                place = f"row {self._unread[name]}" if row.line is None else f"line {row.line}"
                error = f"{name}, {place}: {row.error}"
            records.append(
                SourceRecord(
                    row.value, name, self._unread[name], at_ms=at_ms, line=row.line, error=error
                )
            )
            most -= 1
        return most > 0

    def _unreadable_at(self, name: str, error: Exception) -> RuntimeError:
        """The error of a file that could be read to the position of the task."""
        place = f"{name} (after {self._unread[name]} records)" if self._unread[name] else name
        return _unreadable(place, error)

    def _modified_secs(self, name: str) -> float | None:
        listed = self._listed.get(name)
        return None if listed is None else listed.time

    def _rows_from(self, name: str, count: int) -> Iterator[FileRow]:
        """The records of a file after the first ``count``."""
        version = self._versions.get(name)
        if version is None:
            version = self._listed.get(name, FileVersion())
        can_seek = self.format == "lines" and self.text.is_utf8 and _compression_of(name) is None
        if can_seek and count and version.rows == count:
            return self._values(name, version)
        return islice(self._values(name, msgspec.structs.replace(version, rows=None)), count, None)

    def _values(
        self, name: str, version: FileVersion, most_bytes: int | None = None
    ) -> Iterator[FileRow]:
        """All records of a file by the format, from its beginning.

        If the number of rows of its version is known, the records behind the bytes of this version.
        With ``most_bytes`` the records of so many first bytes, without effect on the version.
        """
        rows = version.rows or 0
        lines = 0
        with self._fs.open(name, "rb") as file:
            if most_bytes is not None:
                part = io.BufferedReader(_FirstBytes(file, most_bytes))
                yield from self._parse(name, part)
                return
            if version.etag is None:
                version = _with_head(version, file.read(min(version.size or 0, HEAD_BYTES)))
                file.seek(0)
            self._versions[name] = version
            if rows:
                file.seek(version.size)
                lines = version.lines
            for row in self._parse(name, file, lines):
                rows += 1
                lines = row.line or 0
                yield row
            size = version.size if self._is_whole(name) else file.tell()
        self._versions[name] = msgspec.structs.replace(version, size=size, rows=rows, lines=lines)

    def _parse(self, name: str, raw: Any, lines_before: int = 0) -> Iterator[FileRow]:
        """The records in the bytes of a file."""
        file = open_decompressed(raw, _compression_of(name))
        if self.format == "lines":
            yield from line_rows(file, self.text, lines_before)
        elif self.format == "csv":
            yield from csv_rows(file, self.text)
        else:
            # The reader of Parquet seeks, which decompression cannot.
            yield from parquet_rows(file if file is raw else io.BytesIO(file.read()))

    def lag(self) -> Mapping[str, Lag]:
        """Number of unread files, and the age of the oldest one."""
        now = time.time()
        ages: list[float] = []
        for name in self._unread:
            modified_secs = self._modified_secs(name)
            if modified_secs is not None:
                ages.append(now - modified_secs)
        return {"files": Lag(len(self._unread), round(max(ages, default=0.0), 3))}


def _check_options(encoding: str, delimiter: str | None, short_rows: str) -> None:
    """Raise :class:`InvalidTopology` for options that mean nothing."""
    try:
        "".encode(encoding)
    except LookupError:
        raise InvalidTopology(
            f'encoding of a FileSource is {encoding!r}: make it one of Python, such as "latin-1"'
        ) from None
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '\r\n"'):
        raise InvalidTopology(
            f'delimiter of a FileSource is {delimiter!r}: make it one character, such as ";"'
        )
    if short_rows not in ("reject", "none"):
        raise InvalidTopology(
            f'short_rows of a FileSource is {short_rows!r}: make it "reject" or "none"'
        )


def _ending_of(path: str) -> str:
    """The ending of a file's name that tells its format, such as ``csv`` of ``a.csv.gz``."""
    endings = path.rsplit("/", 1)[-1].lower().split(".")[1:]
    for ending in endings:
        if ending in _KINDS:
            return ending
    return ""


def _compression_of(name: str) -> str | None:
    """Compression of a file by the ending of its name; ``None`` without one."""
    from fsspec.utils import infer_compression

    return infer_compression(name)


def _with_head(version: FileVersion, head: bytes) -> FileVersion:
    return msgspec.structs.replace(version, head_bytes=len(head), head=hash_of(head))


def _unreadable(name: str, error: Exception) -> RuntimeError:
    return RuntimeError(f"file {name} cannot be read: {type(error).__name__}: {error}")


class _FirstBytes(io.RawIOBase):
    """The first bytes of a file, as a file."""

    def __init__(self, file: Any, count: int) -> None:
        self._file = file
        self._left = count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), self._left))
        self._left -= len(data)
        buffer[: len(data)] = data
        return len(data)
