"""Deleting what a topology leaves: nodes in fenced transactions, blobs after a look at the epoch."""

from __future__ import annotations

from storm_dagster.blobstore.store import BlobStore
from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced, KeyNotFound
from storm_dagster.model.names import code_key, conf_key, jar_key, placement_key
from storm_dagster.model.records import StormBase
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.staging import newest_token_key, staging_key
from storm_dagster.operations.turnstile import delete_tree

__all__ = ["delete_blobs", "delete_code", "sweep"]

_WORKER_POLL_SECS = 0.1


def sweep(ctx: OperationsContext, epoch: int, topology_id: str) -> None:
    """Delete the nodes of a topology that is assigned no more, once its workers have ended or their time is up."""
    _await_workers(ctx, topology_id, float(ctx.conf.get("task.cleanup.timeout.sec", 10)))
    for path in (
        paths.tasks(topology_id),
        paths.taskbeats(topology_id),
        paths.task_errors(topology_id),
        paths.gray_upgrade(topology_id),
        paths.metrics(topology_id),
    ):
        delete_tree(ctx, epoch, path, "remove")
    if not ctx.cluster.state.find_children(paths.workers(topology_id)):
        # A worker that is still there keeps its node: the cleaner takes the parent once it is gone.
        delete_tree(ctx, epoch, paths.workers(topology_id), "remove")
    # Blobs are not in ZooKeeper, so their deletion is preceded by a look at the epoch.
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


def delete_blobs(blobs: BlobStore, topology_id: str, base: StormBase) -> None:
    """Delete the topology's blobs and its staging; those that are gone already do not matter."""
    delete_code(blobs, topology_id)
    keys = blobs.keys(staging_key(base.token, ""))
    newest = newest_token_key(base.name)
    try:
        if blobs.read(newest) == base.token.encode():
            keys.append(newest)
    except KeyNotFound:
        pass
    _delete(blobs, keys)


def delete_code(blobs: BlobStore, topology_id: str) -> None:
    """Delete archive, conf, topology and reasons of an id; those that are gone already do not matter."""
    _delete(blobs, [key(topology_id) for key in (jar_key, conf_key, code_key, placement_key)])


def _delete(blobs: BlobStore, keys: list[str]) -> None:
    for key in keys:
        try:
            blobs.delete(key)
        except KeyNotFound:
            continue
