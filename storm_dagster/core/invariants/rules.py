"""The rules of the invariants I1 to I8. Pure.

Each yields (thing, reason) pairs, and its docstring is the rule in words.
"""

from collections import Counter

from storm_dagster.core.invariants.snapshot import (
    ClusterSnapshot,
    GrayNodes,
    Problems,
    Rule,
    Violation,
    rule_of,
    title,
    visible,
)
from storm_dagster.model import paths
from storm_dagster.model.multimap import multimap
from storm_dagster.model.names import code_keys
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import TopologyView

# -- I1: every task has one slot -------------------------------------------------------------------


@rule_of(
    "I1",
    remedy=(
        "`storm-dagster explain NAME` prints why a task is where it is; `storm-dagster "
        "rebalance NAME --reassign` places all tasks again"
    ),
    by_view=True,
)
def one_slot_per_task(snapshot: ClusterSnapshot) -> Problems:
    """Every task of every topology has exactly one slot."""
    for topology in visible(snapshot.view):
        if topology.assignment is None or topology.tasks is None:
            continue
        tasks = set(topology.tasks.component_of())
        slot_counts: Counter[int] = Counter()
        for worker in topology.assignment.workers:
            slot_counts.update(worker.ids)
        duplicates = {task for task, count in slot_counts.items() if count > 1}
        if duplicates:
            yield title(topology), f"tasks {encode_ranges(duplicates)} stand in more than one slot"
        unknown = slot_counts.keys() - tasks
        if unknown:
            yield (
                title(topology),
                f"tasks {encode_ranges(unknown)} are assigned but belong to no component",
            )
        unschedulable = snapshot.unschedulable.get(topology.id, frozenset())
        missing = tasks - slot_counts.keys() - unschedulable
        if missing:
            yield (
                title(topology),
                f"tasks {encode_ranges(missing)} have no slot, and no reason says why",
            )


@rule_of(
    "I1",
    remedy="`storm-dagster rebalance NAME --reassign` for one of them",
    by_view=True,
)
def slots_not_shared(snapshot: ClusterSnapshot) -> Problems:
    """No slot is given to two topologies."""
    owners: dict[Slot, str] = {}
    for topology in snapshot.view.topologies.values():
        counts = Counter(worker.slot for worker in topology.workers)
        for slot, count in sorted(counts.items()):
            owner = owners.setdefault(slot, topology.id)
            if owner != topology.id:
                yield f"slot {slot.key}", f"is given to {owner} and to {topology.id}"
            if count > 1:
                yield title(topology), f"lists slot {slot.key} {count} times"


@rule_of(
    "I1",
    remedy=(
        "start the supervisor, or wait: its tasks are placed elsewhere (if there are too few "
        "slots, `show` names that)"
    ),
    by_view=True,
    heals=True,
)
def assigned_to_live_slots(snapshot: ClusterSnapshot) -> Problems:
    """Every assigned slot belongs to a supervisor that lives and offers it."""
    for topology in visible(snapshot.view):
        for worker in topology.workers:
            supervisor = snapshot.view.supervisors.get(worker.node)
            if supervisor is None:
                yield title(topology), f"supervisor {worker.node} of slot {worker.port} is gone"
            elif worker.port not in supervisor.ports:
                yield title(topology), f"supervisor {worker.node} does not offer port {worker.port}"


# -- I2: one live process per task -----------------------------------------------------------------


@rule_of(
    "I2",
    remedy=(
        "`storm-dagster logs NAME --worker HOST:PORT` of both; the older one must end itself "
        "when its lease is over"
    ),
    by_view=True,
)
def one_live_owner(snapshot: ClusterSnapshot) -> Problems:
    """At most one live process runs a task."""
    for topology in snapshot.view.topologies.values():
        # (task, version of the assignment) -> slot. With different versions one of two processes is
        # handing the task over.
        owners: dict[tuple[int, int], Slot] = {}
        for slot, worker in sorted(topology.live_workers.items()):
            if worker.status != "running":
                continue
            for task in sorted(topology.own_tasks(worker.tasks)):
                owner = owners.setdefault((task, worker.version), slot)
                if owner != slot:
                    yield title(topology), f"task {task} runs in {owner.key} and in {slot.key}"


@rule_of(
    "I2",
    remedy="end the process that `storm-dagster show` does not name",
)
def one_process_per_slot(snapshot: ClusterSnapshot) -> Problems:
    """At most one worker process runs in a slot, the one that holds its node."""
    if snapshot.processes is None:
        return
    by_slot = multimap((process.slot, process) for process in snapshot.processes)
    for slot, processes in sorted(by_slot.items()):
        if len(processes) > 1:
            pids = ", ".join(f"{process.pid} ({process.topology_id})" for process in processes)
            yield f"slot {slot.key}", f"{len(processes)} worker processes run in it: {pids}"
    for topology in snapshot.view.topologies.values():
        for slot, worker in sorted(topology.live_workers.items()):
            processes = by_slot.get(slot, [])
            if not processes or worker.pid in {process.pid for process in processes}:
                continue
            yield (
                f"slot {slot.key}",
                f"process {processes[0].pid} runs in it, but process {worker.pid} holds its node",
            )


