"""Verbs that list the records of a topology page by page: its state and its dead letters."""

import json
from collections.abc import Mapping
from typing import Any, TextIO
from urllib.parse import quote

import click

from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import (
    notify,
    print_json,
    print_line,
    print_table,
    utc_time,
)
from storm_dagster.client.http import NimbusClient
from storm_dagster.model.errors import InvalidRequest

_MAX_PAGE = 1000
"""Entries of a page at most."""

_after_option = click.option("--after", metavar="TASK:N", help="Continue after an earlier page.")


@verb("state")
@click.argument("name")
@click.argument("component")
@click.argument("key", required=False)
@click.option(
    "--limit",
    type=click.IntRange(1, _MAX_PAGE),
    default=100,
    show_default=True,
    help="Largest number of entries.",
)
@_after_option
def state(
    invocation: Invocation,
    name: str,
    component: str,
    key: str | None,
    limit: int,
    after: str | None,
) -> None:
    """Read the current state of stateful bolt COMPONENT of topology NAME.

    With KEY only that entry. KEY is a string, or JSON for keys that are numbers or lists.
    """
    query = _without_nulls({"key": key, "limit": limit, "after": after})
    with invocation.nimbus() as nimbus:
        document = nimbus.get(f"/v1/topologies/{name}/state/{quote(component, safe='')}", **query)
    if invocation.json:
        print_json(document)
        return
    rows: list[tuple[object, ...]] = []
    for entry in document["entries"]:
        value = entry.get("shown") or json.dumps(entry["value"])
        rows.append((entry["task"], json.dumps(entry["key"]), value))
    print_table("", "task key value", rows)
    if not document["entries"]:
        click.echo(f"{document['id']} has no state {'for that key ' if key else ''}in {component}")
    if document["next"]:
        notify(f"more: --after {document['next']}")


def _without_nulls(query: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


@verb("dead-letters")
@click.argument("name")
@click.option("--component", metavar="SPOUT", help="Only those of one spout.")
@click.option(
    "--limit",
    type=click.IntRange(1, _MAX_PAGE),
    default=100,
    show_default=True,
    help="Largest number of dead letters.",
)
@_after_option
@click.option(
    "--replay",
    is_flag=True,
    help="Emit all of them a second time, for example after a bug is fixed.",
)
@click.option(
    "--export",
    type=click.File("w", encoding="utf-8", lazy=True),
    help="Write all of them as lines of JSON.",
)
@click.option(
    "--delete",
    is_flag=True,
    help="Delete them for good: export them first. It needs --older-than or --all.",
)
@click.option(
    "--older-than",
    type=click.IntRange(1),
    metavar="SECS",
    help="Delete those whose last failure is so long ago.",
)
@click.option("--all", "all_letters", is_flag=True, help="Delete all.")
def dead_letters(
    invocation: Invocation,
    name: str,
    component: str | None,
    limit: int,
    after: str | None,
    replay: bool,
    export: TextIO | None,
    delete: bool,
    older_than: int | None,
    all_letters: bool,
) -> None:
    """List the dead letters of topology NAME.

    These are tuples that failed too often, each with its last error.
    """
    _check_dead_letter_options(
        replay=replay,
        exports=export is not None,
        delete=delete,
        has_age=older_than is not None,
        all_letters=all_letters,
    )
    # They take all dead letters, and not one page.
    is_whole = replay or delete or export is not None
    query = {
        "component": component,
        "limit": str(_MAX_PAGE if is_whole else limit),
        "after": after,
        "older_secs": str(older_than or 0) if delete else None,
    }
    path = f"/v1/topologies/{name}/dead-letters"
    method = "GET"
    if replay or delete:
        path = f"{path}/{'replay' if replay else 'delete'}"
        method = "POST"
    with invocation.nimbus() as nimbus:
        letters, document = _read_dead_letters(nimbus, method, path, query, is_whole=is_whole)
    topology_id = document["id"]
    count = len(letters)
    if export is not None:
        export.writelines(json.dumps(letter) + "\n" for letter in letters)
        text = f"{count} dead letters of {topology_id} exported"
        print_line(invocation.json, {"id": topology_id, "exported": count}, text)
    elif replay:
        text = f"{count} dead letters of {topology_id} are emitted again"
        print_line(invocation.json, {"id": topology_id, "replayed": count}, text)
    elif delete:
        text = f"{count} dead letters of {topology_id} are deleted"
        print_line(invocation.json, {"id": topology_id, "deleted": count}, text)
    elif invocation.json:
        print_json(document)
    else:
        _print_dead_letters(document)


def _check_dead_letter_options(
    *, replay: bool, exports: bool, delete: bool, has_age: bool, all_letters: bool
) -> None:
    """Refuse options that exclude each other, and a deletion without its extent."""
    if replay and exports:
        raise InvalidRequest("--replay and --export exclude each other: export first")
    if delete and (replay or exports):
        raise InvalidRequest("--delete excludes --replay and --export: export first")
    if delete != (has_age or all_letters) or (has_age and all_letters):
        raise InvalidRequest(
            "--delete needs either --older-than SECS or --all, which no other request takes"
        )


def _read_dead_letters(
    nimbus: NimbusClient,
    method: str,
    path: str,
    query: Mapping[str, str | None],
    *,
    is_whole: bool,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The dead letters of one page, or with ``is_whole`` of all, and the document of the last."""
    letters: list[dict[str, Any]] = []
    after = query["after"]
    while True:
        page_query = {**query, "after": after}
        document = nimbus.request(method, path, params=_without_nulls(page_query)).json()
        letters += document["letters"]
        after = document["next"]
        if after is None or not is_whole:
            return letters, document


def _print_dead_letters(document: Mapping[str, Any]) -> None:
    """Print a page of dead letters as a table."""
    columns = [
        "spout",
        "task",
        "number",
        "tries",
        "last",
        "failed in=in",
        "error",
        "values",
        "replayed",
    ]
    letters = document["letters"]
    print_table("", columns, map(_letter_row, letters))
    if not letters:
        click.echo(f"{document['id']} has no dead letters")
    if document["next"]:
        notify(f"more: --after {document['next']}")


def _letter_row(letter: dict[str, Any]) -> dict[str, Any]:
    """A dead letter with the cells of its table."""
    failed_in = None
    if letter["component"]:
        failed_in = f"{letter['component']}[{letter['failed_task']}]"
    replayed = None
    if letter.get("replayed_ms") is not None:
        replayed = utc_time(letter["replayed_ms"] // 1000)
    return {
        **letter,
        "last": utc_time(letter["last_ms"] // 1000),
        "in": failed_in,
        "values": json.dumps(letter["values"])[:60],
        "replayed": replayed,
    }


COMMANDS: Mapping[str, click.Command] = {"state": state, "dead-letters": dead_letters}
