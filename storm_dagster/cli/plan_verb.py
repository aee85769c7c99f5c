"""``plan``: what-if scheduling."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import notify, print_json, print_table
from storm_dagster.model.errors import InvalidRequest


def _read(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"plan file {file} cannot be read: {error}") from None


def _show(document: dict[str, Any]) -> None:
    for name, outcome in document["topologies"].items():
        error = outcome.get("error")
        outcome_text = f"{name}: {outcome['status']}" + (f" ({error['message']})" if error else "")
        print_table(
            f"{outcome_text}, {outcome['moved']} tasks moved",
            ["node", "host:port", "tasks", "components", "kept"],
            [
                (
                    worker["node"],
                    f"{worker['host']}:{worker['port']}",
                    ", ".join(map(str, worker["tasks"])),
                    ", ".join(f"{component} {count}" for component, count in worker["components"].items()),
                    "yes" if worker["kept"] else "no",
                )
                for worker in outcome["workers"]
            ],
        )
        for task, reason in outcome.get("unassigned", {}).items():
            notify(f"  task {task} is unassigned: {reason}")
        for warning in outcome.get("warnings", []):
            notify(f"  warning: {warning}")
    seconds = document["seconds"]
    click.echo(f"session {seconds['session']:.2f} s, assignment {seconds['assign']:.2f} s")


@verb("plan")
@click.argument("file")
def plan(invocation: Invocation, file: str) -> None:
    """Place the topologies of FILE (YAML or JSON, - for standard input) as a submission would; touches nothing."""
    text = _read(file)
    from storm_dagster.operations.read.plan_file import plan_text

    documents = plan_text(text, conf=invocation.conf, log=notify)
    if invocation.json:
        print_json(documents[0] if len(documents) == 1 else documents)
        return
    for document in documents:
        _show(document)


COMMANDS: dict[str, click.Command] = {"plan": plan}
