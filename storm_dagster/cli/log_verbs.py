"""``logs`` and ``tail``: the log files of a local cluster."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import click

from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import plain, print_json
from storm_dagster.model.errors import InvalidRequest, StormDagsterError

__all__ = ["COMMANDS"]


def _workers(invocation: Invocation, name: str) -> list[dict[str, Any]]:
    """The logs of a topology's workers on this machine: of its present deployment, else of the newest one."""
    folder = invocation.home / "logs" / "workers"
    topology_id: str | None = None
    hosts: dict[int, str] = {}
    try:
        with invocation.nimbus(patience=0.0) as nimbus:
            document = nimbus.get(f"/v1/topologies/{name}")
        topology_id = document["id"]
        hosts = {worker["port"]: worker["host"] for worker in document["workers"]}
    except StormDagsterError:
        # Killed, or the cluster is down: what it wrote is still there.
        pattern = re.compile(rf"{re.escape(name)}(-[0-9]+-[0-9]+)?")
        found = [path for path in folder.glob("*") if pattern.fullmatch(path.name)]
        if found:
            topology_id = max(found, key=lambda path: path.stat().st_mtime).name
    if topology_id is None:
        return []
    local = str(invocation.conf["storm.local.hostname"])
    rows = [
        {"host": hosts.get(int(path.parent.name), local), "port": int(path.parent.name), "log": str(path)}
        for path in (folder / topology_id).glob("*/worker.log")
        if path.parent.name.isdigit()
    ]
    return sorted(rows, key=lambda row: row["port"])


def _last_lines(path: Path, count: int) -> list[str]:
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - 512 * 1024))
            return stream.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []


def _follow(files: dict[str, Path], count: int) -> None:
    """Print the last lines of each file, then whatever is appended, until Ctrl-C."""
    offsets: dict[str, int] = {}
    for label, path in files.items():
        for line in _last_lines(path, count):
            click.echo(plain(f"{label}{line}"))
        offsets[label] = path.stat().st_size if path.exists() else 0
    rest: dict[str, bytes] = dict.fromkeys(files, b"")
    while True:
        for label, path in files.items():
            try:
                size = path.stat().st_size
                # Smaller than before: rotated, read the new file from its beginning.
                offsets[label] = 0 if size < offsets[label] else offsets[label]
                if size == offsets[label]:
                    continue
                with path.open("rb") as stream:
                    stream.seek(offsets[label])
                    read = stream.read(1 << 20)
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
@click.option("-n", "count", type=click.IntRange(0), default=50, show_default=True, help="Lines of each.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is appended.")
def logs(invocation: Invocation, name: str, worker: str | None, count: int, follow: bool) -> None:
    """The logs of the workers of topology NAME (of this machine)."""
    rows = _workers(invocation, name)
    if worker is not None:
        rows = [row for row in rows if worker == f"{row['host']}:{row['port']}"]
    if not rows:
        raise InvalidRequest(
            f"no log of topology {name!r}{' on ' + worker if worker else ''} lies in {invocation.home}: see "
            "`storm-dagster list`; logs of other hosts are read there"
        )
    if invocation.json:
        print_json({"logs": [{**row, "lines": _last_lines(Path(row["log"]), count)} for row in rows]})
        return
    several = len(rows) > 1
    files = {f"{row['host']}:{row['port']} " if several else "": Path(row["log"]) for row in rows}
    if follow:
        _follow(files, count)
    for label, path in files.items():
        for line in _last_lines(path, count):
            click.echo(plain(f"{label}{line}"))


@verb("tail")
@click.option("-n", "count", type=click.IntRange(0), default=10, show_default=True, help="Lines of each.")
@click.option(
    "-f/-F", "--follow/--no-follow", default=True, help="Go on with what is appended. [default: yes]"
)
def tail(invocation: Invocation, count: int, follow: bool) -> None:
    """Follow the logs of all daemons of a local cluster."""
    folder = invocation.home / "logs"
    paths = sorted([*folder.glob("*.log"), *folder.glob("*.out")])
    if not paths:
        raise InvalidRequest(f"{folder} holds no logs: start a cluster with `storm-dagster dev`")
    if invocation.json:
        print_json({"logs": [{"log": str(path), "lines": _last_lines(path, count)} for path in paths]})
        return
    files = {f"{path.name:<28} ": path for path in paths}
    if follow:
        _follow(files, count)
    for label, path in files.items():
        for line in _last_lines(path, count):
            click.echo(plain(f"{label}{line}"))


COMMANDS: dict[str, click.Command] = {"logs": logs, "tail": tail}
