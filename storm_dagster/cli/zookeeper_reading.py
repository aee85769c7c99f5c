"""State of a cluster by ZooKeeper alone, for the time in which no nimbus answers."""

import time
from collections.abc import Iterator

from storm_dagster.core.host_problems import supervisor_problems
from storm_dagster.core.liveness.pause import pause_text
from storm_dagster.core.snapshot.statuses import down_tasks
from storm_dagster.model import paths
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.read.exposures import HealthResult
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.security.settings import zookeeper_tls
from storm_dagster.zk.embedded import server_address, server_answers
from storm_dagster.zk.storm_cluster_state import StormClusterState

_MAX_TOPOLOGIES = 50
"""Number of topologies that are named."""
_PROBE_SECS = 1.0
"""Time in which a server must answer."""
_NOT_READ = (
    "not checked, since no nimbus answers: the reasons why tasks do not run, disks and clocks of"
    " nimbuses, events for Dagster"
)


def check_by_zookeeper(conf: ClusterConf) -> Iterator[HealthResult]:
    """Yield results of the records that this user may read, and a line for each other part."""
    if not _is_reachable(conf):
        text = "not checked: supervisors and topologies (no server of storm.zookeeper.servers)"
        yield "warning", text, "start ZooKeeper, or name it in storm.zookeeper.servers"
        return
    try:
        with StormClusterState.open(conf.values) as cluster:
            leader = cluster.state.get_data(paths.NIMBUS_MASTER)
            view = cluster.load_view()
    except StormDagsterError as error:
        text = f"not checked: supervisors and topologies ({error.message})"
        yield "warning", text, "run doctor on a host, and as a user, that ZooKeeper admits"
        return
    name = leader.decode("utf-8", "replace") if leader else "none"
    yield "ok", f"by ZooKeeper: {len(view.supervisors)} supervisors, the leader is {name}", ""
    if view.healing_pause is not None:
        remedy = (
            "start a nimbus: it ends the pause at its time, or by `storm-dagster resume-healing`"
        )
        yield "warning", pause_text(view.healing_pause), remedy
    for path, reason in sorted(view.corrupt.items()):
        text = f"the records of {path} cannot be read: {reason}"
        yield "broken", text, "restore it from a backup (docs/backup.md)"
    for problem in supervisor_problems(view.supervisors):
        yield problem.severity, problem.text, problem.remedy
    yield from _topologies(view, float(conf["nimbus.task.launch.secs"]))
    yield "warning", _NOT_READ, "start a nimbus, and run doctor again"


def _is_reachable(conf: ClusterConf) -> bool:
    """True if the conf names servers, and one of them answers.

    A server at the default address may be another cluster's.
    """
    if conf.origins["storm.zookeeper.servers"] == "default":
        return False
    tls = zookeeper_tls(conf)
    for server in conf["storm.zookeeper.servers"]:
        host, port = server_address(server, conf)
        if server_answers(host, port, _PROBE_SECS, tls, TrustedServers.of(conf)):
            return True
    return False


def _topologies(view: ClusterView, launch_secs: float) -> Iterator[HealthResult]:
    """Yield the topologies whose tasks do not run; those that are not named are counted.

    A task that was placed within ``launch_secs`` may still start.
    """
    now_secs = int(time.time())
    named = 0
    more = 0
    topologies = sorted(view.topologies.values(), key=lambda topology: topology.base.name)
    for topology in topologies:
        down = down_tasks(view, topology, now_secs, launch_secs)
        if not down:
            continue
        if named == _MAX_TOPOLOGIES:
            more += 1
            continue
        named += 1
        text = f"topology {topology.base.name}: {len(down)} tasks do not run"
        yield "warning", text, "a nimbus or heartbeat_sensor moves them: start one"
    if more:
        yield "warning", f"and {more} more topologies have tasks that do not run", ""
    elif not named:
        yield "ok", f"by ZooKeeper: the tasks of {len(topologies)} topologies have workers", ""