# -- I3: no orphans, no missing parts --------------------------------------------------------------


@rule_of(
    "I3",
    remedy="kill it and submit it again",
    by_view=True,
)
def base_implies_published(snapshot: ClusterSnapshot) -> Problems:
    """A topology that is visible has its tasks and its assignment."""
    for topology in visible(snapshot.view):
        missing: list[str] = []
        if topology.tasks is None:
            missing.append("task table")
        if topology.assignment is None:
            missing.append("assignment")
        if missing:
            yield (
                title(topology),
                f"is {topology.base.status} but has no {' and no '.join(missing)}",
            )


@rule_of(
    "I3",
    remedy="look at the node, then remove it or restore the ensemble's backup",
    by_view=True,
)
def records_intact(snapshot: ClusterSnapshot) -> Problems:
    """Every record of the cluster in ZooKeeper is readable."""
    yield from sorted(snapshot.view.corrupt.items())


@rule_of(
    "I3",
    remedy=(
        "restart the supervisor of that slot; a worker alone ends itself when its lease is over"
    ),
)
def no_stray_processes(snapshot: ClusterSnapshot) -> Problems:
    """No worker runs for a slot that no assignment names."""
    for process in snapshot.processes or ():
        topology = snapshot.view.topologies.get(process.topology_id)
        slot = process.slot
        if any(f"/{process.topology_id}" in path for path in snapshot.view.corrupt):
            continue  # No decision is made about a damaged topology; its workers continue.
        if topology is None or topology.assignment is None:
            yield (
                f"process {process.pid}",
                f"runs in {slot.key} for {process.topology_id}, which is gone",
            )
        elif slot not in {worker.slot for worker in topology.assignment.workers}:
            yield (
                f"process {process.pid}",
                f"runs in {slot.key} for {process.topology_id}, "
                "whose assignment no longer names that slot",
            )


# -- I4: code is stored and replicated -------------------------------------------------------------


@rule_of(
    "I4",
    remedy="start the nimbus that holds them, or submit the topology again",
)
def blobs_present(snapshot: ClusterSnapshot) -> Problems:
    """Archive, conf and code of every topology are stored, each with its content hash."""
    if snapshot.blobs is None:
        return
    for topology in visible(snapshot.view):
        for key in code_keys(topology.code_dir):
            if not snapshot.blobs.get(key):
                yield title(topology), f"blob {key} is missing"


@rule_of(
    "I4",
    remedy="`storm-dagster status` shows which one lacks it; it fetches what it lacks by itself",
    heals=True,
)
def blobs_replicated(snapshot: ClusterSnapshot) -> Problems:
    """The code of every topology is on as many nimbuses as it wants, or on all there are."""
    if snapshot.copies is None:
        return
    for topology in visible(snapshot.view):
        wanted_copies = snapshot.wanted_copies.get(topology.id, 1)
        for key in code_keys(topology.code_dir):
            copies = snapshot.copies.get(key, 0)
            if copies < wanted_copies:
                yield (
                    title(topology),
                    f"blob {key} is held by {copies} nimbuses of {wanted_copies}",
                )


# -- I5: only the newest leader writes -------------------------------------------------------------


@rule_of(
    "I5",
    remedy="ZooKeeper's data was replaced by an older copy: restore the newest, or submit again",
)
def epoch_rises(snapshot: ClusterSnapshot) -> Problems:
    """No token was claimed in an epoch above the newest, and since the last check the cluster is
    the same one, with no smaller epoch or placement version.
    """
    for token, record in sorted((snapshot.tokens or {}).items()):
        if record.epoch > snapshot.view.epoch:
            yield (
                f"token {token}",
                f"was claimed in epoch {record.epoch}, the newest is {snapshot.view.epoch}",
            )
    if snapshot.former is None:
        return
    former = snapshot.former.view
    view = snapshot.view
    if former.cluster_id != view.cluster_id:
        yield (
            f"cluster {view.cluster_id}",
            f"replaced cluster {former.cluster_id} since the last check",
        )
    elif view.epoch < former.epoch or view.assignments_version < former.assignments_version:
        yield (
            f"cluster {view.cluster_id}",
            f"went back from epoch {former.epoch}, placement {former.assignments_version} "
            f"to epoch {view.epoch}, placement {view.assignments_version}",
        )


# -- I6: one topology for one token and one name ---------------------------------------------------


@rule_of(
    "I6",
    remedy="kill the older of the two",
)
def one_topology_per_token(snapshot: ClusterSnapshot) -> Problems:
    """One client token, and one name, stand for one topology."""
    owner_of_name: dict[str, str] = {}
    owner_of_token: dict[str, str] = {}
    for topology in snapshot.view.topologies.values():
        base = topology.base
        owner = owner_of_name.setdefault(base.name, topology.id)
        if owner != topology.id:
            yield title(topology), f"and {owner} both stand for {base.name!r}"
        owner = owner_of_token.setdefault(base.token, topology.id)
        if owner != topology.id:
            yield title(topology), f"and {owner} both stand for {base.token!r}"
        if snapshot.tokens is None:
            continue
        record = snapshot.tokens.get(base.token)
        if record is None:
            yield (
                title(topology),
                f"its token {base.token!r} does not exist: a repetition would publish it twice",
            )
        elif record.topology_id != topology.id or not record.published:
            yield (
                title(topology),
                f"its token {base.token!r} says {record.topology_id}, "
                f"published: {record.published}",
            )


