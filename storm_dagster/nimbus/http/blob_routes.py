"""Blobs, their copies on followers, and upload sessions."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from storm_dagster.blobstore import BlobMeta
from storm_dagster.blobstore.store import check_sha256
from storm_dagster.http.authentication import may_do_all
from storm_dagster.http.documents import Digest, Number, absent_field
from storm_dagster.http.responses import JSONResponse, StreamResponse
from storm_dagster.http.router import Parameter, Router
from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced, InvalidRequest, KeyNotFound, Unavailable
from storm_dagster.model.names import check_blob_key
from storm_dagster.model.requests import parse_number
from storm_dagster.nimbus.blobs.replicated_store import WriteTerms
from storm_dagster.nimbus.blobs.uploads import new_inbox_file
from storm_dagster.nimbus.http.parameters import EPOCH
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.upload_cancelling import cancel_upload

_MAX_DOCUMENT_BYTES = 64 << 20
"""Largest conf or topology part of an upload."""
_MAX_HEADER_NUMBER = 10**9 - 1
"""Highest epoch, and highest number of copies, in a header."""
_BYTES = {"application/octet-stream": bytes}
"""Content of a blob, in OpenAPI."""
_WRITE_ERRORS = (404, 409, 503)
"""Statuses of errors that OpenAPI lists for routes that write."""
_KEY = Parameter("path", "key", "Blob key")
_HANDLE = Parameter("path", "handle", "Handle from POST /v1/uploads")
_PART = Parameter("path", "part", "archive, conf or topology")
_STORED_CONTENT = Parameter(
    "query", "sha256", "Instead of a body: content that is stored already", schema=Digest
)
_BODY_HASH = Parameter(
    "header", "X-Content-SHA256", "Hash of the body: another body is refused", schema=Digest
)
_COPIES = Parameter("header", "X-Storm-Min-Replication", "Copies to wait for", schema=Number)
_DEGRADED = Parameter("header", "X-Storm-Allow-Degraded", "true: accept fewer copies")
_BY_HASH = Parameter("header", "X-Content-By-Hash", "true: no body")
_CONTENT_RESPONSES = {200: _BYTES, 206: _BYTES, 304: None, 416: None}

UploadHandle = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class BlobDocument(BaseModel, extra="ignore"):
    """A stored blob."""

    key: str
    size: int
    sha256: Digest


class StoredBlob(BaseModel, extra="ignore"):
    """A blob that was written, with the number of nimbuses that hold it."""

    key: str
    size: int
    sha256: Digest
    copies: int = absent_field()


class BlobList(BaseModel, extra="forbid"):
    """Blobs that one nimbus holds."""

    cluster_id: str | None
    blobs: list[BlobDocument]


class ArchiveDocument(BaseModel, extra="forbid"):
    """An archive that is stored."""

    sha256: Digest


class UploadDocument(BaseModel, extra="forbid"):
    """An upload that began."""

    handle: UploadHandle


class FinishedUpload(BaseModel, extra="forbid"):
    """An upload whose parts no longer change."""

    handle: str
    parts: dict[str, BlobDocument]


@asynccontextmanager
async def receive_file(
    request: Request,
    inbox: Path,
    *,
    max_bytes: int,
    idle_secs: float,
    touch: Callable[[], object] = lambda: None,
) -> AsyncIterator[tuple[Path, str]]:
    """Write the request's body to a new file: the file, and the body's hash.

    The file is in ``inbox``, and is removed at the end, that of a refused body too. ``touch`` is
    called with each chunk.

    :class:`InvalidRequest` for a body of more than ``max_bytes``, before more than these are read,
    for an incomplete body, and for one whose hash is not that of the header ``X-Content-SHA256``
    (which may be absent). :class:`Unavailable` after ``idle_secs`` without a byte, or when the disk
    fails.
    """
    announced = request.headers.get("x-content-sha256")
    expected = check_sha256(announced) if announced is not None else None
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    path = new_inbox_file(inbox)
    try:
        try:
            size, digest = await _write_body(
                request, path, max_bytes=max_bytes, idle_secs=idle_secs, touch=touch
            )
        except (TimeoutError, asyncio.TimeoutError):
            raise Unavailable(
                f"no byte arrived for {idle_secs:g} s: the transfer was dropped, send it again"
            ) from None
        except ClientDisconnect:
            raise InvalidRequest("the transfer broke off: send it again") from None
        except OSError as error:
            raise Unavailable(
                f"the body cannot be stored ({error.strerror}): free space on nimbus's disk"
            ) from error
        if expected is not None and digest != expected:
            raise InvalidRequest(
                f"{size} bytes with SHA-256 {digest} arrived, {expected} was announced: "
                "the transfer was damaged, send it again"
            )
        yield path, digest
    finally:
        # A read-only disk refuses even the removal of a file that does not exist.
        with suppress(OSError):
            path.unlink(missing_ok=True)


async def _write_body(
    request: Request,
    path: Path,
    *,
    max_bytes: int,
    idle_secs: float,
    touch: Callable[[], object],
) -> tuple[int, str]:
    """Write the body to a new file; return its size and its hash.

    Raises ``TimeoutError`` after ``idle_secs`` without a byte, and :class:`InvalidRequest` for a
    body of more than ``max_bytes``.
    """
    digest = hashlib.sha256()
    size = 0
    with await run_in_threadpool(path.open, "xb") as sink:
        stream = request.stream()
        while True:
            chunk = await asyncio.wait_for(anext(stream, None), idle_secs)
            if chunk is None:
                break
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            digest.update(chunk)
            await run_in_threadpool(sink.write, chunk)
            touch()
    return size, digest.hexdigest()


def _too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"the body is larger than {max_bytes} bytes: send less, or raise nimbus.upload.max.bytes"
    )


def _key(request: Request) -> str:
    return check_blob_key(request.path_params["key"])


def _number(request: Request, header: str) -> int | None:
    """Number in a header; ``None`` without it, :class:`InvalidRequest` for other text."""
    text = request.headers.get(header)
    if text is None:
        return None
    return parse_number(f"header {header}", text, highest=_MAX_HEADER_NUMBER)


def write_terms(request: Request) -> WriteTerms:
    """Terms of a write from its headers."""
    return WriteTerms(
        epoch=_number(request, "X-Storm-Epoch"),
        minimum=_number(request, "X-Storm-Min-Replication"),
        allow_degraded=request.headers.get("X-Storm-Allow-Degraded", "").lower() == "true",
    )


class BlobRoutes:
    """Routes of blobs, of their copies on other nimbuses, and of uploads."""

    router: ClassVar = Router("blobs")

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._chunk_bytes = int(nimbus.conf["storm.blobstore.inputstream.buffer.size.bytes"])
        self._idle_secs = float(nimbus.conf["nimbus.file.copy.expiration.secs"])
        """Longest time without a byte of a transfer."""
        self._max_bytes = int(nimbus.conf["nimbus.upload.max.bytes"])
        """Largest body of a blob."""

    @router.route(
        "GET",
        "/v1/blobs",
        summary="Blobs that this nimbus holds",
        responses={200: BlobList},
        errors=(503,),
    )
    def list_blobs(
        self,
        prefix: Annotated[str | None, Parameter("query", "prefix", "Only keys that begin so")],
    ) -> dict[str, Any]:
        """Metadata of blobs in order of their keys."""
        blobs = [meta.to_document() for meta in self._nimbus.blobs.list(prefix or "")]
        return {"cluster_id": self._nimbus.cluster.cluster_id(), "blobs": blobs}

    @router.route(
        "GET",
        "/v1/blobs/{key}",
        summary="Content of a blob, or the byte range in the header Range",
        parameters=(_KEY,),
        responses=_CONTENT_RESPONSES,
        errors=(404, 503),
    )
    async def read_blob(self, request: Request) -> Response:
        """Content of a blob."""
        return await self._send(request, _key(request))

    @router.route(
        "PUT",
        "/v1/blobs/{key}",
        summary="Store a blob; answered when enough nimbuses hold it",
        parameters=(_KEY, _STORED_CONTENT, _BODY_HASH, EPOCH, _COPIES, _DEGRADED),
        body=_BYTES,
        responses={201: StoredBlob},
        errors=_WRITE_ERRORS,
    )
    async def write_blob(self, request: Request) -> Response:
        """Store a blob at the leader and its copies."""
        key = _key(request)
        terms = write_terms(request)
        await run_in_threadpool(self._nimbus.status.require, terms.epoch)
        meta, copies = await self._store(request, key, terms, self._max_bytes)
        return JSONResponse({**meta.to_document(), "copies": copies}, status_code=201)

    @router.route(
        "DELETE",
        "/v1/blobs/{key}",
        summary="Remove a blob",
        parameters=(_KEY, EPOCH, _COPIES, _DEGRADED),
        responses={204: None},
        errors=_WRITE_ERRORS,
    )
    async def delete_blob(self, request: Request) -> Response:
        """Remove a blob at all nimbuses."""
        await run_in_threadpool(self._nimbus.blobs.delete, _key(request), write_terms(request))
        return Response(status_code=204)

    @router.route(
        "PUT",
        "/v1/replicas/{key}",
        summary="Between nimbuses: take over a copy",
        parameters=(_KEY, EPOCH, _BODY_HASH, _BY_HASH),
        body=_BYTES,
        responses={200: BlobDocument},
        errors=_WRITE_ERRORS,
    )
    async def write_replica(self, request: Request) -> Response:
        """Store a copy from the leader; :class:`Fenced` for a former leader."""
        key = _key(request)
        await run_in_threadpool(self._check_replica, request)
        sha256 = check_sha256(request.headers.get("X-Content-SHA256"))
        accept = self._nimbus.blobs.accept_replica
        if request.headers.get("X-Content-By-Hash", "").lower() == "true":
            meta = await run_in_threadpool(accept, key, sha256, None)
        else:
            inbox = self._nimbus.inbox
            async with receive_file(
                request, inbox, max_bytes=self._max_bytes, idle_secs=self._idle_secs
            ) as (path, _):
                meta = await run_in_threadpool(accept, key, sha256, path)
        return JSONResponse(meta.to_document())

    @router.route(
        "DELETE",
        "/v1/replicas/{key}",
        summary="Between nimbuses: drop a copy",
        parameters=(_KEY, EPOCH),
        responses={204: None},
        errors=_WRITE_ERRORS,
    )
    async def delete_replica(self, request: Request) -> Response:
        """Drop a copy; :class:`Fenced` for a former leader."""
        key = _key(request)
        await run_in_threadpool(self._check_replica, request)
        await run_in_threadpool(self._nimbus.blobs.drop_replica, key)
        return Response(status_code=204)

    @router.route(
        "GET",
        "/v1/archives/{sha256}",
        summary="Check that an archive of that hash is stored",
        responses={200: ArchiveDocument},
        errors=(404,),
    )
    def has_archive(self, sha256: Annotated[str, Parameter("path", "sha256")]) -> dict[str, Any]:
        """:class:`KeyNotFound` when no archive has that hash."""
        if not self._nimbus.blobs.base.has_content(check_sha256(sha256)):
            raise KeyNotFound(f"no archive with SHA-256 {sha256} is stored: upload it")
        return {"sha256": sha256}

    @router.route(
        "POST",
        "/v1/uploads",
        summary="Begin an upload of archive, conf and topology",
        responses={201: UploadDocument},
        errors=(503,),
    )
    def begin_upload(self) -> dict[str, Any]:
        """The handle of a new upload."""
        self._nimbus.status.require()
        return {"handle": self._nimbus.uploads.begin()}

    @router.route(
        "POST",
        "/v1/uploads/{handle}/finish",
        summary="End an upload: its parts no longer change",
        responses={200: FinishedUpload},
        errors=_WRITE_ERRORS,
    )
    def finish_upload(self, handle: Annotated[str, _HANDLE]) -> dict[str, Any]:
        """Metadata of the parts, which can no longer change."""
        self._nimbus.status.require()
        parts = self._nimbus.uploads.finish(handle)
        return {
            "handle": handle,
            "parts": {part: meta.to_document() for part, meta in parts.items()},
        }

    @router.route(
        "PUT",
        "/v1/uploads/{handle}/{part}",
        summary="Send one part of an upload",
        parameters=(_HANDLE, _PART, _STORED_CONTENT, _BODY_HASH, EPOCH, _COPIES, _DEGRADED),
        body=_BYTES,
        responses={201: StoredBlob},
        errors=_WRITE_ERRORS,
    )
    async def write_part(self, request: Request) -> Response:
        """Store a part of an upload."""
        uploads = self._nimbus.uploads
        handle = request.path_params["handle"]
        part = request.path_params["part"]
        await run_in_threadpool(self._nimbus.status.require)
        key = await run_in_threadpool(uploads.key, handle, part)
        await run_in_threadpool(uploads.touch, handle)
        max_bytes = self._max_bytes
        if part != "archive":
            max_bytes = min(self._max_bytes, _MAX_DOCUMENT_BYTES)
        meta, copies = await self._store(
            request, key, write_terms(request), max_bytes, lambda: uploads.refresh(handle)
        )
        # If the upload was cancelled while the last bytes arrived, this removes the part.
        await run_in_threadpool(uploads.stored, handle)
        return JSONResponse({**meta.to_document(), "copies": copies}, status_code=201)

    @router.route(
        "GET",
        "/v1/uploads/{handle}/{part}",
        summary="Read one part of an upload back",
        parameters=(_HANDLE, _PART),
        responses=_CONTENT_RESPONSES,
        errors=(404, 503),
    )
    async def read_part(self, request: Request) -> Response:
        """Content of a part of an upload."""
        handle = request.path_params["handle"]
        part = request.path_params["part"]
        return await self._send(
            request, await run_in_threadpool(self._nimbus.uploads.key, handle, part)
        )

    @router.route(
        "DELETE",
        "/v1/uploads/{handle}",
        summary="Cancel an upload and remove its parts",
        parameters=(_HANDLE,),
        responses={204: None},
        errors=_WRITE_ERRORS,
    )
    async def cancel_upload(self, request: Request) -> Response:
        """Remove an upload with its parts, and the staged files of a failed run."""
        await run_in_threadpool(cancel_upload, self._nimbus, request.path_params["handle"])
        return Response(status_code=204)

    async def _send(self, request: Request, key: str) -> Response:
        """Content of a blob of this nimbus; :class:`KeyNotFound` if it is not here.

        Its hash is the ETag.
        """
        meta, stream = await run_in_threadpool(self._nimbus.blobs.base.open_with_meta, key)
        headers = {"Content-Type": "application/octet-stream", "X-Content-SHA256": meta.sha256}
        return StreamResponse(
            stream,
            meta.size,
            request=request,
            chunk=self._chunk_bytes,
            idle_secs=self._idle_secs,
            headers=headers,
            tag=f'"{meta.sha256}"',
        )

    async def _store(
        self,
        request: Request,
        key: str,
        terms: WriteTerms,
        max_bytes: int,
        touch: Any = lambda: None,
    ) -> tuple[BlobMeta, int]:
        """Store the body, or with ``?sha256=`` content that is stored already.

        Return the blob and the number of nimbuses that hold it. ``touch`` is called with each chunk
        of the body.
        """
        sha256 = request.query_params.get("sha256")
        if sha256 is not None:
            return await self._store_content(request, key, sha256, terms)
        inbox = self._nimbus.inbox
        async with receive_file(
            request, inbox, max_bytes=max_bytes, idle_secs=self._idle_secs, touch=touch
        ) as (path, body_sha256):
            return await run_in_threadpool(
                self._nimbus.blobs.put_file, key, path, body_sha256, terms
            )

    async def _store_content(
        self, request: Request, key: str, sha256: str, terms: WriteTerms
    ) -> tuple[BlobMeta, int]:
        """Store content that is here already under ``key``; :class:`KeyNotFound` without it.

        Only for users with all rights: for others the hash of a content would be enough to read it.
        """
        stored = None
        if may_do_all(request.scope, self._nimbus.conf.values):
            stored = await run_in_threadpool(
                self._nimbus.blobs.put_content, key, check_sha256(sha256), terms
            )
        if stored is None:
            raise KeyNotFound(f"content {sha256} is not (or no longer) stored: send its bytes")
        return stored

    def _check_replica(self, request: Request) -> None:
        """Raise :class:`Fenced` unless the sender leads in the current epoch.

        The leader itself does not accept copies.
        """
        claimed = _number(request, "X-Storm-Epoch")
        if claimed is None:
            raise InvalidRequest("a copy carries the header X-Storm-Epoch")
        self._nimbus.cluster.state.sync_path(paths.EPOCH)
        current = self._nimbus.cluster.epoch()
        is_accepted = False
        if current is not None:
            epoch, record = current
            is_leader = record.leader == self._nimbus.identity.address
            is_accepted = epoch == claimed and not is_leader
        if not is_accepted:
            raise Fenced(f"the copy comes from epoch {claimed}, which is over: nothing was stored")
