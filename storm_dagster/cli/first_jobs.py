"""First jobs of a Spark server, run when it starts."""

import click

from storm_dagster.host.waiting import poll
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.security.server_identity import TrustedServers


def run_first_jobs(conf: ClusterConf, remote: str) -> None:
    """Run the first jobs of the server, in the placement's pinned session.

    Without a cluster, they run in another session. The import of the pipeline takes place while the
    server starts; then the server is waited for.
    """
    import storm_dagster.spark.assignment.pipeline  # noqa: F401
    from storm_dagster.cli.dev.plan import PLACED
    from storm_dagster.cli.dev.readiness import listens
    from storm_dagster.security.spark_remote import host_and_port
    from storm_dagster.spark.planner import plan_on_cluster
    from storm_dagster.spark.warm_up import warm_planner, warm_up
    from storm_dagster.zk.storm_cluster_state import StormClusterState

    host, port = host_and_port(remote)
    trusted = TrustedServers.of(conf)
    poll(lambda: listens(port, host, trusted), timeout=180.0)
    try:
        cluster = StormClusterState.open(conf.values)
    except StormDagsterError:
        warm_up(remote, trusted)
        return
    with cluster:
        server_conf = {**conf.values, "spark.remote": remote}
        warm_planner(
            lambda batch: plan_on_cluster(server_conf, cluster, batch), lambda: click.echo(PLACED)
        )
