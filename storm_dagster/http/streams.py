"""Bodies that are files: sent with ranges, a chunk at a time, and never to a reader that takes nothing."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, BinaryIO

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_RANGE = re.compile(r"bytes=(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})")


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


class StreamResponse(Response):
    """``size`` bytes of an open file, or the range of them that the request asks for; the file is closed at the end.

    ``tag`` is an ETag: ``If-None-Match`` is answered with 304, ``If-Range`` of another content with all of it.
    A reader that takes nothing for ``idle_secs`` is dropped.
    """

    def __init__(
        self,
        stream: BinaryIO,
        size: int,
        *,
        request: Request,
        chunk: int,
        idle_secs: float,
        headers: Mapping[str, str],
        tag: str | None = None,
    ) -> None:
        fields = {"Accept-Ranges": "bytes", "Cache-Control": "no-cache", **headers}
        if tag is not None:
            fields["ETag"] = tag
        status = 200
        first, last = 0, size - 1
        if tag is not None and tag in request.headers.get("if-none-match", ""):
            status, last = 304, -1
        else:
            wanted = request.headers.get("range")
            if request.headers.get("if-range", tag) != tag:
                wanted = None
            try:
                chosen = parse_range(wanted, size)
            except ValueError:
                status, last = 416, -1
                fields["Content-Range"] = f"bytes */{size}"
            else:
                if chosen is not None:
                    status, (first, last) = 206, chosen
                    fields["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._length = max(0, last - first + 1)
        if status != 304:
            fields["Content-Length"] = str(self._length)
        super().__init__(status_code=status, headers=fields)
        if status == 304:
            self.raw_headers: list[tuple[bytes, bytes]] = [
                pair for pair in self.raw_headers if pair[0] != b"content-length"
            ]
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
            await patiently({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            left = self._length if self._body_wanted else 0
            await run_in_threadpool(self._stream.seek, self._first)
            while left > 0:
                chunk = await run_in_threadpool(self._stream.read, min(self._chunk, left))
                if not chunk:
                    raise OSError("the content is shorter than announced")
                left -= len(chunk)
                await patiently({"type": "http.response.body", "body": chunk, "more_body": left > 0})
            if not self._body_wanted or self._length == 0:
                await patiently({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, asyncio.TimeoutError):
            # Leaving without the last chunk makes the server close the connection.
            raise ConnectionAbortedError(f"a reader took nothing for {self._idle_secs:g} s") from None
        finally:
            self._stream.close()
