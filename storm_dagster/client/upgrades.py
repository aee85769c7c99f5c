"""Gray upgrade: new code for a topology that runs, worker by worker."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from storm_dagster.client.changes import Change, ask, ask_for_code, change_of
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.waiting import Progress, wait_for_run, wait_for_status


def gray_upgrade(
    nimbus: NimbusClient,
    name: str,
    target: str | None = None,
    args: Sequence[str] = (),
    *,
    number: int = 0,
    component: str | None = None,
    workers: Iterable[str] = (),
    conf: Mapping[str, Any] | None = None,
    home: Path | None = None,
    requirements: Path | None = None,
    token: str | None = None,
    allow_degraded: bool = False,
    wait: bool = True,
    timeout: float = 300.0,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Change:
    """Run the new code of TARGET on some workers first; without TARGET, take the next batch of workers.

    ``workers`` (``host:port``) count before ``component``, that before ``number``. With ``wait`` it returns when the
    batch runs the new code; when that code ends a worker meanwhile the upgrade is rolled back and the reason raised.
    ``conf`` and ``dry_run`` as of :func:`~storm_dagster.client.changes.update_topology`.
    """
    started = time.monotonic()
    answer = ask_for_code(
        nimbus,
        name,
        "gray-upgrade",
        target,
        args,
        conf=conf,
        home=home,
        requirements=requirements,
        token=token,
        allow_degraded=allow_degraded,
        dry_run=dry_run,
        progress=progress,
        more={"number": number, "component": component, "workers": list(workers)},
    )
    document = None
    if wait and not dry_run:
        if answer.get("run_id"):
            wait_for_run(nimbus, answer["run_id"], deadline=started + timeout, progress=progress)
        document = nimbus.get(f"/v1/topologies/{name}")
    return change_of(answer, name, started, document)


def complete_upgrade(
    nimbus: NimbusClient,
    name: str,
    *,
    wait: bool = True,
    timeout: float = 300.0,
    progress: Progress | None = None,
) -> Change:
    """End the upgrade in its present state: its code is the topology's. Other workers get it at their next start."""
    return _end(nimbus, name, "complete-upgrade", wait, timeout, progress)


def roll_back(
    nimbus: NimbusClient,
    name: str,
    *,
    wait: bool = True,
    timeout: float = 300.0,
    progress: Progress | None = None,
) -> Change:
    """Take every upgraded worker back to the former code; with ``wait`` until all of them run it."""
    return _end(nimbus, name, "rollback", wait, timeout, progress)


def _end(nimbus: NimbusClient, name: str, verb: str, wait: bool, timeout: float, progress: Progress | None) -> Change:
    started = time.monotonic()
    answer = ask(nimbus, name, verb, {})
    document = None
    if wait:
        deadline = started + timeout
        if answer.get("run_id"):
            wait_for_run(nimbus, answer["run_id"], deadline=deadline, progress=progress)
        document = wait_for_status(
            nimbus,
            name,
            lambda found: found is None or found["status"] not in ("UPGRADING", "ROLLBACK"),
            deadline=deadline,
            what="the end of the upgrade",
        )
    return change_of(answer, name, started, document)
