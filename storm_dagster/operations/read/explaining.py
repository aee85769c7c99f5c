"""Documents with reasons.

They are the placement that ``explain`` shows, the moves of a plan, and the reasons why tasks do not
run.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from storm_dagster.core.dataplane.window_state import WAITS_METRIC
from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.liveness.pause import pause_text
from storm_dagster.core.reassignment import Runnable, current_topology, monitor_batch
from storm_dagster.core.scheduling.explain import choice_of
from storm_dagster.core.scheduling.obstacles import closed_hosts
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.core.snapshot.topology import TopologySnapshot
from storm_dagster.model.errors import Corrupt
from storm_dagster.model.fusion import fused_components
from storm_dagster.model.multimap import multimap
from storm_dagster.model.names import AWAITED_METRIC, SLOW_CALLS
from storm_dagster.model.placement import TopologyPlacement, TopologyToPlace
from storm_dagster.model.records import Assignment, StateHome, TaskError, WorkerSlot
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.zk.storm_cluster_state import StormClusterState

_DAY_SECS = 86_400
_REASON_LOST = "why it is here could not be stored: rebalance the topology to get new reasons"
"""Reason of a task whose stored reason belongs to a former placement."""


def explain_document(
    view: ClusterView,
    topology: TopologyView,
    runnable: Runnable,
    stored: Mapping[str, Any],
    down: Collection[int],
    task: int | None = None,
) -> dict[str, Any]:
    """``stored`` (blob ``<id>-placement.json``) completed by the current state.

    ``stored`` itself stays unchanged; the result is a copy if the topology has no tasks. ``down``
    are tasks that do not run. Those without a free slot are in ``unassigned`` with the reason, the
    others in ``waiting`` with the slot that they would get. A task that ``stored`` has in another
    slot has no stored reason. ``components`` and ``slots`` map each task; ``fused`` maps bolts to
    the spout whose query runs them; ``choice`` compares the worker of ``task`` with its
    alternatives. ``healing`` is there while operators have paused healing.
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
    stored_slots: dict[int, Slot] = {}
    for worker in workers:
        stored_slots.update(dict.fromkeys(worker.ids, worker.slot))
    # A later placement, whose reasons could not be stored, has moved them.
    moved = {number for number, slot in slots.items() if stored_slots.get(number, slot) != slot}
    if moved:
        lost_reasons = {str(number): _REASON_LOST for number in moved}
        document["reasons"] = {**stored["reasons"], **lost_reasons}
    # Tasks that do not run, and tasks that the assignment does not name.
    lost: set[int] = {*down, *(components.keys() - slots.keys())} & components.keys()
    unassigned, waiting = _slot_outlook(view, topology, runnable, lost)
    document["unassigned"] = unassigned
    document["waiting"] = waiting
    if view.healing_pause is not None:
        document["healing"] = pause_text(view.healing_pause)
    if task is not None:
        document["choice"] = None
        if placement is not None and task not in moved:
            to_place = current_topology(view, topology, runnable, topology.tasks)
            document["choice"] = choice_document(to_place, placement, task)
    return document


def slow_call_problems(errors: Iterable[tuple[str, TaskError]], now_secs: int) -> list[str]:
    """A sentence for each component whose slow calls took its worker's loop within the last day.

    ``errors`` are (component, error). Its worker reports that once.
    """
    sentences: list[str] = []
    for _, error in errors:
        is_new = now_secs - error.time < _DAY_SECS
        if is_new and error.group.startswith(f"{SLOW_CALLS}: "):
            text = error.error.removeprefix(f"{SLOW_CALLS}: ")
            sentences.append(text.partition("SlowCalls: ")[2].strip() or text.strip())
    return sentences


def reasons_of_tasks(snapshot: TopologySnapshot) -> dict[str, Any]:
    """Parts of ``explain`` beside the placement: windows, systems, and a failed upgrade."""
    failed = snapshot.failed_upgrade
    return {
        "windows": window_reasons(snapshot),
        "awaits": awaited_systems(snapshot),
        "failed_upgrade": None if failed is None else failed.to_document(),
    }


def window_reasons(snapshot: TopologySnapshot) -> dict[str, str]:
    """Task -> reason why its next window is not due, as the tasks of windowed bolts report it."""
    reasons: dict[str, str] = {}
    for (_, task), metrics in snapshot.metrics.items():
        reason = metrics.get(WAITS_METRIC)
        if isinstance(reason, str) and reason:
            reasons[task] = reason
    return reasons


def awaited_systems(snapshot: TopologySnapshot) -> dict[str, str]:
    """Task -> systems that it waits for, as reported by tasks whose system is away."""
    awaited: dict[str, str] = {}
    for (_, task), metrics in snapshot.metrics.items():
        text = metrics.get(AWAITED_METRIC)
        if isinstance(text, str) and text:
            awaited[task] = text
    return awaited


def _stored_placement(stored: Mapping[str, Any]) -> TopologyPlacement | None:
    """The placement in the blob; ``None`` if it has none, or a damaged one."""
    try:
        return TopologyPlacement.from_document(stored)
    except (KeyError, TypeError, ValueError):
        return None


