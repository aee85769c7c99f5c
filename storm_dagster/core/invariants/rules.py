"""The rules of the invariants: I1 to I8. Pure; each yields (thing, reason) pairs, and its docstring
is the rule in words.
"""

from collections import Counter

from storm_dagster.core.invariants.snapshot import (
    ClusterSnapshot,
    Found,
    Rule,
    Violation,
    rule_of,
    title,
    visible,
)
from storm_dagster.model import paths
from storm_dagster.model.multimap import multimap
from storm_dagster.model.names import code_keys
from storm_dagster.model.ranges import decode_ranges, encode_ranges
from storm_dagster.model.slot import Slot

# -- I1: every task has one slot -------------------------------------------------------------------


@rule_of(
    "I1",
    remedy=(
        "`storm-dagster explain NAME` prints why a task is where it is; `storm-dagster "
        "rebalance NAME --reassign` places all tasks again"
    ),
    by_view=True,
)
def one_slot_per_task(snapshot: ClusterSnapshot) -> Found:
    """Every task of every topology has exactly one slot."""
    for topology in visible(snapshot.view):
        if topology.assignment is None or topology.tasks is None:
            continue
        known = set(topology.tasks.component_of())
        times = Counter(task for worker in topology.assignment.workers for task in worker.ids)
        if twice := {task for task, count in times.items() if count > 1}:
            yield title(topology), f"tasks {encode_ranges(twice)} stand in more than one slot"
        if unknown := times.keys() - known:
            yield (
                title(topology),
                f"tasks {encode_ranges(unknown)} are assigned but belong to no component",
            )
        if without := known - times.keys() - snapshot.unschedulable.get(topology.id, frozenset()):
            yield (
                title(topology),
                f"tasks {encode_ranges(without)} have no slot, and no reason says why",
            )


@rule_of(
    "I1",
    remedy="`storm-dagster rebalance NAME --reassign` for one of them",
    by_view=True,
)
def slots_not_shared(snapshot: ClusterSnapshot) -> Found:
    """No slot is given to two topologies."""
    owners: dict[Slot, str] = {}
    for topology in snapshot.view.topologies.values():
        counts = Counter(worker.slot for worker in topology.workers)
        for slot, count in sorted(counts.items()):
            other = owners.setdefault(slot, topology.id)
            if other != topology.id:
                yield f"slot {slot.key}", f"is given to {other} and to {topology.id}"
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
def assigned_to_live_slots(snapshot: ClusterSnapshot) -> Found:
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
def one_live_owner(snapshot: ClusterSnapshot) -> Found:
    """At most one live process runs a task."""
    for topology in snapshot.view.topologies.values():
        owner: dict[tuple[int, int], Slot] = {}
        for slot, worker in sorted(topology.live_workers.items()):
            # With different versions of the assignment one of the two is handing the task over.
            for task in decode_ranges(worker.tasks) if worker.status == "running" else ():
                other = owner.setdefault((task, worker.version), slot)
                if other != slot:
                    yield (
                        title(topology),
                        f"task {task} runs in {other.key} and in {slot.key}",
                    )


@rule_of(
    "I2",
    remedy="end the process that `storm-dagster show` does not name",
)
def one_process_per_slot(snapshot: ClusterSnapshot) -> Found:
    """At most one worker process runs in a slot, the one that holds its node."""
    if snapshot.processes is None:
        return
    here = multimap((process.slot, process) for process in snapshot.processes)
    for slot, found in sorted(here.items()):
        if len(found) > 1:
            pids = ", ".join(f"{part.pid} ({part.topology_id})" for part in found)
            yield f"slot {slot.key}", f"{len(found)} worker processes run in it: {pids}"
    for topology in snapshot.view.topologies.values():
        for slot, worker in sorted(topology.live_workers.items()):
            found = here.get(slot, [])
            if found and all(part.pid != worker.pid for part in found):
                reason = (
                    f"process {found[0].pid} runs in it, but process {worker.pid} holds its node"
                )
                yield f"slot {slot.key}", reason


_UPGRADING = frozenset({"UPGRADING", "ROLLBACK"})

# -- I3: no orphans, nothing referenced is missing -------------------------------------------------


@rule_of(
    "I3",
    remedy="kill it and submit it again",
    by_view=True,
)
def base_implies_published(snapshot: ClusterSnapshot) -> Found:
    """A topology that is visible has its tasks and its assignment."""
    for topology in visible(snapshot.view):
        parts = (("task table", topology.tasks), ("assignment", topology.assignment))
        if missing := [what for what, part in parts if part is None]:
            yield (
                title(topology),
                f"is {topology.base.status} but has no {' and no '.join(missing)}",
            )


@rule_of(
    "I3",
    remedy="look at the node, then remove it or restore the ensemble's backup",
    by_view=True,
)
def records_intact(snapshot: ClusterSnapshot) -> Found:
    """Every record of the cluster in ZooKeeper is readable."""
    yield from sorted(snapshot.view.corrupt.items())


@rule_of(
    "I3",
    remedy=(
        "restart the supervisor of that slot; a worker alone ends itself when its lease is over"
    ),
)
def no_stray_processes(snapshot: ClusterSnapshot) -> Found:
    """No worker runs for a slot that no assignment names."""
    for process in snapshot.processes or ():
        topology = snapshot.view.topologies.get(process.topology_id)
        slot = process.slot
        if any(f"/{process.topology_id}" in path for path in snapshot.view.corrupt):
            continue  # Nothing is decided about a damaged topology, whose workers go on.
        if topology is None or topology.assignment is None:
            yield (
                f"process {process.pid}",
                f"runs in {slot.key} for {process.topology_id}, which is gone",
            )
        elif slot not in {worker.slot for worker in topology.assignment.workers}:
            reason = f"runs in {slot.key} for {process.topology_id}, whose assignment names that slot no more"
            yield f"process {process.pid}", reason


