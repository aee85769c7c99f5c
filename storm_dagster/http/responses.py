"""Query parameters, read strictly; errors as JSON documents, and endpoints that are plain functions."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from storm_dagster.model.errors import InvalidRequest, StormDagsterError

_INT = re.compile(r"-?[0-9]{1,18}")


def query_text(request: Request, name: str, longest: int = 4096) -> str | None:
    """The query parameter, ``None`` when it is absent or empty; :class:`InvalidRequest` when it is too long."""
    value = request.query_params.get(name)
    if value is not None and len(value) > longest:
        raise InvalidRequest(f"parameter {name} has {len(value)} characters: at most {longest} are allowed")
    return value or None


def query_int(request: Request, name: str, default: int | None = None) -> int | None:
    """The parameter as a whole number; :class:`InvalidRequest` when it is none."""
    value = query_text(request, name)
    if value is None:
        return default
    if not _INT.fullmatch(value):
        raise InvalidRequest(f"parameter {name} must be a whole number, got {value!r:.40}")
    return int(value)


def query_flag(request: Request, name: str) -> bool:
    """Whether the parameter is ``1`` or ``true``; :class:`InvalidRequest` unless it is one of these, 0 or false."""
    return query_word(request, name, ("false", "true", "0", "1"), "false") in ("true", "1")


def query_word(request: Request, name: str, words: Collection[str], default: str) -> str:
    """The parameter, if it is one of ``words``; :class:`InvalidRequest` otherwise."""
    value = (query_text(request, name) or default).strip()
    if value not in words:
        raise InvalidRequest(f"parameter {name} must be one of {', '.join(words)}, got {value!r:.40}")
    return value


_log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
_T = TypeVar("_T")
MOST_JSON_BYTES = 1 << 20
"""Largest JSON body of a request."""
_BODY_SECS = 10.0
"""Longest time that the whole of it may take."""
_MOST_READS = 16
_reads: RunVar[CapacityLimiter] = RunVar("storm_dagster_reads")


def error_response(error: StormDagsterError) -> JSONResponse:
    """The error document with the status of its class."""
    return JSONResponse(error.to_document(), status_code=error.http_status)


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
    # The stack goes to the log only: it may hold what a caller must not see.
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(
        {"error": {"type": "StormDagsterError", "message": "the service failed to answer: see its log"}},
        status_code=500,
    )


EXCEPTION_HANDLERS: dict[Any, Any] = {StormDagsterError: _typed, HTTPException: _http, Exception: _unexpected}


async def bounded_json(request: Request) -> dict[str, Any]:
    """The request's body as a JSON map of at most 1 MiB; an empty body is an empty map."""
    raw = bytearray()
    try:
        stream = request.stream()
        deadline = time.monotonic() + _BODY_SECS
        while True:
            chunk = await asyncio.wait_for(anext(stream, None), max(0.0, deadline - time.monotonic()))
            if chunk is None:
                break
            raw += chunk
            if len(raw) > MOST_JSON_BYTES:
                raise InvalidRequest(f"the request's body is larger than {MOST_JSON_BYTES} bytes: send less")
    except (TimeoutError, asyncio.TimeoutError, ClientDisconnect):
        raise InvalidRequest("the request's body did not arrive: send it again") from None
    if not raw.strip():
        return {}
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidRequest("the request's body is not valid JSON: send a JSON map") from None
    if not isinstance(document, dict):
        raise InvalidRequest(f"the request's body is a JSON {type(document).__name__}: send a JSON map")
    return document


async def run_read(function: Callable[..., _T], *args: Any) -> _T:
    """Run a blocking read in a thread, at most 16 at once.

    Changes have threads of their own (``run_in_threadpool``): however many pages wait for a topology master, ``kill``
    waits for none of them.
    """
    try:
        limiter = _reads.get()
    except LookupError:
        limiter = CapacityLimiter(_MOST_READS)
        _reads.set(limiter)
    return await to_thread.run_sync(function, *args, limiter=limiter)
