"""Steps of two releases in one cluster; each release runs them in a process of its own."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.model import paths
from storm_dagster.nimbus.requests.unreported import LeaderOutbox
from storm_dagster.operations.live.blacklist import change_blacklist
from storm_dagster.operations.live.lifecycle import activate, deactivate
from storm_dagster.operations.live.log_levels import keep_log_levels, level_change
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.zk.cluster_state import ClusterState
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.records import World

_CONF = {"topology.workers": 3, "topology.master.single.worker": True}


def in_other_release(step: str, conf: dict[str, Any], blobs: str) -> Any:
    """Run a step of this module on the cluster of the conf; its session stays until the process
    ends.
    """
    return globals()[step](_world(json.dumps(conf), blobs))


@functools.cache
def _world(conf: str, blobs: str) -> World:
    values = json.loads(conf)
    return World(
        StormClusterState.open(values, create_root=True), LocalBlobStore(Path(blobs)), values
    )


def build(world: World) -> None:
    """A leader, two supervisors and a topology with everything that it leaves in ZooKeeper."""
    world.lead()
    for supervisor in ("s1", "s2"):
        world.supervisor(supervisor)
    topology_id = world.submit("wc", conf=_CONF)
    world.run_workers(topology_id)
    world.cluster.register_metrics(topology_id, 0.1, ["count:words"], assignment_version=0)
    world.cluster.report_error(
        topology_id, 1, "trace", component="split", host="s1", port=6900, time=1
    )
    change_blacklist(world.context(), add=["h9"])
    keep_log_levels(world.context(), "wc", {"a": level_change("a", "DEBUG", 0, None)})
    LeaderOutbox().add(world.context(), "wc", "d")


def change(world: World) -> None:
    """Change all that the leader and the topology master read and write again."""
    ctx = world.context()
    topology = world.named()
    assert topology.assignment_at is not None
    world.cluster.register_metrics(
        topology.id,
        0.1,
        ["count:words", "count:lines"],
        assignment_version=topology.assignment_at.version,
    )
    change_blacklist(ctx, add=["h8"])
    keep_log_levels(ctx, "wc", {"b": level_change("b", "INFO", 0, None)})
    outbox = LeaderOutbox()
    outbox.adopt(ctx)
    outbox.add(ctx, "wc", "e")
    deactivate(ctx, "wc")
    activate(ctx, "wc")
    rebalance(ctx, "wc", executors={"split": 4}, wait_secs=0)


def seen(world: World) -> dict[str, Any]:
    """The cluster as this process's release reads it."""
    view, unreported = world.cluster.load_view(), world.cluster.state.get_data(paths.UNREPORTED)
    assert unreported is not None
    return {
        "corrupt": view.corrupt,
        "supervisors": {key: list(info.ports) for key, info in sorted(view.supervisors.items())},
        "hosts": sorted(view.blacklist),
        "deeds": [event["description"] for event in json.loads(unreported)["deeds"]],
        "topologies": {
            topology.base.name: {
                "status": topology.base.status,
                "executors": topology.base.executors,
                "tasks": world.tasks(topology.base.name).components["split"].tasks,
                "assigned": sorted(world.assignment(topology.base.name).task_slots()),
                "workers": len(topology.live_workers),
                "errors": [
                    error.error for error in world.cluster.errors_by_component(topology.id)["split"]
                ],
                "loggers": sorted(world.cluster.read_log_levels(topology.id).loggers),
            }
            for topology in view.topologies.values()
        },
    }


def documents(state: ClusterState, path: str = "") -> dict[str, dict[str, Any]]:
    """Path -> content of every node below ``path`` that holds a JSON map."""
    found: dict[str, dict[str, Any]] = {}
    raw = state.get_data(path or "/")
    if raw is not None and raw.startswith(b"{"):
        found[path] = json.loads(raw)
    for name in state.find_children(path or "/") or ():
        found.update(documents(state, f"{path}/{name}"))
    return found
