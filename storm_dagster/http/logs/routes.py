"""The routes of log files: JStorm's ``/logview?cmd=...`` and the pages that Storm's log links lead to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from storm_dagster.http.description import HttpOperation, Media, Parameter
from storm_dagster.http.logs.pages import (
    LONGEST_PAGE,
    PAGE_BYTES,
    check_encoding,
    page_bounds,
    read_page,
    whole_characters,
)
from storm_dagster.http.logs.search import Found, Search, search_log
from storm_dagster.http.logs.tree import LogTree
from storm_dagster.http.query import query_flag, query_int, query_text, query_word
from storm_dagster.http.responses import run_read
from storm_dagster.http.schemas import Port, choice
from storm_dagster.http.streams import StreamResponse
from storm_dagster.model.errors import InvalidRequest, KeyNotFound

_CHUNK = 1 << 18
_PAGE = (
    Parameter("file", str, "Log file, relative to the folder of logs", required=True),
    Parameter("start", int, "First byte. Default: the end of the file"),
    Parameter("length", int, f"Bytes, at most {LONGEST_PAGE}"),
    Parameter("encoding", str, "Encoding of the log. Default: utf-8"),
)
_RAW = Media({"application/octet-stream": str})
_COMMANDS = ("showLog", "download", "listDir", "searchLog", "jstack", "jstat", "showConf")


_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def log_page(*, path: str, name: str, text: str, start: int, length: int, size: int) -> str:
    """HTML of the part of a log, with links to the other parts. Control and bidi characters are shown as ``\\ufffd``."""
    shown = escape(_UNSEEN.sub("\ufffd", text))
    last = max(0, size - length)
    places = {"first": 0, "previous": max(0, start - length), "next": min(start + length, last), "last": last}
    links = " ".join(
        f'<a href="{escape(path)}?file={quote(name, safe="")}&amp;start={place}&amp;length={length}">{word}</a>'
        for word, place in places.items()
    )
    title = escape(_UNSEEN.sub("\ufffd", name))
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:14px sans-serif;margin:1em}pre{white-space:pre-wrap;overflow-wrap:anywhere}</style>"
        f"</head><body><h1>{title}</h1><p>bytes {start} to {start + len(text.encode('utf-8', 'replace'))} of {size}: {links}</p>"
        f"<pre>{shown}</pre><p>{links}</p></body></html>\n"
    )


class LogRoutes:
    """Log files of one daemon's HOME.

    ``stacks(port)`` gives the text that answers ``cmd=jstack`` for the workers of a port; ``conf()`` the conf to
    show, secrets removed.
    """

    def __init__(
        self, logs: Path, *, stacks: Callable[[int], str], conf: Callable[[], Mapping[str, Any]], idle_secs: float
    ) -> None:
        self._tree = LogTree(logs)
        self._workers = LogTree(logs / "workers")
        self._stacks = stacks
        self._conf = conf
        self._idle_secs = idle_secs

    def operations(self) -> list[HttpOperation]:
        """The routes and what they answer."""
        return [
            HttpOperation(
                "GET",
                "/logview",
                self.logview,
                "JStorm's log view: show, download, list or search logs, stacks of a worker, conf of this daemon",
                "logs",
                parameters=(
                    Parameter("cmd", choice(*_COMMANDS), "What to do", required=True),
                    Parameter("log", str, "showLog, download: file, relative to the folder of logs"),
                    Parameter("pos", int, "showLog, download: first byte. Default: the end of the file"),
                    Parameter("size", int, f"showLog, download: bytes, at most {LONGEST_PAGE}"),
                    Parameter("dir", str, "listDir: folder, relative to the folder of logs"),
                    Parameter("file", str, "searchLog: file, relative to the folder of logs"),
                    Parameter("key", str, "searchLog: text to find"),
                    Parameter("offset", int, "searchLog: bytes to leave out at the side that the search begins at"),
                    Parameter("max_match", int, "searchLog: most matches (default 10)"),
                    Parameter("look_back", int, "searchLog: lines before a match (default 2)"),
                    Parameter("look_ahead", int, "searchLog: lines after a match (default 10)"),
                    Parameter("case_ignore", choice("true", "false", "1", "0"), "searchLog: ignore case (ASCII)"),
                    Parameter("search_from", choice("head", "tail"), "searchLog: side to begin at"),
                    Parameter("workerPort", Port, "jstack, jstat: port of the worker"),
                ),
                answers={200: Media({"text/plain": str, "application/json": dict[str, Any], **_RAW}), 206: _RAW},
                errors=(404, 416, 503),
            ),
            self._page_of(
                self._workers, "/api/v1/log", "Page of a worker's log (TOPOLOGY-ID/Port/worker.log) for browsers"
            ),
            self._page_of(self._tree, "/api/v1/daemonlog", "Page of a daemon's log for browsers"),
            self._download_from(self._workers, "/api/v1/download", "A worker's"),
            self._download_from(self._tree, "/api/v1/daemondownload", "A daemon's"),
            HttpOperation(
                "GET",
                "/api/v1/listLogs",
                self.list_logs,
                "Log files of the workers of this daemon's host",
                "logs",
                parameters=(
                    Parameter("topoId", str, "Only those of this topology id"),
                    Parameter("port", Port, "Only those of this port"),
                ),
                answers={200: list[str]},
            ),
        ]

    # -- JStorm ------------------------------------------------------------------------------------------

    async def logview(self, request: Request) -> Response:
        """``GET /logview?cmd=...``."""
        command = query_text(request, "cmd")
        if command not in _COMMANDS:
            raise InvalidRequest(f"cmd must be one of {', '.join(_COMMANDS)}, got {command!r:.40}")
        reading = {"showLog": self._show, "download": self._download, "listDir": self._list, "searchLog": self._search}
        if command in reading:
            return await run_read(reading[command], request)
        if command == "showConf":
            return JSONResponse(dict(await run_read(self._conf)))
        port = query_int(request, "workerPort")
        if port is None or not 0 <= port <= 65535:
            raise InvalidRequest("workerPort must be the port of a worker, such as workerPort=6900")
        return PlainTextResponse(await run_read(self._stacks, port))

    def _show(self, request: Request) -> Response:
        stream, size = self._tree.open(_required(request, "log"))
        with stream:
            first, length = page_bounds(size, query_int(request, "pos"), query_int(request, "size"))
            body = b"%016d\n" % size + read_page(stream, first, length)
        return Response(body, media_type="text/plain; charset=utf-8", headers=_BYTES)

    def _download(self, request: Request) -> Response:
        name = _required(request, "log")
        position, length = query_int(request, "pos"), query_int(request, "size")
        if position is None and length is None:
            return self._whole(self._tree, name, request)
        stream, size = self._tree.open(name)
        with stream:
            first, length = page_bounds(size, position, length)
            return Response(
                read_page(stream, first, length), media_type="application/octet-stream", headers=_attached(name)
            )

    def _list(self, request: Request) -> Response:
        folder = (query_text(request, "dir") or "").strip("/")
        entries = self._tree.list("" if folder == "." else folder)
        return JSONResponse(
            {
                f"{folder}/{entry.name}".lstrip("/"): {
                    "fileName": entry.name,
                    "isDir": "true" if entry.is_folder else "false",
                    "modifyTime": entry.modified_ms,
                    "size": entry.size,
                }
                for entry in entries
            }
        )

    def _search(self, request: Request) -> Response:
        name = _required(request, "file")
        key = _raw_key(request)
        if not 1 <= len(key) <= 1024:
            raise InvalidRequest("key must have 1 to 1024 bytes")
        search = Search(
            key=key,
            offset=_bounded(request, "offset", 0, 0, 2**62),
            most=_bounded(request, "max_match", 10, 1, 1000),
            context_before=_bounded(request, "look_back", 2, 0, 100),
            context_after=_bounded(request, "look_ahead", 10, 0, 100),
            ignore_case=query_flag(request, "case_ignore"),
            search_from="head" if query_word(request, "search_from", ("head", "tail"), "tail") == "head" else "tail",
        )
        stream, size = self._tree.open(name)
        with stream:
            found: Found = search_log(stream, size, search)
        return JSONResponse(
            {
                "num_match": len(found.matches),
                "match_results": {str(offset): text for offset, text in found.matches.items()},
                "next_offset": found.next_offset,
            }
        )

    # -- Storm -------------------------------------------------------------------------------------------

    def _page_of(self, tree: LogTree, path: str, summary: str) -> HttpOperation:
        def page(request: Request) -> Response:
            name = _required(request, "file")
            encoding = check_encoding(query_text(request, "encoding"))
            stream, size = tree.open(name)
            with stream:
                wanted = query_int(request, "length", PAGE_BYTES) or 0
                first, length = page_bounds(size, query_int(request, "start"), wanted)
                raw = read_page(stream, first, length)
            text = whole_characters(raw, encoding, cut_before=first > 0)
            return HTMLResponse(
                log_page(path=path, name=name, text=text, start=first, length=wanted, size=size), headers=_BYTES
            )

        answers = {200: Media({"text/html": str})}
        return HttpOperation("GET", path, _in_thread(page), summary, "logs", _PAGE, answers=answers, errors=(404, 416))

    def _download_from(self, tree: LogTree, path: str, whose: str) -> HttpOperation:
        return HttpOperation(
            "GET",
            path,
            _in_thread(lambda request: self._whole(tree, _required(request, "file"), request)),
            f"{whose} log file as a whole, or a byte range of it",
            "logs",
            parameters=_PAGE[:1],
            answers={200: _RAW, 206: _RAW},
            errors=(404, 416),
        )

    async def list_logs(self, request: Request) -> Response:
        """``GET /api/v1/listLogs``."""
        topology_id, port = query_text(request, "topoId"), query_text(request, "port")

        def names() -> list[str]:
            found: list[str] = []
            for topology in self._workers.list() if self._tree_has_workers() else ():
                if not topology.is_folder or topology_id not in (None, topology.name):
                    continue
                for slot in self._workers.list(topology.name):
                    if not slot.is_folder or port not in (None, slot.name):
                        continue
                    folder = f"{topology.name}/{slot.name}"
                    found.extend(f"{folder}/{one.name}" for one in self._workers.list(folder) if not one.is_folder)
            return found

        return JSONResponse(await run_read(names))

    def _tree_has_workers(self) -> bool:
        try:
            return any(entry.name == "workers" and entry.is_folder for entry in self._tree.list())
        except KeyNotFound:
            return False  # nothing was logged yet

    def _whole(self, tree: LogTree, name: str, request: Request) -> Response:
        stream, size = tree.open(name)
        return StreamResponse(
            stream,
            size,
            request=request,
            chunk=_CHUNK,
            idle_secs=self._idle_secs,
            headers={"Content-Type": "application/octet-stream", **_attached(name)},
        )


_BYTES = {"Cache-Control": "no-store"}


def _attached(name: str) -> dict[str, str]:
    file = name.rpartition("/")[2]
    return {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(file, safe='')}", **_BYTES}


def _in_thread(answer: Callable[[Request], Response]) -> Any:
    async def endpoint(request: Request) -> Response:
        return await run_read(answer, request)

    return endpoint


def _required(request: Request, name: str) -> str:
    value = query_text(request, name)
    if value is None:
        raise InvalidRequest(f"parameter {name} is missing")
    return value


def _raw_key(request: Request) -> bytes:
    """The key as bytes: logs hold any bytes that a worker wrote."""
    pairs = parse_qsl(request.scope["query_string"].decode("latin-1"), encoding="latin-1")
    return next((value.encode("latin-1") for name, value in pairs if name == "key"), b"")


def _bounded(request: Request, name: str, default: int, low: int, high: int) -> int:
    value = query_int(request, name, default)
    if value is None or not low <= value <= high:
        raise InvalidRequest(f"parameter {name} must be from {low} to {high}, got {value}")
    return value
