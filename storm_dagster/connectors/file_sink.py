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
_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oci"}
"""Stores where a file appears when all of it is written. Elsewhere it gets its name then."""
_TOKEN = re.compile(r"-(\d{12})(?:-[0-9a-f]{16})?\.\w+$")


class FileSink:
    """Writes each batch to a file of its own below ``url``. ``s3://`` needs the extra ``s3``,
    others their fsspec package.

    A file is there with all of its rows or not at all. The newest token of a task is in the name of
    its newest file: leave that one when you move files away. ``format`` is ``jsonl``, ``csv`` (with
    a header) or ``parquet``. The conf has the options of the file system below ``prefix``:
    ``files.endpoint_url``, ``files.key``, ``files.secret.file``.
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
        self._url, self._format, self._prefix = url, format, prefix
        self.assets = assets_of("files", url)
        self._fs: Any = None

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        """Find the newest file of the owner. An earlier opening of the owner finishes no file any
        more, on file systems and on S3. Other object storage has no means for that: there only the
        worker's lease ends it, which is logged.
        """
        fs, folder = file_system(self._url, client_settings(conf, self._prefix))
        me, self._opening = file_name_of(owner), secrets.token_hex(8)
        self._fs, self._path, self._staging = fs, f"{folder.rstrip('/')}/{me or 'part'}", ""
        self._upload: dict[str, Any] | None = None
        """On S3, the upload of the next file: open before the file before it is complete, for the
        next opening to abort.
        """
        if _WHOLE.isdisjoint({fs.protocol} if isinstance(fs.protocol, str) else fs.protocol):
            staging = f"{folder.rstrip('/')}/_staging"
            fs.makedirs(staging, exist_ok=True)
            for earlier in fs.glob(f"{staging}/{me}-*") if me else ():
                # Renamed as a whole: what is written there now has no path to its name any more.
                fs.mv(earlier, gone := f"{staging}/gone-{secrets.token_hex(8)}", recursive=True)
                fs.rm(gone, recursive=True)
            self._staging = f"{staging}/{me or 'part'}-{self._opening}"
            fs.makedirs(self._staging)
        if not owner:
            return None
        newest = self._newest()
        if hasattr(fs, "call_s3"):
            before = -1
            while before != newest:
                # The first of an earlier opening's next two files fails without its upload, so the
                # second is not begun.
                for token, format in product((newest + 1, newest + 2), _FORMATS):
                    self._abort_uploads(self._place(token, format))
                before, newest = newest, self._newest()
            self._upload = self._begin_upload(newest + 1)
        elif not self._staging:
            why = "a worker that is frozen in an upload for longer than its lease may leave a batch twice"
            _log.warning("%s has no means to fence an earlier writer: %s", self._url, why)
        return newest

    def _newest(self) -> int:
        found = map(_TOKEN.search, self._fs.glob(f"{self._path}-*"))
        return max((int(one[1]) for one in found if one), default=0)

    def _place(self, token: int, format: str = "") -> dict[str, str]:
        bucket, _, key = f"{self._path}-{token:012d}.{format or self._format}".partition("/")
        return {"Bucket": bucket, "Key": key}

    def _begin_upload(self, token: int) -> dict[str, Any]:
        place = self._place(token)
        return {
            **place,
            "UploadId": self._fs.call_s3("create_multipart_upload", **place)["UploadId"],
        }

    def _abort_uploads(self, place: Mapping[str, str]) -> None:
        # Some servers find uploads by their whole key only.
        found = self._fs.call_s3(
            "list_multipart_uploads", Bucket=place["Bucket"], Prefix=place["Key"]
        )
        for one in (each for each in found.get("Uploads", ()) if each["Key"] == place["Key"]):
            # One that is not there any more may be complete: the file is looked for afterwards.
            with suppress(FileNotFoundError):
                self._fs.call_s3("abort_multipart_upload", **place, UploadId=one["UploadId"])

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
        kept: list[Mapping[str, Any]] = []
        data = b""

        def add(part: Sequence[Row]) -> None:
            nonlocal data
            # A row may fit by itself, and not to the rows before it: text below numbers.
            data = _FORMATS[self._format]([*kept, *(row.values for row in part)])
            kept.extend(row.values for row in part)

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
            # The name, too, shall survive a power cut.
            os.fsync(folder := os.open(os.path.dirname(target), os.O_RDONLY))
            os.close(folder)

    def close(self) -> None:
        """Remove the folder of unfinished files, or the upload that no file came for."""
        if self._fs is not None and self._upload is not None:
            with suppress(OSError):
                self._fs.call_s3("abort_multipart_upload", **self._upload)
        if self._fs is not None and self._staging and self._fs.exists(self._staging):
            self._fs.rm(self._staging, recursive=True)


def file_name_of(owner: str) -> str:
    """A part of file names for an owner, in letters that every store takes; another one for another
    owner.
    """
    return re.sub(r"[^A-Za-z0-9.]", lambda found: f"_{ord(found[0]):x}_", owner)


def _jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _columns(rows))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(
        pyarrow.table({name: [row.get(name) for row in rows] for name in _columns(rows)}), sink
    )
    return sink.getvalue().to_pybytes()


_Encode = Callable[[Sequence[Mapping[str, Any]]], bytes]
_FORMATS: dict[str, _Encode] = {"jsonl": _jsonl, "csv": _csv, "parquet": _parquet}
