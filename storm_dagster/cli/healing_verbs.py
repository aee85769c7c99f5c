"""Verbs ``pause-healing`` and ``resume-healing``."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import print_line
from storm_dagster.client.healing import pause_healing, resume_healing
from storm_dagster.model.healing_pause import DEFAULT_PAUSE_SECS, MAX_PAUSE_SECS
from storm_dagster.operations.read.exposures import HealthResult


@verb("pause-healing")
@click.option(
    "--for",
    "secs",
    metavar="SECS",
    type=click.IntRange(1, MAX_PAUSE_SECS),
    default=DEFAULT_PAUSE_SECS,
    show_default=True,
    help="Seconds until healing continues by itself; a day at most.",
)
@click.option("--dry-run", is_flag=True, help="Show the effect without changing anything.")
def pause(invocation: Invocation, secs: int) -> None:
    """Stop moving tasks of dead workers and lost hosts for a while.

    Neither Dagster's sensor nor the leader moves a task then. Supervisors still restart workers in
    place, and a rebalance that you ask for moves tasks. The pause ends after SECS, or by
    resume-healing; tasks that are dead then are healed at once. Another call replaces the pause.
    """
    with invocation.nimbus() as nimbus:
        if invocation.dry_run:
            healing = nimbus.get("/v1/cluster").get("healing") or {}
            text = f"healing would be paused for {secs} s"
            current = healing.get("pause")
            if current:
                text += f", instead of this pause: {current['text']}"
            print_line(invocation.json, {**healing, "secs": secs, "dry_run": True}, text)
            return
        document = pause_healing(nimbus, secs=secs)
    print_line(invocation.json, document, document["pause"]["text"])


@verb("resume-healing")
@click.option("--dry-run", is_flag=True, help="Show the effect without changing anything.")
def resume(invocation: Invocation) -> None:
    """End the pause of healing: dead tasks are healed at once."""
    with invocation.nimbus() as nimbus:
        if invocation.dry_run:
            healing = nimbus.get("/v1/cluster").get("healing") or {}
            is_paused = bool(healing.get("pause"))
            document = {"resumed": is_paused, "dry_run": True}
            text = "healing would continue" if is_paused else "healing is not paused"
            print_line(invocation.json, document, text)
            return
        is_resumed = resume_healing(nimbus)
    text = "healing continues" if is_resumed else "healing was not paused"
    print_line(invocation.json, {"resumed": is_resumed}, text)


def pause_lines(cluster: Mapping[str, Any]) -> list[str]:
    """Lines about a pause of healing in ``GET /v1/cluster``; empty without one.

    A nimbus of an earlier release has none.
    """
    current = (cluster.get("healing") or {}).get("pause")
    if not current:
        return []
    lines = [str(current["text"])]
    if current["waiting_causes"]:
        lines.append(f"{current['waiting_causes']} causes wait for the end of the pause")
        lines += [f"  {cause}" for cause in current["waiting"]]
    return lines


def healing_results(cluster: Mapping[str, Any]) -> Iterator[HealthResult]:
    """Results of ``doctor`` about a pause of healing in ``GET /v1/cluster``."""
    lines = pause_lines(cluster)
    if lines:
        yield "warning", "; ".join(line.strip() for line in lines), "storm-dagster resume-healing"


COMMANDS: Mapping[str, click.Command] = {"pause-healing": pause, "resume-healing": resume}
