"""Blobs, their copies on followers, and upload sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import NotRequired, TypedDict

from storm_dagster.blobstore import BlobMeta
from storm_dagster.blobstore.store import check_sha256
from storm_dagster.http.authentication import may_do_all
from storm_dagster.http.description import HttpOperation, Media, Parameter, path_names
from storm_dagster.http.responses import Endpoint, get
from storm_dagster.http.schemas import Digest, UploadHandle, closed, extensible
from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced, InvalidRequest, KeyNotFound
from storm_dagster.model.names import check_blob_key
from storm_dagster.nimbus.blobs.replicated_store import WriteTerms
from storm_dagster.nimbus.http.transfer import BlobResponse, receive_file
from storm_dagster.nimbus.member import Nimbus

_MOST_DOCUMENT_BYTES = 64 << 20
"""Largest conf or topology part of an upload."""


_Number = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


@extensible
class BlobDocument(TypedDict):
    """A stored blob."""

    key: str
    size: int
    sha256: Digest


class StoredBlob(BlobDocument):
    """A blob that was written, with the number of nimbuses that hold it."""

    copies: NotRequired[int]


@closed
class BlobList(TypedDict):
    """Blobs that one nimbus holds."""

    cluster_id: str | None
    blobs: list[BlobDocument]


@closed
class ArchiveDocument(TypedDict):
    """An archive that is stored."""

    sha256: Digest


@closed
class UploadDocument(TypedDict):
    """An upload that began."""

    handle: UploadHandle


@closed
class FinishedUpload(TypedDict):
    """An upload whose parts no longer change."""

    handle: str
    parts: dict[str, BlobDocument]


def _key(request: Request) -> str:
    return check_blob_key(request.path_params["key"])


def _number(request: Request, header: str) -> int | None:
    text = request.headers.get(header)
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 9:
        raise InvalidRequest(f"header {header} must be a number, got {text!r:.40}")
    return int(text)


def write_terms(request: Request) -> WriteTerms:
    """Terms of a write from its headers."""
    return WriteTerms(
        epoch=_number(request, "X-Storm-Epoch"),
        minimum=_number(request, "X-Storm-Min-Replication"),
        allow_degraded=request.headers.get("X-Storm-Allow-Degraded", "").lower() == "true",
    )


class _BlobEndpoints:
    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._chunk = int(nimbus.conf["storm.blobstore.inputstream.buffer.size.bytes"])
        self._idle = float(nimbus.conf["nimbus.file.copy.expiration.secs"])
        self._most = int(nimbus.conf["nimbus.upload.max.bytes"])

    def list_blobs(self, request: Request) -> dict[str, Any]:
        prefix = request.query_params.get("prefix", "")
        blobs = [meta.to_document() for meta in self._nimbus.blobs.list(prefix)]
        return {"cluster_id": self._nimbus.cluster.cluster_id(), "blobs": blobs}

    async def send(self, request: Request, key: str) -> Response:
        meta, stream = await run_in_threadpool(self._nimbus.blobs.base.open_with_meta, key)
        return BlobResponse(meta, stream, request=request, chunk=self._chunk, idle_secs=self._idle)

    async def read_blob(self, request: Request) -> Response:
        return await self.send(request, _key(request))

    async def write_blob(self, request: Request) -> Response:
        key, terms = _key(request), write_terms(request)
        await run_in_threadpool(self._nimbus.status.require, terms.epoch)
        meta, copies = await self._store(request, key, terms, self._most)
        return JSONResponse({**meta.to_document(), "copies": copies}, status_code=201)

    async def _store(
        self, request: Request, key: str, terms: WriteTerms, most_bytes: int, touch: Any = lambda: None
    ) -> tuple[BlobMeta, int]:
        """Store the body, or with ``?sha256=`` a content that is here already, under ``key``."""
        blobs = self._nimbus.blobs
        sha256 = request.query_params.get("sha256")
        if sha256 is not None:
            # Whoever knows a hash would otherwise get the content.
            stored = None
            if may_do_all(request.scope, self._nimbus.conf.values):
                stored = await run_in_threadpool(blobs.put_content, key, check_sha256(sha256), terms)
            if stored is None:
                raise KeyNotFound(f"content {sha256} is not stored (any more): send its bytes")
            return stored
        received = await receive_file(
            request, self._nimbus.inbox, most_bytes=most_bytes, idle_secs=self._idle, touch=touch
        )
        try:
            return await run_in_threadpool(blobs.put_file, key, received.path, received.sha256, terms)
        finally:
            received.discard()

    async def delete_blob(self, request: Request) -> Response:
        await run_in_threadpool(self._nimbus.blobs.delete, _key(request), write_terms(request))
        return Response(status_code=204)

    def has_archive(self, request: Request) -> dict[str, Any]:
        sha256 = check_sha256(request.path_params["sha256"])
        if not self._nimbus.blobs.base.has_content(sha256):
            raise KeyNotFound(f"no archive with SHA-256 {sha256} is stored: upload it")
        return {"sha256": sha256}

    # copies

    def _check_replica(self, request: Request) -> None:
        """The sender must be the leader of the present epoch, and this nimbus must not."""
        claimed = _number(request, "X-Storm-Epoch")
        if claimed is None:
            raise InvalidRequest("a copy carries the header X-Storm-Epoch")
        state = self._nimbus.cluster.state
        state.sync_path(paths.EPOCH)
        found = self._nimbus.cluster.epoch()
        if found is None or found[0] != claimed or found[1].leader == self._nimbus.identity.address:
            raise Fenced(f"the copy comes from epoch {claimed}, which is over: nothing was stored")

    async def write_replica(self, request: Request) -> Response:
        key = _key(request)
        await run_in_threadpool(self._check_replica, request)
        sha256 = check_sha256(request.headers.get("X-Content-SHA256"))
        accept = self._nimbus.blobs.accept_replica
        if request.headers.get("X-Content-By-Hash", "").lower() == "true":
            meta = await run_in_threadpool(accept, key, sha256, None)
            return JSONResponse(meta.to_document())
        received = await receive_file(request, self._nimbus.inbox, most_bytes=self._most, idle_secs=self._idle)
        try:
            meta = await run_in_threadpool(accept, key, sha256, received.path)
        finally:
            received.discard()
        return JSONResponse(meta.to_document())

    async def delete_replica(self, request: Request) -> Response:
        key = _key(request)
        await run_in_threadpool(self._check_replica, request)
        await run_in_threadpool(self._nimbus.blobs.drop_replica, key)
        return Response(status_code=204)

    # uploads

    def begin_upload(self, request: Request) -> dict[str, Any]:
        self._nimbus.status.require()
        return {"handle": self._nimbus.uploads.begin()}

    async def write_part(self, request: Request) -> Response:
        uploads = self._nimbus.uploads
        handle, part = request.path_params["handle"], request.path_params["part"]
        await run_in_threadpool(self._nimbus.status.require)
        key = uploads.key(handle, part)
        await run_in_threadpool(uploads.touch, handle)
        most = self._most if part == "archive" else min(self._most, _MOST_DOCUMENT_BYTES)
        meta, copies = await self._store(request, key, write_terms(request), most, lambda: uploads.refresh(handle))
        # Cancelled while the last bytes were on their way: what was stored since goes as well.
        await run_in_threadpool(uploads.stored, handle)
        return JSONResponse({**meta.to_document(), "copies": copies}, status_code=201)

    async def read_part(self, request: Request) -> Response:
        key = self._nimbus.uploads.key(request.path_params["handle"], request.path_params["part"])
        return await self.send(request, key)

    def finish_upload(self, request: Request) -> dict[str, Any]:
        self._nimbus.status.require()
        handle = request.path_params["handle"]
        parts = self._nimbus.uploads.finish(handle)
        return {"handle": handle, "parts": {part: meta.to_document() for part, meta in parts.items()}}

    async def cancel_upload(self, request: Request) -> Response:
        await run_in_threadpool(self._nimbus.status.require)
        await run_in_threadpool(self._nimbus.uploads.cancel, request.path_params["handle"])
        return Response(status_code=204)


def blob_operations(nimbus: Nimbus) -> list[HttpOperation]:
    """The routes of this module."""
    on = _BlobEndpoints(nimbus)
    in_path = {
        "key": Parameter("key", str, "Blob key", where="path"),
        "handle": Parameter("handle", str, "What POST /v1/uploads gave", where="path"),
        "part": Parameter("part", str, "archive, conf or topology", where="path"),
        "sha256": Parameter("sha256", str, where="path"),
    }
    epoch = Parameter("X-Storm-Epoch", _Number, "Refuse unless the leader's epoch is this one", "header")
    terms = (
        epoch,
        Parameter("X-Storm-Min-Replication", _Number, "Copies to wait for", "header"),
        Parameter("X-Storm-Allow-Degraded", str, "true: accept fewer copies", "header"),
    )
    announced = Parameter("X-Content-SHA256", Digest, "Hash of the body: another body is refused", "header")
    by_content = Parameter("sha256", Digest, "Instead of a body: content that is stored already")
    by_hash = Parameter("X-Content-By-Hash", str, "true: no body", "header")
    whole = Media({"application/octet-stream": bytes})
    content: dict[int, Any] = {200: whole, 206: whole, 304: None, 416: None}

    def one(
        method: Literal["GET", "POST", "PUT", "DELETE"],
        path: str,
        endpoint: Endpoint,
        summary: str,
        *asked: Parameter,
        answers: Mapping[int, Any],
        errors: tuple[int, ...] = (404, 409, 503),
    ) -> HttpOperation:
        parameters = (*(in_path[name] for name in path_names(path)), *asked)
        body = ("application/octet-stream", bytes) if method == "PUT" else None
        return HttpOperation(
            method, f"/v1{path}", endpoint, summary, "blobs", parameters, body, answers=answers, errors=errors
        )

    def remove(path: str, endpoint: Endpoint, summary: str, *asked: Parameter) -> HttpOperation:
        return one("DELETE", path, endpoint, summary, *asked, answers={204: None})

    def send(path: str, endpoint: Endpoint, summary: str) -> HttpOperation:
        return one("GET", path, endpoint, summary, answers=content, errors=(404, 503))

    return [
        one(
            "GET",
            "/blobs",
            get(on.list_blobs),
            "Blobs that this nimbus holds",
            Parameter("prefix", str, "Only keys that begin so"),
            answers={200: BlobList},
            errors=(503,),
        ),
        send("/blobs/{key}", on.read_blob, "Content of a blob, or the byte range of it that Range asks for"),
        one(
            "PUT",
            "/blobs/{key}",
            on.write_blob,
            "Store a blob; answered when enough nimbuses hold it",
            by_content,
            announced,
            *terms,
            answers={201: StoredBlob},
        ),
        remove("/blobs/{key}", on.delete_blob, "Remove a blob", *terms),
        one(
            "PUT",
            "/replicas/{key}",
            on.write_replica,
            "Between nimbuses: take over a copy",
            epoch,
            announced,
            by_hash,
            answers={200: BlobDocument},
        ),
        remove("/replicas/{key}", on.delete_replica, "Between nimbuses: drop a copy", epoch),
        one(
            "GET",
            "/archives/{sha256}",
            get(on.has_archive),
            "Whether an archive of that hash is stored",
            answers={200: ArchiveDocument},
            errors=(404,),
        ),
        one(
            "POST",
            "/uploads",
            get(on.begin_upload, 201),
            "Begin an upload of archive, conf and topology",
            answers={201: UploadDocument},
            errors=(503,),
        ),
        one(
            "POST",
            "/uploads/{handle}/finish",
            get(on.finish_upload),
            "End an upload: from now on its parts do not change",
            answers={200: FinishedUpload},
        ),
        one(
            "PUT",
            "/uploads/{handle}/{part}",
            on.write_part,
            "Send one part of an upload",
            by_content,
            announced,
            *terms,
            answers={201: StoredBlob},
        ),
        send("/uploads/{handle}/{part}", on.read_part, "Read one part of an upload back"),
        remove("/uploads/{handle}", on.cancel_upload, "Cancel an upload: nothing of it stays"),
    ]
