"""Bodies that are files: received with limits, and never waiting for ever."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from storm_dagster.blobstore.store import check_sha256
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.nimbus.requests.inbox import new_inbox_file


@asynccontextmanager
async def receive_file(
    request: Request, inbox: Path, *, most_bytes: int, idle_secs: float, touch: Callable[[], object] = lambda: None
) -> AsyncIterator[tuple[Path, str]]:
    """Write the request's body to a fresh file of ``inbox``; the file, which goes in the end, and the body's hash.

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
        yield path, digest.hexdigest()
    finally:
        path.unlink(missing_ok=True)


def _too_large(most_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"the body is larger than {most_bytes} bytes: send less, or raise nimbus.upload.max.bytes")
