"""``logs`` and ``tail``: logs of workers on any host, and of local daemons."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import httpx

from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import plain, print_json
from storm_dagster.model.errors import InvalidRequest, StormDagsterError, error_text
from storm_dagster.security.settings import Security

_MAX_BYTES = 512 * 1024
"""Bytes at the end of a log in which its last lines are searched."""
_PAGE = 1 << 20
"""Bytes that one read returns at most; the log view of a supervisor has the same limit."""
_HEAD = 17
"""Bytes before a page's own: 16 digits of the file's size, and a newline."""


class FileLog:
    """Log file of this machine, which may grow and be rotated.

    Its methods raise ``OSError`` if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.place: str = str(path)
        """Path or URL for people."""

    def former(self) -> "FileLog":
        """The newest rotated file of this log, which need not exist."""
        return FileLog(self._path.with_name(f"{self._path.name}.1"))

    def size(self) -> int:
        """Size in bytes now."""
        return self._path.stat().st_size

    def read(self, offset: int) -> bytes:
        """Up to 1 MiB of the log from the offset on."""
        with self._path.open("rb") as stream:
            stream.seek(offset)
            return stream.read(_PAGE)


class SupervisorLog:
    """Log file of a worker, read through the log view of its supervisor.

    ``http`` has the credentials of the cluster. The methods raise ``OSError`` as those of
    :class:`FileLog`.
    """

    def __init__(
        self,
        http: httpx.Client,
        base: str,
        topology_id: str,
        port: int,
        name: str = "worker.log",
    ) -> None:
        self._http = http
        self._base = base
        self._worker = (topology_id, port)
        self._log = f"workers/{topology_id}/{port}/{name}"
        self.place: str = f"{base}/api/v1/log?file={topology_id}%2F{port}%2F{name}"

    def former(self) -> "SupervisorLog":
        """The newest rotated file of this log, which need not exist."""
        return SupervisorLog(self._http, self._base, *self._worker, "worker.log.1")

    def _page(self, **query: Any) -> bytes:
        """The response of the log view: the size of the log, and the bytes that ``query`` names."""
        try:
            response = self._http.get(
                f"{self._base}/logview", params={"cmd": "showLog", "log": self._log, **query}
            )
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise OSError(f"{self._base} did not answer: {error_text(error)}") from error
        if len(response.content) < _HEAD or not response.content[:16].isdigit():
            raise OSError(f"{self._base} is not a log service")
        return response.content

    def size(self) -> int:
        """Size in bytes now."""
        return int(self._page(size=1)[:16])

    def read(self, offset: int) -> bytes:
        """Up to 1 MiB of the log from the offset on."""
        return self._page(pos=offset, size=_PAGE)[_HEAD:]


LogSource = FileLog | SupervisorLog


def _last_lines(source: LogSource, count: int) -> list[str]:
    """The last lines, of at most the last 512 KiB.

    If a log was rotated just now, they are in its former file as well. None if the log cannot be
    read.
    """
    if not count:
        return []
    raw = _end_of(source)
    if raw.count(b"\n") < count:
        former = _end_of(source.former())
        # The first line of a rotated log may have begun in the former file.
        raw = (former + raw)[-_MAX_BYTES:]
    return raw.decode("utf-8", "replace").splitlines()[-count:]


def _end_of(source: LogSource) -> bytes:
    """The last 512 KiB of a log; empty if it cannot be read."""
    try:
        return source.read(max(0, source.size() - _MAX_BYTES))
    except OSError:
        return b""


