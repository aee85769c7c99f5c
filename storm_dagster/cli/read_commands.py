"""Verbs that show a cluster or a topology."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from storm_dagster.cli.health import withdrawn_lines
from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import (
    human_seconds,
    notify,
    plain,
    print_answer,
    print_json,
    print_line,
    print_operations,
    print_table,
    row_for_table,
    utc_time,
)
from storm_dagster.client.waiting import list_operations
from storm_dagster.model.conf import CONF_KEYS, mask
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.event_log import event_log_text
from storm_dagster.model.operation_text import operation_text


@verb("conf")
@click.argument("key", required=False)
def conf(invocation: Invocation, key: str | None) -> None:
    """Show the merged cluster conf, or one KEY of it: value, origin, meaning.

    The origin is a file (storm.yaml, or one of storm.d beside it), -c, or the shipped default.
    """
    merged = invocation.conf
    if key is not None and key not in merged.values:
        raise InvalidRequest(f"conf key {key!r} is not set and not known: see `storm-dagster conf`")
    # Also for one key: a secret is not shown on a terminal either.
    values = mask(merged.values)
    rows: dict[str, dict[str, Any]] = {}
    for name in [key] if key is not None else sorted(values):
        rows[name] = {
            "value": values[name],
            "origin": merged.origins.get(name, "default"),
            "doc": CONF_KEYS[name].doc if name in CONF_KEYS else None,
        }
    if invocation.json:
        print_json({"conf": rows, "warnings": list(merged.warnings)})
        return
    cells: list[tuple[object, ...]] = []
    for name, row in rows.items():
        value = "null" if row["value"] is None else row["value"]
        cells.append((name, value, row["origin"], row["doc"] or ""))
    print_table("", "key value origin meaning", cells)
    for warning in merged.warnings:
        notify(f"warning: {warning}")


def _print_members(invocation: Invocation, kind: str, columns: str) -> None:
    """Print the supervisors or nimbuses of the cluster."""
    with invocation.nimbus() as nimbus:
        rows = nimbus.get("/v1/cluster")[kind]
    print_answer(invocation.json, {kind: rows}, columns, map(row_for_table, rows))
    for line in withdrawn_lines(rows):
        notify(line)


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
        # Read first: a submission that ends in between is a topology in the second response.
        operations = list_operations(nimbus)
        document = nimbus.get("/v1/topologies")
    topologies = document["topologies"]
    paused = document.get("healing_pause")
    if invocation.json:
        answer = {"topologies": topologies, "operations": operations}
        print_json({**answer, "healing_pause": paused} if paused else answer)
        return
    columns = "id name status uptime workers executors tasks"
    print_table("", columns, map(row_for_table, topologies))
    print_operations(operations)
    if paused:
        click.echo(plain(paused))


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
        task = f"{row['component']}[{row['task']}] on {row['host']}:{row['port']}"
        click.echo(plain(f"{utc_time(row['time'])}  {task}{times}"))
        for line in str(row["error"]).rstrip().splitlines():
            click.echo(plain(f"    {line}"))


@verb("explain")
@click.argument("name")
@click.argument("task", type=int, required=False)
def explain(invocation: Invocation, name: str, task: int | None) -> None:
    """Explain the placement of the tasks of topology NAME, or of one TASK."""
    query = {} if task is None else {"task": task}
    with invocation.nimbus() as nimbus:
        document = nimbus.get(f"/v1/topologies/{name}/placement", **query)
    tasks = [
        *document.get("reasons", {}),
        *document.get("unassigned", {}),
        *document.get("waiting", {}),
    ]
    if task is not None and str(task) not in tasks:
        raise InvalidRequest(f"topology {name!r} has no task {task}")
    if invocation.json:
        print_json(document)
        return
    numbers = sorted(set(tasks), key=int) if task is None else [str(task)]
    rows = [_placement_row(document, number) for number in numbers]
    print_table("", ["task", "component", "slot", "", "why"], rows)
    if document.get("fused"):
        print_table(
            "fused: these run on Spark, in the query of a spout",
            "component spout",
            document["fused"].items(),
        )
    _print_choice(document.get("choice"))
    worker_reasons = sorted(document.get("worker_reasons", {}).items())
    if task is not None:
        slot_of_task = document.get("slots", {}).get(str(task))
        worker_reasons = [row for row in worker_reasons if row[0] == slot_of_task]
    print_table("", "slot why", worker_reasons)
    windows = document.get("windows", {})
    _print_tasks("windows", "why the next one is not due", windows, numbers)
    awaits = document.get("awaits", {})
    _print_tasks("systems that are away", "what it waits for", awaits, numbers)
    if document.get("healing"):
        click.echo(plain(document["healing"]))
    _print_failed_upgrade(document.get("failed_upgrade"))
    for warning in document.get("warnings", []):
        notify(f"warning: {warning}")


def _print_choice(choice: dict[str, Any] | None) -> None:
    """Print the workers that were not chosen for a task; nothing without a comparison."""
    if choice:
        print_table(
            f"{choice['candidates']} workers could take it; not chosen, the closest first",
            ["worker", "decided by=selector", "there=had", f"in {choice['worker']}=chosen_had"],
            choice["alternatives"],
        )


def _print_tasks(title: str, column: str, texts: dict[str, str], numbers: list[str]) -> None:
    """Print the text of each of these tasks that has one."""
    rows = [(number, texts[number]) for number in numbers if number in texts]
    print_table(title, ["task", column], rows)


def _print_failed_upgrade(failed: dict[str, Any] | None) -> None:
    """Print the upgrade that was rolled back, and the address of the log that has its cause."""
    if not failed:
        return
    click.echo(plain(f"the upgrade to {failed['code']} was rolled back: {failed['reason']}"))
    if failed["log"]:
        click.echo(plain(f"the log of {failed['worker']}: {failed['log']}"))


def _placement_row(document: dict[str, Any], number: str) -> tuple[Any, ...]:
    """Task, component, slot, state and reason of the task of that number."""
    component = document.get("components", {}).get(number)
    slot = document.get("slots", {}).get(number)
    unassigned = document.get("unassigned", {})
    waiting = document.get("waiting", {})
    if number in unassigned:
        return number, component, slot, "unscheduled", unassigned[number]
    if number in waiting:
        reason = f"its worker is gone; it would go to {waiting[number]} now"
        return number, component, slot, "waiting", reason
    reason = document.get("reasons", {}).get(number, "")
    return number, component, slot, "placed", reason


def _show_placements(document: dict[str, Any]) -> None:
    """Print the placements of one plan: a table for each topology, and the durations."""
    for name, outcome in document["topologies"].items():
        error = outcome.get("error")
        reason = f" ({error['message']})" if error else ""
        title = f"{name}: {outcome['status']}{reason}, {outcome['moved']} tasks moved"
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
    """Plan the topologies of FILE as a submission would, without any change.

    FILE is YAML or JSON, - for standard input.
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
    if document.get("healing_pause"):
        click.echo(plain(document["healing_pause"]))
    for problem in document.get("problems", []):
        notify(f"warning: {problem}")
    # An older nimbus has no event log.
    events = event_log_text(document["events"], time.time()) if document.get("events") else None
    if events is not None:
        click.echo(plain(f"Dagster: {events}"))
    print_table("workers", "node host:port pid uptime version tasks", document["workers"])
    upgrade = document.get("upgrade")
    if upgrade is not None:
        suffix = " is rolled back" if upgrade["rollback"] else ""
        click.echo(f"upgrade to {upgrade['code']}{suffix}")
        for worker, state in sorted(upgrade["workers"].items()):
            click.echo(f"  {worker}  {state}")
    columns = (
        "task=id component on=host:port status uptime emitted executed acked failed execute_ms"
        " complete_ms"
    )
    tasks = [{**task, **(task.get("stats") or {})} for task in document["tasks"]]
    print_table("tasks", columns, tasks)
    _print_loads(document)
    _print_metrics(document)
    _print_findings(document)
    _print_history(document)
    for error in document.get("errors", [])[:10]:
        lines = str(error["error"]).strip().splitlines()
        last_line = lines[-1] if lines else ""
        times = f" ({error['count']} times)" if error.get("count", 1) > 1 else ""
        notify(f"error in {error['component']}[{error['task']}]: {last_line}{times}")


