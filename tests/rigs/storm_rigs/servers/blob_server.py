"""A server of blobs for supervisors, whose answers a test can spoil."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import socket
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from storm_dagster.blobstore import BlobMeta
from storm_dagster.testing.waiting import eventually

_FOR_EVER_SECS = 3600.0


@dataclass
class BlobServer:
    """Serves blobs as a nimbus does, records requests, and fails on demand."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    lies: dict[str, str] = field(default_factory=dict)
    """Key -> a hash that is announced in place of the true one."""
    failures: int = 0
    """So many requests are answered with 503 first."""
    lost_after: int | None = None
    """Bytes of the next reply that arrive; the rest of it, and its end, never do. ``None``: all
    arrive.
    """
    gate: threading.Event | None = None
    """Contents are sent once it is set; ``None``: at once."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    copies: list[str | None] = field(default_factory=list)
    """How many copies each put asked for; ``None``: as many as the conf of nimbus says."""
    url: str = ""

    def put_code(
        self, code_dir: str, conf: dict[str, Any] | None = None, archive: bytes | None = None
    ) -> None:
        """The three blobs of a topology."""
        self.blobs[f"{code_dir}-stormjar.jar"] = (
            archive if archive is not None else zip_bytes({"wc.py": b"x = 1\n"})
        )
        self.blobs[f"{code_dir}-stormconf.ser"] = json.dumps(conf or {}).encode()
        self.blobs[f"{code_dir}-stormcode.ser"] = b"{}"

    def gets(self, key: str) -> int:
        return self.requests.count(("GET", key))

    async def serve_blob(self, request: Request) -> Response:
        key = request.path_params["key"]
        self.requests.append((request.method, key))
        if self.failures > 0:
            self.failures -= 1
            return Response("{}", 503)
        if request.method == "PUT":
            self.copies.append(request.headers.get("X-Storm-Min-Replication"))
            content = self.blobs[key] = await request.body()
            meta = BlobMeta(key, len(content), hashlib.sha256(content).hexdigest())
            return Response(json.dumps(meta.to_document()))
        if key not in self.blobs:
            return Response('{"error": {"type": "KeyNotFound", "message": "no blob"}}', 404)
        content = self.blobs[key]
        headers = {"X-Content-SHA256": self.lies.get(key) or hashlib.sha256(content).hexdigest()}
        if self.gate is not None and request.method == "GET":
            await asyncio.to_thread(self.gate.wait, _FOR_EVER_SECS)
        arrives, self.lost_after = self.lost_after, None
        if arrives is None:
            return Response(content, headers=headers)
        if arrives == 0:
            await asyncio.sleep(_FOR_EVER_SECS)
        return StreamingResponse(
            _cut_off(content[:arrives]), headers={**headers, "Content-Length": str(len(content))}
        )


async def _cut_off(content: bytes) -> AsyncIterator[bytes]:
    yield content
    await asyncio.sleep(_FOR_EVER_SECS)


def zip_bytes(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@contextmanager
def serve_blobs() -> Iterator[BlobServer]:
    """A real HTTP server on a free port of loopback."""
    blobs = BlobServer()
    methods = ["GET", "HEAD", "PUT"]
    app = Starlette(routes=[Route("/v1/blobs/{key}", blobs.serve_blob, methods=methods)])
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    eventually(lambda: server.started, what="the blob server's start")
    blobs.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield blobs
    server.should_exit = True
    thread.join(timeout=10)
    listener.close()
