"""Strict query parameters, error documents, and files with ranges.

Files are sent a chunk at a time. A reader that does not take the chunks is dropped.
"""

import asyncio
import json
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, BinaryIO, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from storm_dagster.model.errors import (
    NOT_LEADING_HEADER,
    InvalidRequest,
    NotLeading,
    StormDagsterError,
)

# 18 digits fit into 64 bits.
_INT = re.compile(r"-?[0-9]{1,18}")


def query_text(request: Request, name: str, max_characters: int = 4096) -> str | None:
    """The query parameter, ``None`` when it is absent or empty.

    :class:`InvalidRequest` when it has more than ``max_characters``.
    """
    value = request.query_params.get(name)
    if value is not None and len(value) > max_characters:
        raise InvalidRequest(
            f"parameter {name} has {len(value)} characters: at most {max_characters} are allowed"
        )
    return value or None


def query_int(request: Request, name: str, default: int | None = None) -> int | None:
    """The parameter as an integer, ``default`` when it is absent or empty.

    :class:`InvalidRequest` for other text.
    """
    value = query_text(request, name)
    if value is None:
        return default
    if not _INT.fullmatch(value):
        raise InvalidRequest(f"parameter {name} must be a whole number, got {value!r:.40}")
    return int(value)


def query_flag(request: Request, name: str) -> bool:
    """True for ``1`` and ``true``; false for ``0``, ``false`` and no value.

    :class:`InvalidRequest` for other text.
    """
    return query_word(request, name, ("false", "true", "0", "1"), "false") in ("true", "1")


def query_word(request: Request, name: str, words: Collection[str], default: str) -> str:
    """The parameter, one of ``words``; :class:`InvalidRequest` otherwise."""
    value = (query_text(request, name) or default).strip()
    if value not in words:
        raise InvalidRequest(
            f"parameter {name} must be one of {', '.join(words)}, got {value!r:.40}"
        )
    return value


_log = logging.getLogger(__name__)


class JSONResponse(Response):
    """JSON of any document, also of text and numbers that other processes wrote.

    A lone surrogate is an escape, since UTF-8 has no bytes for it. NaN and infinity are ``null``,
    which JSON has in their place.
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the document."""
        try:
            text = _encode(content)
        except ValueError:
            text = _encode(_with_finite_numbers(content))
        # The replacement of a surrogate is the escape that JSON has for it.
        return text.encode("utf-8", "backslashreplace")


