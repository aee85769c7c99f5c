"""Files as a source: each new one is read, on disks and in whatever fsspec reaches."""

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
_MOST_FILES, _RETRY_SECS = 8, 10.0


class FileSource(Source):
    """The records of all files that match ``path``, a pattern such as ``/in/*.jsonl`` or
    ``s3://bucket/in/*.csv``.

    Each file is a partition, and is read once, by its name: files that come late are read whatever
    their time is, and what is appended to a file later is not. So write a file under another name,
    and rename it when it is complete; names that begin with ``.`` or ``_`` are not read. A name
    that a task has seen gone for a week may come again.

    ``format``: ``"lines"`` gives bytes (JSONL, text), ``"csv"`` and ``"parquet"`` a map from column
    names; by default it follows from the name. ``.gz`` and the like are decompressed. Keys of the
    conf that begin with ``files.`` are settings of fsspec's file system.
    """

    refresh_secs: ClassVar[float] = 5.0

    def __init__(
        self, path: str, *, format: Literal["lines", "csv", "parquet"] | None = None
    ) -> None:
        parts = path.rsplit("/", 1)[-1].lower().split(".")
        found = format or next((_KINDS[part] for part in parts[1:] if part in _KINDS), None)
        if found not in set(_KINDS.values()):
            raise InvalidTopology(
                f'the format of {path!r} is not known: set format="lines", "csv" or "parquet"'
            )
        self.path, self.format = path, found
        self.assets = assets_of("files", path.rpartition("/")[0] or path)

    def open(self, conf: Mapping[str, Any], context: Any) -> None:
        """Find the file system."""
        self._fs, self._pattern = file_system(self.path, client_settings(conf, "files."))
        self._times: dict[str, float | None] = {}
        self._unread: dict[str, int] = {}
        """Files to read, in their order -> records that were read."""
        self._ended: set[str] = set()
        self._rows: dict[str, Iterator[Any]] = {}
        self._later: dict[str, float] = {}
        """Files that could not be read -> when to try again."""

    def partitions(self) -> Collection[str]:
        """The names of the files."""
        self._fs.invalidate_cache()
        found = self._fs.glob(self._pattern, detail=True)
        if all(info["type"] == "directory" for info in found.values()):
            # A folder that cannot be listed looks like an empty one to a pattern.
            with suppress(FileNotFoundError):
                self._fs.ls(re.split(r"[^/]*[*?[]", self._pattern, maxsplit=1)[0])
        self._times = {
            name: _seconds(info)
            for name, info in found.items()
            if (info["type"] == "file" or (info.get("islink") and self._fs.isfile(name)))
            and name.rsplit("/", 1)[-1][:1] not in ("", ".", "_")
        }
        return self._times.keys()

    def assign(self, mine: Mapping[str, Any]) -> None:
        """Read these files, from where each was left; the oldest first."""
        self._ended &= mine.keys()
        kept = {name: at for name, at in self._unread.items() if name in mine}
        new = [
            name
            for name, at in mine.items()
            if at != _END and name not in kept and name not in self._ended
        ]
        new.sort(key=lambda name: (self._times.get(name) or 0.0, name))
        self._unread = kept | {name: mine[name] or 0 for name in new}
        self._rows = {name: rows for name, rows in self._rows.items() if name in mine}

    def read(
        self, most: int, full: Collection[str]
    ) -> Sequence[SourceRecord | PartitionEnd | Exception]:
        """The next records of the first files."""
        found: list[SourceRecord | PartitionEnd | Exception] = []
        now = time.monotonic()
        ready = (
            name for name in self._unread if name not in full and self._later.get(name, 0.0) <= now
        )
        for name in list(islice(ready, _MOST_FILES)):
            try:
                ended = self._read_file(name, most, found)
            except Exception as error:
                self._rows.pop(name, None)
                self._later[name] = time.monotonic() + _RETRY_SECS
                found.append(
                    RuntimeError(f"file {name} cannot be read: {type(error).__name__}: {error}")
                )
                continue
            if ended:
                found.append(PartitionEnd(name, _END, closed=True))
                self._ended.add(name)
                for table in (self._unread, self._rows, self._later):
                    table.pop(name, None)
            if len(found) >= most:
                break
        return found

    def _read_file(self, name: str, most: int, found: list[Any]) -> bool:
        """Add records of a file. Whether these were the last."""
        if name not in self._rows:
            self._rows[name] = islice(self._values(name), self._unread[name], None)
        at = self._times.get(name)
        at_ms = None if at is None else int(at * 1000)
        for _ in range(most):
            value = next(self._rows[name], _END)
            if value is _END:
                return True
            self._unread[name] = after = self._unread[name] + 1
            found.append(SourceRecord(value, name, after, at_ms=at_ms))
        return False

    def _values(self, name: str) -> Iterator[Any]:
        with self._fs.open(name, "rb", compression="infer") as file:
            if self.format == "lines":
                yield from (row for line in file if (row := line.rstrip(b"\r\n")))
            elif self.format == "csv":
                yield from csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""))
            else:
                from pyarrow.parquet import ParquetFile

                for batch in ParquetFile(file).iter_batches(1000):
                    yield from batch.to_pylist()

    def lag(self) -> Mapping[str, Lag]:
        """Of all files together: how many are unread, and the age of the oldest."""
        ages = [
            time.time() - at for name in self._unread if (at := self._times.get(name)) is not None
        ]
        return {"files": Lag(len(self._unread), round(max(ages, default=0.0), 3))}


def _seconds(info: Mapping[str, Any]) -> float | None:
    """Time of the last modification, as each file system names it."""
    at: Any = next(
        (
            info[key]
            for key in ("mtime", "LastModified", "last_modified", "updated")
            if info.get(key)
        ),
        None,
    )
    return (
        at.timestamp()
        if hasattr(at, "timestamp")
        else float(at)
        if isinstance(at, int | float)
        else None
    )
