"""Deletion of a topology's remains.

Nodes are deleted in fenced transactions, blobs after a check of the epoch.
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
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, load_code
from storm_dagster.operations.steps import shared_steps, step
from storm_dagster.operations.submit.staging import PARTS, newest_token_key, staging_key
from storm_dagster.operations.transactions import (
    commit,
    delete_tree,
    epoch_is_over,
    retry_on_conflict,
)
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.security.spark_remote import cluster_spark_servers, derived_spark_token
from storm_dagster.zk.gray_upgrades import listed_nodes

_SWEPT = {
    "sweep.tasks": paths.tasks,
    "sweep.taskbeats": paths.taskbeats,
    "sweep.taskerrors": paths.task_errors,
    "sweep.gray_upgrade": paths.gray_upgrade,
    "sweep.metrics": paths.metrics,
}
"""Step -> function that returns the path which the step deletes, by the topology id."""
SWEEP = shared_steps("sweep", *_SWEPT, "sweep.workers")
DELETE_CODE = shared_steps(
    "delete_code",
    "delete.stormjar.jar",
    "delete.stormconf.ser",
    "delete.stormcode.ser",
    "delete.placement.json",
)
DELETE_BLOBS = shared_steps(
    "delete_blobs", DELETE_CODE, *(f"delete.staged.{part}" for part in PARTS), "delete.newest"
)

_WORKER_POLL_SECS = 0.1
"""Pause between two polls of the workers that have to end."""
_DELETES_IN_ONE_TRANSACTION = 100
"""Deleted nodes of one transaction that empties the lists of an ended upgrade."""


def sweep(ctx: OperationsContext, epoch: int, topology_id: str) -> None:
    """Delete the nodes of a topology without an assignment.

    Waits until its workers have ended, at most ``task.cleanup.timeout.sec``. Nodes that cannot be
    deleted are left to the cleaner. :class:`Fenced` if ``epoch`` is over: the caller then must not
    delete the blobs.
    """
    _await_workers(ctx, topology_id, float(ctx.conf.get("task.cleanup.timeout.sec", 10)))
    for name, path_of in _SWEPT.items():
        path = path_of(topology_id)
        try:
            delete_tree(ctx, epoch, path, name)
        except Conflict as error:
            # A worker may have created nodes there that are closed to the cluster. They must not
            # prevent the removal of the topology.
            ctx.log.warning("%s is left to the cleaner: %s", path, error.message)
    if not ctx.cluster.state.find_children(paths.workers(topology_id)):
        # A live worker keeps its node: the cleaner deletes the parent once the worker has ended.
        delete_tree(ctx, epoch, paths.workers(topology_id), "sweep.workers")
    # Blobs are not in ZooKeeper, so the epoch is checked before their deletion.
    if epoch_is_over(ctx, epoch):
        raise Fenced(
            f"leadership epoch {epoch} is over, no blob was deleted: "
            "stop acting, ask the new leader"
        )


def _await_workers(ctx: OperationsContext, topology_id: str, wait_secs: float) -> None:
    """Wait until no worker has a node; log it if some have after ``wait_secs``."""
    deadline = ctx.monotonic() + wait_secs
    while ctx.cluster.state.find_children(paths.workers(topology_id)):
        if ctx.monotonic() >= deadline:
            ctx.log.warning("workers of %s did not end within %g s", topology_id, wait_secs)
            return
        ctx.sleep(_WORKER_POLL_SECS)


def sweep_upgrade_lists(ctx: OperationsContext, epoch: int, topology_id: str) -> None:
    """Empty both lists of workers of an ended upgrade; without a record they have no effect.

    No write while an upgrade is under way.
    """

    def attempt(view: ClusterView) -> None:
        state = ctx.cluster.read_upgrade(topology_id)
        if state.record is not None or state.at < 0:
            return
        nodes = list(listed_nodes(ctx.cluster.state, topology_id))
        for start in range(0, len(nodes), _DELETES_IN_ONE_TRANSACTION):
            transaction = ctx.cluster.fenced(epoch).check(paths.gray_upgrade(topology_id), state.at)
            for node in nodes[start : start + _DELETES_IN_ONE_TRANSACTION]:
                transaction.delete(node)
            commit(ctx, transaction, "sweep.upgraded")

    retry_on_conflict(ctx, f"clearing the lists of {topology_id}", attempt)


def delete_blobs(ctx: OperationsContext, topology_id: str, name: str, token: str) -> None:
    """Delete the blobs of a topology and its staging; missing blobs do not matter.

    ``token`` is that of its submission.
    """
    delete_code(ctx, topology_id)
    for part in PARTS:
        _delete(ctx, f"delete.staged.{part}", staging_key(token, part))
    newest = newest_token_key(name)
    # A later submission of the name may have its own token there.
    if ctx.find_blob(newest) == token.encode():
        _delete(ctx, "delete.newest", newest)


def delete_code(ctx: OperationsContext, topology_id: str) -> None:
    """Delete archive, conf, topology and reasons of an id.

    Missing blobs do not matter.
    """
    end_spark_queries(ctx, code_key(topology_id))
    for key in (*code_keys(topology_id), placement_key(topology_id)):
        _delete(ctx, f"delete.{key.rpartition('-')[2]}", key)
    for key in ctx.blobs.keys(f"{topology_id}."):
        # Later versions of the code, which upgrades have stored.
        if id_of_blob_key(key) == topology_id:
            end_spark_queries(ctx, key)
            _delete(ctx, f"delete.{key.rpartition('-')[2]}", key)


def end_spark_queries(ctx: OperationsContext, key: str) -> None:
    """End the queries of killed workers on a Spark Connect server.

    Called before the blob ``key`` is deleted. No effect unless that is the blob with the spec of a
    topology with Spark queries, so that it is done once for each code. A server that does not
    respond is logged: it ends the queries when their session expires.
    """
    code_dir = code_dir_of_blob_key(key)
    try:
        if code_dir is None or key != code_key(code_dir) or ctx.find_blob(key) is None:
            return
        runnable = load_code(ctx, code_dir)
        conf = runnable.conf
        remote = conf.get("topology.spark.remote") or conf.get("spark.remote")
        if remote and _has_spark_query(runnable.spec):
            # Imported here, because every Dagster process loads this module.
            from storm_dagster.spark.query_sessions import end_query_session

            servers = cluster_spark_servers(ctx.conf)
            token = derived_spark_token(ctx.conf)
            trusted = TrustedServers.of(ctx.conf)
            end_query_session(str(remote), code_dir, servers, token, trusted)
    except StormDagsterError as error:
        ctx.log.warning("queries of %s on Spark may still run: %s", code_dir, error.message)


def _has_spark_query(spec: TopologySpec) -> bool:
    """True if a component runs a Spark query, which has a checkpoint."""
    for _, _, component in spec.components():
        if {"query", "checkpoint"} <= component.object.args.keys():
            return True
    return False


def _delete(ctx: OperationsContext, name: str, key: str) -> None:
    """Delete the blob as the step ``name``; a missing one does not matter."""
    with step(ctx, name), suppress(KeyNotFound):
        ctx.blobs.delete(key)
