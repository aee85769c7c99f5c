"""Verbs for operators: ``blacklist`` and ``blob``."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from storm_dagster.cli.options import Invocation, change_options, verb, verb_group
from storm_dagster.cli.output import Steps, print_answer, print_json, print_line
from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.client.changes import drain_hosts, topologies_on
from storm_dagster.client.http import NimbusClient
from storm_dagster.model.errors import Conflict, InvalidRequest, KeyNotFound
from storm_dagster.model.event_log import is_batch_key
from storm_dagster.model.names import check_blob_key, id_of_blob_key
from storm_dagster.security.settings import Security

_hosts_argument = click.argument("hosts", metavar="HOST...", nargs=-1, required=True)

# -- blacklist -------------------------------------------------------------------------------------


def _print_hosts(
    invocation: Invocation, cluster: dict[str, Any], hosts: list[str], **more: Any
) -> None:
    """Print hosts with their supervisors and the number of used slots.

    ``more`` are further fields of the JSON document.
    """
    rows: list[dict[str, Any]] = []
    for host in hosts:
        supervisors = [row for row in cluster["supervisors"] if row["host"] == host]
        used = sum(len(row["used"]) for row in supervisors)
        rows.append({"host": host, "supervisors": [row["id"] for row in supervisors], "used": used})
    cells = [{**row, "supervisors": row["supervisors"] or "none registered"} for row in rows]
    columns = ["host", "supervisors", "slots in use=used"]
    print_answer(invocation.json, {"hosts": rows, **more}, columns, cells)


def _change_blacklist(
    invocation: Invocation,
    hosts: tuple[str, ...],
    action: str,
    drain: bool = False,
    wait_secs: int | None = None,
) -> None:
    """Add or remove hosts (``action``), and print the list; with ``drain`` also move their tasks.

    ``wait_secs`` is the silence before tasks move, and :class:`InvalidRequest` without ``drain``.
    """
    if wait_secs is not None and not drain:
        raise InvalidRequest(
            "-w is the silence before tasks move, and none do: give --drain as well"
        )
    # Further fields of the JSON document: ``drained`` topologies, ``empty`` hosts.
    more: dict[str, Any] = {}
    with (
        invocation.nimbus() as nimbus,
        Steps(f"blacklist {action}", quiet=invocation.json) as steps,
    ):
        cluster = nimbus.get("/v1/cluster")
        if invocation.dry_run:
            if drain:
                more["drained"] = topologies_on(nimbus, hosts)
            listed_hosts = _planned_hosts(nimbus, hosts, action)
            _print_hosts(invocation, cluster, listed_hosts, dry_run=True, **more)
            return
        blacklisted = nimbus.post("/v1/blacklist", {action: list(hosts)})["hosts"]
        if drain:
            more["drained"] = drain_hosts(
                nimbus,
                hosts,
                wait=invocation.wait,
                wait_secs=wait_secs,
                progress=steps.on_step,
            )
            cluster = nimbus.get("/v1/cluster")
            more["empty"] = not any(
                row["used"] for row in cluster["supervisors"] if row["host"] in hosts
            )
    _print_hosts(invocation, cluster, blacklisted, **more)
    if drain and not invocation.json:
        number = len(more["drained"])
        if more["empty"]:
            click.echo(f"{', '.join(hosts)}: {number} topologies moved, empty")
        else:
            click.echo(f"{', '.join(hosts)}: {number} topologies are being moved")
    if action == "add":
        _warn_of_unregistered(cluster, hosts)


def _planned_hosts(nimbus: NimbusClient, hosts: tuple[str, ...], action: str) -> list[str]:
    """The blacklist as it would be after the change."""
    listed_hosts = set(nimbus.get("/v1/blacklist")["hosts"])
    if action == "add":
        return sorted(listed_hosts | set(hosts))
    return sorted(listed_hosts - set(hosts))


def _warn_of_unregistered(cluster: dict[str, Any], hosts: tuple[str, ...]) -> None:
    """Warn of hosts that are listed without a registered supervisor."""
    registered_hosts = {row["host"] for row in cluster["supervisors"]}
    for host in hosts:
        if host not in registered_hosts:
            click.echo(
                f"no supervisor of host {host} is registered now; the host is listed anyway",
                err=True,
            )


@verb("add")
@change_options
@_hosts_argument
@click.option(
    "--drain", is_flag=True, help="Move its tasks elsewhere, and return when the host is empty."
)
@click.option(
    "-w",
    "wait_secs",
    type=click.IntRange(0),
    help="Of --drain: seconds of silence before tasks move. [default: message timeout]",
)
def blacklist_add(
    invocation: Invocation, hosts: tuple[str, ...], drain: bool, wait_secs: int | None
) -> None:
    """Give the supervisors of HOST no new work.

    Its workers continue, but for --drain.
    """
    _change_blacklist(invocation, hosts, "add", drain, wait_secs)


@verb("remove")
@change_options
@_hosts_argument
def blacklist_remove(invocation: Invocation, hosts: tuple[str, ...]) -> None:
    """Let the supervisors of HOST get new work."""
    _change_blacklist(invocation, hosts, "remove")


@verb("list")
def blacklist_list(invocation: Invocation) -> None:
    """List the hosts that get no new work."""
    with invocation.nimbus() as nimbus:
        cluster = nimbus.get("/v1/cluster")
        hosts = nimbus.get("/v1/blacklist")["hosts"]
    _print_hosts(invocation, cluster, hosts)


# -- blobs -----------------------------------------------------------------------------------------


def _blobs(invocation: Invocation, nimbus: NimbusClient) -> NimbusBlobClient:
    return NimbusBlobClient(nimbus.leader(), security=Security.of(invocation.conf))


def _check_users_key(nimbus: NimbusClient, key: str, doing: str) -> None:
    """Refuse the key of a blob of a topology or submission, which users must not change.

    ``doing`` is ``stored`` or ``deleted``. A blob of a topology that is gone may be deleted.
    """
    check_blob_key(key)
    topology_id = id_of_blob_key(key)
    live_ids = {row["id"] for row in nimbus.get("/v1/topologies")["topologies"]}
    if topology_id in live_ids:
        raise Conflict(
            f"blob {key!r} belongs to topology {topology_id}, which is alive, and cannot be "
            f"{doing}: "
            "use `storm-dagster update` or `kill`"
        )
    if topology_id is not None and doing == "stored":
        raise InvalidRequest(
            f"blob {key!r} has the form of a topology's, and the cleaner would remove it: use "
            "another key"
        )
    if key.startswith(("staging.", "staging-of.", "upload.")):
        raise InvalidRequest(
            f"blob {key!r} belongs to a submission and cannot be {doing}: the cleaner removes it"
        )
    if is_batch_key(key):
        raise InvalidRequest(
            f"blob {key!r} holds events for Dagster and cannot be {doing}: it is removed when "
            "Dagster has them"
        )


@verb("list")
@click.argument("prefix", default="")
def blob_list(invocation: Invocation, prefix: str) -> None:
    """List the blobs whose key begins with PREFIX."""
    with invocation.nimbus() as nimbus:
        query = {"prefix": prefix} if prefix else {}
        blobs = nimbus.get("/v1/blobs", **query)["blobs"]
    rows = [(blob["key"], blob["size"], blob["sha256"][:16]) for blob in blobs]
    print_answer(invocation.json, {"blobs": blobs}, "key bytes sha256", rows)


@verb("cat")
@click.argument("key")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to this file instead.",
)
def blob_cat(invocation: Invocation, key: str, output: Path | None) -> None:
    """Write the verified content of blob KEY to standard output."""
    check_blob_key(key)
    if invocation.json and output is None:
        raise InvalidRequest(
            "`blob cat --json` needs -o FILE: standard output can hold the blob or the JSON, not "
            "both"
        )
    with (
        invocation.nimbus() as nimbus,
        _blobs(invocation, nimbus) as blobs,
        blobs.open(key) as content,
    ):
        if output is None:
            shutil.copyfileobj(content, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
        with output.open("wb") as sink:
            shutil.copyfileobj(content, sink)
    if invocation.json:
        print_json({"key": key, "size": output.stat().st_size, "file": str(output)})


@verb("put")
@change_options
@click.argument("key")
@click.argument(
    "source",
    metavar="FILE",
    type=click.Path(allow_dash=True, dir_okay=False, path_type=Path),
)
def blob_put(invocation: Invocation, key: str, source: Path) -> None:
    """Store FILE (- for standard input) as blob KEY.

    Returns when the blob is replicated.
    """
    with invocation.nimbus() as nimbus:
        _check_users_key(nimbus, key, "stored")
        if str(source) != "-" and not source.is_file():
            raise InvalidRequest(
                f"file {str(source)!r} does not exist: name a file, or - for standard input"
            )
        if invocation.dry_run:
            print_line(invocation.json, {"key": key, "dry_run": True}, f"would store {key}")
            return
        content = sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()
        with _blobs(invocation, nimbus) as blobs:
            meta = blobs.put(key, content)
    document = {"key": meta.key, "size": meta.size, "sha256": meta.sha256}
    print_line(
        invocation.json, document, f"stored {meta.key}, {meta.size} bytes, SHA-256 {meta.sha256}"
    )


@verb("delete")
@change_options
@click.argument("key")
def blob_delete(invocation: Invocation, key: str) -> None:
    """Delete blob KEY from all nimbuses."""
    with invocation.nimbus() as nimbus:
        _check_users_key(nimbus, key, "deleted")
        with _blobs(invocation, nimbus) as blobs:
            if not blobs.exists(key):
                raise KeyNotFound(f"blob {key!r} does not exist: see `storm-dagster blob list`")
            if not invocation.dry_run:
                blobs.delete(key)
    if invocation.dry_run:
        print_line(
            invocation.json, {"key": key, "deleted": False, "dry_run": True}, f"would delete {key}"
        )
    else:
        print_line(invocation.json, {"key": key, "deleted": True}, f"deleted {key}")


blacklist = verb_group(
    "blacklist", "Hosts that get no new work.", blacklist_add, blacklist_remove, blacklist_list
)
blob = verb_group("blob", "Blobs of the cluster.", blob_list, blob_cat, blob_put, blob_delete)

COMMANDS: Mapping[str, click.Command] = {"blacklist": blacklist, "blob": blob}
