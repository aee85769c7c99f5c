"""Verbs on topologies that run: ``list``, ``show``, and their life cycle."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import Steps, human_seconds, plain, print_answer, print_json, print_table
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.waiting import wait_for_run, wait_for_status, wait_for_tasks
from storm_dagster.model.errors import InvalidRequest

_WAIT_SECS = 300.0
_Effect = Callable[[NimbusClient, float, Steps], dict[str, Any] | None]
"""Waits for the effect of a change until a deadline; the topology's document then."""


@verb("list")
def list_topologies(invocation: Invocation) -> None:
    """List the topologies of the cluster."""
    with invocation.nimbus() as nimbus:
        document = nimbus.get("/v1/topologies")
    print_answer(
        invocation.json,
        document,
        ["id", "name", "status", "uptime", "workers", "executors", "tasks"],
        [
            (
                row["id"],
                row["name"],
                row["status"],
                human_seconds(row["uptime_secs"]),
                row["workers"],
                row["executors"],
                _tasks(row),
            )
            for row in document["topologies"]
        ],
    )


def _tasks(row: dict[str, Any]) -> str:
    down = row.get("not_running")
    return f"{row['tasks']} ({down} do not run: see `show`)" if down else str(row["tasks"])


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) and not value.is_integer() else f"{value:.0f}"


@verb("show")
@click.argument("name")
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
    print_table(
        "workers",
        ["node", "host:port", "pid", "uptime", "version", "tasks"],
        [
            (
                worker["node"],
                f"{worker['host']}:{worker['port']}",
                worker["pid"],
                human_seconds(worker["uptime_secs"]),
                worker.get("version"),
                ", ".join(map(str, worker["tasks"])),
            )
            for worker in document["workers"]
        ],
    )
    upgrade = document.get("upgrade")
    if upgrade is not None:
        click.echo(f"upgrade to {upgrade['code']}" + (" is rolled back" if upgrade["rollback"] else ""))
        for worker, state in sorted(upgrade["workers"].items()):
            click.echo(f"  {worker}  {state}")
    columns = ("emitted", "executed", "acked", "failed", "execute_ms", "complete_ms")
    print_table(
        "tasks",
        ["task", "component", "on", "status", "uptime", *columns],
        [
            (
                task["id"],
                task["component"],
                f"{task['host']}:{task['port']}" if task.get("port") else None,
                task["status"],
                human_seconds(task["uptime_secs"]),
                *(_number((task.get("stats") or {}).get(column)) for column in columns),
            )
            for task in document["tasks"]
        ],
    )
    _print_loads(document)
    reported = [
        (task, component, metric, value)
        for component, part in document["components"].items()
        for task, metrics in (part.get("metrics") or {}).items()
        for metric, value in sorted(metrics.items())
    ]
    if reported:
        print_table("metrics", ["task", "component", "metric", "value"], reported)
    for error in document.get("errors", [])[:10]:
        lines = str(error["error"]).strip().splitlines()
        times = f" ({error['count']} times)" if error.get("count", 1) > 1 else ""
        click.echo(
            plain(f"error in {error['component']}[{error['task']}]: {lines[-1] if lines else ''}{times}"), err=True
        )


def _print_loads(document: dict[str, Any]) -> None:
    """A line for each component and kind of latency, of the last ten minutes; nothing from an older nimbus."""
    rows: list[tuple[Any, ...]] = []
    for component, part in sorted(document["components"].items()):
        if component.startswith("__") or "latency" not in part:
            continue
        loads = [_number(part[name]) for name in ("waiting", "capacity", "lag")]
        for kind, found in sorted(part["latency"].items()) or [(None, {})]:
            rows.append((component, *loads, kind, *(_number(found.get(f"p{n}_ms")) for n in (50, 95, 99))))
    if rows:
        print_table(
            "components", ["component", "waiting", "capacity", "lag", "latency", "p50_ms", "p95_ms", "p99_ms"], rows
        )
    if document.get("back_pressure"):
        click.echo(
            f"back pressure: {document['back_pressure']} of {len(document['workers'])} workers hold the spouts back"
        )


def _answer(invocation: Invocation, document: dict[str, Any]) -> None:
    if invocation.json:
        print_json(document)
        return
    if document.get("dry_run"):
        click.echo(f"would {document['would']} {document['id']} ({document['status']})")
        _show_plan(document.get("plan"))
        return
    run = f" (run {document['run_id']})" if document.get("run_id") else ""
    status = document["status"] or "being changed"
    click.echo(f"{document['id'] or document['name']} is {status}{run}, {document['seconds']:.1f} s")


def _show_plan(plan: dict[str, Any] | None) -> None:
    if plan is None:
        return
    added, removed = len(plan["tasks_added"]), len(plan["tasks_removed"])
    click.echo(f"plan: {plan['outcome']}, {plan['moved']} tasks move, {added} are added, {removed} are removed")
    print_table(
        "moves",
        ["task", "component", "from", "to", "why"],
        [(move["task"], move["component"], move["from"], move["to"], move["why"]) for move in plan["moves"]],
    )
    print_table(
        "workers",
        ["node", "host:port", "tasks", "kept"],
        [
            (
                worker["node"],
                f"{worker['host']}:{worker['port']}",
                ", ".join(map(str, worker["tasks"])),
                "yes" if worker["kept"] else "no",
            )
            for worker in plan["workers"]
        ],
    )
    for warning in plan["warnings"]:
        click.echo(plain(f"warning: {warning}"), err=True)


