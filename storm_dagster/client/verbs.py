"""Functions of the verbs that change topologies: one for each verb.

All of them take these options:

``dry_run``
    Only describe the effect, in :attr:`~storm_dagster.client.changes.Change.planned`.
``wait``
    Return when the change has its effect; otherwise, return when it is accepted.
``timeout``
    Seconds that the wait may take; ``wait_secs`` is added.
``progress``
    Called with (step, state) while the call waits.

A field that is left out has the default of its request in :mod:`storm_dagster.model.requests`. All
of them raise :class:`~storm_dagster.model.errors.NotAlive` if the topology does not run,
:class:`~storm_dagster.model.errors.Conflict` if its status does not allow the change, and
:class:`~storm_dagster.model.errors.Unavailable` at the timeout (the change continues).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storm_dagster.client.changes import Change, change_topology
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.waiting import Progress

_TIMEOUT_SECS = 300.0
"""Default of ``timeout``."""


def activate_topology(
    nimbus: NimbusClient,
    name: str,
    *,
    dry_run: bool = False,
    wait: bool = True,
    timeout: float = _TIMEOUT_SECS,
    progress: Progress | None = None,
) -> Change:
    """Start the spouts of a topology.

    With ``wait`` the call returns when the topology is ACTIVE.
    """
    return change_topology(
        nimbus,
        name,
        verb="activate",
        dry_run=dry_run,
        wait=wait,
        timeout=timeout,
        progress=progress,
    )


def deactivate_topology(
    nimbus: NimbusClient,
    name: str,
    *,
    dry_run: bool = False,
    wait: bool = True,
    timeout: float = _TIMEOUT_SECS,
    progress: Progress | None = None,
) -> Change:
    """Stop the spouts of a topology; tuples in flight finish, its workers stay.

    With ``wait`` the call returns when the topology is INACTIVE.
    """
    return change_topology(
        nimbus,
        name,
        verb="deactivate",
        dry_run=dry_run,
        wait=wait,
        timeout=timeout,
        progress=progress,
    )


def kill_topology(
    nimbus: NimbusClient,
    name: str,
    *,
    wait_secs: int | None = None,
    dry_run: bool = False,
    wait: bool = True,
    timeout: float = _TIMEOUT_SECS,
    progress: Progress | None = None,
) -> Change:
    """Kill a topology: deactivate its spouts, then remove workers, state and code.

    ``wait_secs`` is the time between the two, so that tuples finish; by default the topology's
    message timeout. With ``wait`` the call returns when the topology is gone. If the topology is
    still being submitted, the submission is cancelled: ``status`` is then ``CANCELLED``.
    """
    return change_topology(
        nimbus,
        name,
        verb="kill",
        wait_secs=wait_secs,
        dry_run=dry_run,
        wait=wait,
        timeout=timeout,
        progress=progress,
    )


def restart_topology(
    nimbus: NimbusClient,
    name: str,
    *,
    dry_run: bool = False,
    wait: bool = True,
    timeout: float = _TIMEOUT_SECS,
    progress: Progress | None = None,
) -> Change:
    """Restart the workers of a topology; id, places, code and conf stay.

    With ``wait`` the call returns when all tasks run.
    """
    return change_topology(
        nimbus,
        name,
        verb="restart",
        dry_run=dry_run,
        wait=wait,
        timeout=timeout,
        progress=progress,
    )


def rebalance_topology(
    nimbus: NimbusClient,
    name: str,
    *,
    wait_secs: int | None = None,
    workers: int | None = None,
    executors: dict[str, int] | None = None,
    reassign: bool = False,
    dry_run: bool = False,
    wait: bool = True,
    timeout: float = _TIMEOUT_SECS,
    progress: Progress | None = None,
) -> Change:
    """Change parallelism or spread of a topology while it runs.

    ``workers`` is the new number of workers, ``executors`` the new parallelism by component; what
    is left out stays. ``wait_secs`` is the time before the change, so that tuples finish; by
    default the topology's message timeout. The fewest tasks move; with ``reassign`` all tasks get
    new places. With ``wait`` the call returns when all tasks run. The ``planned`` result of a
    ``dry_run`` has the plan.
    """
    return change_topology(
        nimbus,
        name,
        verb="rebalance",
        wait_secs=wait_secs,
        workers=workers,
        executors=executors,
        reassign=reassign,
        dry_run=dry_run,
        wait=wait,
        timeout=timeout,
        progress=progress,
    )


def update_topology(
    nimbus: NimbusClient,
    name: str,
    target: str | None = None,
    args: Sequence[str] = (),
    *,
    conf: Mapping[str, Any] | None = None,
    home: Path | None = None,
    requirements: Path | None = None,
    handle: str | None = None,
    token: str | None = None,
    allow_degraded: bool = False,
    dry_run: bool = False,
    wait: bool = True,
    timeout: float = _TIMEOUT_SECS,
    progress: Progress | None = None,
) -> Change:
    """Replace the code of a topology (hot deploy).

    The old code runs until the new code is ready, and still runs if this raises. ``target``,
    ``args``, ``conf``, ``home`` and ``requirements`` describe the new code as for
    :func:`~storm_dagster.client.submission.submit_target`; conf of earlier submissions that is not
    in ``conf`` is kept. Instead of ``target``, ``handle`` names code that is uploaded already.
    Calls with the same ``token`` take effect once. ``allow_degraded`` continues although too few
    nimbuses hold the code. With ``wait`` the call returns when all tasks run.
    """
    return change_topology(
        nimbus,
        name,
        target,
        args,
        verb="update",
        conf=conf,
        home=home,
        requirements=requirements,
        handle=handle,
        token=token,
        allow_degraded=allow_degraded,
        dry_run=dry_run,
        wait=wait,
        timeout=timeout,
        progress=progress,
    )


def gray_upgrade(
    nimbus: NimbusClient,
    name: str,
    target: str | None = None,
    args: Sequence[str] = (),
    *,
    number: int | None = None,
    component: str | None = None,
    workers: str | list[str] | tuple[str, ...] = (),
    conf: Mapping[str, Any] | None = None,
    home: Path | None = None,
    requirements: Path | None = None,
    handle: str | None = None,
    token: str | None = None,
    allow_degraded: bool = False,
    dry_run: bool = False,
    wait: bool = True,
    timeout: float = _TIMEOUT_SECS,
    progress: Progress | None = None,
) -> Change:
    """Upgrade a batch of a topology's workers to new code.

    The first call gives the new code, as for :func:`update_topology`; later calls without code
    upgrade the next workers. The batch is ``workers`` (each ``host:port``), else the workers of
    ``component``, all or ``number`` of them, else the ``number`` workers with the lowest
    ``host:port``. With ``wait`` the call returns when the batch runs the new code;
    :attr:`~storm_dagster.client.changes.Change.upgrade` has the state of each worker.
    """
    return change_topology(
        nimbus,
        name,
        target,
        args,
        verb="gray-upgrade",
        number=number,
        component=component,
        workers=workers,
        conf=conf,
        home=home,
        requirements=requirements,
        handle=handle,
        token=token,
        allow_degraded=allow_degraded,
        dry_run=dry_run,
        wait=wait,
        timeout=timeout,
        progress=progress,
    )


def complete_upgrade(
    nimbus: NimbusClient,
    name: str,
    *,
    dry_run: bool = False,
    wait: bool = True,
    timeout: float = _TIMEOUT_SECS,
    progress: Progress | None = None,
) -> Change:
    """Complete a gray upgrade at its current state.

    The other workers get the new code at their next start. With ``wait`` the call returns when the
    upgrade has ended.
    """
    return change_topology(
        nimbus,
        name,
        verb="complete-upgrade",
        dry_run=dry_run,
        wait=wait,
        timeout=timeout,
        progress=progress,
    )


def roll_back(
    nimbus: NimbusClient,
    name: str,
    *,
    dry_run: bool = False,
    wait: bool = True,
    timeout: float = _TIMEOUT_SECS,
    progress: Progress | None = None,
) -> Change:
    """Undo a gray upgrade: every upgraded worker returns to the former code.

    With ``wait`` the call returns when the upgrade has ended.
    """
    return change_topology(
        nimbus,
        name,
        verb="rollback",
        dry_run=dry_run,
        wait=wait,
        timeout=timeout,
        progress=progress,
    )


# The names of the verbs' jobs.
gray_upgrade_topology = gray_upgrade
complete_upgrade_topology = complete_upgrade
rollback_topology = roll_back

# Names that programs of earlier releases may use.
activate = activate_topology
deactivate = deactivate_topology
kill = kill_topology
restart = restart_topology
rebalance = rebalance_topology
update = update_topology
rollback = roll_back
roll_back_topology = roll_back
