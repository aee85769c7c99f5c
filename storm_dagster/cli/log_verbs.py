"""``logs`` and ``tail``: the log files of a local cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import plain, print_json
from storm_dagster.model.errors import InvalidRequest, NotAlive, StormDagsterError
from storm_dagster.model.worker_spec import WorkerSpec

__all__ = ["COMMANDS"]


def _specs(home: Path) -> Iterator[tuple[WorkerSpec, float]]:
    """The specs of the workers that were started in this HOME, with their age."""
    for path in home.glob("**/*.json"):
        # Worker folders only: HOME/workers/<worker id>/..., at most two levels deep.
        if path.parent.parent != home / "workers":
            continue
        try:
            yield WorkerSpec.model_validate_json(path.read_bytes()), path.stat().st_mtime
        except (OSError, ValueError):
            continue


def _workers(invocation: Invocation, name: str) -> list[dict[str, Any]]:
    """The workers of a topology, newest last: of those that run, else of whatever is on the disk."""
    live: set[tuple[str, int]] | None = None
    topology_id = name
    try:
        with invocation.nimbus(patience=0.0) as nimbus:
            document = nimbus.get(f"/v1/topologies/{name}")
        topology_id = document["id"]
        live = {(worker["node"], worker["port"]) for worker in document["workers"]}
    except NotAlive:
        pass
    except StormDagsterError:
        live = None
    found: dict[tuple[str, int], tuple[float, dict[str, Any]]] = {}
    for spec, age in _specs(invocation.home):
        if spec.topology_id != topology_id and not spec.topology_id.startswith(f"{name}-"):
            continue
        slot = (spec.node, spec.port)
        if live and slot not in live:
            continue
        if slot not in found or found[slot][0] < age:
            row = {"node": spec.node, "host": spec.host, "port": spec.port, "log": spec.log_path}
            found[slot] = (age, row)
    return [row for _, row in sorted(found.values(), key=lambda item: (item[1]["node"], item[1]["port"]))]


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
        rows = [
            row for row in rows if worker in (f"{row['host']}:{row['port']}", f"{row['node']}:{row['port']}")
        ]
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
