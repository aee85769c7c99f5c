"""A submission as six assets.

Each asset calls one stage, which reads its input from the blob store. Assets return only metadata:
the state is in ZooKeeper and in the blob store and does not pass through Dagster's storage, so that
each stage can be repeated alone, in another process.
"""

import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import dagster as dg

from storm_dagster.defs import keys
from storm_dagster.defs.binding import asset_settings, bind, cluster_key
from storm_dagster.defs.forms import RebalanceConfig, SubmitConfig
from storm_dagster.defs.metadata import (
    active_metadata,
    code_metadata,
    conf_metadata,
    fields_of,
    in_force_metadata,
    placement_metadata,
    planned_metadata,
    published_metadata,
    running_metadata,
    step_errors,
    table,
    task_components,
    tasks_metadata,
)
from storm_dagster.defs.resources.operating import (
    Handles,
    claim_record,
    end_record,
    operations,
    recorded_request,
    tag_run,
    tags_of,
    token_for,
)
from storm_dagster.defs.resources.processes import NimbusResource, upload_of
from storm_dagster.model.dagster_names import (
    REBALANCE_JOB,
    SCHEDULED_TAG,
    TOKEN_TAG,
    DagsterNames,
)
from storm_dagster.model.errors import InvalidRequest, NotAlive
from storm_dagster.model.names import check_topology_name
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.run_result import RunResult
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.read.explaining import moves_document
from storm_dagster.operations.read.run_results import rebalance_result
from storm_dagster.operations.results import ConfResult, RebalanceResult
from storm_dagster.operations.submit import submission
from storm_dagster.operations.submit.continuing import run_stage
from storm_dagster.operations.submit.staging import check_client_token, newest_token_key, read_tasks


def _topology_of(context: dg.AssetExecutionContext, names: DagsterNames) -> str:
    """The run's topology: its partition key, which must be a registered one.

    :class:`InvalidRequest` without a partition, or for an unknown one; a key that was dropped while
    nimbus's run was queued is added. Dagster checks this for a launch from the UI, not for one by
    GraphQL with a partition tag.
    """
    if not context.has_partition_key:
        raise InvalidRequest(
            "the run has no partition: the topology's name is the partition key; add it to "
            f"{names.partitions} and launch the run for it"
        )
    name = check_topology_name(context.partition_key)
    if not context.instance.has_dynamic_partition(names.partitions, name):
        if TOKEN_TAG in context.run.tags:
            # Nimbus added the key before it launched this run; the end of a killed namesake has
            # dropped it since.
            context.instance.add_dynamic_partitions(names.partitions, [name])
            return name
        raise InvalidRequest(
            f"topology {name!r} is not a registered partition of {names.partitions}: "
            "add the key first (`storm-dagster submit` does, "
            "and so does 'Add partition' in the launch dialog)"
        )
    return name


def _keep_key(
    context: dg.AssetExecutionContext, ops: OperationsContext, names: DagsterNames, name: str
) -> None:
    """Add the run's partition key if it was dropped, because Dagster refuses a result without it.

    The key stays while a run uses it (``drop_key``), but a user may delete it, and the end of a
    namesake may delete it for a moment. :class:`NotAlive` in a run of `rebalance_topology` whose
    topology is gone.
    """
    if context.instance.has_dynamic_partition(names.partitions, name):
        return
    is_rebalance = context.run.job_name == names.name(REBALANCE_JOB)
    if is_rebalance and ops.cluster.load_view().topology_named(name) is None:
        raise NotAlive(f"topology {name!r} was killed while it was rebalanced: submit it again")
    context.instance.add_dynamic_partitions(names.partitions, [name])


def _with_seconds(metadata: dict[str, Any], began: float) -> dg.MaterializeResult:
    """The result with the seconds since ``began`` of the monotonic clock."""
    return dg.MaterializeResult(
        metadata={**metadata, "seconds": round(time.monotonic() - began, 3)}
    )


def _inherited_token(context: dg.AssetExecutionContext, config: SubmitConfig) -> str | None:
    """The token in the run's tags, if it belongs to this submission.

    "Open in Launchpad" copies the tags of an earlier run: with another TARGET, that is another
    submission, unless the run is a re-execution of the first.
    """
    if config.target and context.run.root_run_id is None:
        return None
    return tags_of(context).get(TOKEN_TAG)


