"""Verbs that show topologies: ``list`` and ``show``."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import human_seconds, plain, print_json, print_table, say


@verb("show")
def show(invocation: Invocation, name: str) -> None:
    """Show the workers, tasks, statistics and errors of topology NAME."""
    with invocation.nimbus() as nimbus:
        document = nimbus.get(f"/v1/topologies/{name}")
    if invocation.json:
        print_json(document)
        return
    click.echo(f"{document['id']}  {document['status']}  up {human_seconds(document['uptime_secs'])}")
    for problem in document.get("problems", []):
        click.echo(plain(f"warning: {problem}"), err=True)
    print_table("workers", "node host:port pid uptime version tasks", document["workers"])
    upgrade = document.get("upgrade")
    if upgrade is not None:
        click.echo(f"upgrade to {upgrade['code']}" + (" is rolled back" if upgrade["rollback"] else ""))
        for worker, state in sorted(upgrade["workers"].items()):
            click.echo(f"  {worker}  {state}")
    columns = "task=id component on=host:port status uptime emitted executed acked failed execute_ms complete_ms"
    print_table("tasks", columns, [{**task, **(task.get("stats") or {})} for task in document["tasks"]])
    _print_loads(document)
    reported = [
        (task, component, metric, value)
        for component, part in document["components"].items()
        for task, metrics in (part.get("metrics") or {}).items()
        for metric, value in sorted(metrics.items())
    ]
    if reported:
        print_table("metrics", "task component metric value", reported)
    _print_findings(document)
    for error in document.get("errors", [])[:10]:
        lines = str(error["error"]).strip().splitlines()
        times = f" ({error['count']} times)" if error.get("count", 1) > 1 else ""
        click.echo(
            plain(f"error in {error['component']}[{error['task']}]: {lines[-1] if lines else ''}{times}"), err=True
        )


@verb("visualize")
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
    """A line for each component and kind of latency, of the last ten minutes; nothing from an older nimbus."""
    rows = [
        {**part, **found, "component": component, "latency": kind}
        for component, part in sorted(document["components"].items())
        if not component.startswith("__") and "latency" in part
        for kind, found in sorted(part["latency"].items()) or [(None, {})]
    ]
    if rows:
        print_table("components", "component waiting capacity lag latency p50_ms p95_ms p99_ms", rows)
    if document.get("back_pressure"):
        click.echo(
            f"back pressure: {document['back_pressure']} of {len(document['workers'])} workers hold the spouts back"
        )
