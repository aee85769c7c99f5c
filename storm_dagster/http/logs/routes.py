"""Routes of log files: JStorm's ``/logview`` and Storm's pages of logs."""

import re
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import parse_qsl, quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from storm_dagster.http.documents import JsonMap, Port
from storm_dagster.http.logs.pages import (
    PAGE_BYTES,
    check_encoding,
    page_bounds,
    read_page,
    whole_characters,
)
from storm_dagster.http.logs.search import Search, search_log
from storm_dagster.http.logs.tree import LogTree
from storm_dagster.http.responses import (
    JSONResponse,
    StreamResponse,
    query_flag,
    query_int,
    query_text,
    query_word,
)
from storm_dagster.http.router import Parameter, Router
from storm_dagster.model.conf import mask
from storm_dagster.model.errors import InvalidRequest, KeyNotFound

_CHUNK = 1 << 18
"""Bytes of a file that are read and sent at once."""
# Values of ``cmd`` of ``/logview``.
_COMMANDS = ("showLog", "download", "listDir", "searchLog", "jstack", "jstat", "showConf")

_NOT_CACHED = {"Cache-Control": "no-store"}
_CONTENT = {"application/octet-stream": str}
_FILE = Parameter("query", "file", "Log file, relative to the folder of logs", required=True)
_PAGE_PARAMETERS = (
    _FILE,
    Parameter("query", "start", "First byte. Default: the end of the file", schema=int),
    Parameter("query", "length", "Bytes, at most 1048576", schema=int),
    Parameter("query", "encoding", "Encoding of the log. Default: utf-8"),
)
_LOGVIEW_PARAMETERS = (
    Parameter("query", "cmd", "What to do", schema=Literal[_COMMANDS], required=True),
    Parameter("query", "log", "showLog, download: file, relative to the folder of logs"),
    Parameter(
        "query", "pos", "showLog, download: first byte. Default: the end of the file", schema=int
    ),
    Parameter("query", "size", "showLog, download: bytes, at most 1048576", schema=int),
    Parameter("query", "dir", "listDir: folder, relative to the folder of logs"),
    Parameter("query", "file", "searchLog: file, relative to the folder of logs"),
    Parameter("query", "key", "searchLog: text to find"),
    Parameter(
        "query",
        "offset",
        "searchLog: bytes to leave out at the side that the search begins at",
        schema=int,
    ),
    Parameter("query", "max_match", "searchLog: most matches (default 10)", schema=int),
    Parameter("query", "look_back", "searchLog: lines before a match (default 2)", schema=int),
    Parameter("query", "look_ahead", "searchLog: lines after a match (default 10)", schema=int),
    Parameter(
        "query",
        "case_ignore",
        "searchLog: ignore case (ASCII)",
        schema=Literal["true", "false", "1", "0"],
    ),
    Parameter(
        "query", "search_from", "searchLog: side to begin at", schema=Literal["head", "tail"]
    ),
    Parameter("query", "workerPort", "jstack, jstat: port of the worker", schema=Port),
)

_INVISIBLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and line breaks, and the characters that change the direction."""


def log_page(*, path: str, name: str, text: str, start: int, length: int, size: int) -> str:
    """HTML of a part of a log, with links to the other parts.

    ``path`` is that of the route, ``name`` the file. ``text`` begins at byte ``start`` of ``size``;
    ``length`` is the number of bytes of a page. Control and bidi characters are shown as
    ``\\ufffd``.
    """
    content = escape(_INVISIBLE.sub("\ufffd", text))
    last = max(0, size - length)
    places = {
        "first": 0,
        "previous": max(0, start - length),
        "next": min(start + length, last),
        "last": last,
    }
    address = f"{escape(path)}?file={quote(name, safe='')}&amp;length={length}&amp;start="
    links = " ".join(f'<a href="{address}{place}">{word}</a>' for word, place in places.items())
    title = escape(_INVISIBLE.sub("\ufffd", name))
    end = start + len(text.encode("utf-8", "replace"))
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:14px "
        "sans-serif;margin:1em}pre{white-space:pre-wrap;overflow-wrap:anywhere}</style>"
        f"</head><body><h1>{title}</h1><p>bytes {start} to {end} of {size}: {links}</p>"
        f"<pre>{content}</pre><p>{links}</p></body></html>\n"
    )


class LogRoutes:
    """Routes of the log files of one daemon's HOME.

    ``stacks(port)`` returns the response to ``cmd=jstack`` for the workers of a port.
    """

    router: ClassVar = Router("logs")

    def __init__(self, logs: Path, stacks: Callable[[int], str], conf: Mapping[str, Any]) -> None:
        self._tree = LogTree(logs)
        self._workers = LogTree(logs / "workers")
        self._stacks = stacks
        self._conf = conf
        self._idle_secs = float(conf["nimbus.file.copy.expiration.secs"])

    # -- JStorm ------------------------------------------------------------------------------------

    @router.route(
        "GET",
        "/logview",
        summary=(
            "JStorm's log view: show, download, list or search logs, stacks of a worker, conf of "
            "this daemon"
        ),
        parameters=_LOGVIEW_PARAMETERS,
        responses={
            200: {
                "text/plain": str,
                "application/json": JsonMap,
                "application/octet-stream": str,
            },
            206: _CONTENT,
        },
        errors=(404, 416, 503),
    )
    def logview(self, request: Request) -> Response:
        """Respond to a command of JStorm."""
        command = query_text(request, "cmd")
        if command not in _COMMANDS:
            raise InvalidRequest(f"cmd must be one of {', '.join(_COMMANDS)}, got {command!r:.40}")
        handlers = {
            "showLog": self._show,
            "download": self._download,
            "listDir": self._list,
            "searchLog": self._search,
        }
        if command in handlers:
            return handlers[command](request)
        if command == "showConf":
            return JSONResponse(mask(self._conf))
        port = query_int(request, "workerPort")
        if port is None or not 0 <= port <= 65535:
            raise InvalidRequest("workerPort must be the port of a worker, such as workerPort=6900")
        return PlainTextResponse(self._stacks(port))

    def _show(self, request: Request) -> Response:
        """A page of a log, after the size of the log in 16 digits, as in JStorm."""
        stream, size = self._tree.open(_required(request, "log"))
        with stream:
            first, length = page_bounds(size, query_int(request, "pos"), query_int(request, "size"))
            body = b"%016d\n" % size + read_page(stream, first, length)
        return Response(body, media_type="text/plain; charset=utf-8", headers=_NOT_CACHED)

    def _download(self, request: Request) -> Response:
        """The file as a whole, or the part that ``pos`` and ``size`` name."""
        name = _required(request, "log")
        position = query_int(request, "pos")
        length = query_int(request, "size")
        if position is None and length is None:
            return self._whole(self._tree, request, "log")
        stream, size = self._tree.open(name)
        with stream:
            first, length = page_bounds(size, position, length)
            body = read_page(stream, first, length)
        return Response(body, media_type="application/octet-stream", headers=_attached(name))

    def _list(self, request: Request) -> Response:
        """The entries of a folder: path -> attributes, as in JStorm."""
        folder = (query_text(request, "dir") or "").strip("/")
        rows: dict[str, Any] = {}
        for entry in self._tree.list("" if folder == "." else folder):
            path = f"{folder}/{entry.name}".lstrip("/")
            rows[path] = {
                "fileName": entry.name,
                "isDir": "true" if entry.is_folder else "false",
                "modifyTime": entry.modified_ms,
                "size": entry.size,
            }
        return JSONResponse(rows)

    def _search(self, request: Request) -> Response:
        """The matches of a search, and the offset for the next one."""
        name = _required(request, "file")
        key = _query_bytes(request, "key")
        if not 1 <= len(key) <= 1024:
            raise InvalidRequest("key must have 1 to 1024 bytes")
        search = Search(
            key=key,
            offset=_bounded(request, "offset", 0, 0, 2**62),
            max_matches=_bounded(request, "max_match", 10, 1, 1000),
            context_before=_bounded(request, "look_back", 2, 0, 100),
            context_after=_bounded(request, "look_ahead", 10, 0, 100),
            ignore_case=query_flag(request, "case_ignore"),
            search_from=_search_side(request),
        )
        stream, size = self._tree.open(name)
        with stream:
            matches, next_offset = search_log(stream, size, search)
        results = {str(offset): text for offset, text in matches.items()}
        return JSONResponse(
            {"num_match": len(matches), "match_results": results, "next_offset": next_offset}
        )

    # -- Storm -------------------------------------------------------------------------------------

    @router.route(
        "GET",
        "/api/v1/log",
        summary="Page of a worker's log (TOPOLOGY-ID/Port/worker.log) for browsers",
        parameters=_PAGE_PARAMETERS,
        responses={200: {"text/html": str}},
        errors=(404, 416),
    )
    def worker_page(self, request: Request) -> Response:
        """Page of a worker's log."""
        return self._page(self._workers, request)

    @router.route(
        "GET",
        "/api/v1/daemonlog",
        summary="Page of a daemon's log for browsers",
        parameters=_PAGE_PARAMETERS,
        responses={200: {"text/html": str}},
        errors=(404, 416),
    )
    def daemon_page(self, request: Request) -> Response:
        """Page of a daemon's log."""
        return self._page(self._tree, request)

    @router.route(
        "GET",
        "/api/v1/download",
        summary="A worker's log file as a whole, or a byte range of it",
        parameters=(_FILE,),
        responses={200: _CONTENT, 206: _CONTENT},
        errors=(404, 416),
    )
    def worker_file(self, request: Request) -> Response:
        """Content of a worker's log file."""
        return self._whole(self._workers, request)

    @router.route(
        "GET",
        "/api/v1/daemondownload",
        summary="A daemon's log file as a whole, or a byte range of it",
        parameters=(_FILE,),
        responses={200: _CONTENT, 206: _CONTENT},
        errors=(404, 416),
    )
    def daemon_file(self, request: Request) -> Response:
        """Content of a daemon's log file."""
        return self._whole(self._tree, request)

    @router.route(
        "GET",
        "/api/v1/listLogs",
        summary="Log files of the workers of this daemon's host",
        responses={200: list[str]},
    )
    def list_logs(
        self,
        topology_id: Annotated[
            str | None, Parameter("query", "topoId", "Only those of this topology id")
        ],
        port: Annotated[
            str | None, Parameter("query", "port", "Only those of this port", schema=Port)
        ],
    ) -> list[str]:
        """Names of the files, relative to the folder of the workers' logs."""
        files: list[str] = []
        try:
            topologies = self._workers.list()
        except KeyNotFound:
            return files  # No worker has logged yet.
        for topology in topologies:
            if not topology.is_folder or topology_id not in (None, topology.name):
                continue
            for slot in self._workers.list(topology.name):
                if not slot.is_folder or port not in (None, slot.name):
                    continue
                folder = f"{topology.name}/{slot.name}"
                files.extend(
                    f"{folder}/{entry.name}"
                    for entry in self._workers.list(folder)
                    if not entry.is_folder
                )
        return files

    def _page(self, tree: LogTree, request: Request) -> Response:
        """A part of a file as a page, by default its end; bad bytes are shown as U+FFFD."""
        name = _required(request, "file")
        encoding = check_encoding(query_text(request, "encoding"))
        stream, size = tree.open(name)
        with stream:
            # page_bounds refuses 0.
            page_bytes = query_int(request, "length", PAGE_BYTES) or 0
            first, length = page_bounds(size, query_int(request, "start"), page_bytes)
            raw = read_page(stream, first, length)
        text = whole_characters(raw, encoding, cut_before=first > 0)
        page = log_page(
            path=request.url.path, name=name, text=text, start=first, length=page_bytes, size=size
        )
        return HTMLResponse(page, headers=_NOT_CACHED)

    def _whole(self, tree: LogTree, request: Request, parameter: str = "file") -> Response:
        """The file that a parameter names, or its byte range; sent while it is read."""
        name = _required(request, parameter)
        stream, size = tree.open(name)
        headers = {"Content-Type": "application/octet-stream", **_attached(name)}
        return StreamResponse(
            stream, size, request=request, chunk=_CHUNK, idle_secs=self._idle_secs, headers=headers
        )


def _attached(name: str) -> dict[str, str]:
    """Headers with which a browser saves the response under the file's name."""
    file = name.rpartition("/")[2]
    return {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file, safe='')}",
        **_NOT_CACHED,
    }


def _required(request: Request, name: str) -> str:
    value = query_text(request, name)
    if value is None:
        raise InvalidRequest(f"parameter {name} is missing")
    return value


def _query_bytes(request: Request, name: str) -> bytes:
    """The parameter as bytes, because logs contain any bytes."""
    query = request.scope["query_string"].decode("latin-1")
    for key, value in parse_qsl(query, encoding="latin-1"):
        if key == name:
            return value.encode("latin-1")
    return b""


def _search_side(request: Request) -> Literal["head", "tail"]:
    side = query_word(request, "search_from", ("head", "tail"), "tail")
    return "head" if side == "head" else "tail"


def _bounded(request: Request, name: str, default: int, low: int, high: int) -> int:
    value = query_int(request, name, default)
    if value is None or not low <= value <= high:
        raise InvalidRequest(f"parameter {name} must be from {low} to {high}, got {value}")
    return value