def _summary(report: RebalanceResult) -> dict[str, Any]:
    """Metadata of a rebalance, of the plan and of the rebalance itself."""
    metadata = {
        **fields_of(report, "topology_id status outcome delay_secs"),
        "workers_wanted": report.workers,
        "executors_wanted": dg.MetadataValue.json(dict(report.executors)),
        "moved_tasks": report.moved,
        "assign_seconds": round(report.assign_secs, 3),
        "tasks_added": encode_ranges(report.tasks_added) or "none",
        "tasks_removed": encode_ranges(report.tasks_removed) or "none",
        "planner": report.planner or "none",
    }
    if report.reason:
        metadata["reason"] = report.reason
    if report.warnings:
        metadata["warnings"] = "; ".join(report.warnings)
    return metadata


def _is_scheduled(context: dg.AssetExecutionContext) -> bool:
    """True if a schedule asked for the run."""
    return SCHEDULED_TAG in tags_of(context)


def plan_rebalance(
    ops: OperationsContext, name: str, config: RebalanceConfig, *, scheduled: bool
) -> dict[str, Any]:
    """Metadata of the planned rebalance, without an effect.

    A rebalance that does not fit is refused here. ``scheduled``: a schedule asked for it.
    """
    report = rebalance(ops, name, **config.model_dump(), dry_run=True, scheduled=scheduled)
    metadata = _summary(report)
    if report.placement is not None:
        components = task_components(ops, report.topology_id)
        planned = placement_metadata(report.placement, components, "planned")
        metadata = {**planned, **metadata}
        moves = moves_document(report.assignment, report.placement, report.components)
        cells = itemgetter("task", "component", "from", "to", "why")
        metadata["moves"] = table("task:int component from to why", [cells(move) for move in moves])
    return metadata


def publish_rebalance(
    context: dg.AssetExecutionContext, ops: OperationsContext, name: str, names: DagsterNames
) -> dict[str, Any]:
    """Rebalance with the run's config, and wait for the end of its delay.

    Returns metadata of the assignment afterwards.
    """
    # The form of the run belongs to the first of the two assets.
    op_configs: Any = context.run.run_config.get("ops") or {}
    op_config = op_configs.get(names.stage_op("assignment")) or {}
    form = op_config.get("config") or {}
    fields = RebalanceConfig(**form).model_dump()
    report = rebalance(
        ops,
        name,
        **fields,
        scheduled=_is_scheduled(context),
        request_id=recorded_request(context),
    )
    answer = rebalance_result(report)
    context.log.info(answer.summary)
    for warning in answer.warnings:
        context.log.warning(warning)
    context.instance.add_run_tags(context.run.run_id, answer.to_tags())
    return {
        **_summary(report),
        "summary": answer.summary,
        **in_force_metadata(report, task_components(ops, report.topology_id)),
    }


_STAGES: list[tuple[Callable[..., dg.MaterializeResult], dg.AssetKey]] = []
"""Function and key of each stage, in order; each depends on the one before."""


def _stage(key: dg.AssetKey) -> Any:
    """The decorator of the six stages; it does not need their cluster."""

    def remember(
        function: Callable[..., dg.MaterializeResult],
    ) -> Callable[..., dg.MaterializeResult]:
        _STAGES.append((function, key))
        return function

    return remember


@_stage(keys.TOPOLOGY_CONF)
def topology_conf(
    context: dg.AssetExecutionContext,
    config: SubmitConfig,
    names: DagsterNames,
    handles: Handles,
    nimbus: NimbusResource,
) -> dg.MaterializeResult:
    """Stage 1."""
    began = time.monotonic()
    with step_errors():
        name = _topology_of(context, names)
        token = config.token or _inherited_token(context, config)
        handle = upload_of(
            context.log, nimbus, config.handle, config.target, config.conf, config.allow_degraded
        )
    with operations(context, handles) as ops:
        if token is None:
            # The run was launched by hand. Without an upload it submits the staged parts of the
            # name unchanged.
            token = _staged_token(ops, name) if handle is None else context.run.run_id
        check_client_token(token)
        tag_run(context, token)

        def stage() -> ConfResult:
            return submission.stage_conf(
                ops,
                name=name,
                token=token,
                handle=handle,
                inactive=config.inactive,
                allow_degraded=config.allow_degraded,
            )

        report = run_stage(ops, token, stage)
        _keep_key(context, ops, names, name)
    _warn(context, report.warnings)
    return _with_seconds(conf_metadata(report), began)


def _warn(context: dg.AssetExecutionContext, warnings: Sequence[str]) -> None:
    """Log warnings about the submitted conf, and add them to those in the run's tags.

    The client of the submission reads them there.
    """
    for warning in warnings:
        context.log.warning(warning)
    if warnings:
        earlier = RunResult(warnings=RunResult.of_tags(tags_of(context)).warnings)
        tags = earlier.with_warnings(warnings).to_tags()
        context.instance.add_run_tags(context.run.run_id, tags)


