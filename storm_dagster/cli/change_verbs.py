"""The verbs that change a topology, each made of its row in :data:`storm_dagster.model.verbs.VERBS`."""

from __future__ import annotations

import json
from typing import Any

import click

from storm_dagster.cli.grammar import grammar, parameters
from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import Steps, plain, print_json, print_table
from storm_dagster.cli.submit_verbs import code_of, field_options
from storm_dagster.client.changes import Change, change_topology
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.verbs import VERBS, Verb


def command_of(row: Verb) -> click.Command:
    """The command of a verb."""

    def call(invocation: Invocation, name: str, target: str | None = None, **given: Any) -> None:
        code = code_of(invocation, given) if row.brings_code else {}
        if row.brings_code and target is None and (code["conf"] or code["requirements"]):
            raise InvalidRequest("--conf, --conf-file and --requirements belong to new code: give TARGET")
        given["executors"] = _executors(given.pop("executors", ()))
        given |= {"wait": invocation.wait, "dry_run": invocation.dry_run, **code}
        with invocation.nimbus() as nimbus, Steps(f"{row.name} {name}", quiet=invocation.json) as steps:
            done = change_topology(nimbus, name, target, verb=row.name, progress=steps.on_step, **given)
        _print(invocation, done)

    call.__doc__ = row.summary.replace("a topology", "topology NAME", 1)
    made: Any = field_options(row.request, call)
    if row.brings_code:
        target = {"target": {"required": not row.batches}, "args": {"nargs": -1}}
        made = parameters({**target, **grammar()["shared"]["code"]}, made)
    return verb(row.name, changes=True)(click.argument("name")(made))


def _executors(pairs: tuple[str, ...]) -> dict[str, int]:
    executors: dict[str, int] = {}
    for pair in pairs:
        component, equals, number = pair.rpartition("=")
        if not equals or not component or not number.isdigit() or int(number) < 1:
            raise InvalidRequest(f"-e {pair!r} is not of the form COMPONENT=N with N of 1 or more")
        executors[component] = int(number)
    return executors


def _print(invocation: Invocation, done: Change) -> None:
    if invocation.json:
        print_json(done.to_document())
        return
    for key, value in (done.conf or {}).items():
        old, new = (json.dumps(value[side], default=str) for side in ("old", "new"))
        click.echo(plain(f"{key}: {old} -> {new}"))
    if done.planned:
        click.echo(f"would {done.planned['would']} {done.id} ({done.status})")
        _print_plan(done.planned.get("plan"))
        return
    run = f" (run {done.run_id})" if done.run_id else ""
    click.echo(f"{done.id or done.name} is {done.status or 'being changed'}{run}, {done.seconds:.1f} s")
    for worker, state in sorted((done.upgrade or {}).get("workers", {}).items()):
        click.echo(f"  {worker}  {state}")


def _print_plan(plan: dict[str, Any] | None) -> None:
    if plan is None:
        return
    added, removed = len(plan["tasks_added"]), len(plan["tasks_removed"])
    click.echo(f"plan: {plan['outcome']}, {plan['moved']} tasks move, {added} are added, {removed} are removed")
    print_table("moves", "task component from to why", plan["moves"])
    print_table("workers", "node host:port tasks kept", plan["workers"])
    for warning in plan["warnings"]:
        click.echo(plain(f"warning: {warning}"), err=True)


globals().update({row.name: command_of(row) for row in VERBS.values()})
