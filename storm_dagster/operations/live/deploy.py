"""A topology in the place of another of its name: restart, and hot deploy (``docs/decisions.md#hot-deploy``).

The one that runs is touched only when its successor is validated, stored, replicated and planned; then one
transaction ends the one and publishes the other. There is never a moment without the topology.
"""

from __future__ import annotations

from storm_dagster.core.submission.conf import SUBMITTED_KEYS, message_timeout_secs, total_conf
from storm_dagster.core.submission.validation import normalize_submission
from storm_dagster.model.errors import Conflict, StormDagsterError
from storm_dagster.model.names import ACKER, code_key, conf_key, jar_key
from storm_dagster.model.topology import decode_topology
from storm_dagster.model.view import TopologyView
from storm_dagster.operations.context import OperationsContext, load_runnable, topology_by_name
from storm_dagster.operations.documents import decode_json
from storm_dagster.operations.live.draining import drain, undo_drain
from storm_dagster.operations.results import LifecycleResult
from storm_dagster.operations.steps import operation
from storm_dagster.operations.submit.archive_check import check_uploaded_archive
from storm_dagster.operations.submit.publishing import activate_topology, publish_assignment, stage_assignment
from storm_dagster.operations.submit.staging import (
    StagingRecord,
    read_record,
    read_token,
    read_topology,
    write_part,
)
from storm_dagster.operations.submit.submission import (
    SUBMIT,
    check_confs,
    stage_code,
    stage_conf,
    stage_tasks,
    take_over,
)
from storm_dagster.operations.submit.sweeping import DELETE_CODE, SWEEP, delete_code, sweep

UPDATE = operation("update", SUBMIT, SWEEP, DELETE_CODE)
_LONGEST_DRAIN_SECS = 30.0
RESTART = operation("restart", UPDATE)


def restart(ctx: OperationsContext, name: str, *, token: str | None = None) -> LifecycleResult:
    """Start the topology again from its own stored code, with its present parallelism, under a new id.

    Its status stays ACTIVE or INACTIVE as it was. ``token`` makes a repetition after a crash finish the
    same restart; without one it is made from the id that is replaced. :class:`NotAlive`, :class:`Conflict`
    in any other status, :class:`Unavailable` when it does not fit.
    """
    if token is None or not _is_published(ctx, token):
        topology = _replaceable(ctx, name)
        token = token or f"restart-{topology.id}"
        _stage_copy(ctx, topology, token)
        _prepare(ctx, topology, token, None)
    return _replace(ctx, token)


def update(
    ctx: OperationsContext, name: str, *, token: str, handle: str | None, allow_degraded: bool = False
) -> LifecycleResult:
    """Hot deploy: run the uploaded topology in the place of the one of that name, under a new id.

    Whatever is wrong with the new one, its archive included, is raised before the old one is touched. Then the old
    one's spouts fall silent, what is under way finishes (at most the message timeout, 30 s), and one transaction
    swaps them; when that fails the old one goes on. Errors as of :func:`restart`, and those of a submission.
    """
    if not _is_published(ctx, token):
        _prepare(ctx, _replaceable(ctx, name), token, handle, allow_degraded)
        record = read_record(ctx, token)
        conf, spec = read_topology(ctx, token)
        check_uploaded_archive(ctx, record.archive, spec, total_conf(ctx.values(), conf))
    return _replace(ctx, token)


def _is_published(ctx: OperationsContext, token: str) -> bool:
    known = read_token(ctx, token)
    return known is not None and known[0].published


def _replaceable(ctx: OperationsContext, name: str) -> TopologyView:
    topology = topology_by_name(ctx.cluster.load_view(), name)
    if topology.base.status not in ("ACTIVE", "INACTIVE"):
        raise Conflict(
            f"topology {name!r} is {topology.base.status} and cannot be replaced: wait until it has finished"
        )
    return topology


def _prepare(
    ctx: OperationsContext,
    topology: TopologyView,
    token: str,
    handle: str | None,
    allow_degraded: bool = False,
) -> None:
    stage_conf(
        ctx,
        name=topology.base.name,
        token=token,
        handle=handle,
        inactive=topology.base.wanted_status == "INACTIVE",
        allow_degraded=allow_degraded,
        replaces=topology.id,
    )
    stage_code(ctx, token=token)
    stage_tasks(ctx, token=token)
    stage_assignment(ctx, token=token)


def _replace(ctx: OperationsContext, token: str) -> LifecycleResult:
    if _is_published(ctx, token):
        # A repetition, maybe under another leader: what is left to do is done in the current epoch.
        take_over(ctx, token)
    old = read_record(ctx, token).replaces
    drained = _drain(ctx, old)
    began = ctx.monotonic()
    try:
        published = publish_assignment(ctx, token=token)
    except StormDagsterError:
        if old is not None:
            undo_drain(ctx, old)
        raise
    report = activate_topology(ctx, token=token)
    # A repetition after a crash sweeps what the first one published over and did not come to sweep.
    replaced = published.replaced or (old if published.already else None)
    if replaced is not None:
        delete_replaced(ctx, replaced)
    return LifecycleResult(
        report.topology_id,
        report.name,
        report.status,
        changed=True,
        drain_secs=drained,
        swap_secs=ctx.monotonic() - began,
    )


def _drain(ctx: OperationsContext, old: str | None) -> float:
    """Drain the old topology once everything else is ready; the seconds it took."""
    topology = ctx.cluster.load_view().topologies.get(old) if old is not None else None
    if old is None or topology is None or not topology.live_workers:
        return 0.0
    conf = load_runnable(ctx, topology.code_dir).conf
    return drain(ctx, old, min(float(message_timeout_secs(conf)), _LONGEST_DRAIN_SECS))


def delete_replaced(ctx: OperationsContext, topology_id: str) -> None:
    """Delete the rest of a replaced topology; the cleaner deletes what this misses."""
    sweep(ctx, ctx.current_epoch(), topology_id)
    delete_code(ctx, topology_id)


def _stage_copy(ctx: OperationsContext, topology: TopologyView, token: str) -> None:
    """Stage the running topology's conf and code, with its present parallelism.

    What an older release stored meets the rules of this one here, as an upload does where it is read.
    """
    conf = decode_json(ctx.blobs.read(conf_key(topology.code_dir)), conf_key(topology.code_dir))
    spec = decode_topology(ctx.blobs.read(code_key(topology.code_dir)))
    executors = topology.base.executors
    conf = {
        **conf,
        "topology.workers": topology.base.workers,
        "topology.acker.executors": executors.get(ACKER, 0),
        "topology.bolt.parallelism": {
            component: count for component, count in executors.items() if component in spec.bolts
        },
        "topology.spout.parallelism": {
            component: count for component, count in executors.items() if component in spec.spouts
        },
    }
    conf, spec, _ = check_confs(conf, spec, f"the stored conf of {topology.id}", "warn")
    conf.setdefault(SUBMITTED_KEYS, [])
    conf, spec = normalize_submission(ctx.values(), conf, spec)
    head = StagingRecord(topology_id=topology.id, name=topology.base.name, epoch=0, archive=jar_key(topology.code_dir))
    write_part(ctx, token, "conf", conf)
    write_part(ctx, token, "topology", spec)
    write_part(ctx, token, "record", head)
