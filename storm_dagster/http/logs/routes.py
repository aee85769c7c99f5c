"""The routes of log files: JStorm's ``/logview?cmd=...`` and the pages that Storm's log links lead
to.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from storm_dagster.http.description import HttpApi
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
    StreamResponse,
    query_flag,
    query_int,
    query_text,
    query_word,
)
from storm_dagster.model.conf import mask
from storm_dagster.model.errors import InvalidRequest, KeyNotFound

_CHUNK = 1 << 18
_COMMANDS = ("showLog", "download", "listDir", "searchLog", "jstack", "jstat", "showConf")


_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def log_page(*, path: str, name: str, text: str, start: int, length: int, size: int) -> str:
    """HTML of the part of a log, with links to the other parts. Control and bidi characters are
    shown as ``\\ufffd``.
    """
    shown = escape(_UNSEEN.sub("\ufffd", text))
    last = max(0, size - length)
    places = {
        "first": 0,
        "previous": max(0, start - length),
        "next": min(start + length, last),
        "last": last,
    }
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

    ``stacks(port)`` gives the text that answers ``cmd=jstack`` for the workers of a port.
    """

    def __init__(self, logs: Path, stacks: Callable[[int], str], conf: Mapping[str, Any]) -> None:
        self._tree = LogTree(logs)
        self._workers = LogTree(logs / "workers")
        self._stacks = stacks
        self._conf = conf
        self._idle_secs = float(conf["nimbus.file.copy.expiration.secs"])

    def add_to(self, api: HttpApi) -> None:
        """Add the routes of this package."""
        handlers = {
            "logs": self,
            "log": partial(self._page, self._workers),
            "daemonlog": partial(self._page, self._tree),
            "download": partial(self._whole, self._workers),
            "daemondownload": partial(self._whole, self._tree),
        }
        api.add("storm_dagster.http.logs", handlers, {"log command": Literal[_COMMANDS]})

    # -- JStorm ------------------------------------------------------------------------------------

    def logview(self, request: Request) -> Response:
        """``GET /logview?cmd=...``."""
        command = query_text(request, "cmd")
        if command not in _COMMANDS:
            raise InvalidRequest(f"cmd must be one of {', '.join(_COMMANDS)}, got {command!r:.40}")
        reading = {
            "showLog": self._show,
            "download": self._download,
            "listDir": self._list,
            "searchLog": self._search,
        }
        if command in reading:
            return reading[command](request)
        if command == "showConf":
            return JSONResponse(mask(self._conf))
        port = query_int(request, "workerPort")
        if port is None or not 0 <= port <= 65535:
            raise InvalidRequest("workerPort must be the port of a worker, such as workerPort=6900")
        return PlainTextResponse(self._stacks(port))

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
            return self._whole(self._tree, request, "log")
        stream, size = self._tree.open(name)
        with stream:
            first, length = page_bounds(size, position, length)
            body = read_page(stream, first, length)
        return Response(body, media_type="application/octet-stream", headers=_attached(name))

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
        # As bytes: logs hold any bytes that a worker wrote.
        pairs = parse_qsl(request.scope["query_string"].decode("latin-1"), encoding="latin-1")
        key = next((value.encode("latin-1") for each, value in pairs if each == "key"), b"")
        if not 1 <= len(key) <= 1024:
            raise InvalidRequest("key must have 1 to 1024 bytes")
        search = Search(
            key=key,
            offset=_bounded(request, "offset", 0, 0, 2**62),
            most=_bounded(request, "max_match", 10, 1, 1000),
            context_before=_bounded(request, "look_back", 2, 0, 100),
            context_after=_bounded(request, "look_ahead", 10, 0, 100),
            ignore_case=query_flag(request, "case_ignore"),
            search_from="head"
            if query_word(request, "search_from", ("head", "tail"), "tail") == "head"
            else "tail",
        )
        stream, size = self._tree.open(name)
        with stream:
            found, following = search_log(stream, size, search)
        matches = {str(offset): text for offset, text in found.items()}
        return JSONResponse(
            {"num_match": len(found), "match_results": matches, "next_offset": following}
        )

    # -- Storm -------------------------------------------------------------------------------------

    def _page(self, tree: LogTree, request: Request) -> Response:
        name = _required(request, "file")
        encoding = check_encoding(query_text(request, "encoding"))
        stream, size = tree.open(name)
        with stream:
            wanted = query_int(request, "length", PAGE_BYTES) or 0
            first, length = page_bounds(size, query_int(request, "start"), wanted)
            raw = read_page(stream, first, length)
        text = whole_characters(raw, encoding, cut_before=first > 0)
        page = log_page(
            path=request.url.path, name=name, text=text, start=first, length=wanted, size=size
        )
        return HTMLResponse(page, headers=_BYTES)

    def list_logs(self, topoId: str | None, port: str | None) -> list[str]:
        """``GET /api/v1/listLogs``."""
        found: list[str] = []
        try:
            topologies = self._workers.list()
        except KeyNotFound:
            return found  # nothing was logged yet
        for topology in topologies:
            if not topology.is_folder or topoId not in (None, topology.name):
                continue
            for slot in self._workers.list(topology.name):
                if not slot.is_folder or port not in (None, slot.name):
                    continue
                folder = f"{topology.name}/{slot.name}"
                found.extend(
                    f"{folder}/{one.name}"
                    for one in self._workers.list(folder)
                    if not one.is_folder
                )
        return found

    def _whole(self, tree: LogTree, request: Request, parameter: str = "file") -> Response:
        name = _required(request, parameter)
        stream, size = tree.open(name)
        headers = {"Content-Type": "application/octet-stream", **_attached(name)}
        return StreamResponse(
            stream, size, request=request, chunk=_CHUNK, idle_secs=self._idle_secs, headers=headers
        )


_BYTES = {"Cache-Control": "no-store"}


def _attached(name: str) -> dict[str, str]:
    file = name.rpartition("/")[2]
    return {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(file, safe='')}", **_BYTES}


def _required(request: Request, name: str) -> str:
    value = query_text(request, name)
    if value is None:
        raise InvalidRequest(f"parameter {name} is missing")
    return value


def _bounded(request: Request, name: str, default: int, low: int, high: int) -> int:
    value = query_int(request, name, default)
    if value is None or not low <= value <= high:
        raise InvalidRequest(f"parameter {name} must be from {low} to {high}, got {value}")
    return value
