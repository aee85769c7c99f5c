"""Deletion of a topology's remains: nodes in fenced transactions, blobs after a check of the
epoch.
"""

from contextlib import suppress

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Fenced, KeyNotFound, StormDagsterError
from storm_dagster.model.names import (
    code_dir_of_blob_key,
    code_key,
    code_keys,
    id_of_blob_key,
    placement_key,
)
from storm_dagster.model.records import StormBase
from storm_dagster.operations.context import OperationsContext, load_code
from storm_dagster.operations.steps import shared_steps, step
from storm_dagster.operations.submit.staging import PARTS, newest_token_key, staging_key
from storm_dagster.operations.transactions import delete_tree
from storm_dagster.security.spark_remote import cluster_spark_servers, derived_spark_token

_SWEPT = {
    "sweep.tasks": paths.tasks,
    "sweep.taskbeats": paths.taskbeats,
    "sweep.taskerrors": paths.task_errors,
    "sweep.gray_upgrade": paths.gray_upgrade,
    "sweep.metrics": paths.metrics,
}
SWEEP = shared_steps("sweep", *_SWEPT, "sweep.workers")
DELETE_CODE = shared_steps(
    "delete_code",
    *(
        f"delete.{suffix}"
        for suffix in ("stormjar.jar", "stormconf.ser", "stormcode.ser", "placement.json")
    ),
)
DELETE_BLOBS = shared_steps(
    "delete_blobs", DELETE_CODE, *(f"delete.staged.{part}" for part in PARTS), "delete.newest"
)

_WORKER_POLL_SECS = 0.1


def sweep(ctx: OperationsContext, epoch: int, topology_id: str) -> None:
    """Delete the nodes of a topology that is assigned no more, once its workers have ended or their
    time is up.
    """
    _await_workers(ctx, topology_id, float(ctx.conf.get("task.cleanup.timeout.sec", 10)))
    for name, path_of in _SWEPT.items():
        path = path_of(topology_id)
        try:
            delete_tree(ctx, epoch, path, name)
        except Conflict as error:
            # A worker may have put nodes there that are closed to the cluster: they must not keep
            # the topology.
            ctx.log.warning("%s is left to the cleaner: %s", path, error.message)
    if not ctx.cluster.state.find_children(paths.workers(topology_id)):
        # A worker that is still there keeps its node: the cleaner takes the parent once it is gone.
        delete_tree(ctx, epoch, paths.workers(topology_id), "sweep.workers")
    # Blobs are not in ZooKeeper, so the epoch is checked before their deletion.
    found = ctx.cluster.epoch()
    if found is None or found[0] != epoch:
        raise Fenced(
            f"leadership epoch {epoch} is over, no blob was deleted: stop acting, ask the new leader"
        )


def _await_workers(ctx: OperationsContext, topology_id: str, wait_secs: float) -> None:
    deadline = ctx.monotonic() + wait_secs
    while ctx.cluster.state.find_children(paths.workers(topology_id)):
        if ctx.monotonic() >= deadline:
            ctx.log.warning("workers of %s did not end within %g s", topology_id, wait_secs)
            return
        ctx.sleep(_WORKER_POLL_SECS)


def delete_blobs(ctx: OperationsContext, topology_id: str, base: StormBase) -> None:
    """Delete the topology's blobs and its staging; those that are gone already do not matter."""
    delete_code(ctx, topology_id)
    for part in PARTS:
        _delete(ctx, f"delete.staged.{part}", staging_key(base.token, part))
    newest = newest_token_key(base.name)
    if ctx.find_blob(newest) == base.token.encode():
        _delete(ctx, "delete.newest", newest)


def delete_code(ctx: OperationsContext, topology_id: str) -> None:
    """Delete archive, conf, topology and reasons of an id; those that are gone already do not
    matter.
    """
    end_spark_queries(ctx, code_key(topology_id))
    for key in (*code_keys(topology_id), placement_key(topology_id)):
        _delete(ctx, f"delete.{key.rpartition('-')[2]}", key)
    for key in ctx.blobs.keys(f"{topology_id}."):
        # Later versions of the code, which upgrades left.
        if id_of_blob_key(key) == topology_id:
            end_spark_queries(ctx, key)
            _delete(ctx, f"delete.{key.rpartition('-')[2]}", key)


def end_spark_queries(ctx: OperationsContext, key: str) -> None:
    """End what killed workers left running on a Spark Connect server, before the blob of their
    topology's code goes.

    A server that does not answer is logged: it ends the queries when their session expires.
    """
    code_dir = code_dir_of_blob_key(key)
    try:
        if code_dir is None or key != code_key(code_dir) or ctx.find_blob(key) is None:
            return
        known = load_code(ctx, code_dir)
        remote = known.conf.get("topology.spark.remote") or known.conf.get("spark.remote")
        if remote and any(
            {"query", "checkpoint"} <= part.object.args.keys()
            for _, _, part in known.spec.components()
        ):
            # Every Dagster process loads this module.
            from storm_dagster.spark.query_sessions import end_query_session

            servers = cluster_spark_servers(ctx.conf)
            end_query_session(str(remote), code_dir, servers, derived_spark_token(ctx.conf))
    except StormDagsterError as error:
        ctx.log.warning("queries of %s on Spark may still run: %s", code_dir, error.message)


def _delete(ctx: OperationsContext, name: str, key: str) -> None:
    with step(ctx, name), suppress(KeyNotFound):
        ctx.blobs.delete(key)