def _workers(invocation: Invocation, name: str, http: httpx.Client) -> list[dict[str, Any]]:
    """The logs of a topology's workers, by host and port.

    They are those of the current deployment, else those on this machine of the newest one. Logs of
    other hosts are read through their supervisors. Each row has ``host``, ``port`` and ``source``,
    a :class:`LogSource`. A worker whose supervisor has no log service is left out.
    """
    folder = invocation.home / "logs" / "workers"
    local = str(invocation.conf["storm.local.hostname"])
    try:
        with invocation.nimbus(patience=0.0) as nimbus:
            document = nimbus.get(f"/v1/topologies/{name}")
            supervisors = nimbus.get("/v1/cluster")["supervisors"]
    except StormDagsterError:
        return _logs_on_disk(folder, name, local)
    services = {supervisor["id"]: supervisor["http"] for supervisor in supervisors}
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for worker in document["workers"]:
        host = worker["host"]
        port = worker["port"]
        path = folder / document["id"] / str(port) / "worker.log"
        base = services.get(worker["node"])
        if host == local and path.exists():
            source: LogSource = FileLog(path)
        elif base:
            source = SupervisorLog(http, base, document["id"], port)
        else:
            continue
        rows[host, port] = {"host": host, "port": port, "source": source}
    for row in _logs_on_disk(folder, document["id"], local):
        # Of slots that the topology had before.
        if all(port != row["port"] for _, port in rows):
            rows[row["host"], row["port"]] = row
    return [row for _, row in sorted(rows.items())]


def _logs_on_disk(folder: Path, name: str, local: str) -> list[dict[str, Any]]:
    """Logs on this machine of a topology's newest deployment, by its name, or of one by its id.

    They stay when the topology is killed or the cluster is down. ``folder`` has a folder for each
    deployment, ``local`` is the name of this host.
    """
    pattern = re.compile(rf"{re.escape(name)}(-[0-9]+-[0-9]+)?")
    deployments = [path for path in folder.glob("*") if pattern.fullmatch(path.name)]
    if not deployments:
        return []
    newest = max(deployments, key=lambda path: path.stat().st_mtime)
    return [
        {"host": local, "port": int(path.parent.name), "source": FileLog(path)}
        for path in sorted(newest.glob("*/worker.log"))
        if path.parent.name.isdigit()
    ]


def _print_logs(sources: dict[str, LogSource], count: int, follow: bool) -> None:
    """Print the last lines of each log, each after the label of the log.

    With ``follow`` also new lines, until Ctrl-C. A log that cannot be read now is tried once more.
    """
    offsets: dict[str, int] = {}
    for label, source in sources.items():
        for line in _last_lines(source, count):
            click.echo(plain(f"{label}{line}"))
        try:
            offsets[label] = source.size() if follow else 0
        except OSError:
            offsets[label] = 0
    unfinished_lines: dict[str, bytes] = dict.fromkeys(sources, b"")
    while follow:
        for label, source in sources.items():
            try:
                size = source.size()
                if size < offsets[label]:
                    # The log was rotated: read the new file from its beginning.
                    offsets[label] = 0
                if size == offsets[label]:
                    continue
                read = source.read(offsets[label])
            except OSError:
                continue
            offsets[label] += len(read)
            *lines, unfinished = (unfinished_lines[label] + read).split(b"\n")
            unfinished_lines[label] = unfinished
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
            place = f" on {worker}" if worker else ""
            raise InvalidRequest(
                f"no log of topology {name!r}{place} lies in {invocation.home} or at its "
                "supervisors: see `storm-dagster list`"
            )
        if invocation.json:
            logs: list[dict[str, Any]] = []
            for row in rows:
                source = row.pop("source")
                logs.append({**row, "log": source.place, "lines": _last_lines(source, count)})
            print_json({"logs": logs})
            return
        sources: dict[str, LogSource] = {}
        for row in rows:
            label = f"{row['host']}:{row['port']} " if len(rows) > 1 else ""
            sources[label] = row["source"]
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
        logs = [{"log": str(path), "lines": _last_lines(FileLog(path), count)} for path in paths]
        print_json({"logs": logs})
        return
    sources: dict[str, LogSource] = {f"{path.name:<28} ": FileLog(path) for path in paths}
    _print_logs(sources, count, follow)


COMMANDS: Mapping[str, click.Command] = {"logs": logs, "tail": tail}
