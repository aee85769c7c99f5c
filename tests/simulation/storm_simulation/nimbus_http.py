"""The HTTP routes of a simulated nimbus that nimbuses, supervisors and runs use: as
``nimbus/http/blob_routes.py``.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.blobstore.store import check_sha256
from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced, InvalidRequest, KeyNotFound, StormDagsterError
from storm_dagster.nimbus.blobs.replicated_store import WriteTerms
from storm_dagster.nimbus.member import Nimbus
from storm_simulation.network import Request, Response


def _json(document: Any, status: int = 200) -> Response:
    return Response(status, json.dumps(document).encode())


def _number(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    return None if text is None else int(text)


def _terms(headers: Mapping[str, str]) -> WriteTerms:
    return WriteTerms(
        epoch=_number(headers, "X-Storm-Epoch"),
        minimum=_number(headers, "X-Storm-Min-Replication"),
        allow_degraded=headers.get("X-Storm-Allow-Degraded", "").lower() == "true",
    )


def _received(nimbus: Nimbus, request: Request) -> tuple[Any, str]:
    """The body as a file of the inbox, and its hash."""
    sha256 = hashlib.sha256(request.body).hexdigest()
    announced = request.headers.get("X-Content-SHA256")
    if announced is not None and announced != sha256:
        raise InvalidRequest("the body does not have the hash that was announced: send it again")
    path = nimbus.inbox / f"in-{uuid.uuid4().hex}"
    path.write_bytes(request.body)
    return path, sha256


def _check_replica(nimbus: Nimbus, request: Request) -> None:
    claimed = _number(request.headers, "X-Storm-Epoch")
    state = nimbus.cluster.state
    state.sync_path(paths.EPOCH)
    found = nimbus.cluster.epoch()
    if found is None or found[0] != claimed or found[1].leader == nimbus.identity.address:
        raise Fenced(f"the copy comes from epoch {claimed}, which is over: nothing was stored")


def _write_blob(nimbus: Nimbus, key: str, request: Request) -> Response:
    terms = _terms(request.headers)
    nimbus.status.require(terms.epoch)
    sha256 = request.query.get("sha256")
    if sha256 is not None:
        stored = nimbus.blobs.put_content(key, check_sha256(sha256), terms)
        if stored is None:
            raise KeyNotFound(f"content {sha256} is not (or no longer) stored: send its bytes")
        meta, copies = stored
    else:
        path, actual = _received(nimbus, request)
        try:
            meta, copies = nimbus.blobs.put_file(key, path, actual, terms)
        finally:
            path.unlink(missing_ok=True)
    return _json({**meta.to_document(), "copies": copies}, 201)


def _write_replica(nimbus: Nimbus, key: str, request: Request) -> Response:
    _check_replica(nimbus, request)
    sha256 = check_sha256(request.headers.get("X-Content-SHA256"))
    if request.headers.get("X-Content-By-Hash", "").lower() == "true":
        return _json(nimbus.blobs.accept_replica(key, sha256, None).to_document())
    path, _ = _received(nimbus, request)
    try:
        return _json(nimbus.blobs.accept_replica(key, sha256, path).to_document())
    finally:
        path.unlink(missing_ok=True)


def _read_blob(nimbus: Nimbus, key: str, request: Request) -> Response:
    meta, stream = nimbus.blobs.base.open_with_meta(key)
    headers = {"X-Content-SHA256": meta.sha256, "Content-Length": str(meta.size)}
    return Response(200, b"" if request.method == "HEAD" else stream.read(), headers)


def _route(nimbus: Nimbus, request: Request) -> Response:
    _, version, kind, *rest = request.path.split("/", 3)
    assert version == "v1"
    key = rest[0] if rest else ""
    if (request.method, kind, key) == ("GET", "blobs", ""):
        blobs = [meta.to_document() for meta in nimbus.blobs.list(request.query.get("prefix", ""))]
        return _json({"cluster_id": nimbus.cluster.cluster_id(), "blobs": blobs})
    if kind == "blobs" and request.method in ("GET", "HEAD"):
        return _read_blob(nimbus, key, request)
    if kind == "blobs" and request.method == "PUT":
        return _write_blob(nimbus, key, request)
    if kind == "blobs" and request.method == "DELETE":
        nimbus.blobs.delete(key, _terms(request.headers))
        return Response(204)
    if kind == "replicas" and request.method == "PUT":
        return _write_replica(nimbus, key, request)
    if kind == "replicas" and request.method == "DELETE":
        _check_replica(nimbus, request)
        nimbus.blobs.drop_replica(key)
        return Response(204)
    return Response(404, b"{}")


def nimbus_handler(nimbus: Nimbus) -> Callable[[Request], Response]:
    """The service of one nimbus."""

    def handle(request: Request) -> Response:
        try:
            return _route(nimbus, request)
        except StormDagsterError as error:
            return _json(error.to_document(), error.http_status)
        except Exception as error:
            document = {
                "error": {"type": "StormDagsterError", "message": f"the service failed: {error!r}"}
            }
            return _json(document, 500)

    return handle
