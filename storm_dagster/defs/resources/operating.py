"""Context of the operations for a step of a run.

It has connections, planner, token, and errors.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import dagster as dg

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.defs.keys import STAGED_BY_TAG
from storm_dagster.defs.metadata import step_errors
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.spark import SparkResource
from storm_dagster.model.dagster_names import RECORDED_TAG, REQUEST_TAG, TOKEN_TAG
from storm_dagster.model.errors import InvalidRequest, KeyNotFound, NotAlive
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.change_records import claim_change, end_change_of_run
from storm_dagster.operations.submit.staging import (
    newest_token_key,
    read_client_token,
    read_record,
    refuse_cancelled,
)
from storm_dagster.operations.submit.submission import restage_conf
from storm_dagster.spark.session_keys import no_key_check


@dataclass(frozen=True)
class Handles:
    """The resources that an operation needs."""

    zookeeper: ZooKeeperResource
    blobstore: BlobStoreResource
    spark: SparkResource


@contextmanager
def connect(handles: Handles, log: logging.Logger, run: str = "") -> Iterator[OperationsContext]:
    """The operations' context of the run with that id, or of a tick.

    It is connected inside the block; typed errors pass. ``epoch`` stays open: a submission's stages
    take the one in their staging record, all other operations the current one.
    """
    with handles.zookeeper.cluster() as cluster, handles.blobstore.blobs(cluster) as blobs:
        conf = handles.zookeeper.conf()
        # In a tick PySpark would change the environment of the project's code server, which its own
        # runs inherit.
        planner = handles.spark.planner(cluster) if run else plan_placement
        spark_keys = handles.spark.check_keys if run else no_key_check
        yield OperationsContext(
            cluster=cluster,
            blobs=blobs,
            conf=conf,
            planner=planner,
            spark_keys=spark_keys,
            log=log,
            run=run,
        )


@contextmanager
def operations(
    context: dg.OpExecutionContext | dg.AssetExecutionContext | dg.AssetCheckExecutionContext,
    handles: Handles,
) -> Iterator[OperationsContext]:
    """Connect (:func:`connect`) for one step; typed errors become Dagster failures."""
    with step_errors(), connect(handles, context.log, context.run.run_id) as ops:
        yield ops


def claim_record(
    context: dg.OpExecutionContext | dg.AssetExecutionContext, ops: OperationsContext
) -> None:
    """Claim the record of the operation for which a leader launched this run.

    Two leaders may have launched a run each: only the first run executes the operation, and the
    other one fails with :class:`Conflict`. A re-execution was requested by a user: it claims no
    record.
    """
    tags = context.run.tags
    request = tags.get(REQUEST_TAG)
    if request is not None and context.run.parent_run_id is None:
        claim_change(ops, request, context.run.run_id, is_recorded=RECORDED_TAG in tags)


def recorded_request(context: dg.OpExecutionContext | dg.AssetExecutionContext) -> str:
    """The request whose record this run has claimed; empty for a run without a record."""
    tags = context.run.tags
    if context.run.parent_run_id is not None or RECORDED_TAG not in tags:
        return ""
    return tags.get(REQUEST_TAG, "")


def end_record(
    context: dg.OpExecutionContext | dg.AssetExecutionContext, ops: OperationsContext
) -> None:
    """Delete the record of this run's operation, if a leader launched the run.

    A run that is lost leaves its record, which the leader deletes. The record of another run stays.
    """
    request = context.run.tags.get(REQUEST_TAG)
    if request is not None:
        end_change_of_run(ops, request, context.run.run_id)


def tags_of(context: dg.AssetExecutionContext) -> Mapping[str, str]:
    """The current tags of the run: an earlier step of it may have set some."""
    run = context.instance.get_run_by_id(context.run.run_id)
    return run.tags if run is not None else context.run.tags


def tag_run(context: dg.AssetExecutionContext, token: str) -> None:
    """Tag the run with its token, and as the run that staged the submission.

    No effect if it has the tags already. The run's later steps, its re-executions, and users who
    search for it read the tags.
    """
    tags = {TOKEN_TAG: token, STAGED_BY_TAG: context.run.run_id}
    if tags.items() - tags_of(context).items():
        context.instance.add_run_tags(context.run.run_id, tags)


def token_for(context: dg.AssetExecutionContext, ops: OperationsContext, name: str) -> str:
    """The token of this step's staging.

    It is the run's token, else the newest of the topology's name. A run that did not stage it (a
    re-execution from a later stage, or a stage alone) takes it over under the current epoch, once.
    :class:`NotAlive` if no submission of the name is staged, or if it was cancelled;
    :class:`InvalidRequest` if the run's token belongs to another topology.
    """
    tags = tags_of(context)
    token = tags.get(TOKEN_TAG)
    if token is None:
        try:
            token = ops.blobs.read(newest_token_key(name)).decode()
        except KeyNotFound:
            raise NotAlive(
                f"nothing is staged for topology {name!r}: materialize storm/topology_conf first, "
                "or submit it"
            ) from None
    record = read_record(ops, token)
    if record.name != name:
        raise InvalidRequest(
            f"token {token!r} belongs to topology {record.name!r}, "
            f"this run's partition is {name!r}: launch it for partition {record.name!r}"
        )
    stored = read_client_token(ops, token)
    if stored is not None:
        token_record, _ = stored
        refuse_cancelled(token, token_record)
    if tags.get(STAGED_BY_TAG) != context.run.run_id:
        if restage_conf(ops, token):
            context.log.info("another leader since %s was staged: it was staged again", token)
        tag_run(context, token)
    return token
