"""Gray upgrade of a declared topology: batch by batch, until every worker runs the declared code.

It can be interrupted anywhere: the upgrade under way is found again and goes on with the workers that are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.client import NimbusClient
from storm_dagster.client.waiting import wait_for_status
from storm_dagster.model.errors import InvalidTopology, NotAlive

_LONGEST_SECS = 900.0

Change = Callable[[str, Mapping[str, Any]], object]
"""Asks for a change by its verb and body, and waits for its run."""


def upgrade_all_workers(
    nimbus: NimbusClient, name: str, handle: str | None, batch: Mapping[str, Any], *, token: str, change: Change
) -> None:
    """Begin the upgrade with the uploaded code of ``handle`` (without: go on), and take batch after batch.

    ``batch`` is the component whose workers come first, if any, and the number of workers in each. Returns when the
    upgrade is complete. :class:`InvalidTopology` when the new code made it roll back, :class:`Unavailable` after 15
    minutes; what is under way then goes on, and so does the next call.
    """
    deadline = time.monotonic() + _LONGEST_SECS
    if handle is not None:
        change("gray-upgrade", {"handle": handle, "token": token, **batch})
    while True:
        document = wait_for_status(nimbus, name, _batch_over, deadline=deadline, what="the end of a batch")
        if document is None:
            raise NotAlive(f"topology {name!r} was killed while it was upgraded")
        if document["status"] == "ACTIVE":
            return
        upgrade = document.get("upgrade") or {}
        if document["status"] != "UPGRADING" or upgrade.get("rollback"):
            reason = upgrade.get("reason") or "somebody asked for that"
            raise InvalidTopology(f"the gray upgrade of {name!r} is rolled back: {reason}")
        change("gray-upgrade", next_batch(document, batch))


def next_batch(document: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the next call, by `show` of the topology: the component's workers, and then the others."""
    left = {worker for worker, state in document["upgrade"]["workers"].items() if state == "former"}
    component = batch.get("component")
    of_component = {f"{task['host']}:{task['port']}" for task in document["tasks"] if task["component"] == component}
    wanted = dict(batch) if left & of_component else {"number": batch.get("number", 1)}
    # Nothing of a former batch's token: with it the call would only be told that the upgrade began.
    return {key: value for key, value in wanted.items() if value is not None}


def _batch_over(document: Mapping[str, Any] | None) -> bool:
    """Whether no batch is under way, nor an upgrade of which every worker is through about to be ended."""
    if document is None or document["status"] != "UPGRADING":
        return True
    upgrade = document.get("upgrade")
    if not upgrade or upgrade["asked"] or upgrade["upgrading"]:
        return False
    return "former" in upgrade["workers"].values()
