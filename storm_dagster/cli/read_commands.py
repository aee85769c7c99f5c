"""Verbs that show a cluster or a topology, and ``dead-letters``."""

import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

import click

from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import (
    human_seconds,
    notify,
    plain,
    print_answer,
    print_json,
    print_operations,
    print_table,
    row_for_table,
    say,
)
from storm_dagster.client.waiting import list_operations
from storm_dagster.model.conf import CONF_KEYS, mask
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.operation_text import operation_text

_after_option = click.option("--after", metavar="TASK:N", help="Continue after an earlier page.")


@verb("conf")
@click.argument("key", required=False)
def conf(invocation: Invocation, key: str | None) -> None:
    """Show the merged cluster conf, or one KEY of it: value, origin, meaning."""
    merged = invocation.conf
    if key is not None and key not in merged.values:
        raise InvalidRequest(f"conf key {key!r} is not set and not known: see `storm-dagster conf`")
    # One key may be asked for by name, too: a secret is not shown to a terminal either.
    values = mask(merged.values)
    rows: dict[str, dict[str, Any]] = {
        name: {
            "value": values[name],
            "origin": merged.origins.get(name, "default"),
            "doc": CONF_KEYS[name].doc if name in CONF_KEYS else None,
        }
        for name in ([key] if key is not None else sorted(values))
    }
    if invocation.json:
        print_json({"conf": rows, "warnings": list(merged.warnings)})
        return
    cells = [
        (n, "null" if r["value"] is None else r["value"], r["origin"], r["doc"] or "")
        for n, r in rows.items()
    ]
    print_table("", "key value origin meaning", cells)
    for warning in merged.warnings:
        notify(f"warning: {warning}")


def _print_members(invocation: Invocation, kind: str, columns: str) -> None:
    """Print the supervisors or nimbuses of the cluster."""
    with invocation.nimbus() as nimbus:
        rows = nimbus.get("/v1/cluster")[kind]
    print_answer(invocation.json, {kind: rows}, columns, map(row_for_table, rows))


@verb("supervisors")
def supervisors(invocation: Invocation) -> None:
    """List the supervisors with their slots and used slots."""
    _print_members(invocation, "supervisors", "id host ports used uptime")


@verb("nimbuses")
def nimbuses(invocation: Invocation) -> None:
    """List the nimbuses and their leader."""
    _print_members(invocation, "nimbuses", "host:port http role uptime version")


@verb("list")
def list_topologies(invocation: Invocation) -> None:
    """List the topologies of the cluster, and the submissions and changes under way."""
    with invocation.nimbus() as nimbus:
        # Read first: a submission that ends in between is a topology by then.
        operations = list_operations(nimbus)
        topologies = nimbus.get("/v1/topologies")["topologies"]
    if invocation.json:
        print_json({"topologies": topologies, "operations": operations})
        return
    columns = "id name status uptime workers executors tasks"
    print_table("", columns, map(row_for_table, topologies))
    print_operations(operations)


def _when(secs: float) -> str:
    return datetime.datetime.fromtimestamp(secs, datetime.timezone.utc).isoformat()


@verb("errors")
@click.argument("name")
def errors(invocation: Invocation, name: str) -> None:
    """List the errors of the tasks of topology NAME, newest first."""
    with invocation.nimbus() as nimbus:
        document = nimbus.get(f"/v1/topologies/{name}")
    rows = document.get("errors", [])
    if invocation.json:
        print_json({"id": document["id"], "name": document["name"], "errors": rows})
        return
    if not rows:
        click.echo(f"{document['id']} has reported no errors")
    for row in rows:
        times = f", {row['count']} times" if row.get("count", 1) > 1 else ""
        where = f"{row['component']}[{row['task']}] on {row['host']}:{row['port']}"
        click.echo(plain(f"{_when(row['time'])}  {where}{times}"))
        for line in str(row["error"]).rstrip().splitlines():
            click.echo(plain(f"    {line}"))


