"""How a step of a run comes to the operations: connections, planner, token, and errors on the way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import dagster as dg

from storm_dagster.defs.failures import step_errors
from storm_dagster.defs.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.keys import TOKEN_TAG
from storm_dagster.defs.spark_resource import SparkResource
from storm_dagster.model.errors import InvalidRequest, KeyNotFound, NotAlive
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.staging import newest_token_key, read_record

__all__ = ["Handles", "operations", "run_token", "tag_run", "token_for"]


@dataclass(frozen=True)
class Handles:
    """The resources that an operation needs."""

    zookeeper: ZooKeeperResource
    blobstore: BlobStoreResource
    spark: SparkResource


@contextmanager
def operations(
    context: dg.OpExecutionContext | dg.AssetExecutionContext | dg.AssetCheckExecutionContext,
    handles: Handles,
) -> Iterator[OperationsContext]:
    """The operations' context for one step, connected inside; typed errors leave as Dagster failures.

    ``epoch`` stays open: a submission's stages take the one in their staging record, everything else the
    current one.
    """
    with step_errors(), handles.zookeeper.cluster() as cluster:
        with handles.blobstore.blobs(cluster) as blobs:
            yield OperationsContext(
                cluster=cluster,
                blobs=blobs,
                conf=handles.zookeeper.conf(),
                planner=handles.spark.planner(cluster),
                log=context.log,
            )


def run_token(context: dg.AssetExecutionContext) -> str | None:
    """The submission that the run belongs to, by its tag, which an earlier step of it may have set."""
    run = context.instance.get_run_by_id(context.run.run_id)
    return (run.tags if run is not None else context.run.tags).get(TOKEN_TAG)


def tag_run(context: dg.AssetExecutionContext, token: str) -> None:
    """Remember the token at the run, for its later steps, its re-executions, and people who search."""
    if run_token(context) != token:
        context.instance.add_run_tags(context.run.run_id, {TOKEN_TAG: token})


def token_for(context: dg.AssetExecutionContext, ops: OperationsContext, name: str) -> str:
    """The token whose staging this step works on: the run's, else the newest of the topology's name.

    :class:`NotAlive` when nothing is staged under the name, :class:`InvalidRequest` when the run's token
    belongs to another topology.
    """
    token = run_token(context)
    if token is None:
        try:
            token = ops.blobs.read(newest_token_key(name)).decode()
        except KeyNotFound:
            raise NotAlive(
                f"nothing is staged for topology {name!r}: materialize storm/topology_conf first, or submit it"
            ) from None
    record = read_record(ops, token)
    if record.name != name:
        raise InvalidRequest(
            f"token {token!r} belongs to topology {record.name!r}, this run's partition is {name!r}: "
            f"launch it for partition {record.name!r}"
        )
    return token