def _encode(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _with_finite_numbers(value: Any) -> Any:
    """Copy of a value in which ``None`` replaces NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _with_finite_numbers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_finite_numbers(part) for part in value]
    return value


Endpoint = Callable[[Request], Awaitable[Response]]
_T = TypeVar("_T")
MAX_JSON_BYTES = 1 << 20
"""Largest JSON body of a request."""
_BODY_SECS = 10.0
"""Longest time that the whole of it can take."""
_MAX_READS = 16
"""Reads in progress at the same time."""
_reads: RunVar[CapacityLimiter] = RunVar("storm_dagster_reads")
"""Limiter of the reads; each event loop has its own."""


def error_response(error: StormDagsterError) -> JSONResponse:
    """The error document with the status of its class."""
    headers = {NOT_LEADING_HEADER: "true"} if isinstance(error, NotLeading) else None
    return JSONResponse(error.to_document(), status_code=error.http_status, headers=headers)


async def refuse_websocket(send: Send) -> None:
    """End the handshake with status 403."""
    await send({"type": "websocket.close", "code": 1008})


async def _typed(request: Request, error: Exception) -> Response:
    assert isinstance(error, StormDagsterError)
    return error_response(error)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = InvalidRequest(f"{request.method} {request.url.path!r:.200}: {error.detail}")
    return JSONResponse(kind.to_document(), status_code=error.status_code, headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    # The stack goes to the log only: it may contain data that a caller must not see.
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(StormDagsterError("the service failed to answer: see its log"))


EXCEPTION_HANDLERS: dict[Any, Any] = {
    StormDagsterError: _typed,
    HTTPException: _http,
    Exception: _unexpected,
}
"""Handlers of a Starlette application: every error becomes an error document."""


async def bounded_json(request: Request) -> dict[str, Any]:
    """The request's body as a JSON map; an empty body is an empty map.

    :class:`InvalidRequest` for a body of more than 1 MiB, one that does not arrive within 10 s, and
    one that is not a JSON map.
    """
    # The limit is checked for each chunk: the announced length may be missing or wrong.
    raw = bytearray()
    try:
        stream = request.stream()
        deadline = time.monotonic() + _BODY_SECS
        while True:
            remaining_secs = max(0.0, deadline - time.monotonic())
            chunk = await asyncio.wait_for(anext(stream, None), remaining_secs)
            if chunk is None:
                break
            raw += chunk
            if len(raw) > MAX_JSON_BYTES:
                raise InvalidRequest(
                    f"the request's body is larger than {MAX_JSON_BYTES} bytes: send less"
                )
    except (TimeoutError, asyncio.TimeoutError, ClientDisconnect):
        raise InvalidRequest("the request's body did not arrive: send it again") from None
    if not raw.strip():
        return {}
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidRequest("the request's body is not valid JSON: send a JSON map") from None
    if not isinstance(document, dict):
        raise InvalidRequest(
            f"the request's body is a JSON {type(document).__name__}: send a JSON map"
        )
    return document


async def run_read(function: Callable[..., _T], *args: Any) -> _T:
    """Run a blocking read in a thread, at most 16 at once.

    Changes have their own threads (``run_in_threadpool``): ``kill`` does not wait for pages,
    however many of these wait for a topology master.
    """
    try:
        limiter = _reads.get()
    except LookupError:
        limiter = CapacityLimiter(_MAX_READS)
        _reads.set(limiter)
    return await to_thread.run_sync(function, *args, limiter=limiter)


# A single range of the header ``Range``: first byte, last byte, or a number of bytes at the end.
_RANGE = re.compile(r"bytes=(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})")


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(first, last) byte of the range in the header ``Range``.

    ``None`` for the whole content. A header that is not a single byte range is ignored, as RFC 9110
    allows. ``ValueError`` for a range that lies outside of the content (status 416).
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
    """``size`` bytes of an open file, or the range that the request names.

    The file is closed at the end. ``tag`` is an ETag: ``If-None-Match`` is answered with 304,
    ``If-Range`` of another content with all of it. A reader that takes no chunk for ``idle_secs``
    is dropped.
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
        first = 0
        length = size
        if tag is not None and tag in request.headers.get("if-none-match", ""):
            status = 304
            length = 0
        else:
            is_same_content = request.headers.get("if-range", tag) == tag
            range_header = request.headers.get("range") if is_same_content else None
            try:
                byte_range = parse_range(range_header, size)
            except ValueError:
                status = 416
                length = 0
                fields["Content-Range"] = f"bytes */{size}"
            else:
                if byte_range is not None:
                    status = 206
                    first, last = byte_range
                    length = last - first + 1
                    fields["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._length = length
        if status != 304:
            fields["Content-Length"] = str(self._length)
        super().__init__(status_code=status, headers=fields)
        self._stream = stream
        self._first = first
        self._chunk = chunk
        self._idle_secs = idle_secs
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the content, a chunk at a time.

        Raises ``ConnectionAbortedError`` for a reader that takes no chunk in time, and ``OSError``
        if the file has become shorter: then the server closes the connection.
        """

        async def send_in_time(message: Any) -> None:
            await asyncio.wait_for(send(message), self._idle_secs)

        try:
            await send_in_time(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            unsent = self._length if self._request.method != "HEAD" else 0
            await run_in_threadpool(self._stream.seek, self._first)
            # The server accepts chunks for a peer that has disconnected: the loop must see it.
            while unsent > 0 and not await self._request.is_disconnected():
                chunk = await run_in_threadpool(self._stream.read, min(self._chunk, unsent))
                if not chunk:
                    raise OSError("the content is shorter than announced")
                unsent -= len(chunk)
                await send_in_time(
                    {"type": "http.response.body", "body": chunk, "more_body": unsent > 0}
                )
            if self._request.method == "HEAD" or self._length == 0:
                await send_in_time({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, asyncio.TimeoutError):
            # Leaving without the last chunk makes the server close the connection.
            raise ConnectionAbortedError(
                f"the client read no data for {self._idle_secs:g} s"
            ) from None
        finally:
            self._stream.close()