def _staged_token(ops: OperationsContext, name: str) -> str:
    """The token of the newest staging of the name.

    :class:`InvalidRequest` without one.
    """
    key = newest_token_key(name)
    if not ops.blobs.exists(key):
        raise InvalidRequest(
            f"nothing to submit as {name!r}: give `target` in the form, "
            "for example examples/word_count.py:WordCount"
        )
    return check_client_token(ops.blobs.read(key).decode())


def _plain_stage(
    key: dg.AssetKey, operation: Callable[..., Any], to_metadata: Callable[[Any], dict[str, Any]]
) -> None:
    """Define a stage whose only input is its token."""

    @_stage(key)
    def stage(
        context: dg.AssetExecutionContext, names: DagsterNames, handles: Handles
    ) -> dg.MaterializeResult:
        began = time.monotonic()
        with operations(context, handles) as ops:
            name = _topology_of(context, names)
            token = token_for(context, ops, name)
            report = run_stage(ops, token, lambda: operation(ops, token=token))
            _keep_key(context, ops, names, name)
        return _with_seconds(to_metadata(report), began)


_plain_stage(keys.TOPOLOGY_CODE, submission.stage_code, code_metadata)
_plain_stage(keys.TASK_INFO, submission.stage_tasks, tasks_metadata)


@_stage(keys.ASSIGNMENT)
def assignment(
    context: dg.AssetExecutionContext,
    config: RebalanceConfig,
    names: DagsterNames,
    handles: Handles,
) -> dg.MaterializeResult:
    """Stage 4; in a run of `rebalance_topology`, the plan of the rebalance."""
    began = time.monotonic()
    with operations(context, handles) as ops:
        name = _topology_of(context, names)
        if context.run.job_name == names.name(REBALANCE_JOB):
            claim_record(context, ops)
            try:
                scheduled = _is_scheduled(context)
                metadata = plan_rebalance(ops, name, config, scheduled=scheduled)
                _keep_key(context, ops, names, name)
                return _with_seconds(metadata, began)
            except BaseException:
                # After a plan the next step of the run ends the record.
                end_record(context, ops)
                raise
        token = token_for(context, ops, name)
        report = run_stage(ops, token, lambda: submission.stage_assignment(ops, token=token))
        _keep_key(context, ops, names, name)
        _warn(context, report.placement.warnings)
        if report.in_force is not None:
            current = task_components(ops, report.topology_id)
            return _with_seconds(running_metadata(report, report.in_force, current), began)
        components = read_tasks(ops, token).table.component_of()
        return _with_seconds(planned_metadata(report, components), began)


@_stage(keys.PUBLISHED_ASSIGNMENT)
def published_assignment(
    context: dg.AssetExecutionContext, names: DagsterNames, handles: Handles
) -> dg.MaterializeResult:
    """Stage 5; in a run of `rebalance_topology`, the rebalance itself."""
    began = time.monotonic()
    with operations(context, handles) as ops:
        name = _topology_of(context, names)
        if context.run.job_name == names.name(REBALANCE_JOB):
            claim_record(context, ops)
            try:
                metadata = publish_rebalance(context, ops, name, names)
                _keep_key(context, ops, names, name)
                return _with_seconds(metadata, began)
            finally:
                end_record(context, ops)
        token = token_for(context, ops, name)
        report = run_stage(ops, token, lambda: submission.publish_assignment(ops, token=token))
        _keep_key(context, ops, names, name)
        components = read_tasks(ops, token).table.component_of()
    if report.replanned:
        _warn(context, report.placement.warnings)
        # The cluster had changed since storm/assignment was computed: this is its newest value.
        context.log_event(
            dg.AssetMaterialization(
                asset_key=handles.zookeeper.asset_key(keys.ASSIGNMENT),
                partition=name,
                description=f"planned again while publishing ({report.replanned} times)",
                metadata={
                    "topology_id": report.topology_id,
                    "planner": report.planner,
                    **placement_metadata(report.placement, components),
                },
            )
        )
    return _with_seconds(published_metadata(report, components), began)


_plain_stage(keys.ACTIVE_TOPOLOGY, submission.activate_topology, active_metadata)


def build_submission_assets(names: DagsterNames) -> list[dg.AssetsDefinition]:
    """The six assets, in order.

    Each live topology has one partition, so that a name has one history across deploys.
    """
    partitions = dg.DynamicPartitionsDefinition(name=names.partitions)
    assets: list[dg.AssetsDefinition] = []
    former_stages: list[dg.AssetKey] = []
    for function, key in _STAGES:
        decorate = dg.asset(
            **asset_settings(names, key),
            deps=former_stages[-1:],
            partitions_def=partitions,
            code_version="1",
        )
        assets.append(decorate(bind(function, names)))
        former_stages.append(cluster_key(names, key))
    return assets
