"""``update``, ``gray-upgrade``, ``complete-upgrade`` and ``rollback``: new code for a topology that runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import click

from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import Steps, plain, print_json
from storm_dagster.cli.submit_verbs import code_options
from storm_dagster.client.changes import Change, update_topology
from storm_dagster.client.upgrades import complete_upgrade, gray_upgrade, roll_back
from storm_dagster.core.upgrade.selection import Selection, parse_workers
from storm_dagster.model.errors import InvalidRequest


def _answer(invocation: Invocation, done: Change, would: str | None = None) -> None:
    """Print what was done, or with ``--dry-run`` what ``would`` be."""
    if invocation.json:
        print_json({**done.to_document(), **({"dry_run": True, "would": would} if would else {})})
        return
    for key, value in (done.conf or {}).items():
        click.echo(plain(f"{key}: {_shown(value['old'])} -> {_shown(value['new'])}"))
    if would:
        click.echo(f"would {would} {done.id} ({done.status})")
        return
    run = f" (run {done.run_id})" if done.run_id else ""
    click.echo(f"{done.id or done.name} is {done.status}{run}, {done.seconds:.1f} s")
    if done.upgrade is not None:
        for worker, state in sorted(done.upgrade.get("workers", {}).items()):
            click.echo(f"  {worker}  {state}")


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)


def _dry_run(invocation: Invocation, name: str, action: str, body: Mapping[str, Any] | None = None) -> None:
    """Show what would be done without new code."""
    with invocation.nimbus() as nimbus:
        answer = nimbus.post(f"/v1/topologies/{name}/{action}", {**(body or {}), "dry_run": True}, repeat=False)
    _answer(invocation, Change(answer["id"], answer["name"], answer["status"], None), action)


@verb("update", changes=True)
@click.argument("name")
@click.argument("target")
@click.argument("args", nargs=-1)
@code_options
def update(invocation: Invocation, name: str, target: str, args: tuple[str, ...], code: dict[str, Any]) -> None:
    """Replace the code of topology NAME by TARGET (hot deploy). The old code runs until the new code is ready."""
    with invocation.nimbus() as nimbus, Steps(f"updating {name}", quiet=invocation.json) as steps:
        done = update_topology(nimbus, name, target, args, progress=steps.on_step, **code)
    _answer(invocation, done, "update" if invocation.dry_run else None)


@verb("gray-upgrade", changes=True)
@click.argument("name")
@click.argument("target", required=False)
@click.argument("args", nargs=-1)
@click.option("-n", "number", type=click.IntRange(min=1), help="Number of workers, lowest host:port first.")
@click.option("-p", "component", help="Workers of this component: all of them, or -n of them.")
@click.option("-w", "workers", metavar="HOST:PORT,...", help="Exactly these workers.")
@code_options
def gray(
    invocation: Invocation,
    name: str,
    target: str | None,
    args: tuple[str, ...],
    number: int | None,
    component: str | None,
    workers: str | None,
    code: dict[str, Any],
) -> None:
    """Upgrade some workers of topology NAME to the code of TARGET. Without TARGET, upgrade the next workers."""
    chosen = Selection(parse_workers(workers or ()), component, number or 0)
    if target is None and (code["conf"] or code["requirements"]):
        raise InvalidRequest("--conf, --conf-file and --requirements belong to new code: give TARGET")
    if invocation.dry_run and target is None:
        _dry_run(invocation, name, "gray-upgrade", chosen.to_document())
        return
    with invocation.nimbus() as nimbus, Steps(f"upgrading {name}", quiet=invocation.json) as steps:
        done = gray_upgrade(nimbus, name, target, args, progress=steps.on_step, **chosen.to_document(), **code)
    _answer(invocation, done, "gray-upgrade" if invocation.dry_run else None)


def _end(invocation: Invocation, name: str, action: str, doing: str, end: Callable[..., Change]) -> None:
    if invocation.dry_run:
        _dry_run(invocation, name, action)
        return
    with invocation.nimbus() as nimbus, Steps(doing, quiet=invocation.json) as steps:
        done = end(nimbus, name, wait=invocation.wait, progress=steps.on_step)
    _answer(invocation, done)


@verb("complete-upgrade", changes=True)
@click.argument("name")
def complete(invocation: Invocation, name: str) -> None:
    """Complete the upgrade of topology NAME. The other workers get the new code at their next start."""
    _end(invocation, name, "complete-upgrade", f"completing {name}", complete_upgrade)


@verb("rollback", changes=True)
@click.argument("name")
def rollback(invocation: Invocation, name: str) -> None:
    """Return every upgraded worker of topology NAME to the former code."""
    _end(invocation, name, "rollback", f"rolling {name} back", roll_back)
