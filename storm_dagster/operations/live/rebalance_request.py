"""Requests of rebalances: checked, completed, and described in the history of an assignment."""

import difflib

from storm_dagster.core.reassignment import Runnable
from storm_dagster.model import paths
from storm_dagster.model.conf import check_value
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.names import TOPOLOGY_MASTER
from storm_dagster.model.records import Record, StormBase
from storm_dagster.model.view import TopologyView


class PendingRebalance(Record):
    """A requested rebalance.

    It is stored at ``/topology/<id>/rebalance`` while it waits for its delay.
    """

    workers: int
    """Number of workers."""
    executors: dict[str, int]
    """Component -> number of executors, of every component."""
    reassign: bool = False
    """True if every task moves to a new slot."""
    avoid: tuple[str, ...] = ()
    """Supervisors that get no new work. A leader of the release before does not read it."""
    drains: bool = False
    """True for a move off hosts that drain: it waits until no tuple is under way, and workers
    without a slot elsewhere stay. A leader of the release before does not read it.
    """


def pending_path(topology_id: str) -> str:
    """Node of the :class:`PendingRebalance`; its tasks have not moved while it exists."""
    return f"{paths.topology(topology_id)}/rebalance"


def check_rebalance(
    topology: TopologyView,
    runnable: Runnable,
    workers: int | None,
    executors: dict[str, int],
    reassign: bool,
) -> PendingRebalance:
    """Check the requested numbers, and complete them with the current ones.

    :class:`InvalidRequest` for an unknown component, or for a number that is not allowed.
    """
    name = topology.base.name
    problem = None if workers is None else check_value("topology.workers", workers)
    if problem:
        raise InvalidRequest(f"rebalance of {name!r}: {problem}")
    components = topology.base.executors.keys() - {TOPOLOGY_MASTER}
    topology_limit = runnable.conf.get("topology.max.task.parallelism")
    for component, count in executors.items():
        if component not in components:
            matches = difflib.get_close_matches(component, components, n=1, cutoff=0.5)
            if matches:
                hint = f"did you mean {matches[0]!r}?"
            else:
                hint = f"components are {', '.join(sorted(components))}"
            raise InvalidRequest(
                f"topology {name!r} has no component {component!r} to rebalance: {hint}"
            )
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidRequest(
                f"rebalance of {name!r}: {component!r} cannot have {count!r} executors: "
                "give at least 1"
            )
        # The component's own limit replaces that of the topology.
        spec = runnable.spec.component(component)
        own_limit = spec.conf.get("topology.max.task.parallelism") if spec else None
        limit = topology_limit if own_limit is None else own_limit
        if limit is not None and count > limit:
            raise InvalidRequest(
                f"rebalance of {name!r}: {component!r} cannot have {count} executors, "
                f"topology.max.task.parallelism is {limit}"
            )
    return PendingRebalance(
        workers=topology.base.workers if workers is None else workers,
        executors={**topology.base.executors, **executors},
        reassign=reassign,
    )


def rebalance_warnings(topology: TopologyView, request: PendingRebalance) -> tuple[str, ...]:
    """Sentence about a number of workers that exceeds the executors; else empty."""
    executors = sum(
        count for component, count in request.executors.items() if component != TOPOLOGY_MASTER
    )
    if request.workers == topology.base.workers or request.workers <= executors:
        return ()
    return (
        f"topology {topology.base.name!r} keeps topology.workers {request.workers}, but has only "
        f"{executors} executors: no worker is started without an executor",
    )


def describe_rebalance(base: StormBase, request: PendingRebalance, *, resizes: bool = False) -> str:
    """The changes of the request, for the history of the assignment.

    ``resizes``: it moves no task, but gives workers memory and CPU of the conf.
    """
    if request.drains:
        return "hosts drain"
    changes: list[str] = []
    if request.workers != base.workers:
        changes.append(f"{request.workers} workers instead of {base.workers}")
    for name, count in request.executors.items():
        if count != base.executors.get(name):
            former = base.executors.get(name, 0)
            changes.append(f"{name} with {count} executors instead of {former}")
    if changes:
        return ", ".join(changes)
    if resizes:
        return "memory and CPU of workers became those of the conf"
    return "every task was placed again" if request.reassign else "balance was restored"
