"""Documents with reasons: the placement as ``explain`` shows it, the moves of a plan, and why
tasks do not run.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.reassignment import Runnable, current_topology, monitor_batch
from storm_dagster.core.scheduling.explain import choice_of
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.fusion import fused_components
from storm_dagster.model.multimap import multimap
from storm_dagster.model.placement import TopologyPlacement, TopologyToPlace
from storm_dagster.model.records import Assignment, StateHome, WorkerSlot
from storm_dagster.model.view import ClusterView, TopologyView

_OF_A_FORMER_ONE = "why it is here could not be stored: rebalance the topology to get new reasons"


def explain_document(
    view: ClusterView,
    topology: TopologyView,
    runnable: Runnable,
    stored: Mapping[str, Any],
    down: Collection[int],
    task: int | None = None,
) -> dict[str, Any]:
    """``stored`` (blob ``<id>-placement.json``) with the present state.

    ``down`` are tasks that do not run: those for which no slot can be found now are in
    ``unassigned`` with the reason, the others in ``waiting`` with the slot that they would get; a
    task that ``stored`` has in another slot has no stored reason. ``components`` and ``slots`` map
    each task; ``fused`` maps bolts to the spout whose query runs them; ``choice`` compares the
    worker of ``task`` with those that it was chosen from.
    """
    document = dict(stored)
    if topology.tasks is None:
        return document
    components = topology.tasks.component_of()
    document["fused"] = fused_components(runnable.spec, runnable.conf)
    document["components"] = {str(number): name for number, name in sorted(components.items())}
    slots = topology.assignment.task_slots() if topology.assignment else {}
    document["slots"] = {str(number): slot.key for number, slot in sorted(slots.items())}
    placement = _stored_placement(stored)
    workers = placement.workers if placement is not None else ()
    placed = {task_id: worker.slot for worker in workers for task_id in worker.ids}
    moved = {number for number, slot in slots.items() if placed.get(number, slot) != slot}
    if moved:
        document["reasons"] = {
            **stored["reasons"],
            **{str(number): _OF_A_FORMER_ONE for number in moved},
        }
    lost: set[int] = {*down, *(components.keys() - slots.keys())} & components.keys()
    document["unassigned"], document["waiting"] = _slot_outlook(view, topology, runnable, lost)
    if task is not None:
        to_place = current_topology(view, topology, runnable, topology.tasks)
        stands = None if task in moved else placement
        document["choice"] = None if stands is None else choice_document(to_place, stands, task)
    return document


def _stored_placement(stored: Mapping[str, Any]) -> TopologyPlacement | None:
    try:
        return TopologyPlacement.from_document(stored)
    except (KeyError, TypeError, ValueError):
        return None


def problems(
    view: ClusterView, topology: TopologyView, runnable: Runnable, down: Collection[int]
) -> list[str]:
    """Reasons why the tasks ``down`` do not run: a sentence for each reason, with its remedy."""
    if topology.tasks is None or not down:
        return []
    components = topology.tasks.component_of()
    without, waiting = _slot_outlook(view, topology, runnable, set(down) & components.keys())
    by_reason = multimap((reason, int(task)) for task, reason in without.items())
    found = [
        f"{_describe_tasks(tasks, components)} wait for a slot: {why} (`storm-dagster rebalance {topology.base.name} -n WORKERS`)"
        for why, tasks in by_reason.items()
    ]
    if waiting:
        tasks = [int(task) for task in waiting]
        places = ", ".join(sorted(set(waiting.values())))
        found.append(
            f"{_describe_tasks(tasks, components)} lost their worker and are about to be moved to {places}: wait, or see "
            "heartbeat_sensor in Dagster when they do not come back"
        )
    return found


def local_state_problems(topology: TopologyView, home: StateHome) -> list[str]:
    """A sentence, if workers run on several hosts and keep state that stays there."""
    hosts = {worker.host for worker in topology.workers}
    local = [host for host in home.local if host in hosts]
    if len(hosts) < 2 or not local:
        return []
    return [
        f"state lies on {', '.join(local)}, on each by itself (topology.state.local): it is lost or older for a task that "
        "moves; make topology.state.dir a folder that all hosts share"
    ]


def _describe_tasks(tasks: list[int], components: Mapping[int, str]) -> str:
    named = ", ".join(f"{components[task]}[{task}]" for task in sorted(tasks)[:5])
    return f"{len(tasks)} tasks ({named}{', ...' if len(tasks) > 5 else ''})"


def _slot_outlook(
    view: ClusterView, topology: TopologyView, runnable: Runnable, lost: set[int]
) -> tuple[dict[str, str], dict[str, str]]:
    """Of the lost tasks: the reason without a slot, or the slot that each would get."""
    if not lost or topology.tasks is None:
        return {}, {}
    name = topology.base.name
    dead = [
        Cause(
            topology.id, name, 0, "dead_worker", worker.node, worker.host, worker.port, worker.ids
        )
        for worker in topology.workers
        if not lost.isdisjoint(worker.ids)
    ]
    outcome = plan_placement(
        monitor_batch(view, topology, runnable, topology.tasks, dead)
    ).placement(name)
    if outcome.status == "failed":
        return {str(task): outcome.error or "no reason was given" for task in sorted(lost)}, {}
    now = _slot_keys(outcome.workers)
    return {}, {str(task): now[task] for task in sorted(lost)}


def _slot_keys(workers: Iterable[WorkerSlot]) -> dict[int, str]:
    """Task id -> ``node:port``."""
    keys: dict[int, str] = {}
    for worker in workers:
        keys.update(dict.fromkeys(worker.ids, worker.slot.key))
    return keys


def choice_document(
    topology: TopologyToPlace, placement: TopologyPlacement, task: int
) -> dict[str, Any] | None:
    """The choice of a worker for ``task`` with its alternatives; ``None`` where none was made by
    comparing.
    """
    choice = choice_of(topology, placement, task)
    if choice is None:
        return None
    return {
        "task": task,
        **asdict(choice),
        "alternatives": [asdict(other) for other in choice.alternatives],
    }


def moves_document(
    before: Assignment | None, placement: TopologyPlacement, components: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Tasks that move: ``[{"task", "component", "from", "to", "why"}]``, in task order.

    ``from`` is ``null`` for a new task, ``to`` for one that is removed; tasks that stay are not
    listed.
    """
    old = _slot_keys(before.workers if before else ())
    new = _slot_keys(placement.workers)
    rows: list[dict[str, Any]] = []
    for task in sorted(old.keys() | new.keys()):
        if old.get(task) == new.get(task):
            continue
        target = new.get(task)
        why = placement.reasons.get(task, "") if target else "the task is removed"
        if target and placement.worker_reasons.get(target):
            why = f"{why}; {target}: {placement.worker_reasons[target]}"
        rows.append(
            {
                "task": task,
                "component": components.get(task, "?"),
                "from": old.get(task),
                "to": target,
                "why": why,
            }
        )
    return rows
