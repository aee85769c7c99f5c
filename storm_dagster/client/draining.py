"""Draining: every topology leaves the hosts that are blacklisted."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storm_dagster.client.changes import change_topology
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.waiting import find_topology
from storm_dagster.model.errors import NotAlive, StormDagsterError, Unavailable

_AT_ONCE = 8


def topologies_on(nimbus: NimbusClient, hosts: Collection[str]) -> list[str]:
    """Names of the topologies that have workers on one of the hosts."""
    names = [row["name"] for row in nimbus.get("/v1/topologies")["topologies"]]
    found = {name: find_topology(nimbus, name) or {} for name in names}
    return sorted(name for name in names if any(each["host"] in hosts for each in found[name].get("workers", ())))


def drain_hosts(nimbus: NimbusClient, hosts: Collection[str], *, wait: bool = True, **options: Any) -> list[str]:
    """Rebalance every topology that has workers on these hosts, which are on the blacklist; their names.

    The fewest tasks move. With ``wait`` it returns when the hosts are empty and all moved tasks run. A topology that
    cannot be moved keeps no other one: :class:`Unavailable` then lists each with the reason. ``options`` are those of
    :func:`change_topology`: ``wait_secs``, ``timeout``, ``progress``.
    """

    def move(name: str) -> str | None:
        try:
            change_topology(nimbus, name, verb="rebalance", wait=wait, **options)
        except NotAlive:
            pass
        except StormDagsterError as error:
            return error.message
        return None

    names = topologies_on(nimbus, hosts)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        failed = {name: why for name, why in zip(names, pool.map(move, names), strict=True) if why}
    for name in topologies_on(nimbus, hosts) if wait else ():
        failed.setdefault(name, "workers are there whose supervisor cannot stop them, or which came meanwhile")
    if failed:
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(failed.items()))
        raise Unavailable(f"not empty, {', '.join(sorted(hosts))} stay blacklisted, and what is there runs on: {why}")
    return names
