"""A submission in six stages (``docs/decisions.md#two-phase-publication``).

Each stage reads its input from the blob store. No part of a topology is visible before
:func:`publish_assignment`. Every stage may be repeated, alone, after any crash, and the submission
ends in exactly one topology for one client token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from storm_dagster.core.reassignment import Runnable
from storm_dagster.core.submission.conf import (
    base_conf,
    normalize_conf,
    stored_document,
    submitted_keys,
    total_conf,
)
from storm_dagster.core.submission.kept_sizes import (
    WORKERS_KEY,
    KeptSizes,
    sizes_of,
    with_parallelism,
)
from storm_dagster.core.submission.spark_keys import check_spark_keys
from storm_dagster.core.submission.tasks import (
    executor_counts,
    normalize_topology,
    number_tasks,
    with_system_components,
)
from storm_dagster.core.submission.validation import (
    check_task_limit,
    normalize_submission,
)
from storm_dagster.model.conf_layers import merge_conf
from storm_dagster.model.errors import Conflict, NotAlive
from storm_dagster.model.names import check_topology_name
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import (
    OperationsContext,
    check_name_free,
    load_runnable,
)
from storm_dagster.operations.results import (
    CodeResult,
    ConfResult,
    TasksResult,
    UpdateChange,
)
from storm_dagster.operations.steps import operation, shared_steps, step
from storm_dagster.operations.submit import staging
from storm_dagster.operations.submit.code_storage import store_code
from storm_dagster.operations.submit.publishing import (  # noqa: F401 (the later stages)
    ACTIVATE_TOPOLOGY,
    PUBLISH_ASSIGNMENT,
    STAGE_ASSIGNMENT,
    activate_topology,
    publish_assignment,
    stage_assignment,
)
from storm_dagster.operations.submit.spark_conf import check_session_keys
from storm_dagster.operations.submit.targets import base_digest
from storm_dagster.operations.submit.update_changes import (
    describe_kept,
    kept_of_former,
    update_changes,
)
from storm_dagster.operations.submit.uploaded_source import (
    no_upload,
    read_named_sizes,
    read_source,
)

STAGE_CONF = shared_steps(
    "stage_conf", "token", "stage.conf", "stage.topology", "stage.record", "stage.newest"
)
STAGE_CODE = shared_steps(
    "stage_code", "store.stormjar.jar", "store.stormconf.ser", "store.stormcode.ser"
)
STAGE_TASKS = shared_steps("stage_tasks", "stage.tasks")
SUBMIT = operation(
    "submit",
    STAGE_CONF,
    STAGE_CODE,
    STAGE_TASKS,
    STAGE_ASSIGNMENT,
    PUBLISH_ASSIGNMENT,
    ACTIVATE_TOPOLOGY,
)


class _Source(NamedTuple):
    """Checked and normalized input of a submission."""

    conf: dict[str, Any]
    spec: TopologySpec
    archive: str
    """Blob key of the archive."""
    former_code_dir: str
    """Code of the replaced topology whose conf was read; empty: not checked."""
    submitted_keys: tuple[str, ...] | None
    """Conf keys of the submission; ``None``: an earlier release staged it."""
    named: tuple[str, ...]
    """Sizes that the call names."""
    warnings: tuple[str, ...] = ()


def stage_conf(
    ctx: OperationsContext,
    *,
    name: str,
    token: str,
    handle: str | None,
    inactive: bool = False,
    allow_degraded: bool = False,
    replaces: str | None = None,
) -> ConfResult:
    """Stage 1: check and normalize conf and topology, and stage both.

    The token is bound to a topology id. The source is the upload ``handle``. Without one, or if it
    has expired, the source are the staged parts, which were checked and normalized before and stay
    unchanged. A re-execution takes the current leadership epoch. Unknown conf keys are an error, or
    a warning if the upload's part ``source`` is ``thrift``. ``replaces`` (a topology id) publishes
    over the topology of that name instead of beside it.

    Raises :class:`InvalidTopology` before more than the token's record is stored,
    :class:`AlreadyAlive` if the name is taken, :class:`Conflict` if the token's topology was
    published and no longer exists, :class:`NotAlive` if the submission was cancelled, and
    :class:`Unavailable` without a leader.
    """
    check_topology_name(name, is_new=False)
    ctx = ctx.accepting_fewer(allow_degraded)
    epoch = ctx.current_epoch()
    earlier: TokenRecord | None = None
    stored = staging.read_client_token(ctx, token)
    if stored is not None:
        earlier, _ = stored
        staging.refuse_cancelled(token, earlier)
    if earlier is not None and replaces is None:
        replaces = staging.staged_replaces(ctx, token)
    if earlier is None and replaces is None:
        check_topology_name(name)
    view = ctx.cluster.load_view()
    _check_alive_topologies(view, name, token, earlier, replaces)
    if earlier is not None and earlier.published:
        return _take_epoch(ctx, token, epoch)
    # Checked in full before anything is staged.
    replaced = view.topology_named(name) if replaces is not None else None
    source = _read_source_or_staged(ctx, name, token, handle, replaced)
    verb = "submit" if replaces is None else "update"
    token_record, _ = staging.allocate_topology_id(ctx, token, name, epoch, verb)
    conf = {**source.conf, "topology.id": token_record.topology_id}
    record = staging.StagingRecord(
        topology_id=token_record.topology_id,
        name=name,
        epoch=epoch,
        handle=handle,
        archive=source.archive,
        wanted_status="INACTIVE" if inactive else "ACTIVE",
        allow_degraded=allow_degraded,
        replaces=replaces,
        former=source.former_code_dir,
        base=base_digest(replaced.base) if replaced is not None else "",
        run=ctx.run,
        submitted_keys=source.submitted_keys,
        named=source.named,
    )
    _write_parts(ctx, token, record, conf, source.spec)
    return _conf_result(token, record, conf, source.spec, warnings=source.warnings)


def _check_alive_topologies(
    view: ClusterView,
    name: str,
    token: str,
    earlier: TokenRecord | None,
    replaces: str | None,
) -> None:
    """Check that the topologies of the cluster permit the submission.

    ``earlier`` is the token's record of an earlier attempt. Raises the errors of
    :func:`stage_conf` about topologies.
    """
    own_id: str | None = None
    is_published = False
    if earlier is not None:
        own_id = earlier.topology_id
        is_published = earlier.published
    if is_published and own_id not in view.topologies:
        raise Conflict(
            f"token {token!r} was used for {own_id}, which has been killed since: "
            "submit with a new token"
        )
    check_name_free(view, name, (replaces, own_id))
    if replaces is None or is_published:
        return
    alive = view.topology_named(name)
    if alive is None or alive.id != replaces:
        raise NotAlive(
            f"topology {replaces} is not alive and cannot be replaced: "
            f"submit {name!r} as a new topology"
        )


def _write_parts(
    ctx: OperationsContext,
    token: str,
    record: staging.StagingRecord,
    conf: dict[str, Any],
    spec: TopologySpec,
) -> None:
    """Stage the parts of stage 1, and note the token as the newest of the name."""
    document = conf
    # Without the keys an earlier release staged the conf, which names them already.
    if record.submitted_keys is not None:
        document = stored_document(conf, record.submitted_keys)
    staging.write_part(ctx, token, "conf", document)
    staging.write_part(ctx, token, "topology", spec)
    # Last: its existence shows that the stage has ended.
    staging.write_part(ctx, token, "record", record)
    with step(ctx, "stage.newest"):
        ctx.blobs.put(staging.newest_token_key(record.name), token.encode())


def _read_source_or_staged(
    ctx: OperationsContext,
    name: str,
    token: str,
    handle: str | None,
    replaced: TopologyView | None,
) -> _Source:
    """The upload, checked and normalized, else the staged parts of the token.

    ``replaced`` is the topology whose conf an upload completes. The staged parts serve without a
    ``handle``, and if its upload has expired. :class:`NotAlive` if there are none.
    """
    if handle is None or not ctx.blobs.exists(staging.upload_key(handle, "topology")):
        staged = _read_staged_record(ctx, name, token, handle)
        conf, spec = staging.read_topology(ctx, token)
        return _Source(
            conf, spec, staged.archive, staged.former, staged.submitted_keys, staged.named
        )
    uploaded = read_source(ctx, handle, replaced)
    spec = uploaded.spec.model_copy(update={"name": name})
    conf, spec = normalize_submission(ctx.values(), uploaded.conf, spec)
    session_warnings = check_session_keys(ctx, total_conf(ctx.values(), conf), spec)
    return _Source(
        conf,
        spec,
        archive=uploaded.archive,
        former_code_dir=replaced.code_dir if replaced else "",
        submitted_keys=submitted_keys(uploaded.conf),
        named=read_named_sizes(ctx, handle),
        warnings=(*uploaded.warnings, *session_warnings),
    )


def _conf_result(
    token: str,
    record: staging.StagingRecord,
    conf: dict[str, Any],
    spec: TopologySpec,
    **fields: Any,
) -> ConfResult:
    """The result of stage 1; ``fields`` are more fields of it."""
    return ConfResult(
        topology_id=record.topology_id,
        name=record.name,
        epoch=record.epoch,
        token=token,
        conf=merge_conf({"stored": conf}),
        topology=spec,
        replaces=record.replaces,
        **fields,
    )


def restage_conf(ctx: OperationsContext, token: str) -> bool:
    """Restage the conf under the current epoch, for a repeated stage.

    Another process repeats it. A token whose submission has ended is reopened in any case. Returns
    ``False`` if the staging is of the current epoch already, so that its parts stay unchanged.
    Raises :class:`NotAlive` if none is staged, and the errors of :func:`stage_conf`.
    """
    record = staging.read_record(ctx, token)
    epoch = ctx.current_epoch()
    staging.reopen_token(ctx, token, epoch)
    if record.epoch == epoch:
        return False
    stage_conf(
        ctx,
        name=record.name,
        token=token,
        handle=record.handle,
        inactive=record.wanted_status == "INACTIVE",
        allow_degraded=record.allow_degraded,
        replaces=record.replaces,
    )
    return True


def _take_epoch(ctx: OperationsContext, token: str, epoch: int) -> ConfResult:
    """Repeat stage 1 of a submission that was published already.

    The staged parts stay, but the part ``record`` gets the current ``epoch``, by which
    :func:`restage_conf` recognizes that the stage was repeated under it.
    """
    record = staging.read_record(ctx, token).model_copy(update={"epoch": epoch})
    conf, spec = staging.read_topology(ctx, token)
    staging.write_part(ctx, token, "record", record)
    return _conf_result(token, record, conf, spec, published=True)


def _read_staged_record(
    ctx: OperationsContext, name: str, token: str, handle: str | None
) -> staging.StagingRecord:
    """The head of an earlier staging; :class:`Conflict` if it is of another name.

    :class:`NotAlive` if there is none; the error names the upload ``handle``, if it was given.
    """
    if not ctx.blobs.exists(staging.staging_key(token, "record")):
        if handle:
            raise no_upload(handle)
        raise NotAlive(
            f"submission {token!r} has nothing staged and names no upload: submit from the start"
        )
    record = staging.read_record(ctx, token)
    if record.name != name:
        raise Conflict(
            f"token {token!r} belongs to topology {record.name!r}: "
            f"submit {name!r} with a token of its own"
        )
    return record


def update_differences(
    ctx: OperationsContext, topology: TopologyView, handle: str, *, replaces: bool = True
) -> dict[str, dict[str, Any]]:
    """Changes to the conf of a running topology by an update with an upload.

    The shape is key -> ``{"old", "new"}``; secrets are masked. With ``replaces`` also the numbers
    of executors that change (``parallelism.COMPONENT``); a gray upgrade changes none.
    :class:`InvalidTopology` for an upload that is not a valid topology.
    """
    uploaded = read_source(ctx, handle, topology)
    spec = uploaded.spec
    former = load_runnable(ctx, topology)
    conf = normalize_conf(ctx.values(), uploaded.conf, spec, topology.id)
    check_spark_keys(ctx.values(), conf, spec)
    new = total_conf(ctx.values(), conf)
    executors: dict[str, int] = {}
    if replaces:
        spec = normalize_topology(new, spec)
        kept = kept_of_former(topology, former, spec, new, read_named_sizes(ctx, handle))
        if kept.workers is not None:
            new[WORKERS_KEY] = kept.workers
        executors = {**sizes_of(spec, new).executors, **kept.executors}
    changes = update_changes(topology, former, new, executors)
    return {change.key: {"old": change.old, "new": change.new} for change in changes}


def stage_code(ctx: OperationsContext, *, token: str) -> CodeResult:
    """Stage 2: store archive, conf and topology under the topology's id.

    Waits until they are replicated. An archive that is stored already with the same content is not
    copied, and no blob of a published topology is replaced. Raises :class:`Unavailable` if
    ``topology.min.replication.count`` nimbuses do not hold all of it within
    ``topology.max.replication.wait.time.sec``, unless degraded was allowed.
    """
    record = staging.read_record(ctx, token)
    ctx = ctx.accepting_fewer(record.allow_degraded)
    conf, spec = staging.read_topology(ctx, token)
    is_published = False
    stored = staging.read_client_token(ctx, token)
    if stored is not None:
        token_record, _ = stored
        is_published = token_record.published
    return store_code(
        ctx,
        record.topology_id,
        name=record.name,
        archive=record.archive,
        conf=conf,
        spec=spec,
        # A repetition never replaces running code: a published topology is only completed.
        keep=is_published,
        allow_degraded=record.allow_degraded,
    )


def stage_tasks(ctx: OperationsContext, *, token: str) -> TasksResult:
    """Stage 3: number the tasks of the topology and its system components.

    The result of an update lists what it changes in the topology that it replaces; the log also
    names what it keeps.
    """
    record = staging.read_record(ctx, token)
    ctx = ctx.accepting_fewer(record.allow_degraded)
    conf, spec = staging.read_topology(ctx, token)
    total = total_conf(ctx.values(), conf)
    full_spec = with_system_components(spec, total)
    base_fields = base_conf(total)
    kept = KeptSizes()
    replaced: TopologyView | None = None
    former: Runnable | None = None
    if record.replaces is not None:
        replaced = ctx.cluster.load_view().topologies.get(record.replaces)
        if replaced is None and ctx.blobs.exists(staging.staging_key(token, "tasks")):
            # It was replaced by an earlier attempt, whose numbers stay.
            return _tasks_result(record, staging.read_tasks(ctx, token))
    if replaced is not None:
        former = load_runnable(ctx, replaced)
        kept = kept_of_former(replaced, former, spec, total, record.named)
        full_spec = with_parallelism(full_spec, kept.executors)
    staged = staging.StagedTasks(
        table=number_tasks(full_spec, total),
        executors=executor_counts(full_spec),
        workers=int(total[WORKERS_KEY]) if kept.workers is None else kept.workers,
        owner=base_fields.owner,
        isolation=base_fields.isolation,
    )
    own_tasks = [
        len(part.ids)
        for component, part in staged.table.components.items()
        if not component.startswith("__")
    ]
    check_task_limit(ctx.values(), record.name, sum(own_tasks))
    staging.write_part(ctx, token, "tasks", staged)
    if replaced is None or former is None:
        return _tasks_result(record, staged)
    new_conf = {**total, WORKERS_KEY: staged.workers}
    changes = update_changes(replaced, former, new_conf, staged.executors)
    _log_update(ctx, record.name, kept, changes)
    return _tasks_result(record, staged, changes)


def _log_update(
    ctx: OperationsContext, name: str, kept: KeptSizes, changes: Sequence[UpdateChange]
) -> None:
    """Log the kept and the changed parts of the update, one line each."""
    for kept_size in describe_kept(kept):
        ctx.log.info("the update of %s keeps %s, of a rebalance", name, kept_size)
    for change in changes:
        ctx.log.info("the update of %s changes %s", name, change.describe())


def _tasks_result(
    record: staging.StagingRecord,
    staged: staging.StagedTasks,
    changes: tuple[UpdateChange, ...] = (),
) -> TasksResult:
    """The result of stage 3."""
    return TasksResult(
        topology_id=record.topology_id,
        name=record.name,
        table=staged.table,
        executors=staged.executors,
        workers=staged.workers,
        tasks=len(staged.table.component_of()),
        changes=changes,
    )