def _change(
    invocation: Invocation,
    name: str,
    action: str,
    body: dict[str, Any] | None,
    await_effect: _Effect,
    *,
    extra_secs: float = 0.0,
) -> None:
    """Request ``action``, wait for its run and then for its effect, and print the result."""
    started = time.monotonic()
    with invocation.nimbus() as nimbus:
        if invocation.dry_run:
            would = nimbus.post(f"/v1/topologies/{name}/{action}", {**(body or {}), "dry_run": True})
            _answer(invocation, {**would, "seconds": round(time.monotonic() - started, 3)})
            return
        with Steps(f"{action} {name}", quiet=invocation.json) as steps:
            accepted = nimbus.post(f"/v1/topologies/{name}/{action}", body or {}, repeat=False)
            result = {
                "id": accepted.get("id"),
                "name": accepted.get("name") or name,
                "status": accepted.get("status"),
                "run_id": accepted.get("run_id"),
            }
            if invocation.wait:
                deadline = started + _WAIT_SECS + extra_secs
                if result["run_id"]:
                    wait_for_run(nimbus, result["run_id"], deadline=deadline, progress=steps.on_step)
                document = await_effect(nimbus, deadline, steps)
                if document is not None:
                    result["status"] = document["status"]
    _answer(invocation, {**result, "seconds": round(time.monotonic() - started, 3)})


def _until(name: str, step: str, what: str, *statuses: str | None) -> _Effect:
    """Wait for one of ``statuses``, ``None`` being that of a topology that is gone."""

    def await_effect(nimbus: NimbusClient, deadline: float, steps: Steps) -> dict[str, Any] | None:
        steps.begin(step)
        found = wait_for_status(
            nimbus,
            name,
            lambda document: (None if document is None else document["status"]) in statuses,
            deadline=deadline,
            what=what,
        )
        steps.done(step)
        return {"status": "KILLED"} if found is None else found

    return await_effect


def _until_running(name: str) -> _Effect:
    await_change = _until(name, "stable", "the change to end", "ACTIVE", "INACTIVE")

    def await_effect(nimbus: NimbusClient, deadline: float, steps: Steps) -> dict[str, Any] | None:
        await_change(nimbus, deadline, steps)
        return wait_for_tasks(nimbus, name, deadline=deadline, progress=steps.on_step)

    return await_effect


@verb("activate", changes=True)
@click.argument("name")
def activate(invocation: Invocation, name: str) -> None:
    """Start the spouts of topology NAME."""
    _change(invocation, name, "activate", None, _until(name, "active", "ACTIVE", "ACTIVE"))


@verb("deactivate", changes=True)
@click.argument("name")
def deactivate(invocation: Invocation, name: str) -> None:
    """Stop the spouts of topology NAME. Tuples in flight finish."""
    _change(invocation, name, "deactivate", None, _until(name, "inactive", "INACTIVE", "INACTIVE"))


@verb("kill", changes=True)
@click.argument("name")
@click.option(
    "-w",
    "wait_secs",
    type=click.IntRange(min=0),
    help="Seconds to let tuples finish. [default: message timeout]",
)
def kill(invocation: Invocation, name: str, wait_secs: int | None) -> None:
    """Kill topology NAME and wait until it is removed."""
    body = {} if wait_secs is None else {"wait_secs": wait_secs}
    _change(invocation, name, "kill", body, _until(name, "removal", "its removal", None), extra_secs=wait_secs or 0)


@verb("restart", changes=True)
@click.argument("name")
def restart(invocation: Invocation, name: str) -> None:
    """Restart topology NAME from its own code, with a new id, a new placement and its current parallelism."""
    _change(invocation, name, "restart", None, _until_running(name))


def _executors(pairs: tuple[str, ...]) -> dict[str, int]:
    executors: dict[str, int] = {}
    for pair in pairs:
        component, equals, number = pair.rpartition("=")
        if not equals or not component or not number.isdigit() or int(number) < 1:
            raise InvalidRequest(f"-e {pair!r} is not of the form COMPONENT=N with N of 1 or more")
        executors[component] = int(number)
    return executors


@verb("rebalance", changes=True)
@click.argument("name")
@click.option("-w", "wait_secs", type=click.IntRange(min=0), help="Seconds to let tuples finish first.")
@click.option("-n", "workers", type=click.IntRange(min=1), help="New number of workers.")
@click.option("-e", "executors", metavar="COMPONENT=N", multiple=True, help="New parallelism of a component.")
@click.option("--reassign", is_flag=True, help="Place all tasks again instead of moving the fewest.")
def rebalance(
    invocation: Invocation,
    name: str,
    wait_secs: int | None,
    workers: int | None,
    executors: tuple[str, ...],
    reassign: bool,
) -> None:
    """Change parallelism or spread of topology NAME while it runs."""
    body: dict[str, Any] = {"reassign": reassign}
    if wait_secs is not None:
        body["wait_secs"] = wait_secs
    if workers is not None:
        body["workers"] = workers
    if executors:
        body["executors"] = _executors(executors)
    _change(invocation, name, "rebalance", body, _until_running(name), extra_secs=wait_secs or 0)