def problems(
    view: ClusterView, topology: TopologyView, runnable: Runnable, down: Collection[int]
) -> list[str]:
    """Reasons why the tasks ``down`` do not run.

    One sentence per reason, with its remedy.
    """
    if topology.tasks is None or not down:
        return []
    components = topology.tasks.component_of()
    unassigned, waiting = _slot_outlook(view, topology, runnable, set(down) & components.keys())
    by_reason = multimap((reason, int(task)) for task, reason in unassigned.items())
    rebalance = f"`storm-dagster rebalance {topology.base.name} -n WORKERS`"
    sentences = [
        f"{_describe_tasks(tasks, components)} wait for a slot: {reason} ({rebalance})"
        for reason, tasks in by_reason.items()
    ]
    if waiting:
        tasks = [int(task) for task in waiting]
        slots = ", ".join(sorted(set(waiting.values())))
        lost = (
            f"{_describe_tasks(tasks, components)} lost their worker and are about to be moved to"
        )
        if view.healing_pause is not None:
            sentences.append(f"{lost} {slots}, but {pause_text(view.healing_pause)}")
        else:
            sentences.append(
                f"{lost} {slots}: wait, or see heartbeat_sensor in Dagster when they do not come "
                "back"
            )
    return sentences


def state_problems(cluster: StormClusterState, topology: TopologyView) -> list[str]:
    """Sentences about the place of a topology's state; also one if its record is damaged.

    Its workers write the record.
    """
    try:
        return local_state_problems(topology, cluster.read_state_home(topology.id))
    except Corrupt as error:
        return [f"where the topology keeps its state is not known: {error.message}"]


def local_state_problems(topology: TopologyView, home: StateHome) -> list[str]:
    """A sentence, if workers run on several hosts and keep state on their own host."""
    hosts = {worker.host for worker in topology.workers}
    local = [host for host in home.local if host in hosts]
    if len(hosts) < 2 or not local:
        return []
    return [
        f"state is on the disks of {', '.join(local)} (topology.state.local): it is lost or older "
        "for a task that moves; make topology.state.dir a folder that all hosts share"
    ]


def _describe_tasks(tasks: list[int], components: Mapping[int, str]) -> str:
    """Their number, and component and id of the first five."""
    labels = [f"{components[task]}[{task}]" for task in sorted(tasks)[:5]]
    if len(tasks) > 5:
        labels.append("...")
    return f"{len(tasks)} tasks ({', '.join(labels)})"


def _slot_outlook(
    view: ClusterView, topology: TopologyView, runnable: Runnable, lost: set[int]
) -> tuple[dict[str, str], dict[str, str]]:
    """Outlook of the lost tasks, from a plan of their reassignment without an effect.

    Two maps: task -> reason without a slot, and task -> slot that it would get. One of them is
    empty, because all tasks fit or none is placed.
    """
    if not lost or topology.tasks is None:
        return {}, {}
    name = topology.base.name
    dead = [
        Cause(
            topology_id=topology.id,
            name=name,
            generation=0,
            kind="dead_worker",
            node=worker.node,
            host=worker.host,
            port=worker.port,
            tasks=worker.ids,
        )
        for worker in topology.workers
        if not lost.isdisjoint(worker.ids)
    ]
    batch = monitor_batch(view, topology, runnable, topology.tasks, dead)
    placement = plan_placement(batch).placement(name)
    if placement.status == "failed":
        # As in the error of the reassignment, with the hosts that others close to the topology.
        closed = closed_hosts(view, [topology.id], ())
        reason = "; ".join(text for text in (placement.error, closed) if text)
        reason = reason or "no reason was given"
        return {str(task): reason for task in sorted(lost)}, {}
    new_slots = _slot_keys(placement.workers)
    return {}, {str(task): new_slots[task] for task in sorted(lost)}


def _slot_keys(workers: Iterable[WorkerSlot]) -> dict[int, str]:
    """Task id -> ``node:port``."""
    keys: dict[int, str] = {}
    for worker in workers:
        keys.update(dict.fromkeys(worker.ids, worker.slot.key))
    return keys


def choice_document(
    topology: TopologyToPlace, placement: TopologyPlacement, task: int
) -> dict[str, Any] | None:
    """The choice of a worker for ``task`` with its alternatives.

    ``None`` if no workers were compared for it.
    """
    choice = choice_of(topology, placement, task)
    if choice is None:
        return None
    return {
        "task": task,
        **asdict(choice),
        "alternatives": [asdict(alternative) for alternative in choice.alternatives],
    }


def moves_document(
    before: Assignment | None, placement: TopologyPlacement, components: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Tasks that move, in task order.

    Each entry is ``{"task", "component", "from", "to", "why"}``. ``from`` is ``null`` for a new
    task, ``to`` for one that is removed; tasks that stay are not listed.
    """
    old = _slot_keys(before.workers if before else ())
    new = _slot_keys(placement.workers)
    rows: list[dict[str, Any]] = []
    for task in sorted(old.keys() | new.keys()):
        if old.get(task) == new.get(task):
            continue
        target = new.get(task)
        reason = placement.reasons.get(task, "") if target else "the task is removed"
        if target and placement.worker_reasons.get(target):
            reason = f"{reason}; {target}: {placement.worker_reasons[target]}"
        rows.append(
            {
                "task": task,
                "component": components.get(task, "?"),
                "from": old.get(task),
                "to": target,
                "why": reason,
            }
        )
    return rows
