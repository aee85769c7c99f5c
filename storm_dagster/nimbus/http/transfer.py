"""Bodies that are files: received with limits, sent with ranges, and never waiting for ever (S10, S12)."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from storm_dagster.blobstore import BlobMeta
from storm_dagster.blobstore.store import check_sha256
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.nimbus.inbox import new_inbox_file

__all__ = ["BlobResponse", "Received", "parse_range", "receive_file"]

_RANGE = re.compile(r"bytes=(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})")


@dataclass(frozen=True)
class Received:
    """A body that arrived whole. Who takes the file over moves it away; :meth:`discard` is always safe."""

    path: Path
    size: int
    sha256: str

    def discard(self) -> None:
        """Remove the file if it is still there."""
        self.path.unlink(missing_ok=True)


async def receive_file(
    request: Request,
    inbox: Path,
    *,
    most_bytes: int,
    idle_secs: float,
    touch: Callable[[], object] = lambda: None,
) -> Received:
    """Write the request's body to a fresh file of ``inbox``.

    Refused with :class:`InvalidRequest` before more than ``most_bytes`` were read, when the body breaks
    off, or when its hash is not that of the header ``X-Content-SHA256`` (which may be absent);
    :class:`Unavailable` after ``idle_secs`` without a byte or when the disk fails. ``touch`` is called with
    each chunk. Nothing is left of a refused body.
    """
    announced = request.headers.get("x-content-sha256")
    expected = check_sha256(announced) if announced is not None else None
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most_bytes:
        raise _too_large(most_bytes)
    path = new_inbox_file(inbox)
    digest = hashlib.sha256()
    size = 0
    try:
        try:
            with await run_in_threadpool(path.open, "xb") as sink:
                stream = request.stream()
                while (chunk := await asyncio.wait_for(anext(stream, None), idle_secs)) is not None:
                    size += len(chunk)
                    if size > most_bytes:
                        raise _too_large(most_bytes)
                    digest.update(chunk)
                    await run_in_threadpool(sink.write, chunk)
                    touch()
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
        if expected is not None and digest.hexdigest() != expected:
            raise InvalidRequest(
                f"{size} bytes with SHA-256 {digest.hexdigest()} arrived, {expected} was announced: "
                "the transfer was damaged, send it again"
            )
        return Received(path, size, digest.hexdigest())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _too_large(most_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"the body is larger than {most_bytes} bytes: send less, or raise nimbus.upload.max.bytes"
    )


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(first, last) byte of a single range of the header ``Range``; ``None`` for the whole content.

    A header that is no single byte range is ignored, as RFC 9110 allows; ``ValueError`` for one that lies
    outside of the content (status 416).
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or (not match["first"] and not match["last"]):
        return None
    if not match["first"]:
        length = min(int(match["last"]), size)
        if length == 0:
            raise ValueError("an empty range")
        return size - length, size - 1
    first = int(match["first"])
    last = min(int(match["last"]), size - 1) if match["last"] else size - 1
    if first >= size or last < first:
        raise ValueError("a range outside of the content")
    return first, last


class BlobResponse(Response):
    """A blob's bytes. A reader that takes nothing for ``idle_secs`` is dropped."""

    def __init__(
        self, meta: BlobMeta, stream: BinaryIO, *, request: Request, chunk: int, idle_secs: float
    ) -> None:
        headers = {
            "Content-Type": "application/octet-stream",
            "ETag": f'"{meta.sha256}"',
            "X-Content-SHA256": meta.sha256,
            "Accept-Ranges": "bytes",
            "Cache-Control": "no-cache",
        }
        status = 200
        first, last = 0, meta.size - 1
        if f'"{meta.sha256}"' in request.headers.get("if-none-match", ""):
            status, last = 304, -1
        else:
            try:
                chosen = parse_range(request.headers.get("range"), meta.size)
            except ValueError:
                status, last = 416, -1
                headers["Content-Range"] = f"bytes */{meta.size}"
            else:
                if chosen is not None:
                    status, (first, last) = 206, chosen
                    headers["Content-Range"] = f"bytes {first}-{last}/{meta.size}"
        self._length = max(0, last - first + 1)
        if status != 304:
            headers["Content-Length"] = str(self._length)
        super().__init__(status_code=status, headers=headers)
        if status == 304:
            self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._stream = stream
        self._first = first
        self._chunk = chunk
        self._idle_secs = idle_secs
        self._body_wanted = request.method != "HEAD"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, a chunk at a time."""

        async def patiently(message: Any) -> None:
            await asyncio.wait_for(send(message), self._idle_secs)

        try:
            await patiently(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            left = self._length if self._body_wanted else 0
            await run_in_threadpool(self._stream.seek, self._first)
            while left > 0:
                chunk = await run_in_threadpool(self._stream.read, min(self._chunk, left))
                if not chunk:
                    raise OSError("the stored content is shorter than its description")
                left -= len(chunk)
                await patiently({"type": "http.response.body", "body": chunk, "more_body": left > 0})
            if not self._body_wanted or self._length == 0:
                await patiently({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, asyncio.TimeoutError):
            # Leaving without the last chunk makes the server close the connection.
            raise ConnectionAbortedError(f"a reader took nothing for {self._idle_secs:g} s") from None
        finally:
            self._stream.close()
