"""`start_local_cluster` and `stop_local_cluster`: the command line's `dev` and `stop`, as jobs.

Only these and `dev` itself start daemons. The cluster is detached: it outlives the run.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg

from storm_dagster.client.command import CLUSTER_MARK
from storm_dagster.defs.forms import StartClusterConfig, StopClusterConfig
from storm_dagster.defs.metadata import step_errors
from storm_dagster.defs.resources.handles import (
    ZooKeeperResource,
    local_cluster_runs,
    run_cli,
    start_cluster,
)
from storm_dagster.host.endpoints import ClusterFile, home_dir
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.packaging.target import target_roots


def _home(named: str | None, zookeeper: ZooKeeperResource) -> Path:
    """The cluster's folder; a form may name another one in the project alone, for it is closed to
    other users.
    """
    own = zookeeper.home_path()
    home = home_dir(named) if named else own
    with step_errors():
        if home != own and not any(
            root in home.resolve().parents for root in target_roots(zookeeper.conf())
        ):
            raise InvalidRequest(
                f"home {home} is not in a folder of targets: leave it empty, run `storm-dagster dev` or `stop --home "
                f"{home}`, or set dagster.target.roots in the conf of the code location"
            )
    return home


def _cluster_metadata(home: Path, cluster: ClusterFile) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "home": dg.MetadataValue.path(str(home)),
        "zookeeper": f"{cluster.zookeeper}{cluster.zookeeper_root}",
        "nimbuses": ", ".join(nimbus.http for nimbus in cluster.nimbuses),
        "supervisors": len(cluster.supervisors),
        "slots": sum(len(supervisor.ports) for supervisor in cluster.supervisors),
        "spark": cluster.spark.remote if cluster.spark else "none",
    }
    if cluster.dagster is not None:
        metadata["ui"] = dg.MetadataValue.url(cluster.dagster.url)
    return metadata


def start_local_cluster(
    context: dg.OpExecutionContext, config: StartClusterConfig, zookeeper: ZooKeeperResource
) -> None:
    """Start the cluster; one that runs already is left as it is."""
    home = _home(config.home, zookeeper)
    with step_errors():
        if local_cluster_runs(home):
            context.log.info(f"a cluster runs already in {home}: it is left as it is")
        else:
            start_cluster(
                home, supervisors=config.supervisors, slots=config.slots, nimbuses=config.nimbuses
            )
        cluster = ClusterFile.read(home)
        if cluster is None:
            raise Unavailable(
                f"{home}/cluster.json is missing: the cluster did not become ready, see {home}/logs"
            )
    context.add_output_metadata(_cluster_metadata(home, cluster))


def stop_local_cluster(
    context: dg.OpExecutionContext, config: StopClusterConfig, zookeeper: ZooKeeperResource
) -> None:
    """Stop the cluster. When this very Dagster belongs to it, the end comes right after the
    run's.
    """
    home = _home(config.home, zookeeper)
    with step_errors():
        cluster = ClusterFile.read(home)
        if cluster and cluster.dagster and cluster.dagster.home == os.environ.get("DAGSTER_HOME"):
            # Detached and late, so that this run can still record its success; without the mark by
            # which `stop` finds the cluster's processes, so that it does not end itself.
            environment = {key: value for key, value in os.environ.items() if key != CLUSTER_MARK}
            subprocess.Popen(
                [sys.executable, "-c", _LATER, sys.executable, str(home)],
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            context.log.info(
                f"this Dagster is part of the cluster in {home}: it ends with it in a moment"
            )
            return
        ended = run_cli("stop", "--home", str(home))
    context.add_output_metadata(
        {"home": dg.MetadataValue.path(str(home)), "ended_processes": int(ended.get("ended") or 0)}
    )


_LATER = """
import subprocess, sys, time
time.sleep(5)
subprocess.run([sys.argv[1], "-m", "storm_dagster", "stop", "--home", sys.argv[2]])
"""
