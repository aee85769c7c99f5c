"""The ``spark`` resource: dagster-pyspark's session, on Spark Connect or on a classic master.

pyspark and dagster-pyspark are imported when a session is first asked for, not when definitions
load.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from storm_dagster.defs.resources.handles import ClusterHandle
from storm_dagster.model.placement import PlacementBatch, PlacementResult
from storm_dagster.operations.context import Planner
from storm_dagster.security.spark_remote import (
    cluster_spark_servers,
    derived_spark_token,
    with_spark_token,
)
from storm_dagster.zk.storm_cluster_state import StormClusterState

if TYPE_CHECKING:
    from dagster_pyspark import LazyPySparkResource
    from pyspark.sql import SparkSession

_RELEASE_SECS = 5.0
"""Time that the process of a run gives the server at its end to release a session."""


class SparkResource(ClusterHandle):
    """Spark for placements, and a session for the user's own assets."""

    def pyspark(self, conf: dict[str, Any] | None = None) -> "LazyPySparkResource":
        """dagster-pyspark's resource for the cluster's Spark: ``spark.remote`` (Connect), else
        ``spark.master``.

        A session of its own, never the placement's. ``conf`` is added to the session's conf.
        """
        from dagster_pyspark import LazyPySparkResource

        from storm_dagster.spark.link import close_at_exit, limit_retries

        class ClusterPySpark(LazyPySparkResource):
            """Ends with its process, also when the server is gone."""

            @property
            def spark_session(self) -> Any:
                first, session = self._spark_session is None, super().spark_session
                if first and "spark.remote" in where:
                    limit_retries(session)
                    remote = where["spark.remote"]
                    # A session that the URL names is not this process's alone.
                    own = ";session_id=" not in remote
                    close_at_exit(session, remote if own else "", _RELEASE_SECS)
                return session

        cluster = self.conf()
        where = {key: cluster[key] for key in ("spark.remote", "spark.master") if cluster.get(key)}
        # Given both, Spark refuses: Connect comes first.
        if "spark.remote" in where:
            where.pop("spark.master", None)
            token = derived_spark_token(cluster)
            servers = cluster_spark_servers(cluster)
            where["spark.remote"] = with_spark_token(
                where["spark.remote"], servers, self.home_path(), token
            )
        return ClusterPySpark(spark_config={**where, **(conf or {})})

    def planner(self, cluster: StormClusterState) -> Planner:
        """The PySpark assignment over the pinned session; connects when it is first called.

        :class:`Unavailable` from the call when Spark is out of reach: what to do then is the
        caller's choice.
        """

        def plan(batch: PlacementBatch) -> PlacementResult:
            from storm_dagster.spark.planner import plan_on_cluster
            from storm_dagster.spark.session import await_start

            conf, home = self.conf(), self.home_path()
            # Healing has another way; everybody else has the time that the server takes to start.
            if conf.get("spark.remote") and any(
                each.event != "monitor" for each in batch.topologies
            ):
                await_start(conf["spark.remote"], home)
            return plan_on_cluster(conf, cluster, batch, open_session=open_session, home=home)

        return plan


def open_session(where: Mapping[str, str]) -> "SparkSession":
    """A session by dagster-pyspark's resource, for a Spark conf that names ``spark.remote`` or
    ``spark.master``.
    """
    from dagster_pyspark import LazyPySparkResource

    session = LazyPySparkResource(spark_config=dict(where)).spark_session
    if "spark.remote" in where:
        from storm_dagster.spark.link import limit_retries

        limit_retries(session)
        # Ending one process's session would end the pinned one for all.
        vars(session)["release_session_on_close"] = False
    return session