@verb("visualize")
@click.argument("name")
def visualize(invocation: Invocation, name: str) -> None:
    """Print a picture (SVG) of topology NAME with what flows in it now."""
    with invocation.nimbus() as nimbus:
        svg = nimbus.request("GET", f"/topologies/{quote(name, safe='')}/graph.svg").text
    print_line(invocation.json, {"name": name, "svg": svg}, svg)


def _print_metrics(document: dict[str, Any]) -> None:
    """Print the metrics of tasks, apart from the lag of partitions."""
    rows: list[tuple[object, ...]] = []
    for component, part in document["components"].items():
        for task, metrics in (part.get("metrics") or {}).items():
            for metric, value in sorted(metrics.items()):
                if metric != "lag_by_partition":
                    rows.append((task, component, metric, value))
    if rows:
        print_table("metrics", "task component metric value", rows)


def _print_history(document: dict[str, Any]) -> None:
    """Print the newest changes of the topology; an older nimbus has none."""
    rows: list[tuple[object, ...]] = []
    for change in document.get("history", [])[:10]:
        parts = [change["why"]] if change["why"] else []
        if change["moved"]:
            parts.append(f"{change['moved']} tasks moved")
        rows.append((utc_time(change["at_secs"]), change["action"], ", ".join(parts)))
    if rows:
        print_table("changes, newest first (UTC)", "when what why", rows)


def _print_findings(document: dict[str, Any]) -> None:
    """Print a line for each finding; an older nimbus has none."""
    for finding in document.get("findings", []):
        text = f"{finding['severity']}: {finding['text']} What to do: {finding['remedy']}."
        click.echo(plain(text))


def _print_loads(document: dict[str, Any]) -> None:
    """Print the load of the last ten minutes, lags and back pressure.

    A component has a row for each kind of latency. An older nimbus has none.
    """
    loads: list[dict[str, Any]] = []
    lags: list[dict[str, Any]] = []
    for component, part in sorted(document["components"].items()):
        if not component.startswith("__") and "latency" in part:
            latencies = sorted(part["latency"].items()) or [(None, {})]
            for kind, latency in latencies:
                loads.append({**part, **latency, "component": component, "latency": kind})
        for partition, lag in part.get("lag_by_partition", {}).items():
            records, seconds = lag
            row = {"component": component, "partition": partition}
            lags.append({**row, "records": records, "seconds": seconds})
    if loads:
        columns = "component waiting capacity lag latency p50_ms p95_ms p99_ms"
        print_table("components", columns, loads)
    if lags:
        print_table("lag", "component partition records seconds", lags)
    if document.get("back_pressure"):
        workers = f"{document['back_pressure']} of {len(document['workers'])} workers"
        click.echo(f"back pressure: {workers} hold the spouts back")


COMMANDS: Mapping[str, click.Command] = {
    "list": list_topologies,
    "show": show,
    "visualize": visualize,
    "explain": explain,
    "plan": plan,
    "conf": conf,
    "errors": errors,
    "supervisors": supervisors,
    "nimbuses": nimbuses,
}
