"""Sources of a log: a file of this machine, or the HTTP service of the supervisor that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import httpx

_MOST_BYTES = 512 * 1024
_PAGE = 1 << 20
_HEAD = 17
"""Bytes before a page's own: 16 digits of the file's size, and a newline."""


class LogSource(Protocol):
    """One log that may grow, and that may be rotated."""

    place: str
    """Path or URL, to be shown."""

    def size(self) -> int:
        """Bytes now; ``OSError`` when it cannot be read."""
        ...

    def read(self, offset: int) -> bytes:
        """Up to 1 MiB from there; ``OSError`` when it cannot be read."""
        ...


class FileLog:
    """A file of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.place: str = str(path)

    def size(self) -> int:
        """See :class:`LogSource`."""
        return self._path.stat().st_size

    def read(self, offset: int) -> bytes:
        """See :class:`LogSource`."""
        with self._path.open("rb") as stream:
            stream.seek(offset)
            return stream.read(_PAGE)


class SupervisorLog:
    """A worker's log, by the log view of its supervisor. ``http`` carries what the cluster asks for."""

    def __init__(self, http: httpx.Client, base: str, topology_id: str, port: int) -> None:
        self._http = http
        self._base = base
        self._log = f"workers/{topology_id}/{port}/worker.log"
        self.place: str = f"{base}/api/v1/log?file={topology_id}%2F{port}%2Fworker.log"

    def _page(self, **query: Any) -> bytes:
        try:
            answer = self._http.get(f"{self._base}/logview", params={"cmd": "showLog", "log": self._log, **query})
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise OSError(f"{self._base} did not answer: {error}") from error
        if len(answer.content) < _HEAD or not answer.content[:16].isdigit():
            raise OSError(f"{self._base} is not a log service")
        return answer.content

    def size(self) -> int:
        """See :class:`LogSource`."""
        return int(self._page(size=1)[:16])

    def read(self, offset: int) -> bytes:
        """See :class:`LogSource`."""
        return self._page(pos=offset, size=_PAGE)[_HEAD:]


def last_lines(source: LogSource, count: int) -> list[str]:
    """The last lines, of at most the last 512 KiB; none when the log cannot be read."""
    try:
        raw = source.read(max(0, source.size() - _MOST_BYTES))
    except OSError:
        return []
    return raw.decode("utf-8", "replace").splitlines()[-count:] if count else []
