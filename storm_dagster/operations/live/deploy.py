"""Restart of a topology's workers, and hot deploy: a topology in the place of another
(``docs/decisions.md#hot-deploy``).

The one that runs is replaced only when its successor is validated, stored, replicated and planned;
then one transaction ends the one and publishes the other. There is never a moment without the
topology.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storm_dagster.core.submission.conf import message_timeout_secs, total_conf
from storm_dagster.core.transitions import apply_event
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, StormDagsterError, Unavailable
from storm_dagster.model.records import encode_record
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
from storm_dagster.operations.live.worker_requests import ask_worker, link_key_of
from storm_dagster.operations.results import LifecycleResult
from storm_dagster.operations.steps import operation
from storm_dagster.operations.submit import submission
from storm_dagster.operations.submit.code_storage import check_uploaded_archive
from storm_dagster.operations.submit.publishing import check_replaceable
from storm_dagster.operations.submit.staging import read_record, read_token, read_topology
from storm_dagster.operations.submit.sweeping import DELETE_CODE, SWEEP, delete_code, sweep
from storm_dagster.operations.transactions import (
    announce,
    append_assignment,
    commit,
    retry_on_conflict,
    with_change,
)
from storm_dagster.security.settings import Security

DRAIN = operation("drain", "drain")
UNDO_DRAIN = operation("undo_drain", "undo_drain")
UPDATE = operation("update", submission.SUBMIT, SWEEP, DELETE_CODE)
RESTART = operation("restart", "restart")

_LONGEST_DRAIN_SECS = 30.0
_POLL_SECS = 0.05
_ANSWER_SECS = 0.5
_ASKED_AT_ONCE = 16
_SPARE_SECS = 30
"""Added to the drain's own limit: only then may somebody take it for abandoned and let the spouts
run again.
"""


def restart(ctx: OperationsContext, name: str) -> LifecycleResult:
    """Start every worker of the topology again: same id, places, code, conf and status.

    The supervisors replace the processes, each in its slot; what is under way is replayed by the
    spouts. The pauses after earlier crashes end. :class:`NotAlive`; :class:`Conflict` unless ACTIVE
    or INACTIVE; :class:`Unavailable` without an assignment.
    """
    epoch = ctx.current_epoch()
    wanted: dict[str, int] = {}

    def attempt(view: ClusterView) -> LifecycleResult:
        topology = topology_by_name(view, name)
        check_replaceable(topology, "restarted")
        assignment, base = topology.assignment, topology.base
        if assignment is None:
            raise Unavailable(
                f"topology {base.name!r} has no assignment yet: wait until it is healed"
            )
        report = LifecycleResult(
            topology.id, base.name, base.status, changed=True, previous=base.status
        )
        if assignment.restarts >= wanted.setdefault(topology.id, assignment.restarts + 1):
            return report  # The reply of our own commit was lost.
        after = with_change(
            ctx, assignment.model_copy(update={"restarts": wanted[topology.id]}), "restarted"
        )
        transaction = ctx.cluster.fenced(epoch).check(
            paths.topology(topology.id), topology.base_at.version
        )
        append_assignment(ctx, transaction, view, base.name, after)
        announce(ctx, transaction, topology.id, VERBS["restart"].action)
        commit(ctx, transaction, "restart")
        return report

    return retry_on_conflict(ctx, f"restarting {name}", attempt)


def update(
    ctx: OperationsContext,
    name: str,
    *,
    token: str,
    handle: str | None,
    allow_degraded: bool = False,
) -> LifecycleResult:
    """Hot deploy: run the uploaded topology in the place of the one of that name, under a new id.

    Whatever is wrong with the new one, its archive included, is raised before the old one is
    touched. Then the old one's spouts fall silent, what is under way finishes (at most the message
    timeout, 30 s), and one transaction swaps them; when that fails the old one goes on.
    :class:`NotAlive`, :class:`Conflict` in another status than ACTIVE and INACTIVE, and the errors
    of a submission.
    """
    if not _is_published(ctx, token):
        old = topology_by_name(ctx.cluster.load_view(), name)
        check_replaceable(old)
        submission.stage_conf(
            ctx,
            name=old.base.name,
            token=token,
            handle=handle,
            allow_degraded=allow_degraded,
            replaces=old.id,
        )
        submission.stage_code(ctx, token=token)
        submission.stage_tasks(ctx, token=token)
        submission.stage_assignment(ctx, token=token)
        record = read_record(ctx, token)
        conf, spec = read_topology(ctx, token)
        check_uploaded_archive(ctx, record.archive, spec, total_conf(ctx.values(), conf))
    return _replace(ctx, token)


def _is_published(ctx: OperationsContext, token: str) -> bool:
    known = read_token(ctx, token)
    return known is not None and known[0].published


def _replace(ctx: OperationsContext, token: str) -> LifecycleResult:
    if _is_published(ctx, token):
        # A repetition, maybe under another leader: what is left to do is done in the current epoch.
        submission.take_over(ctx, token)
    old = read_record(ctx, token).replaces
    drained = 0.0
    topology = ctx.cluster.load_view().topologies.get(old) if old is not None else None
    try:
        if topology is not None and topology.live_workers:
            longest = min(
                float(message_timeout_secs(load_runnable(ctx, topology).conf)), _LONGEST_DRAIN_SECS
            )
            drained = drain(ctx, topology.id, longest)
        began = ctx.monotonic()
        published = submission.publish_assignment(ctx, token=token)
    except StormDagsterError:
        if old is not None:
            undo_drain(ctx, old)
        raise
    report = submission.activate_topology(ctx, token=token)
    # A repetition after a crash sweeps what the first one published over and did not come to sweep.
    replaced = published.replaced or (old if published.already else None)
    if replaced is not None:
        try:
            sweep(ctx, ctx.current_epoch(), replaced)
            delete_code(ctx, replaced)
        except (
            StormDagsterError
        ) as error:  # The update has taken place, and the cleaner deletes what this misses.
            ctx.log.warning("what %s left is deleted later: %s", replaced, error)
    swap_secs = ctx.monotonic() - began
    return LifecycleResult(
        report.topology_id,
        report.name,
        report.status,
        changed=True,
        drain_secs=drained,
        swap_secs=swap_secs,
    )


def drain(ctx: OperationsContext, topology_id: str, longest_secs: float) -> float:
    """Silence the spouts and wait until no tuple is under way, at most ``longest_secs``; the
    seconds it took.

    If nobody ends the drain, ``lifecycle_sensor`` or the leader makes the topology ACTIVE again.
    What is still under way at the end is replayed by its spouts. An INACTIVE topology is not
    drained: its spouts are silent already.
    """
    began = ctx.monotonic()
    if not _silence(ctx, topology_id, round(longest_secs) + _SPARE_SECS):
        return 0.0
    security = Security.of(ctx.conf)
    quiet = 0
    while ctx.monotonic() - began < longest_secs:
        try:
            topology = ctx.cluster.load_view().topologies.get(topology_id)
        except Unavailable:  # An election of ZooKeeper is no reason to give up.
            quiet = 0
            ctx.sleep(_POLL_SECS)
            continue
        if topology is None or topology.assignment is None:
            break
        # Twice: what is on its way between two workers is in neither while they are asked.
        quiet = quiet + 1 if _quiet(topology, link_key_of(security, topology_id)) else 0
        if quiet == 2:
            break
        ctx.sleep(_POLL_SECS)
    taken = ctx.monotonic() - began
    if quiet < 2:
        ctx.log.warning("%s still has tuples under way after %.1f s", topology_id, taken)
    return taken


def _silence(ctx: OperationsContext, topology_id: str, delay_secs: int) -> bool:
    epoch = ctx.current_epoch()

    def attempt(view: ClusterView) -> bool:
        topology = view.topologies.get(topology_id)
        if topology is None or topology.base.status not in ("ACTIVE", "INACTIVE"):
            raise Conflict(
                f"topology {topology_id} was changed by somebody else meanwhile: try again"
            )
        if topology.base.status == "INACTIVE":
            return topology.base.delay_secs == delay_secs
        after = apply_event(topology.base, "drain", delay_secs=delay_secs)
        transaction = ctx.cluster.fenced(epoch)
        transaction.set(paths.topology(topology_id), encode_record(after), topology.base_at.version)
        commit(ctx, transaction, "drain")
        return True

    return retry_on_conflict(ctx, f"draining {topology_id}", attempt)


def undo_drain(ctx: OperationsContext, topology_id: str) -> None:
    """Let the spouts run again: the successor did not come. A topology that is not being drained
    stays as it is.
    """
    epoch = ctx.current_epoch()

    def attempt(view: ClusterView) -> None:
        topology = view.topologies.get(topology_id)
        if (
            topology is None
            or topology.base.status != "INACTIVE"
            or topology.base.delay_secs is None
        ):
            return
        after = apply_event(topology.base, "activate")
        transaction = ctx.cluster.fenced(epoch)
        transaction.set(paths.topology(topology_id), encode_record(after), topology.base_at.version)
        commit(ctx, transaction, "undo_drain")

    retry_on_conflict(ctx, f"letting {topology_id} go on", attempt)


def _quiet(topology: TopologyView, link_key: str) -> bool:
    """Whether no worker has a tuple waiting or a tree open. One that does not answer has nothing
    under way if dead.
    """
    assert topology.assignment is not None
    tokens = {slot: node.token for slot, node in topology.live_workers.items()}
    asked = [worker for worker in topology.assignment.workers if worker.slot in tokens]
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        return all(
            pool.map(
                lambda one: _worker_quiet(one.host, one.port, tokens[one.slot], link_key), asked
            )
        )


def _worker_quiet(host: str, port: int, token: str, link_key: str) -> bool:
    try:
        answer = ask_worker(host, port, token, "stats", _ANSWER_SECS, link_key)
    except StormDagsterError:
        return False
    workers: Mapping[str, Any] = answer.get("workers") or {}
    systems = [
        worker.get("system") or {} for name, worker in workers.items() if name.endswith(f":{port}")
    ]
    return all(not one.get("waiting_tuples") and not one.get("open_trees") for one in systems)
