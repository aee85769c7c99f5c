"""Draining: every topology leaves the hosts that are blacklisted."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from storm_dagster.client.changes import Change, change_topology
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.waiting import Progress, find_topology, wait_for_run, wait_for_status, wait_for_tasks
from storm_dagster.model.errors import NotAlive, StormDagsterError, Unavailable


def drain_hosts(
    nimbus: NimbusClient,
    hosts: Collection[str],
    *,
    wait: bool = True,
    wait_secs: int | None = None,
    timeout: float = 300.0,
    progress: Progress | None = None,
) -> list[Change]:
    """Rebalance every topology that has workers on these hosts, which are on the blacklist; the fewest tasks move.

    With ``wait`` it returns when the hosts are empty and all moved tasks run. A topology that cannot be moved keeps
    no other one: :class:`Unavailable` then lists each with the reason. ``wait_secs`` is that of the rebalance,
    ``timeout`` (seconds) bounds the waiting after it.
    """
    deadline = time.monotonic() + timeout + (wait_secs or 0)
    asked: dict[str, Change] = {}
    failed: dict[str, str] = {}
    for name in topologies_on(nimbus, hosts):
        try:
            asked[name] = change_topology(nimbus, name, verb="rebalance", wait=False, wait_secs=wait_secs)
        except NotAlive:
            continue
        except StormDagsterError as error:
            failed[name] = error.message
    for name, change in asked.items() if wait else ():
        try:
            if change.run_id:
                wait_for_run(nimbus, change.run_id, deadline=deadline, progress=progress)
            what = f"no worker on {', '.join(hosts)}"
            if wait_for_status(nimbus, name, lambda now: not _is_on(now, hosts), deadline=deadline, what=what):
                wait_for_tasks(nimbus, name, deadline=deadline, progress=progress)
        except StormDagsterError as error:
            failed[name] = error.message
    if failed:
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(failed.items()))
        raise Unavailable(f"not empty, {', '.join(sorted(hosts))} stay blacklisted, and what is there runs on: {why}")
    return list(asked.values())


def topologies_on(nimbus: NimbusClient, hosts: Collection[str]) -> list[str]:
    """Names of the topologies that have workers on one of the hosts."""
    names = [row["name"] for row in nimbus.get("/v1/topologies")["topologies"]]
    return sorted(name for name in names if _is_on(find_topology(nimbus, name), hosts))


def _is_on(document: dict[str, Any] | None, hosts: Collection[str]) -> bool:
    return document is not None and any(worker["host"] in hosts for worker in document["workers"])