# -- I7: each worker is on one version -------------------------------------------------------------

_UPGRADING = frozenset({"UPGRADING", "ROLLBACK"})
"""Statuses of a topology during a gray upgrade."""


@rule_of(
    "I7",
    remedy="`storm-dagster restart NAME`",
)
def one_version_per_worker(snapshot: ClusterSnapshot) -> Problems:
    """Each worker runs one version: the new one when it is upgraded; an upgrade and its status go
    together.
    """
    if snapshot.gray is None:
        return
    for topology in visible(snapshot.view):
        gray = snapshot.gray.get(topology.id, GrayNodes(under_way=False))
        if gray.under_way != (topology.base.status in _UPGRADING):
            recorded = "" if gray.under_way else "not "
            yield (
                title(topology),
                f"is {topology.base.status}, but a gray upgrade is {recorded}recorded",
            )
        ambiguous = gray.upgrading & gray.upgraded
        if ambiguous:
            yield (
                title(topology),
                f"workers {', '.join(sorted(ambiguous))} are upgrading and upgraded at once",
            )
        if gray.under_way:
            yield from _upgraded_workers_with_other_code(topology, gray)


def _upgraded_workers_with_other_code(topology: TopologyView, gray: GrayNodes) -> Problems:
    """Yield the upgraded workers whose process does not run the new code.

    A worker that was not picked may run any former version: it gets the newest at its next start.
    """
    if topology.assignment is None or not gray.code:
        return
    for worker in topology.assignment.workers:
        live = topology.live_workers.get(worker.slot)
        if live is None or not live.code or worker.address not in gray.upgraded:
            continue
        if live.code != gray.code:
            yield (
                title(topology),
                f"worker {worker.address} is upgraded but runs {live.code}, not {gray.code}",
            )


# -- I8: no write without a change, no request without an end --------------------------------------


@rule_of(
    "I8",
    remedy="find the process that rewrites it in the logs of nimbus and of Dagster",
)
def no_idle_writes(snapshot: ClusterSnapshot) -> Problems:
    """Nothing is written when nothing changed."""
    if snapshot.former is None:
        return
    former_topologies = snapshot.former.view.topologies
    for topology_id, topology in snapshot.view.topologies.items():
        former = former_topologies.get(topology_id)
        if former is None:
            continue
        if _base_was_rewritten(former, topology):
            yield paths.topology(topology_id), "was written although nothing of it changed"
        if _assignment_was_rewritten(former, topology):
            yield paths.assignment(topology_id), "was written although nothing of it changed"


def _base_was_rewritten(former: TopologyView, topology: TopologyView) -> bool:
    """True if one write stored an equal base.

    After several writes, the base may have changed and changed back.
    """
    written_once = topology.base_at.version == former.base_at.version + 1
    return written_once and topology.base == former.base


def _assignment_was_rewritten(former: TopologyView, topology: TopologyView) -> bool:
    """True if one write stored an assignment that differs in its timestamp at most."""
    if former.assignment is None or former.assignment_at is None:
        return False
    if topology.assignment is None or topology.assignment_at is None:
        return False
    if topology.assignment_at.version != former.assignment_at.version + 1:
        return False
    timestamp_ms = former.assignment.timestamp_ms
    assignment = topology.assignment.model_copy(update={"timestamp_ms": timestamp_ms})
    return assignment == former.assignment


@rule_of(
    "I8",
    name="wishes_end",
    remedy="`storm-dagster restart NAME`",
)
def rebalances_end(snapshot: ClusterSnapshot) -> Problems:
    """No rebalance waits permanently."""
    for topology in visible(snapshot.view):
        if topology.id in snapshot.rebalance_requests and topology.base.status != "REBALANCING":
            yield (
                title(topology),
                f"is {topology.base.status}, but a rebalance stays below it permanently",
            )


RULES: tuple[Rule, ...] = (
    one_slot_per_task,
    slots_not_shared,
    assigned_to_live_slots,
    one_live_owner,
    one_process_per_slot,
    base_implies_published,
    records_intact,
    no_stray_processes,
    blobs_present,
    blobs_replicated,
    epoch_rises,
    one_topology_per_token,
    one_version_per_worker,
    no_idle_writes,
    rebalances_end,
)
"""All rules, in the order of the invariants."""


def violations(snapshot: ClusterSnapshot) -> list[Violation]:
    """All violations in one snapshot."""
    violations_of_rules: list[Violation] = []
    for rule in RULES:
        violations_of_rules += rule.check(snapshot)
    return violations_of_rules
