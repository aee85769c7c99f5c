"""Files as a sink: JSON lines, CSV and Parquet, in a folder or in object storage."""

import glob
import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from storm_dagster.connectors.json_rows import encode_lines
from storm_dagster.connectors.settings import assets_of, client_settings, file_system
from storm_dagster.connectors.sinks import Rejected, Row
from storm_dagster.host.files import sync_path
from storm_dagster.model.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    import pyarrow as pa

    from storm_dagster.connectors.file_schema import DatasetSchema

_log = logging.getLogger(__name__)
_FORMATS = ("jsonl", "csv", "parquet")
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oci"}
"""Protocols where a file appears when all of it is written.

Elsewhere the sink renames a complete file to its name.
"""
_TOKEN = re.compile(r"-(\d{12})(?:-[0-9a-f]{16})?\.\w+$")
"""The token in a file's name, before the id of the opening, which uploads to S3 do not have."""


class FileSink:
    """Sink that writes each batch to its own file below ``url``.

    ``s3://`` needs the extra ``s3``, other protocols their fsspec package. A file has all of its
    rows, or does not exist. The newest token of a task is in the name of its newest file: keep that
    file when you move files away. ``format`` is ``jsonl``, ``csv`` (with a header) or ``parquet``.

    All files of CSV and Parquet have one schema, which never changes. ``schema`` declares it: a
    schema of Arrow, or a map of columns to types as in ``outputs``. Without it, the first batch
    with rows decides for all tasks: docs/sinks.md. JSON lines have a schema only if it is declared.
    A row is rejected if the format or the schema cannot hold a value unchanged.

    The conf has the options of the file system below ``prefix``: ``files.endpoint_url``,
    ``files.key``, ``files.secret.file``.
    """

    def __init__(
        self,
        url: str,
        format: Literal["jsonl", "csv", "parquet"] = "jsonl",
        *,
        schema: "pa.Schema | Mapping[str, Any] | None" = None,
        prefix: str = "files.",
    ) -> None:
        if format not in _FORMATS:
            raise InvalidRequest(
                f"{format!r} is not a format of files: use one of {', '.join(_FORMATS)}"
            )
        self._url = url
        self._format = format
        self._prefix = prefix
        self._declared = schema
        self.assets = assets_of("files", url)
        self.asset_metadata = {self.assets[0]: {"dagster/uri": _uri(url)}}
        self._fs: Any = None

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        """Find the newest file of the owner, and return its token; ``None`` without an owner.

        On file systems and on S3, an earlier opening of the owner then cannot finish a file. Other
        object storage has no means for that: there only the worker's lease ends it, which is
        logged. Raises :class:`Corrupt` if the schema of the files is damaged, and
        :class:`InvalidRequest` if the declared one would change it.
        """
        fs, path = file_system(self._url, client_settings(conf, self._prefix))
        folder = path.rstrip("/")
        owner_name = file_name_of(owner)
        file_name = owner_name or "part"
        self._opening = secrets.token_hex(8)
        """Id of this opening, so that no two write a file of the same name."""
        self._fs = fs
        self._path = f"{folder}/{file_name}"
        """Path of this task's files, before their tokens."""
        self._staging = ""
        """Folder of unfinished files, which are renamed; empty for an object store."""
        self._upload: dict[str, Any] | None = None
        """Upload of the next file, on S3.

        It begins before the file before it is complete, so that the next opening can abort it.
        """
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else fs.protocol
        if _OBJECT_STORES.isdisjoint(protocols):
            staging = f"{folder}/_staging"
            fs.makedirs(staging, exist_ok=True)
            if owner_name:
                self._remove_staging(staging, owner_name)
            self._staging = f"{staging}/{file_name}-{self._opening}"
            fs.makedirs(self._staging)
        self._dataset = self._open_schema(folder)
        if not owner:
            return None
        newest = self._newest_token()
        if hasattr(fs, "call_s3"):
            newest = self._fence_uploads(newest)
            self._upload = self._begin_upload(newest + 1)
        elif not self._staging:
            _log.warning(
                "%s has no means to fence an earlier writer: a worker that is frozen in an upload "
                "for longer than its lease may leave a batch twice",
                self._url,
            )
        return newest

    def _open_schema(self, folder: str) -> "DatasetSchema | None":
        """The schema of the files; ``None`` for JSON lines without a declared one."""
        if self._format == "jsonl" and self._declared is None:
            return None
        # Its import of pyarrow takes a moment, which other workers do not need.
        from storm_dagster.connectors.file_schema import DatasetSchema, declared_schema

        dataset = DatasetSchema(self._fs, folder, self._url)
        dataset.load()
        declared = declared_schema(self._declared)
        if declared is not None:
            self._check_types(declared)
            dataset.declare(declared)
        return dataset

    def _check_types(self, declared: "pa.Schema") -> None:
        """Raise :class:`InvalidRequest` for a declared type that the format has no form of.

        CSV rejects the rows with values of such a column.
        """
        if self._format == "parquet":
            from storm_dagster.connectors.file_formats import check_parquet_types

            check_parquet_types(declared)

    def _encode(self, rows: Sequence[Row]) -> bytes:
        """The bytes of a file with these rows; :class:`Rejected` for those that do not fit."""
        values = [row.values for row in rows]
        dataset = self._dataset
        if dataset is None:
            return encode_lines(values)
        # It imports pyarrow, which JSON lines without a schema do not need.
        from storm_dagster.connectors.file_formats import TYPES_NOT_IN_CSV, encode_rows

        skipped = TYPES_NOT_IN_CSV if self._format == "csv" else ()
        dataset.infer(values, skipped)
        try:
            return encode_rows(self._format, values, dataset.schema)
        except Rejected:
            # Another task may have agreed on a column since.
            before = dataset.schema
            dataset.load()
            if dataset.schema == before:
                raise
            return encode_rows(self._format, values, dataset.schema)

    def _remove_staging(self, staging: str, owner_name: str) -> None:
        """Remove the folders of unfinished files of earlier openings."""
        for earlier in self._fs.glob(f"{glob.escape(staging)}/{owner_name}-*"):
            # A rename in one step: a file that is written there now cannot be moved to its name.
            removed = f"{staging}/gone-{secrets.token_hex(8)}"
            self._fs.mv(earlier, removed, recursive=True)
            self._fs.rm(removed, recursive=True)

    def _fence_uploads(self, newest: int) -> int:
        """Abort the uploads of earlier openings, and return the newest token after that."""
        while True:
            # An earlier opening has at most two uploads, since it begins the next one before it
            # finishes a file (:meth:`_finish_upload`). Its format may have been another one.
            for token, format in product((newest + 1, newest + 2), _FORMATS):
                self._abort_uploads(self._object_of(token, format))
            current = self._newest_token()
            if current == newest:
                return newest
            # It finished a file before that upload was aborted: now its uploads have later tokens.
            newest = current

    def _newest_token(self) -> int:
        """The largest token in the names of the owner's files; 0 without files."""
        newest = 0
        for path in self._fs.glob(f"{glob.escape(self._path)}-*"):
            match = _TOKEN.search(path)
            if match:
                newest = max(newest, int(match[1]))
        return newest

    def _object_of(self, token: int, format: str = "") -> dict[str, str]:
        """Bucket and key of the file of a token, as arguments of S3's calls."""
        path = f"{self._path}-{token:012d}.{format or self._format}"
        bucket, _, key = path.partition("/")
        return {"Bucket": bucket, "Key": key}

    def _begin_upload(self, token: int) -> dict[str, Any]:
        target = self._object_of(token)
        upload = self._fs.call_s3("create_multipart_upload", **target)
        return {**target, "UploadId": upload["UploadId"]}

    def _abort_uploads(self, target: Mapping[str, str]) -> None:
        """Abort all uploads to a bucket and key."""
        # Some servers find uploads by their whole key only.
        response = self._fs.call_s3(
            "list_multipart_uploads", Bucket=target["Bucket"], Prefix=target["Key"]
        )
        for upload in response.get("Uploads", ()):
            if upload["Key"] != target["Key"]:
                continue
            # A missing upload may be a complete file: the caller lists the files after this.
            with suppress(FileNotFoundError):
                self._fs.call_s3("abort_multipart_upload", **target, UploadId=upload["UploadId"])

    def _finish_upload(self, data: bytes, token: int) -> None:
        """Write the file of a token by its upload, after the begin of the next upload.

        Raises :class:`Unavailable` if the upload is that of another token, and
        ``FileNotFoundError`` if another opening has aborted it.
        """
        upload = self._upload or {}
        if upload["Key"] != self._object_of(token)["Key"]:
            raise Unavailable(f"{self._path} has no upload for token {token}: reopen it")
        part = self._fs.call_s3("upload_part", **upload, PartNumber=1, Body=data)
        next_upload = self._begin_upload(token + 1)
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        self._fs.call_s3("complete_multipart_upload", **upload, MultipartUpload=parts)
        self._upload = next_upload

    def write(self, rows: Sequence[Row], token: int) -> None:
        """Write the file of a batch.

        Raises :class:`Rejected` for rows that the format cannot hold, and :class:`Unavailable` if
        the owner was opened elsewhere.
        """
        data = self._encode(rows)
        target = f"{self._path}-{token:012d}-{self._opening}.{self._format}"
        if not self._staging and self._upload is None:
            # An object store without a means to fence an earlier writer, or no owner.
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
            sync_path(Path(target).parent)

    def close(self) -> None:
        """Remove the folder of unfinished files, or the upload without a file."""
        if self._fs is not None and self._upload is not None:
            with suppress(OSError):
                self._fs.call_s3("abort_multipart_upload", **self._upload)
        if self._fs is not None and self._staging and self._fs.exists(self._staging):
            self._fs.rm(self._staging, recursive=True)


def _uri(url: str) -> str:
    """The URL of a folder; that of a path on this host begins with ``file://``."""
    if "://" in url:
        return url
    return f"file://{os.path.abspath(url)}"


def file_name_of(owner: str) -> str:
    """The part of file names that identifies an owner.

    It has only letters that every store accepts. Two owners never have the same.
    """
    return re.sub(r"[^A-Za-z0-9.]", lambda match: f"_{ord(match[0]):x}_", owner)
