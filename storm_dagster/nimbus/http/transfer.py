"""Bodies that are files: received with limits, sent with ranges, and never waiting for ever."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from storm_dagster.blobstore import BlobMeta
from storm_dagster.blobstore.store import check_sha256
from storm_dagster.http.streams import StreamResponse
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.nimbus.requests.inbox import new_inbox_file


@dataclass(frozen=True)
class Received:
    """A body that was received whole. Its new owner moves the file away; :meth:`discard` is always safe."""

    path: Path
    size: int
    sha256: str

    def discard(self) -> None:
        """Remove the file if it is still there."""
        self.path.unlink(missing_ok=True)


async def receive_file(
    request: Request, inbox: Path, *, most_bytes: int, idle_secs: float, touch: Callable[[], object] = lambda: None
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
            raise Unavailable(f"no byte arrived for {idle_secs:g} s: the transfer was dropped, send it again") from None
        except ClientDisconnect:
            raise InvalidRequest("the transfer broke off: send it again") from None
        except OSError as error:
            raise Unavailable(f"the body cannot be stored ({error.strerror}): free space on nimbus's disk") from error
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
    return InvalidRequest(f"the body is larger than {most_bytes} bytes: send less, or raise nimbus.upload.max.bytes")


class BlobResponse(StreamResponse):
    """A blob's bytes, with their hash. A reader that takes nothing for ``idle_secs`` is dropped."""

    def __init__(self, meta: BlobMeta, stream: BinaryIO, *, request: Request, chunk: int, idle_secs: float) -> None:
        super().__init__(
            stream,
            meta.size,
            request=request,
            chunk=chunk,
            idle_secs=idle_secs,
            headers={"Content-Type": "application/octet-stream", "X-Content-SHA256": meta.sha256},
            tag=f'"{meta.sha256}"',
        )
