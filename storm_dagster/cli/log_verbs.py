"""``logs`` and ``tail``: the logs of workers, of this machine and of others, and those of local
daemons.
"""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import httpx

from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import plain, print_json
from storm_dagster.model.errors import InvalidRequest, StormDagsterError
from storm_dagster.security.settings import Security

_MOST_BYTES = 512 * 1024
_PAGE = 1 << 20
_HEAD = 17
"""Bytes before a page's own: 16 digits of the file's size, and a newline."""


class FileLog:
    """A file of this machine, which may grow and be rotated; ``OSError`` when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.place: str = str(path)
        """Path or URL, to be shown."""

    def size(self) -> int:
        """Bytes now."""
        return self._path.stat().st_size

    def read(self, offset: int) -> bytes:
        """Up to 1 MiB from there."""
        with self._path.open("rb") as stream:
            stream.seek(offset)
            return stream.read(_PAGE)


class SupervisorLog:
    """The same of a worker's log, by the log view of its supervisor. ``http`` carries what the
    cluster asks for.
    """

    def __init__(self, http: httpx.Client, base: str, topology_id: str, port: int) -> None:
        self._http = http
        self._base = base
        self._log = f"workers/{topology_id}/{port}/worker.log"
        self.place: str = f"{base}/api/v1/log?file={topology_id}%2F{port}%2Fworker.log"

    def _page(self, **query: Any) -> bytes:
        try:
            answer = self._http.get(
                f"{self._base}/logview", params={"cmd": "showLog", "log": self._log, **query}
            )
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise OSError(f"{self._base} did not answer: {error}") from error
        if len(answer.content) < _HEAD or not answer.content[:16].isdigit():
            raise OSError(f"{self._base} is not a log service")
        return answer.content

    def size(self) -> int:
        """Bytes now."""
        return int(self._page(size=1)[:16])

    def read(self, offset: int) -> bytes:
        """Up to 1 MiB from there."""
        return self._page(pos=offset, size=_PAGE)[_HEAD:]


LogSource = FileLog | SupervisorLog


def _last_lines(source: LogSource, count: int) -> list[str]:
    """The last lines, of at most the last 512 KiB; none when the log cannot be read."""
    try:
        raw = source.read(max(0, source.size() - _MOST_BYTES))
    except OSError:
        return []
    return raw.decode("utf-8", "replace").splitlines()[-count:] if count else []


def _workers(invocation: Invocation, name: str, http: httpx.Client) -> list[dict[str, Any]]:
    """The logs of a topology's workers: of its present deployment, else those here of the newest
    one.

    Workers of other hosts are read at their supervisors. Each row has ``source``, a
    :class:`LogSource`.
    """
    folder = invocation.home / "logs" / "workers"
    local = str(invocation.conf["storm.local.hostname"])
    try:
        with invocation.nimbus(patience=0.0) as nimbus:
            document = nimbus.get(f"/v1/topologies/{name}")
            services = {one["id"]: one["http"] for one in nimbus.get("/v1/cluster")["supervisors"]}
    except StormDagsterError:
        return _left_here(folder, name, local)
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for worker in document["workers"]:
        host, port = worker["host"], worker["port"]
        path = folder / document["id"] / str(port) / "worker.log"
        base = services.get(worker["node"])
        if host == local and path.exists():
            source: LogSource = FileLog(path)
        elif base:
            source = SupervisorLog(http, base, document["id"], port)
        else:
            continue
        rows[host, port] = {"host": host, "port": port, "source": source}
    for row in _left_here(folder, document["id"], local):
        # Slots that the topology had before.
        if all(port != row["port"] for _, port in rows):
            rows[row["host"], row["port"]] = row
    return [row for _, row in sorted(rows.items())]


def _left_here(folder: Path, name: str, local: str) -> list[dict[str, Any]]:
    """Logs of this machine: killed, or the cluster is down, what it wrote is still there."""
    pattern = re.compile(rf"{re.escape(name)}(-[0-9]+-[0-9]+)?")
    found = [path for path in folder.glob("*") if pattern.fullmatch(path.name)]
    if not found:
        return []
    newest = max(found, key=lambda path: path.stat().st_mtime)
    return [
        {"host": local, "port": int(path.parent.name), "source": FileLog(path)}
        for path in sorted(newest.glob("*/worker.log"))
        if path.parent.name.isdigit()
    ]


def _print_logs(sources: dict[str, LogSource], count: int, follow: bool) -> None:
    """Print the last lines of each log; with ``follow`` then whatever is appended, until Ctrl-C."""
    offsets: dict[str, int] = {}
    for label, source in sources.items():
        for line in _last_lines(source, count):
            click.echo(plain(f"{label}{line}"))
        try:
            offsets[label] = source.size() if follow else 0
        except OSError:
            offsets[label] = 0
    rest: dict[str, bytes] = dict.fromkeys(sources, b"")
    while follow:
        for label, source in sources.items():
            try:
                size = source.size()
                # Smaller than before: rotated, read the new file from its beginning.
                offsets[label] = 0 if size < offsets[label] else offsets[label]
                if size == offsets[label]:
                    continue
                read = source.read(offsets[label])
            except OSError:
                continue
            offsets[label] += len(read)
            *lines, rest[label] = (rest[label] + read).split(b"\n")
            for line in lines:
                click.echo(plain(f"{label}{line.decode('utf-8', 'replace')}"))
        time.sleep(0.2)


@verb("logs")
@click.argument("name")
@click.option("--worker", metavar="HOST:PORT", help="Only this worker.")
@click.option(
    "-n",
    "count",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    help="Lines of each log.",
)
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they are appended.")
def logs(invocation: Invocation, name: str, worker: str | None, count: int, follow: bool) -> None:
    """Print the logs of the workers of topology NAME, from all hosts."""
    options = Security.of(invocation.conf).client_options()
    with httpx.Client(timeout=10.0, **options) as http:
        rows = _workers(invocation, name, http)
        if worker is not None:
            rows = [row for row in rows if worker == f"{row['host']}:{row['port']}"]
        if not rows:
            raise InvalidRequest(
                f"no log of topology {name!r}{' on ' + worker if worker else ''} lies in {invocation.home} or at its "
                "supervisors: see `storm-dagster list`"
            )
        if invocation.json:
            places = [(row, row.pop("source")) for row in rows]
            logs = [
                {**row, "log": source.place, "lines": _last_lines(source, count)}
                for row, source in places
            ]
            print_json({"logs": logs})
            return
        several = len(rows) > 1
        sources = {
            f"{row['host']}:{row['port']} " if several else "": row["source"] for row in rows
        }
        _print_logs(sources, count, follow)


@verb("tail")
@click.option(
    "-n",
    "count",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="Lines of each log.",
)
@click.option(
    "-f/-F",
    "--follow/--no-follow",
    default=True,
    help="Print new lines as they are appended. [default: yes]",
)
def tail(invocation: Invocation, count: int, follow: bool) -> None:
    """Follow the logs of all daemons of a local cluster."""
    folder = invocation.home / "logs"
    paths = sorted([*folder.glob("*.log"), *folder.glob("*.out")])
    if not paths:
        raise InvalidRequest(f"{folder} has no logs: start a cluster with `storm-dagster dev`")
    if invocation.json:
        print_json(
            {
                "logs": [
                    {"log": str(path), "lines": _last_lines(FileLog(path), count)} for path in paths
                ]
            }
        )
        return
    sources: dict[str, LogSource] = {f"{path.name:<28} ": FileLog(path) for path in paths}
    _print_logs(sources, count, follow)


COMMANDS: Mapping[str, click.Command] = {"logs": logs, "tail": tail}