@verb("explain")
@click.argument("name")
@click.argument("task", type=int, required=False)
def explain(invocation: Invocation, name: str, task: int | None) -> None:
    """Explain the placement of the tasks of topology NAME, or of one TASK."""
    asked = {} if task is None else {"task": task}
    with invocation.nimbus() as nimbus:
        document = nimbus.get(f"/v1/topologies/{name}/placement", **asked)
    reasons: dict[str, Any] = document.get("reasons", {})
    unassigned: dict[str, Any] = document.get("unassigned", {})
    waiting: dict[str, Any] = document.get("waiting", {})
    known = {**reasons, **unassigned, **waiting}
    if task is not None and str(task) not in known:
        raise InvalidRequest(f"topology {name!r} has no task {task}")
    if invocation.json:
        print_json(document)
        return
    components, slots = document.get("components", {}), document.get("slots", {})

    def row(number: str) -> tuple[Any, ...]:
        reason, state = reasons.get(number, ""), "placed"
        if number in unassigned:
            reason, state = unassigned[number], "unscheduled"
        elif number in waiting:
            reason, state = f"its worker is gone; it would go to {waiting[number]} now", "waiting"
        return number, components.get(number), slots.get(number), state, reason

    shown = sorted(known, key=int) if task is None else [str(task)]
    print_table("", ["task", "component", "slot", "", "why"], map(row, shown))
    if document.get("fused"):
        print_table(
            "fused: these run on Spark, in the query of a spout",
            "component spout",
            document["fused"].items(),
        )
    if choice := document.get("choice"):
        print_table(
            f"{choice['candidates']} workers could take it; not chosen, the closest first",
            ["worker", "decided by=selector", "there=had", f"in {choice['worker']}=chosen_had"],
            choice["alternatives"],
        )
    mine = slots.get(str(task)) if task is not None else None
    why = sorted(document.get("worker_reasons", {}).items())
    print_table("", "slot why", [pair for pair in why if task is None or pair[0] == mine])
    for warning in document.get("warnings", []):
        notify(f"warning: {warning}")


@verb("state")
@click.argument("name")
@click.argument("component")
@click.argument("key", required=False)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
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
    """Read the current state of stateful bolt COMPONENT of topology NAME, or only KEY.

    KEY is a string, or JSON for keys that are numbers or lists.
    """
    asked = {"key": key, "limit": limit, "after": after}
    with invocation.nimbus() as nimbus:
        given = {part: value for part, value in asked.items() if value is not None}
        document = nimbus.get(f"/v1/topologies/{name}/state/{quote(component, safe='')}", **given)
    if invocation.json:
        print_json(document)
        return
    rows = [
        (r["task"], json.dumps(r["key"]), r.get("shown") or json.dumps(r["value"]))
        for r in document["entries"]
    ]
    print_table("", "task key value", rows)
    if not document["entries"]:
        click.echo(f"{document['id']} keeps nothing {'for that key' if key else ''} in {component}")
    if document["next"]:
        notify(f"more: --after {document['next']}")