# -- I4: code is stored and replicated -------------------------------------------------------------


@rule_of(
    "I4",
    remedy="start the nimbus that holds them, or submit the topology again",
)
def blobs_present(snapshot: ClusterSnapshot) -> Found:
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
def blobs_replicated(snapshot: ClusterSnapshot) -> Found:
    """The code of every topology is on as many nimbuses as it wants, or on all there are."""
    if snapshot.copies is None:
        return
    for topology in visible(snapshot.view):
        wanted = snapshot.wanted_copies.get(topology.id, 1)
        for key in code_keys(topology.code_dir):
            if snapshot.copies.get(key, 0) < wanted:
                yield (
                    title(topology),
                    f"blob {key} is held by {snapshot.copies.get(key, 0)} nimbuses of {wanted}",
                )


# -- I5: only the newest leader writes -------------------------------------------------------------


@rule_of(
    "I5",
    remedy="ZooKeeper's data was replaced by an older copy: restore the newest, or submit again",
)
def epoch_rises(snapshot: ClusterSnapshot) -> Found:
    """Nothing was written in an epoch that was never led, and no state went back."""
    for token, record in sorted((snapshot.tokens or {}).items()):
        if record.epoch > snapshot.view.epoch:
            yield (
                f"token {token}",
                f"was claimed in epoch {record.epoch}, the newest is {snapshot.view.epoch}",
            )
    if snapshot.former is None:
        return
    before, now = snapshot.former.view, snapshot.view
    if before.cluster_id != now.cluster_id:
        yield f"cluster {now.cluster_id}", f"stands where cluster {before.cluster_id} stood"
    elif now.epoch < before.epoch or now.assignments_version < before.assignments_version:
        went = f"went back from epoch {before.epoch}, placement {before.assignments_version} "
        now_at = f"to epoch {now.epoch}, placement {now.assignments_version}"
        yield f"cluster {now.cluster_id}", went + now_at


# -- I6: one topology for one token and one name ---------------------------------------------------


@rule_of(
    "I6",
    remedy="kill the older of the two",
)
def one_topology_per_token(snapshot: ClusterSnapshot) -> Found:
    """One client token, and one name, stand for one topology."""
    names: dict[str, str] = {}
    tokens: dict[str, str] = {}
    for topology in snapshot.view.topologies.values():
        base = topology.base
        for what, known in ((base.name, names), (base.token, tokens)):
            other = known.setdefault(what, topology.id)
            if other != topology.id:
                yield title(topology), f"and {other} both stand for {what!r}"
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
                f"its token {base.token!r} says {record.topology_id}, published: {record.published}",
            )


# -- I7: each worker is on one version -------------------------------------------------------------


@rule_of(
    "I7",
    remedy="`storm-dagster restart NAME`",
)
def one_version_per_worker(snapshot: ClusterSnapshot) -> Found:
    """Each worker runs one version: the new one when it is upgraded; an upgrade and its status go
    together.
    """
    for topology in visible(snapshot.view):
        gray = (snapshot.gray or {}).get(topology.id)
        if snapshot.gray is not None and (gray is not None and gray.going_on) != (
            topology.base.status in _UPGRADING
        ):
            recorded = "" if gray and gray.going_on else "not "
            yield (
                title(topology),
                f"is {topology.base.status}, but a gray upgrade is {recorded}recorded",
            )
        if gray is not None and (both := gray.upgrading & gray.upgraded):
            yield (
                title(topology),
                f"workers {', '.join(sorted(both))} are upgrading and upgraded at once",
            )
        # A worker that was not picked may run any former version: it gets the newest at its next
        # start.
        for worker in (
            topology.assignment.workers if topology.assignment and gray and gray.going_on else ()
        ):
            live = topology.live_workers.get(worker.slot)
            if live is None or not live.code or gray is None or not gray.code:
                continue
            if worker.address in gray.upgraded and live.code != gray.code:
                yield (
                    title(topology),
                    f"worker {worker.address} is upgraded but runs {live.code}, not {gray.code}",
                )


# -- I8: nothing is written when nothing changed ---------------------------------------------------


@rule_of(
    "I8",
    remedy="find the process that rewrites it in the logs of nimbus and of Dagster",
)
def no_idle_writes(snapshot: ClusterSnapshot) -> Found:
    """Nothing is written when nothing changed."""
    before = snapshot.former.view.topologies if snapshot.former is not None else {}
    for topology_id, topology in snapshot.view.topologies.items():
        old = before.get(topology_id)
        if old is None:
            continue
        if topology.base == old.base and topology.base_at.version == old.base_at.version + 1:
            yield paths.topology(topology_id), "was written although nothing of it changed"
        if (
            topology.assignment is not None
            and old.assignment is not None
            and old.assignment_at is not None
            and topology.assignment_at is not None
            and topology.assignment_at.version == old.assignment_at.version + 1
            and topology.assignment.model_copy(update={"timestamp_ms": old.assignment.timestamp_ms})
            == old.assignment
        ):
            yield paths.assignment(topology_id), "was written although nothing of it changed"


@rule_of(
    "I8",
    name="wishes_end",
    remedy="`storm-dagster restart NAME`",
)
def rebalances_end(snapshot: ClusterSnapshot) -> Found:
    """No rebalance waits for ever."""
    for topology in visible(snapshot.view):
        if topology.id in snapshot.rebalance_requests and topology.base.status != "REBALANCING":
            yield (
                title(topology),
                f"is {topology.base.status}, but a rebalance stands below it for ever",
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
    return [violation for rule in RULES for violation in rule.check(snapshot)]
