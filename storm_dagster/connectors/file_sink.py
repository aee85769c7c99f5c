"""Files as a sink: JSON lines, CSV and Parquet, in a folder or in object storage."""

import csv
import io
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, Literal

import msgspec

from storm_dagster.connectors.settings import assets_of, client_settings, file_system
from storm_dagster.connectors.sinks import Row, write_or_reject
from storm_dagster.model.errors import InvalidRequest, Unavailable

_log = logging.getLogger(__name__)
_ATOMIC = {"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oci"}
"""Stores where a file appears when it is complete; in others it is renamed then."""
_TOKEN = re.compile(r"-(\d{12})(?:-[0-9a-f]{16})?\.\w+$")


class FileSink:
    """Sink that writes each batch to a new file below ``url``.

    ``s3://`` needs the extra ``s3``, other stores their fsspec package. A file exists with all of
    its rows or not at all. The newest token of a task is in the name of its newest file: leave that
    file when you move files away. ``format`` is ``jsonl``, ``csv`` (with a header) or ``parquet``.
    The conf has the options of the file system below ``prefix``: ``files.endpoint_url``,
    ``files.key``, ``files.secret.file``.
    """

    def __init__(
        self,
        url: str,
        format: Literal["jsonl", "csv", "parquet"] = "jsonl",
        *,
        prefix: str = "files.",
    ) -> None:
        if format not in _FORMATS:
            raise InvalidRequest(
                f"{format!r} is not a format of files: use one of {', '.join(_FORMATS)}"
            )
        self._url = url
        self._format = format
        self._prefix = prefix
        self.assets = assets_of("files", url)
        self._fs: Any = None

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        """Find the newest file of the owner, and fence its earlier openings.

        On file systems and on S3, an earlier opening of the owner cannot finish a file from here
        on. Other object storage has no means for that: there only the worker's lease ends it, which
        is logged.
        """
        fs, folder = file_system(self._url, client_settings(conf, self._prefix))
        self._fs = fs
        folder = folder.rstrip("/")
        owner_name = file_name_of(owner)
        self._opening = secrets.token_hex(8)
        self._path = f"{folder}/{owner_name or 'part'}"
        self._staging = ""
        self._upload: dict[str, Any] | None = None
        """On S3, the upload of the next file.

        It is open before the file before it is complete, for the next opening to abort.
        """
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else fs.protocol
        if _ATOMIC.isdisjoint(protocols):
            self._staging = self._make_staging(f"{folder}/_staging", owner_name)
        if not owner:
            return None
        if hasattr(fs, "call_s3"):
            newest = self._fence_uploads()
            self._upload = self._begin_upload(newest + 1)
            return newest
        if not self._staging:
            _log.warning(
                "%s has no means to fence an earlier writer: a worker that is frozen in an upload "
                "for longer than its lease may leave a batch twice",
                self._url,
            )
        return self._newest()

    def _make_staging(self, parent: str, owner_name: str) -> str:
        """Make the folder of unfinished files, and remove those of earlier openings."""
        self._fs.makedirs(parent, exist_ok=True)
        if owner_name:
            for earlier in self._fs.glob(f"{parent}/{owner_name}-*"):
                # The whole folder is renamed first: a file that is being written there has no path
                # to its final name from here on.
                renamed = f"{parent}/gone-{secrets.token_hex(8)}"
                self._fs.mv(earlier, renamed, recursive=True)
                self._fs.rm(renamed, recursive=True)
        staging = f"{parent}/{owner_name or 'part'}-{self._opening}"
        self._fs.makedirs(staging)
        return staging

    def _fence_uploads(self) -> int:
        """Abort the uploads of earlier openings; return the newest token."""
        newest = self._newest()
        while True:
            # Without its upload, the first of an earlier opening's next two files fails, so the
            # second is not begun.
            for token, format in product((newest + 1, newest + 2), _FORMATS):
                self._abort_uploads(self._place(token, format))
            before = newest
            newest = self._newest()
            if newest == before:
                return newest

    def _newest(self) -> int:
        newest = 0
        for path in self._fs.glob(f"{self._path}-*"):
            match = _TOKEN.search(path)
            if match:
                newest = max(newest, int(match[1]))
        return newest

    def _place(self, token: int, format: str = "") -> dict[str, str]:
        bucket, _, key = f"{self._path}-{token:012d}.{format or self._format}".partition("/")
        return {"Bucket": bucket, "Key": key}

    def _begin_upload(self, token: int) -> dict[str, Any]:
        place = self._place(token)
        upload = self._fs.call_s3("create_multipart_upload", **place)
        return {**place, "UploadId": upload["UploadId"]}

    def _abort_uploads(self, place: Mapping[str, str]) -> None:
        # Some servers find uploads by their whole key only.
        listing = self._fs.call_s3(
            "list_multipart_uploads", Bucket=place["Bucket"], Prefix=place["Key"]
        )
        for upload in listing.get("Uploads", ()):
            if upload["Key"] != place["Key"]:
                continue
            # An upload that no longer exists may be complete: the files are listed afterwards.
            with suppress(FileNotFoundError):
                self._fs.call_s3("abort_multipart_upload", **place, UploadId=upload["UploadId"])

    def _finish_upload(self, data: bytes, token: int) -> None:
        upload = self._upload or {}
        if upload["Key"] != self._place(token)["Key"]:
            raise Unavailable(f"{self._path} has no upload for token {token}: open it again")
        part = self._fs.call_s3("upload_part", **upload, PartNumber=1, Body=data)
        following = self._begin_upload(token + 1)
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        self._fs.call_s3("complete_multipart_upload", **upload, MultipartUpload=parts)
        self._upload = following

    def write(self, rows: Sequence[Row], token: int) -> None:
        """Write the file of a batch."""
        accepted: list[Mapping[str, Any]] = []
        data = b""

        def add(part: Sequence[Row]) -> None:
            nonlocal data
            values = [row.values for row in part]
            # A row may fit alone, but not with the rows before it: text below numbers.
            data = _FORMATS[self._format](accepted + values)
            accepted.extend(values)

        write_or_reject(rows, add, lambda error: True)
        target = f"{self._path}-{token:012d}-{self._opening}.{self._format}"
        if not self._staging and self._upload is None:
            self._fs.pipe_file(target, data)
            return
        try:
            if self._upload is not None:
                self._finish_upload(data, token)
                return
            with self._fs.open(f"{self._staging}/{token}", "wb") as file:
                file.write(data)
                file.flush()
                if hasattr(file, "fileno"):
                    os.fsync(file.fileno())
            self._fs.mv(f"{self._staging}/{token}", target)
        except FileNotFoundError as error:
            raise Unavailable(
                f"{self._path} was opened elsewhere, and is written from there: {error}"
            ) from None
        if "file" in self._fs.protocol:
            # The name, too, must survive a power cut.
            folder = os.open(os.path.dirname(target), os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

    def close(self) -> None:
        """Remove the folder of unfinished files, or the unused upload."""
        if self._fs is not None and self._upload is not None:
            with suppress(OSError):
                self._fs.call_s3("abort_multipart_upload", **self._upload)
        if self._fs is not None and self._staging and self._fs.exists(self._staging):
            self._fs.rm(self._staging, recursive=True)


def file_name_of(owner: str) -> str:
    """The part of file names for an owner, in characters that every store takes.

    Different owners have different names.
    """
    return re.sub(r"[^A-Za-z0-9.]", lambda match: f"_{ord(match[0]):x}_", owner)


def _jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of all fields, in order of appearance."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return list(names)


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _columns(rows))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, list[Any]] = {}
    for name in _columns(rows):
        columns[name] = [row.get(name) for row in rows]
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


_Encode = Callable[[Sequence[Mapping[str, Any]]], bytes]
_FORMATS: dict[str, _Encode] = {"jsonl": _jsonl, "csv": _csv, "parquet": _parquet}