@verb("dead-letters")
@click.argument("name")
@click.option("--component", metavar="SPOUT", help="Only those of one spout.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    help="Letters to list at most.",
)
@_after_option
@click.option("--replay", is_flag=True, help="Emit all of them again, as after a bug is gone.")
@click.option(
    "--export",
    type=click.File("w", encoding="utf-8", lazy=True),
    help="Write all of them as lines of JSON.",
)
def dead_letters(
    invocation: Invocation,
    name: str,
    component: str | None,
    limit: int,
    after: str | None,
    replay: bool,
    export: TextIO | None,
) -> None:
    """List the dead letters of topology NAME: tuples that failed too often, with the last error."""
    if replay and export is not None:
        raise InvalidRequest("--replay and --export exclude each other: export first")
    letters: list[dict[str, Any]] = []
    asked = {
        "component": component,
        "limit": str(1000 if replay or export else limit),
        "after": after,
    }
    with invocation.nimbus() as nimbus:
        while True:
            query = {part: value for part, value in asked.items() if value is not None}
            path = f"/v1/topologies/{name}/dead-letters"
            method, at = ("POST", f"{path}/replay") if replay else ("GET", path)
            document = nimbus.request(method, at, params=query).json()
            letters += document["letters"]
            asked["after"] = document["next"]
            if document["next"] is None or not (replay or export):
                break
    if export is not None:
        export.writelines(json.dumps(letter) + "\n" for letter in letters)
    if replay or export is not None:
        did = {"id": document["id"], "replayed" if replay else "exported": len(letters)}
        outcome = "are emitted again" if replay else "exported"
        say(invocation.json, did, f"{len(letters)} dead letters of {document['id']} {outcome}")
        return
    if invocation.json:
        print_json(document)
        return
    for row in letters:
        again = row.get("replayed_ms")
        failed_in = f"{row['component']}[{row['failed_task']}]" if row["component"] else None
        values, replayed = (
            json.dumps(row["values"])[:60],
            None if again is None else _when(again // 1000),
        )
        row |= {
            "last": _when(row["last_ms"] // 1000),
            "in": failed_in,
            "values": values,
            "replayed": replayed,
        }
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
    print_table("", columns, letters)
    if not letters:
        click.echo(f"{document['id']} has no dead letters")
    if document["next"]:
        notify(f"more: --after {document['next']}")


def _show_placements(document: dict[str, Any]) -> None:
    for name, outcome in document["topologies"].items():
        error = outcome.get("error")
        outcome_text = f"{name}: {outcome['status']}" + (f" ({error['message']})" if error else "")
        title = f"{outcome_text}, {outcome['moved']} tasks moved"
        print_table(title, "node host:port tasks components kept", outcome["workers"])
        for task, reason in outcome.get("unassigned", {}).items():
            notify(f"  task {task} is unassigned: {reason}")
        for warning in outcome.get("warnings", []):
            notify(f"  warning: {warning}")
    seconds = document["seconds"]
    click.echo(f"session {seconds['session']:.2f} s, assignment {seconds['assign']:.2f} s")


@verb("plan")
@click.argument("file")
def plan(invocation: Invocation, file: str) -> None:
    """Plan the topologies of FILE (YAML or JSON, - for standard input) as a submission would.
    Changes nothing.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"plan file {file} cannot be read: {error}") from None
    from storm_dagster.operations.read.plan_file import plan_text

    documents = plan_text(text, conf=invocation.conf, log=notify)
    if invocation.json:
        print_json(documents[0] if len(documents) == 1 else documents)
        return
    for document in documents:
        _show_placements(document)


@verb("show")
@click.argument("name")
def show(invocation: Invocation, name: str) -> None:
    """Show the workers, tasks, statistics and errors of topology NAME."""
    with invocation.nimbus() as nimbus:
        document = nimbus.get(f"/v1/topologies/{name}")
    if invocation.json:
        print_json(document)
        return
    click.echo(
        f"{document['id']}  {document['status']}  up {human_seconds(document['uptime_secs'])}"
    )
    for operation in document.get("operations", ()):
        click.echo(plain(operation_text(operation)))
    for problem in document.get("problems", []):
        notify(f"warning: {problem}")
    print_table("workers", "node host:port pid uptime version tasks", document["workers"])
    if (upgrade := document.get("upgrade")) is not None:
        click.echo(
            f"upgrade to {upgrade['code']}" + (" is rolled back" if upgrade["rollback"] else "")
        )
        for worker, state in sorted(upgrade["workers"].items()):
            click.echo(f"  {worker}  {state}")
    columns = "task=id component on=host:port status uptime emitted executed acked failed execute_ms complete_ms"
    print_table(
        "tasks", columns, [{**task, **(task.get("stats") or {})} for task in document["tasks"]]
    )
    _print_loads(document)
    reported = [
        (task, component, metric, value)
        for component, part in document["components"].items()
        for task, metrics in (part.get("metrics") or {}).items()
        for metric, value in sorted(metrics.items())
        if metric != "lag_by_partition"
    ]
    if reported:
        print_table("metrics", "task component metric value", reported)
    _print_findings(document)
    for error in document.get("errors", [])[:10]:
        lines = str(error["error"]).strip().splitlines()
        times = f" ({error['count']} times)" if error.get("count", 1) > 1 else ""
        notify(
            f"error in {error['component']}[{error['task']}]: {lines[-1] if lines else ''}{times}"
        )


@verb("visualize")
@click.argument("name")
def visualize(invocation: Invocation, name: str) -> None:
    """Print a picture (SVG) of topology NAME with what flows in it now."""
    with invocation.nimbus() as nimbus:
        svg = nimbus.request("GET", f"/topologies/{quote(name, safe='')}/graph.svg").text
    say(invocation.json, {"name": name, "svg": svg}, svg)


def _print_findings(document: dict[str, Any]) -> None:
    """A line for each finding; nothing from an older nimbus."""
    for one in document.get("findings", []):
        click.echo(plain(f"{one['severity']}: {one['text']} What to do: {one['remedy']}."))


def _print_loads(document: dict[str, Any]) -> None:
    """A line for each component and kind of latency, of the last ten minutes; nothing from an older
    nimbus.
    """
    rows = [
        {**part, **found, "component": component, "latency": kind}
        for component, part in sorted(document["components"].items())
        if not component.startswith("__") and "latency" in part
        for kind, found in sorted(part["latency"].items()) or [(None, {})]
    ]
    if rows:
        print_table(
            "components", "component waiting capacity lag latency p50_ms p95_ms p99_ms", rows
        )
    lags = [
        {"component": component, "partition": partition, "records": lag[0], "seconds": lag[1]}
        for component, part in sorted(document["components"].items())
        for partition, lag in part.get("lag_by_partition", {}).items()
    ]
    if lags:
        print_table("lag", "component partition records seconds", lags)
    if document.get("back_pressure"):
        click.echo(
            f"back pressure: {document['back_pressure']} of {len(document['workers'])} workers hold the spouts back"
        )


COMMANDS: Mapping[str, click.Command] = {
    "list": list_topologies,
    "show": show,
    "visualize": visualize,
    "explain": explain,
    "plan": plan,
    "conf": conf,
    "errors": errors,
    "state": state,
    "dead-letters": dead_letters,
    "supervisors": supervisors,
    "nimbuses": nimbuses,
}
